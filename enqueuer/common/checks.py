"""Checks of single arguments: each error names the argument, the rule and the value.

Names of arguments are checked, too: one that is unknown is answered by the one to give.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from enqueuer.errors import EnqueuerError, StateMismatch

T = TypeVar("T")
Decorated = TypeVar("Decorated", bound=type)

# Characters of a message.
_LONGEST = 1000
_START_METHOD = ("start_method=...", "backend=Processes(start_method=...)")
_WORKERS = ("num_workers=...", "workers=...")
_SEED = ("random_seed=...",)
_QUEUE = ("prefetch_factor=...", "max_queue_size=...")
_MAP = ("map=...", "map=... to OrderedEnqueuer, or do that in the generator")
_COLLATE = ("collate_fn=...", "collate=...")
_SAMPLER = (
    "shuffle=True, or the elements in the sampler's order",
    "shuffle=True to OrderedEnqueuer, or the elements in the sampler's order",
)
# Options of earlier versions and of peers, and those to give now: the first that there is, or else
# the last one, to the enqueuer.
_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "mp_context": _START_METHOD,
    "multiprocessing_context": _START_METHOD,
    "start_method": _START_METHOD,
    "threads_per_worker": ("threads=...", "backend=Processes(threads=...)"),
    "forward_logs": ("backend=Processes(forward_logs=...) or backend=Ray(forward_logs=...)",),
    "address": ("backend=Ray(address=...)",),
    "ray_options": ("actor_options=...", "backend=Ray(actor_options=...)"),
    "writable": ("copy_arrays=...", "backend=Ray(copy_arrays=True)"),
    "max_workers": ("most=...", "workers=Auto(most=...)"),
    **dict.fromkeys(("num_workers", "n_workers", "n_jobs", "num_proc", "num_threads"), _WORKERS),
    "num_parallel_calls": _WORKERS,
    "threads": ("workers=..., as threads are the default",),
    "processes": ("workers=... and backend='process'",),
    **dict.fromkeys(("maxsize", "buffer_size", "prefetch_factor", "max_queue_size"), _QUEUE),
    "prefetch": ("max_queue_size=..., the number of batches that may wait",),
    **dict.fromkeys(("seed", "rng", "generator"), _SEED),
    "batch": ("batch_size=...",),
    **dict.fromkeys(("collate_fn", "collate"), _COLLATE),
    **dict.fromkeys(("transform", "map_func", "function", "fn", "map"), _MAP),
    "drop_remainder": ("drop_last=...",),
    "in_order": ("ordered=...",),
    "num_replicas": ("world_size=...",),
    "shuffle": (
        "shuffle_buffer=..., or OrderedEnqueuer with shuffle=True for a whole dataset",
        "shuffle=True to OrderedEnqueuer, or shuffle_buffer=... to GeneratorEnqueuer",
    ),
    "pin_memory": ("pin_memory=... to TorchLoader, or use CudaDataLoader",),
    "pickle_safe": ("use_multiprocessing=True",),
    **dict.fromkeys(("sampler", "batch_sampler"), _SAMPLER),
    "dataset": ("sequence=...", "the dataset to OrderedEnqueuer"),
    "worker_init_fn": ("initializer=...", "backend=Processes(initializer=...)"),
    "replay_order": ("nothing to replace it: the order repeats by default",),
    "wait_time": ("nothing to replace it: no thread polls",),
    "persistent_workers": ("nothing to replace it: the workers stay until stop()",),
}


def names(made: Callable[..., Any], keywords: Iterable[str], known: Container[str] = ()) -> None:
    """Raise TypeError if there is no option of some name; the message says which one to give.

    Args:
        made: Class or function that was called; all of its parameters are options.
        keywords: Names that were given.
        known: Names that are known to be options; looking at the signature takes long.
    """
    for name in keywords:
        if name not in known and name not in inspect.signature(made).parameters:
            raise _no_option(made, name)


def _no_option(made: Callable[..., Any], name: str) -> TypeError:
    # Only here: it takes a tenth of the time of importing the package.
    import difflib

    options = sorted(inspect.signature(made).parameters)
    peers = _ELSEWHERE.get(name, ())
    here = [text for text in peers if text.partition("=")[0] in options]
    close = [f"{match}=..." for match in difflib.get_close_matches(name, options, 1)]
    # Another class may take what this one does not.
    others = [text if " to " in text else f"{text}, to the enqueuer" for text in peers[-1:]]
    instead = "".join(f"give {text}; " for text in [*here, *close, *others][:1])
    return TypeError(
        f"there is no option {name!r}; {instead}the options of {made.__name__} are "
        f"{', '.join(options)}"
    )


def suggests_options(kind: Decorated) -> Decorated:
    """Let the constructor of a class answer an unknown keyword with the options that there are."""
    made = vars(kind)["__init__"]
    known = frozenset(inspect.signature(made).parameters)

    @functools.wraps(made)
    def checked(self: Any, *args: Any, **keywords: Any) -> None:
        names(kind, keywords, known)
        made(self, *args, **keywords)

    # setattr, as type checkers let no method be replaced.
    setattr(kind, "__init__", checked)  # noqa: B010
    return kind


def positive(name: str, value: object) -> int:
    """Return a count; raise TypeError or ValueError unless it is an int >= 1."""
    return integer(name, value, least=1)


def count(name: str, value: object) -> int:
    """Return a number; raise TypeError or ValueError unless it is an int >= 0."""
    return integer(name, value, least=0)


def integer(name: str, value: object, least: int, kind: str = "an int") -> int:
    """Return an int; raise TypeError or ValueError unless it is one >= `least`."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be {kind}, got {value!r}")
    number = int(value.__index__())
    if number < least:
        raise ValueError(f"{name} must be >= {least}, got {number}")
    return number


def seconds(name: str, value: float) -> float:
    """Return a time; raise TypeError or ValueError unless it is a number >= 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be seconds or None, got {value!r}")
    if math.isnan(value) or value < 0:
        raise ValueError(f"{name} must be >= 0 seconds, got {value!r}")
    return min(float(value), threading.TIMEOUT_MAX / 2)


def wait_limit(name: str, value: float | None) -> float | None:
    """Return the limit of a wait; raise TypeError or ValueError unless None or a time > 0."""
    if value is None:
        return None
    limit = seconds(name, value)
    if limit == 0:
        raise ValueError(f"{name} must be > 0 seconds or None, got {value!r}")
    return limit


def path(name: str, value: object) -> str | None:
    """Return the path of a file as a string; raise TypeError unless it is a path or None."""
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise TypeError(f"{name} must be the path of a file or None, got {value!r}")
    return str(os.fspath(value))


def function(name: str, value: object, of: str) -> None:
    """Raise TypeError unless a value is None or can be called."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a function {of} or None, got {value!r}")


def optional(check: Callable[[str, object], T]) -> Callable[[str, object], T | None]:
    """Return a check that also takes None."""

    def checked(name: str, value: object) -> T | None:
        return None if value is None else check(name, value)

    return checked


def choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless a value is one of several strings."""
    if value not in choices:
        texts = ", ".join(map(repr, choices))
        raise ValueError(f"{name} must be one of {texts}, got {value!r}")


def flag(name: str, value: object) -> bool:
    """Return a truth value; raise TypeError unless it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def rank(rank: object, world_size: object) -> tuple[int, int]:
    """Return rank and world size; raise TypeError or ValueError unless they fit."""
    size, number = positive("world_size", world_size), count("rank", rank)
    if number >= size:
        raise ValueError(f"rank must be < world_size, got rank={number} with world_size={size}")
    return number, size


@contextlib.contextmanager
def reading(of: str = "an enqueuer") -> Iterator[None]:
    """Raise StateMismatch if what is read turns out to be no state of it."""
    try:
        yield
    except StateMismatch as error:
        # What is damaged may be of any size.
        raise StateMismatch(_cut(str(error))) from error.__cause__
    except EnqueuerError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as e:
        raise StateMismatch(_cut(f"this is not the state of {of}: {e!r}")) from e


def _cut(text: str) -> str:
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} ... {text[-half:]}"


def seed(value: object) -> int:
    """Return a random seed; raise TypeError or ValueError unless it is an int >= 0."""
    return integer("random_seed", value, least=0, kind="an int or None")
