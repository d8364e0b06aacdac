"""What OrderedEnqueuer was handed -> tasks: who reads it, and how one of them is done.

    Reader, in the loop's process:  sequence or iterable -> tickets, one after the other
    TaskSource, in each worker:     the element of a ticket -> map -> a result; results -> collate

An element has its own random numbers (`Task`), so that a result depends neither on the worker
nor on the order. Of a sequence only indices travel; of an iterable the elements themselves.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from enqueuer.errors import StateMismatch
from enqueuer.messages import Start, Ticket
from enqueuer.shards import EpochEnd, Task, borrowed_globals
from enqueuer.sources import Stateful, is_indexable, iterate, name_of


class Indexable(Protocol):
    """A sequence, as far as one is needed here."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...


@dataclass
class TaskSource:
    """A sequence, or an iterable, and what is to be done with each element.

    Attributes:
        items: With `__len__` and `__getitem__`, or an iterable that only the reader sees.
        map: Called with the element, and with its `Task` if it takes two arguments; or None.
        batch_size: How many results are collated into one; None: each comes alone.
        collate: Makes one of a list of results.
        random_seed: Of the enqueuer.
    """

    items: Any
    map: Callable[..., Any] | None
    batch_size: int | None
    collate: Callable[[list[Any]], Any]
    random_seed: int
    takes_task: bool = field(init=False)
    is_sequence: bool = field(init=False)
    ended: int = field(init=False, default=0)  # epochs whose end the sequence was told of

    def __post_init__(self) -> None:
        self.takes_task = self.map is not None and takes_two(self.map)
        self.is_sequence = is_indexable(self.items)

    @property
    def runs_code(self) -> bool:
        """Whether there is code of the user's that might draw from the global generators."""
        own = self.map is not None or self.collate is not stack
        return own or type(self.items) not in (list, tuple, range, str, bytes, np.ndarray)

    def __getstate__(self) -> dict[str, Any]:
        """Leave an iterable at home: its elements come with the tickets."""
        return {**self.__dict__, "items": self.items if self.is_sequence else None}

    def result(self, index: int, epoch: int, random_seed: int, element: Any = None) -> Any:
        """Do the task of one element.

        Args:
            index: Of the element.
            epoch: From 0.
            random_seed: Of the enqueuer.
            element: It; needless if this is a sequence.
        """
        if self.is_sequence:
            if self.ended < epoch:
                self.catch_up(epoch)
            element = self.items[index]
        if self.map is None:
            return element
        if self.takes_task:
            return self.map(element, Task(index, epoch, random_seed))
        return self.map(element)

    def catch_up(self, epoch: int) -> None:
        """Tell the sequence of the ends of all epochs before this one, if it wants to know.

        Its copy in each process is told, with the global generators in the same state, so that
        a sequence that shuffles itself stays the same everywhere.
        """
        on_epoch_end = getattr(self.items, "on_epoch_end", None)
        while self.ended < epoch:
            if on_epoch_end is not None:
                with borrowed_globals(EpochEnd(self.ended, self.random_seed)):
                    on_epoch_end()
            self.ended += 1


@dataclass(frozen=True)
class Reading:
    """How the elements are dealt out.

    Attributes:
        shuffle: Whether each epoch has an order of its own, drawn from the seed.
        drop_last: Whether an incomplete batch is left out, and what cannot be dealt out evenly.
        rank: Of the one who reads.
        world_size: How many read, each its own part.
        part: Which batches of the rank are read: every `parts`-th, from this one on.
        parts: How many share the batches of the rank.
    """

    shuffle: bool
    drop_last: bool
    rank: int
    world_size: int
    part: int = 0
    parts: int = 1


class Reader:
    """Reads one epoch of a source into tickets, each when it is asked for.

    Args:
        source: What to read.
        reading: How.
        epoch: From 0.
        start: The task to begin with, and perhaps the state of the iterator before it.
        first: The number of the epoch's first task among those of all epochs.
    """

    def __init__(
        self, source: TaskSource, reading: Reading, epoch: int, start: Start, first: int
    ) -> None:
        self._epoch = epoch
        self._number = first + start.number
        self._stateful: Stateful | None = None
        source.catch_up(epoch)
        size = source.batch_size or 1
        if source.is_sequence:
            indices = order_of(source, reading, epoch)
            steps = steps_in(len(indices), size, reading.drop_last)
            own_steps = range(reading.part, steps, reading.parts)
            self._parts: Iterator[tuple[list[int], list[Any] | None]] = (
                ([int(index) for index in indices[step * size : (step + 1) * size]], None)
                for step in own_steps[start.number :]
            )
        else:
            items, self._stateful = iterate(source.items, start.state)
            own = _dealt(enumerate(items), reading)
            first, behind, had = reading.part, 0, start.number * reading.parts
            if start.state is None:
                _skip(own, had * size)
            else:  # it stands after the last batch that was had
                had = max(0, had - reading.parts + reading.part + 1)
                first = reading.parts - 1 if had else reading.part
                behind = had * size * reading.world_size
            batches = _batches(own, size, reading.drop_last, behind)
            self._parts = itertools.islice(batches, first, None, reading.parts)

    def next(self) -> tuple[Ticket, Any] | None:
        """Return the next ticket, and the state of the iterator after it if it has one.

        Returns:
            None at the end of the epoch.
        """
        part = next(self._parts, None)
        if part is None:
            return None
        indices, elements = part
        own = None if elements is None else tuple(elements)
        ticket = Ticket(self._number, self._epoch, tuple(indices), own)
        self._number += 1
        return ticket, None if self._stateful is None else self._stateful.state_dict()


def places_of(source: TaskSource, reading: Reading) -> range:
    """Return which places of an epoch's order a rank is dealt."""
    count = len(source.items)
    kept = count - count % reading.world_size if reading.drop_last else count
    return range(reading.rank, kept, reading.world_size)


def order_of(source: TaskSource, reading: Reading, epoch: int) -> range | np.ndarray:
    """Return the indices of a rank in an epoch, in the order in which they are dealt out."""
    places = places_of(source, reading)
    if not reading.shuffle:
        return places
    order = permutation(len(source.items), source.random_seed, epoch)
    return order[places.start : places.stop : places.step]


def permutation(count: int, random_seed: int, epoch: int) -> np.ndarray:
    """Return the order of so many elements in an epoch, the same for whoever asks."""
    seeds = np.random.SeedSequence(random_seed, spawn_key=(epoch,))
    return np.random.default_rng(seeds).permutation(count)


def steps_in(count: int, size: int, drop_last: bool) -> int:
    """Return how many batches so many elements make."""
    return count // size if drop_last else -(-count // size)


def _dealt(numbered: Iterator[tuple[int, Any]], reading: Reading) -> Iterator[tuple[int, Any]]:
    """Yield a rank's part of an iterable: one of each `world_size` elements."""
    if reading.world_size == 1:
        yield from numbered
        return
    while group := list(itertools.islice(numbered, reading.world_size)):
        is_whole = len(group) == reading.world_size
        if reading.rank < len(group) and (is_whole or not reading.drop_last):
            yield group[reading.rank]


def _skip(items: Iterator[Any], count: int) -> None:
    had = sum(1 for _ in itertools.islice(items, count))
    if had < count:
        raise StateMismatch(
            f"the iterable ended after {had} elements when it was read again, but {count} had "
            "come of it before: it does not repeat itself"
        )


def _batches(
    own: Iterator[tuple[int, Any]], size: int, drop_last: bool, behind: int
) -> Iterator[tuple[list[int], list[Any]]]:
    while part := list(itertools.islice(own, size)):
        if len(part) == size or not drop_last:
            yield [index + behind for index, _ in part], [element for _, element in part]


# --- what is handed over -----------------------------------------------------------------------


def takes_two(function: Callable[..., Any], name: str = "map", of: str = "element") -> bool:
    """Tell whether `function` wants the `Task` beside the element; raise TypeError if not one.

    Args:
        function: To be asked.
        name: Of the argument that it was given as.
        of: What it is called with.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some built-ins tell nothing of themselves
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    demanded = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(required) > 2 or demanded or not (positional or takes_any):
        raise TypeError(
            f"{name} must take the {of}, or the {of} and its Task, but {name_of(function)} "
            f"takes {inspect.signature(function)}; bind the others with functools.partial"
        )
    return len(required) == 2 or (len(positional) > 1 and positional[1].name == "task")


def stack(results: list[Any], join: Callable[[list[Any]], Any] = np.stack) -> Any:
    """Make one batch of results: arrays and numbers are stacked along a new first axis.

    Dicts, tuples and lists are gone into; what is neither an array, a tensor nor a number stays
    in a list.

    Args:
        results: Of one batch, all of the same build.
        join: Stacks arrays of one shape.

    Raises:
        ValueError: Arrays differ in shape.

    Example:
        >>> stack([{"x": 1.0, "name": "a"}, {"x": 2.0, "name": "b"}])
        {'x': array([1., 2.]), 'name': ['a', 'b']}
    """
    first = results[0]
    if isinstance(first, (np.ndarray, np.generic)):
        shapes = {getattr(result, "shape", ()) for result in results}
        if len(shapes) > 1:
            raise ValueError(
                f"the results of a batch differ in shape ({', '.join(map(str, sorted(shapes)))}); "
                "give them one in map, or give collate= a function that can join them"
            )
        return join(results)
    if isinstance(first, (bool, int, float, complex)):
        return np.array(results)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(first, torch.Tensor):
        return torch.stack(results)
    if isinstance(first, Mapping):
        return {key: stack([result[key] for result in results], join) for key in first}
    if isinstance(first, (tuple, list)):
        columns = [stack(list(column), join) for column in zip(*results, strict=True)]
        if hasattr(first, "_fields"):
            return type(first)(*columns)
        return type(first)(columns)
    return results
