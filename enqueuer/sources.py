"""What was handed over -> something that a shard can run.

generator function (no argument, or the shard) -> FunctionSource: run once per shard and epoch
live iterator, other iterable                  -> LiveSource: one stream that cannot be split
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from enqueuer.shards import Shard


@dataclass(frozen=True)
class FunctionSource:
    """A function that gives an iterable for each shard."""

    function: Callable[..., Any]
    takes_shard: bool

    def open(self, shard: Shard) -> Iterator[Any]:
        """Call the function for `shard`; raise TypeError if what it returns cannot be iterated."""
        items = self.function(shard) if self.takes_shard else self.function()
        try:
            return iter(items)
        except TypeError:
            raise TypeError(
                f"{name_of(self.function)} returned {_a(items)}, which cannot be iterated; "
                "it must be a generator function or return an iterable of batches"
            ) from None


@dataclass(frozen=True)
class LiveSource:
    """An iterator that is already running, or an iterable that gives one."""

    iterable: Iterable[Any]

    def open(self, shard: Shard) -> Iterator[Any]:
        """Return the iterator; a shard of a live source is all of it."""
        return iter(self.iterable)


Source = FunctionSource | LiveSource


def as_source(generator: object) -> Source:
    """Tell what kind of source `generator` is, or raise TypeError that says what to pass."""
    if isinstance(generator, Iterator):
        return LiveSource(generator)
    if _is_async(generator):
        raise TypeError(
            f"the generator must not be async, got {_a(generator)}; "
            "write it with plain `def` and `yield`"
        )
    if callable(generator):
        return FunctionSource(generator, _takes_shard(generator))
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
    """Return what to call `function` in a message."""
    return getattr(function, "__qualname__", None) or repr(function)


def _takes_shard(function: Callable[..., Any]) -> bool:
    """Tell whether `function` wants the shard; raise TypeError if it wants anything else."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some built-ins tell nothing of themselves
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


def _is_collection(generator: object) -> bool:
    if isinstance(generator, (Sequence, Set, Mapping, bytes, bytearray, memoryview)):
        return True
    return hasattr(generator, "__getitem__") and hasattr(generator, "__len__")


def _a(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
