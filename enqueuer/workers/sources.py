"""The source that the user passed -> a source that a shard can run.

generator function (no argument, or the shard) -> FunctionSource: run once per shard and epoch
async generator function                       -> the same, on the event loop of the worker
running iterator, other iterable               -> LiveSource: one stream that cannot be split

    open(shard) -> items, or samples --Samples: shuffled()--> --batched()--> batches

A worker calls `open` for each shard and epoch. Only samples of one shard are in a shuffle buffer or
a batch, so the batches depend on shards and not on workers.
"""

from __future__ import annotations

import copy
import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import GeneratorType
from typing import Any, TypeGuard

from enqueuer.common import checks
from enqueuer.common.text import an
from enqueuer.errors import StateMismatch
from enqueuer.monitoring.duplicates import SampleWatch
from enqueuer.order.position import fingerprint_of
from enqueuer.workers.arrays import stack
from enqueuer.workers.event_loop import AsyncItems, EventLoop
from enqueuer.workers.logs import warn_of_reuse
from enqueuer.workers.shards import Shard, seed_of_shuffle


@dataclass(frozen=True)
class FunctionSource:
    """A function that returns an iterable for each shard.

    Attributes:
        function: The function.
        takes_shard: Whether it takes the shard.
        stage: What becomes of its samples; None if it yields batches.
        takes_first_item: Whether it can begin with any item, by its parameter `first_item`.
        is_async: Whether it is an async generator function.
        loop: Event loop on which its shards run; None: each has one of its own, in the thread that
            asks for its items.
    """

    function: Callable[..., Any]
    takes_shard: bool
    stage: Samples | None = None
    takes_first_item: bool = False
    is_async: bool = False
    loop: EventLoop | None = None
    # See `TaskSource`.
    concurrency = tickets_at_once = 1
    has_threads = False

    @property
    def can_begin_anywhere(self) -> bool:
        """Whether no item before the first one that is wanted has to be made.

        Then the number of an item is all of a position, and no state of an iterator is saved.
        """
        return self.takes_first_item and self.stage is None

    def open(self, shard: Shard, first_item: int = 0, unneeded: int = 0) -> Iterable[Any]:
        """Return an iterable over the items of a shard, or over its batches.

        Args:
            shard: The shard.
            first_item: Number of the item to begin with.
            unneeded: Number of the next items that are made only to come to the one after them.

        Raises:
            TypeError: What the function returns cannot be iterated.
        """
        call = functools.partial(self._call, first_item)
        if self.is_async:
            # Each shard has one batch made ahead, of as many samples as that needs.
            stage = self.stage
            ahead = 1 if stage is None else stage.batch_size or 1
            buffer = 0 if stage is None else stage.shuffle_buffer or 0
            unneeded = 0 if stage is not None else unneeded
            items: Iterable[Any] = AsyncItems(call, shard, self.loop, ahead, buffer, unneeded)
        else:
            items = call(shard)
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

    def _call(self, first_item: int, shard: Shard) -> Any:
        begin = {"first_item": first_item} if first_item else {}
        arguments = (shard,) if self.takes_shard else ()
        return self.function(*arguments, **begin)


@dataclass(frozen=True)
class LiveSource:
    """A running iterator, or an iterable of which there is one stream."""

    iterable: Iterable[Any]
    stage: Samples | None = None
    can_begin_anywhere = is_async = has_threads = False
    concurrency = tickets_at_once = 1

    def open(self, shard: Shard, first_item: int = 0, unneeded: int = 0) -> Iterable[Any]:
        """Return the iterable; a shard of a `LiveSource` is all of it."""
        if self.stage is None:
            return self.iterable
        return self.stage.open(self.iterable, replace(shard, index=0), is_own=False)


# What a function of the user may take as its second argument.
_SECOND = {"task": "its Task", "tasks": "their Tasks"}
# Stands for the end of an iterator.
_END: Any = object()


class Stepped(Iterator[Any]):
    """An iterator over an object with `__next__` alone, such as an old data loader."""

    def __init__(self, stepper: Any) -> None:
        self._stepper = stepper

    def __next__(self) -> Any:
        return self._stepper.__next__()


Source = FunctionSource | LiveSource


def iterate(
    items: Iterable[Any], state: Any = None, is_at_end: bool = False
) -> tuple[Iterator[Any], Any]:
    """Return an iterator over `items`, and the object with its state, if there is one.

    Args:
        items: Iterable of a shard.
        state: State of an earlier iterator, whose next item is to be the first one; None to begin
            with the first item.
        is_at_end: Whether it may be the state of the end of an earlier epoch. An iteration that
            has nothing left then begins again: many an `__iter__` begins anew unless a state was
            loaded.

    Raises:
        StateMismatch: There is a state, and nothing here can load it.
    """
    # What loads it may keep it, and change it.
    loaded = copy.deepcopy(state) if is_at_end else None
    stateful: Any = items if is_stateful(items) else None
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
    if state is not None and is_at_end:
        first = next(iterator, _END)
        if first is not _END:
            iterator = _with_first(first, iterator)
        elif _has_state(stateful, loaded):
            iterator = iter(items)
            stateful = stateful if is_stateful(items) else iterator
        # If neither holds, that was the next epoch, which is empty.
    return iterator, stateful


def _with_first(first: Any, iterator: Iterator[Any]) -> Iterator[Any]:
    yield first
    del first
    yield from iterator


def _has_state(stateful: Any, state: Any) -> bool:
    """Return whether an object still has the state that was loaded."""
    try:
        return bool(stateful.state_dict() == state)
    except Exception:
        # States with arrays or tensors have no single truth.
        return True


def close(iterator: object) -> None:
    """Run the `finally` of a generator, or the `close` of another iterator that has it."""
    if hasattr(iterator, "close"):
        iterator.close()


def can_go_on(iterator: object) -> bool:
    """Return whether an iterator may have more items after it raised an exception."""
    return not isinstance(iterator, (GeneratorType, AsyncItems))


def is_stateful(items: object) -> bool:
    """Return whether an iterator or an iterable can be resumed by its own methods."""
    return hasattr(items, "state_dict") and hasattr(items, "load_state_dict")


def as_source(generator: object) -> Source:
    """Return the source of `generator`; raise TypeError that says what to pass instead."""
    if isinstance(generator, (FunctionSource, LiveSource)):
        # Of another enqueuer.
        return generator
    if isinstance(generator, Iterator):
        return LiveSource(generator)
    if inspect.isasyncgen(generator):
        raise TypeError(
            "a running async generator cannot be passed, as it belongs to one event loop; pass the "
            "function itself, GeneratorEnqueuer(batches) instead of GeneratorEnqueuer(batches())"
        )
    if inspect.iscoroutine(generator) or _is(inspect.iscoroutinefunction, generator):
        raise TypeError(
            f"a coroutine gives one result, got {_a(generator)}; write `async def` with `yield`, "
            "or pass the function as map of OrderedEnqueuer"
        )
    if callable(generator):
        takes_shard, takes_first = _takes_shard(generator), _takes_first(generator)
        is_async = _is(inspect.isasyncgenfunction, generator)
        return FunctionSource(generator, takes_shard, None, takes_first, is_async)
    if hasattr(generator, "__next__"):
        return LiveSource(Stepped(generator))
    if isinstance(generator, Iterable) and not _is_collection(generator):
        return LiveSource(generator)
    raise TypeError(
        "GeneratorEnqueuer needs a generator function or an iterator of batches, "
        f"got {_a(generator)}{_advice_on(generator)}"
    )


def _advice_on(generator: object) -> str:
    """Return what to pass in place of a list or the like."""
    if _holds(generator, Iterator):
        return (
            " of iterators; pass a function that gives each shard its own: `GeneratorEnqueuer("
            "lambda shard: iterators[shard.index], shards=len(iterators))`, for processes with "
            "backend=Processes(start_method='fork')"
        )
    if _holds(generator, Callable):  # type: ignore[arg-type]
        return (
            " of functions; pass a function that calls the one of its shard: "
            "`def batches(shard): return functions[shard.index]()`, with shards=len(functions)"
        )
    if _is_collection(generator):
        return (
            "; write a function that yields batches of it "
            "(`def batches(shard): for x in shard.split(data): yield ...`), or pass iter(data)"
        )
    return ""


def name_of(function: object) -> str:
    """Return the name of `function` for a message."""
    return getattr(function, "__qualname__", None) or repr(function)


@fingerprint_of.register
def _of_function(source: FunctionSource) -> dict[str, Any]:
    return fingerprint_of(source.function)


@fingerprint_of.register
def _of_iterable(source: LiveSource) -> dict[str, Any]:
    return fingerprint_of(source.iterable)


def _takes_shard(function: Callable[..., Any]) -> bool:
    """Return whether `function` takes the shard; raise TypeError if it takes anything else."""
    takes_shard = takes_next(function, 0, "shard")
    if takes_shard is None:
        parameters = inspect.signature(function).parameters.values()
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        required = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
        raise TypeError(
            f"{name_of(function)} must take no argument or one (the shard), "
            f"but it needs {len(required)}: {', '.join(required)}; bind the others with "
            "functools.partial"
        )
    return takes_shard


def _takes_first(function: Callable[..., Any]) -> bool:
    """Return whether `function` has a parameter `first_item=0`; any other is the user's own."""
    try:
        parameter = inspect.signature(function).parameters.get("first_item")
    except ValueError:
        # Some built-in functions have no signature.
        return False
    if parameter is None or parameter.kind is parameter.POSITIONAL_ONLY:
        return False
    return type(parameter.default) is int and parameter.default == 0


def takes_next(function: Callable[..., Any], count: int, name: str) -> bool | None:
    """Return whether `function` takes another positional argument after the first `count`.

    An optional parameter keeps its default, unless it has this name.

    Returns:
        None: it takes fewer arguments than `count`, or needs others.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        # Some built-in functions have no signature.
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    needs_names = any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters)
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if required > count + 1 or needs_names or not (takes_any or len(positional) >= count):
        return None
    return required > count or (len(positional) > count and positional[count].name == name)


def takes_two(
    function: Callable[..., Any], name: str = "map", of: str = "element", second: str = "task"
) -> bool:
    """Return whether `function` takes the `Task` beside the element.

    Args:
        function: Function of the user.
        name: Name of the option by which the user passed it, for the message.
        of: Name of its first argument, for the message.
        second: Name of its second argument. A parameter that has a default gets it by this name.

    Raises:
        TypeError: It takes neither one argument nor two.
    """
    takes = takes_next(function, 1, second)
    if takes is None:
        raise TypeError(
            f"{name} must take the {of}, or the {of} and {_SECOND[second]}, but "
            f"{name_of(function)} takes {inspect.signature(function)}; bind the others with "
            "functools.partial"
        )
    return takes


def is_async(function: object) -> bool:
    """Return whether calls of a function return coroutines.

    Raises:
        TypeError: It is an asynchronous generator function.
    """
    if _is(inspect.isasyncgenfunction, function):
        raise TypeError(
            f"map must return the result of one element, got {_a(function)}, which yields several; "
            "return a list of them"
        )
    return _is(inspect.iscoroutinefunction, function)


def _is(kind: Callable[[object], bool], function: object) -> bool:
    """Return whether a function is of a kind, or what an object or a partial calls."""
    function = function.func if isinstance(function, functools.partial) else function
    return kind(function) or kind(getattr(function, "__call__", None))  # noqa: B004


def is_plain_collection(generator: object) -> TypeGuard[Iterable[Any]]:
    """Return whether `generator` is a list or the like, but not text, and not of iterators."""
    if isinstance(generator, (Iterator, str, bytes, bytearray)) or callable(generator):
        return False
    return _is_collection(generator) and not _holds(generator, Iterator)


def _holds(generator: object, kind: type) -> bool:
    """Return whether `generator` is a list of iterators, or of functions."""
    if not isinstance(generator, (list, tuple)) or not generator:
        return False
    return all(isinstance(element, kind) for element in generator)


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
    # `[i]` of a groupby of pandas selects columns.
    if any(base.__name__ == "SelectionMixin" for base in type(items).__mro__):
        return False
    return hasattr(items, "__getitem__")


def is_sequence(items: object) -> bool:
    """Return whether workers can fetch single elements, by their index.

    A `PyDataset` of Keras 3 may have `num_batches` instead of `__len__`.
    """
    if is_indexable(items):
        return True
    try:
        return has_elements(items) and hasattr(items, "num_batches")
    except NotImplementedError:
        # Keras raises this if the class defines neither.
        return False


def _a(value: object) -> str:
    return an(type(value).__name__)


def batched(
    samples: Iterable[Any], size: int, collate: Callable[[list[Any]], Any], drop_last: bool
) -> Iterator[Any]:
    """Yield batches of `size` samples; pass on None, which belongs to no batch.

    If `samples` raises, the samples of the incomplete batch are dropped.

    Args:
        samples: Samples of one shard.
        size: Number of samples in a batch.
        collate: Function that makes a batch of a list of samples.
        drop_last: Whether an incomplete last batch is left out.

    Example:
        >>> list(batched("abcde", 2, "".join, drop_last=False))
        ['ab', 'cd', 'e']
    """
    batch: list[Any] = []
    watch, seen = SampleWatch(), None
    for sample in samples:
        if sample is None:
            yield None
            continue
        if not batch:
            seen = watch.look(sample)
        batch.append(sample)
        # Without this, it would live on while the loop has its batch.
        del sample
        if len(batch) == size:
            _check_unchanged(watch, seen, batch)
            yield _collated(batch, collate)
    if batch and not drop_last:
        _check_unchanged(watch, seen, batch)
        yield _collated(batch, collate)


def _check_unchanged(watch: SampleWatch, seen: Any, samples: list[Any]) -> None:
    if watch.has_changed(seen, samples[0]):
        warn_of_reuse("a sample of the generator")


def _collated(batch: list[Any], collate: Callable[[list[Any]], Any]) -> Any:
    """Return a batch of some samples, and forget them. `collate` may keep its list."""
    samples = batch.copy()
    batch.clear()
    return collate(samples)


def shuffled(samples: Iterable[Any], size: int, draw: Callable[[], float]) -> Iterator[Any]:
    """Yield each sample once, a random one of the buffer at a time; pass on None.

    If `samples` raises, the samples of the buffer come before the error.

    Args:
        samples: Samples of one shard.
        size: Number of samples in the buffer.
        draw: Function that returns a random number from 0 to below 1.

    Example:
        >>> draws = iter([0.9, 0.0, 0.5, 0.0]).__next__
        >>> [sample for sample in shuffled("abcd", 2, draws) if sample]
        ['b', 'a', 'c', 'd']
    """
    buffer: list[Any] = []
    # No sample has left the buffer until it is full.
    watch, seen = SampleWatch(), None

    def drained() -> Iterator[Any]:
        if seen is not None:
            _check_unchanged(watch, seen, buffer)
        while buffer:
            at = int(draw() * len(buffer))
            buffer[at], buffer[-1] = buffer[-1], buffer[at]
            yield buffer.pop()

    try:
        for sample in samples:
            if sample is not None:
                if len(buffer) == size:
                    if seen is not None:
                        _check_unchanged(watch, seen, buffer)
                        seen = None
                    at = int(draw() * size)
                    sample, buffer[at] = buffer[at], sample
                else:
                    if not buffer:
                        seen = watch.look(sample)
                    buffer.append(sample)
                    # A worker can stop at each None, also while the buffer is filled.
                    sample = None
            yield sample
            del sample
    except Exception:
        # After the samples that were made before it.
        yield from drained()
        raise
    yield from drained()


@dataclass(frozen=True)
class Samples:
    """Options for the samples of a generator, checked.

    Attributes:
        batch_size: Number of samples in a batch; None if the generator yields batches.
        collate: Function that makes a batch of a list of samples.
        drop_last: Whether an incomplete last batch of a shard is left out.
        shuffle_buffer: Number of samples of a shard that are shuffled among each other, or None.
    """

    batch_size: int | None
    collate: Callable[[list[Any]], Any]
    drop_last: bool
    shuffle_buffer: int | None

    @classmethod
    def of(
        cls, batch_size: object, collate: object, drop_last: bool, shuffle_buffer: object
    ) -> Samples | None:
        """Return the options that the user gave; None if the items are to stay as they are.

        Raises:
            TypeError: An option has the wrong type.
            ValueError: An option is out of its range, or needs another one.
        """
        checks.function("collate", collate, "of a list of samples")
        if collate is not None and batch_size is None:
            raise ValueError("collate makes a batch of samples; give batch_size with it")
        if batch_size is None and shuffle_buffer is None:
            return None
        checked = checks.optional(checks.positive)
        size, buffer = checked("batch_size", batch_size), checked("shuffle_buffer", shuffle_buffer)
        if buffer == 1:
            raise ValueError(
                "shuffle_buffer must be >= 2, got 1: a single sample cannot be shuffled; give "
                "the number of samples that a shard can keep in memory, such as 1000"
            )
        return cls(size, stack if collate is None else collate, drop_last, buffer)  # type: ignore[arg-type]

    def open(self, items: Iterable[Any], shard: Shard, is_own: bool) -> Iterable[Any]:
        """Return an iterable over the batches of a shard.

        If the source has a state, so has the iterable, unless there is a shuffle buffer: its
        samples are part of the position, so the shard is run again.

        Args:
            items: Samples of the shard.
            shard: Shard that seeds the shuffling.
            is_own: Whether nothing else reads these samples, also after an error.
        """
        run = functools.partial(self._run, shard, is_own)
        if self.shuffle_buffer is None:
            held: Any = items if is_stateful(items) else iter(items)
            if is_stateful(held):
                return _ResumableBatches(held, run)
            items = held
        samples = iter(items)
        return _Restarted(samples, run) if can_go_on(samples) else run(samples)

    def identity(self) -> dict[str, int | None]:
        """Return the options that a saved position depends on."""
        return {"batch_size": self.batch_size, "shuffle_buffer": self.shuffle_buffer}

    def _run(self, shard: Shard, is_own: bool, samples: Iterator[Any]) -> Iterator[Any]:
        made = samples
        if self.shuffle_buffer is not None:
            draw = random.Random(seed_of_shuffle(shard)).random
            made = shuffled(made, self.shuffle_buffer, draw)
        if self.batch_size is not None:
            made = batched(made, self.batch_size, self.collate, self.drop_last)
        try:
            yield from made
        except BaseException as error:
            # Only now, as the user's iterator may be read again after the end of an epoch, and a
            # running iterator after an error of `collate`. One that can go on is closed at the end.
            if isinstance(error, GeneratorExit) or (is_own and not can_go_on(samples)):
                close(samples)
            raise


class _Restarted(Iterator[Any]):
    """The batches of samples whose iterator can go on after an exception.

    The samples of the batch that was incomplete then are dropped.
    """

    def __init__(
        self, samples: Iterator[Any], run: Callable[[Iterator[Any]], Iterator[Any]]
    ) -> None:
        self._samples = samples
        self._run = run
        # None at the beginning, and after an exception.
        self._made: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._made is None:
            self._made = self._run(self._samples)
        try:
            return next(self._made)
        except StopIteration:
            raise
        except Exception:
            self._made = None
            raise

    def close(self) -> None:
        close(self._samples if self._made is None else self._made)


class _ResumableBatches:
    """The batches of samples that have a state: a batch ends with a sample.

    An incomplete last batch comes after the end of the samples. Their state is then that of their
    end, from which some iterables begin anew, so the state says that nothing is left.
    """

    def __init__(self, samples: Any, run: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
        self._samples = samples
        self._run = run
        self._state: Any = None
        # Whether the samples have ended, and their last batch has not been followed by the end.
        self._is_last = False

    def __iter__(self) -> Iterator[Any]:
        if not self._is_last:
            samples, _ = iterate(self._samples, self._state)
            yield from self._run(self._until_end(samples))
        elif self._state is not None:
            self._samples.load_state_dict(self._state)
        # What a running iterator has at the end of an epoch is its next epoch.
        self._is_last = False

    def _until_end(self, samples: Iterator[Any]) -> Iterator[Any]:
        yield from samples
        self._is_last = True

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self._samples.state_dict(), "is_last": self._is_last}

    @checks.reading("the batches of a shard")
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state, self._is_last = state["samples"], checks.flag("is_last", state["is_last"])
