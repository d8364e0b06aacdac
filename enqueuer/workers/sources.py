"""The source that the user passed -> a source that a shard can run.

generator function (no argument, or the shard) -> FunctionSource: run once per shard and epoch
running iterator, other iterable               -> LiveSource: one stream that cannot be split
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeGuard

from enqueuer.common.text import an
from enqueuer.errors import StateMismatch
from enqueuer.workers.shards import Shard


class Stage(Protocol):
    """What the enqueuer does with the items of a source, such as batching them."""

    def open(self, items: Iterable[Any], shard: Shard, is_own: bool) -> Iterable[Any]:
        """Return an iterable over the results.

        Args:
            items: Items of the source.
            shard: Shard that seeds random choices.
            is_own: Whether nothing else reads these items, also after an error.
        """

    def identity(self) -> dict[str, int | None]:
        """Return the options that a saved position depends on."""


@dataclass(frozen=True)
class FunctionSource:
    """A function that returns an iterable for each shard."""

    function: Callable[..., Any]
    takes_shard: bool
    stage: Stage | None = None

    def open(self, shard: Shard) -> Iterable[Any]:
        """Call the function for `shard`; raise TypeError if what it returns cannot be iterated."""
        items: Iterable[Any] = self.function(shard) if self.takes_shard else self.function()
        if not hasattr(items, "__iter__") and not hasattr(items, "__getitem__"):
            raise TypeError(
                f"{name_of(self.function)} returned {_a(items)}, which cannot be iterated; "
                "it must be a generator function or return an iterable of batches"
            )
        if self.stage is None:
            return items
        # Shards that give the same data keep the same order, so that this is noticed.
        shard = shard if self.takes_shard else replace(shard, index=0)
        return self.stage.open(items, shard, is_own=True)


@dataclass(frozen=True)
class LiveSource:
    """A running iterator, or an iterable of which there is one stream."""

    iterable: Iterable[Any]
    stage: Stage | None = None

    def open(self, shard: Shard) -> Iterable[Any]:
        """Return the iterable; a shard of a `LiveSource` is all of it."""
        if self.stage is None:
            return self.iterable
        return self.stage.open(self.iterable, replace(shard, index=0), is_own=False)


class Stepped(Iterator[Any]):
    """An iterator over an object with `__next__` alone, such as an old data loader."""

    def __init__(self, stepper: Any) -> None:
        self._stepper = stepper

    def __next__(self) -> Any:
        return self._stepper.__next__()


Source = FunctionSource | LiveSource


class Stateful(Protocol):
    """An iterator, or an iterable, that can be resumed without being run again."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...


def iterate(items: Iterable[Any], state: Any = None) -> tuple[Iterator[Any], Stateful | None]:
    """Return an iterator over `items`, and the object with its state, if there is one.

    Args:
        items: Iterable of a shard.
        state: State of an earlier iterator, whose next item is to be the first one; None to begin
            with the first item.

    Raises:
        StateMismatch: There is a state, and nothing here can load it.
    """
    stateful = items if is_stateful(items) else None
    if stateful is not None and state is not None:
        stateful.load_state_dict(state)
    iterator = iter(items)
    if stateful is None and is_stateful(iterator):
        stateful = iterator
        if state is not None:
            stateful.load_state_dict(state)
    if stateful is None and state is not None:
        raise StateMismatch(
            f"the state contains that of an iterator, but {_a(iterator)} has no load_state_dict; "
            "load it with the source that it was saved with"
        )
    return iterator, stateful


def is_stateful(items: object) -> TypeGuard[Stateful]:
    """Return whether an iterator or an iterable can be resumed by its own methods."""
    return hasattr(items, "state_dict") and hasattr(items, "load_state_dict")


def as_source(generator: object) -> Source:
    """Return the source of `generator`; raise TypeError that says what to pass instead."""
    if isinstance(generator, (FunctionSource, LiveSource)):
        # Of another enqueuer.
        return generator
    if isinstance(generator, Iterator):
        return LiveSource(generator)
    if _is_async(generator):
        raise TypeError(
            f"the generator must not be async, got {_a(generator)}; "
            "write it with plain `def` and `yield`"
        )
    if callable(generator):
        return FunctionSource(generator, _takes_shard(generator))
    if hasattr(generator, "__next__"):
        return LiveSource(Stepped(generator))
    if _holds_iterators(generator):
        raise TypeError(
            f"GeneratorEnqueuer needs one generator function or one iterator, got {_a(generator)} "
            "of iterators; pass a function that gives each shard its own: `GeneratorEnqueuer("
            "lambda shard: iterators[shard.index], shards=len(iterators))`, for processes with "
            "backend=Processes(start_method='fork')"
        )
    if _holds_functions(generator):
        raise TypeError(
            f"GeneratorEnqueuer needs one generator function or one iterator, got {_a(generator)} "
            "of functions; pass a function that calls the one of its shard: "
            "`def batches(shard): return functions[shard.index]()`, with shards=len(functions)"
        )
    if _is_collection(generator):
        raise TypeError(
            "GeneratorEnqueuer needs a generator function or an iterator of batches, "
            f"got {_a(generator)}; write a function that yields batches of it "
            "(`def batches(shard): for x in shard.split(data): yield ...`), or pass iter(data)"
        )
    if isinstance(generator, Iterable):
        return LiveSource(generator)
    raise TypeError(
        f"GeneratorEnqueuer needs a generator function or an iterator of batches, "
        f"got {_a(generator)}"
    )


def name_of(function: object) -> str:
    """Return the name of `function` for a message."""
    return getattr(function, "__qualname__", None) or repr(function)


def _takes_shard(function: Callable[..., Any]) -> bool:
    """Return whether `function` takes the shard; raise TypeError if it takes anything else."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        # Some built-in functions have no signature.
        return False
    required = [p for p in parameters if p.default is p.empty and p.kind not in _VARIADIC]
    if len(required) > 1 or any(p.kind is p.KEYWORD_ONLY for p in required):
        wanted = ", ".join(p.name for p in required)
        raise TypeError(
            f"{name_of(function)} must take no argument or one (the shard), "
            f"but it needs {len(required)}: {wanted}; bind the others with functools.partial"
        )
    if required:
        return True
    # An optional parameter keeps its default, unless its name asks for the shard.
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    return bool(positional) and positional[0].name == "shard"


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _is_async(generator: object) -> bool:
    return (
        inspect.isasyncgenfunction(generator)
        or inspect.iscoroutinefunction(generator)
        or inspect.isasyncgen(generator)
        or inspect.iscoroutine(generator)
    )


def is_plain_collection(generator: object) -> TypeGuard[Iterable[Any]]:
    """Return whether `generator` is a list or the like, but not text, and not of iterators."""
    if isinstance(generator, (Iterator, str, bytes, bytearray)) or callable(generator):
        return False
    return _is_collection(generator) and not _holds_iterators(generator)


def _holds_iterators(generator: object) -> bool:
    if not isinstance(generator, (list, tuple)) or not generator:
        return False
    return all(isinstance(element, Iterator) for element in generator)


def _holds_functions(generator: object) -> bool:
    if not isinstance(generator, (list, tuple)) or not generator:
        return False
    return all(callable(element) for element in generator)


def _is_collection(generator: object) -> bool:
    if isinstance(generator, (Sequence, Set, Mapping, bytes, bytearray, memoryview)):
        return True
    return is_indexable(generator)


def is_indexable(items: object) -> bool:
    """Return whether the object has elements by their index, and a length."""
    return hasattr(items, "__len__") and has_elements(items)


def has_elements(items: object) -> bool:
    """Return whether the object has elements by their index."""
    # An IterableDataset inherits a __getitem__ that only raises.
    iterable = getattr(sys.modules.get("torch.utils.data"), "IterableDataset", ())
    if isinstance(items, iterable):
        return False
    return hasattr(items, "__getitem__")


def _a(value: object) -> str:
    return an(type(value).__name__)
