"""Finding the part of an object that cannot be pickled, for an error message.

find_culprit("item", {"x": [lock]}) -> ("item['x'][0]", lock)
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

from enqueuer.common.sizes import check_graph
from enqueuer.common.text import an
from enqueuer.common.trees import attributes_of, members_of
from enqueuer.workers.event_loop import NOT_AWAITED

# Steps into a nest; a message that names more of them is too long to help.
_DEEPEST_CULPRIT = 100


def describe_culprit(value: object, error: BaseException) -> str:
    """Return a sentence that says which part of an item cannot be pickled, and why."""
    path, part = find_culprit("item", value)
    if inspect.iscoroutine(part):
        # Otherwise Python warns of it.
        part.close()
        return f"{path} is {NOT_AWAITED}"
    return (
        f"{path} is {an(name_of(type(part)))}, which cannot be sent between processes ({error}); "
        "yield arrays and plain data, or use backend='thread', which pickles nothing"
    )


def find_culprit(
    path: str,
    value: object,
    parts: Callable[[object], Iterable[tuple[str, object]]] | None = None,
    can_send: Callable[[object], bool] | None = None,
) -> tuple[str, object]:
    """Return the smallest part of `value` that cannot be pickled, and where it is.

    Args:
        path: Name of `value`.
        value: Object that cannot be pickled.
        parts: Function that returns the parts of a value, each with the step to it, which is
            appended to the path; `parts_of` by default.
        can_send: Function that tells whether a part can be pickled; `is_picklable` by default.
    """
    # A nest may contain itself.
    seen: set[int] = set()
    while len(seen) < _DEEPEST_CULPRIT:
        seen.add(id(value))
        for step, part in (parts or parts_of)(value):
            if id(part) not in seen and not (can_send or is_picklable)(part):
                path, value = path + step, part
                break
        else:
            break
    return path, value


def is_picklable(value: object) -> bool:
    """Return whether cloudpickle can pickle `value`, by trying."""
    try:
        dumps_by_value(value)
    except Exception:
        return False
    return True


def dumps_by_value(
    value: object, keep: Callable[[pickle.PickleBuffer], object] | None = None
) -> bytes:
    """Pickle a value by cloudpickle; `keep` is its `buffer_callback`."""
    file = io.BytesIO()
    _pickler_by_value()(file, protocol=5, buffer_callback=keep).dump(value)
    return file.getvalue()


@functools.cache
def _pickler_by_value() -> Any:
    # Its import takes some milliseconds.
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
        def reducer_override(self, obj: Any) -> Any:
            check_graph(obj)
            return super().reducer_override(obj)

    return Pickler


def parts_of(value: object) -> Iterable[tuple[str, object]]:
    """Return the parts of a container, or the attributes of an object, with the step to each."""
    if isinstance(value, (dict, list, tuple)):
        members = members_of(value) or {}
        return [(f"[{key!r}]", part) for key, part in members.items()]
    if isinstance(value, (type, FunctionType)):
        return []
    return [(f".{name}", part) for name, part in attributes_of(value).items()]


def name_of(kind: type) -> str:
    """Return the full name of a class; a built-in one without its module."""
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"
