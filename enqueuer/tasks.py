"""What OrderedEnqueuer was handed -> tasks: who reads it, and how one of them is done.

    Reader, in the loop's process:  sequence or iterable -> tickets, one after the other
    TaskSource, in each worker:     the element of a ticket -> map -> a result; results -> collate

An element has its own random numbers (`Task`), so that a result depends neither on the worker
nor on the order. Of a sequence only indices travel; of an iterable the elements themselves.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from enqueuer.errors import StateMismatch
from enqueuer.formats import an
from enqueuer.messages import Start, Ticket
from enqueuer.shards import EpochBegin, EpochEnd, Task, borrowed_globals
from enqueuer.sources import Stateful, has_elements, is_indexable, iterate, name_of


class Indexable(Protocol):
    """A sequence, as far as one is needed here."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...


class Counted(Protocol):
    """A `PyDataset` of Keras 3 without `__len__`, likewise."""

    @property
    def num_batches(self) -> int | None: ...
    def __getitem__(self, index: Any, /) -> Any: ...


# Stands for an element that is still to be fetched.
FETCH: Any = object()


@dataclass
class TaskSource:
    """A sequence, or an iterable, and what is to be done with each element.

    Attributes:
        items: A sequence (`is_sequence`), or an iterable that only the reader sees.
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
    # Numbers of epochs whose beginning and whose end the sequence was told of. They travel with
    # the sequence, so that every copy is told of each exactly once.
    begun: int = field(init=False, default=0)
    ended: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.takes_task = self.map is not None and takes_two(self.map)
        self.is_sequence = is_sequence(self.items)

    @property
    def is_finite(self) -> bool:
        """Whether the number of elements is known."""
        return self.is_sequence and length_of(self.items) is not None

    @property
    def length(self) -> int:
        """Number of elements of a sequence; if it is endless, the most that a range can have."""
        length = length_of(self.items)
        return sys.maxsize if length is None else length

    @property
    def runs_code(self) -> bool:
        """Whether there is code of the user's that might draw from the global generators."""
        own = self.map is not None or self.collate is not stack
        return own or type(self.items) not in (list, tuple, range, str, bytes, np.ndarray)

    def __getstate__(self) -> dict[str, Any]:
        """Leave an iterable at home: its elements come with the tickets."""
        return {**self.__dict__, "items": self.items if self.is_sequence else None}

    def elements_of(self, ticket: Ticket) -> Sequence[Any]:
        """Return the elements of a ticket, with `FETCH` for those that `result` must fetch.

        A sequence that has `__getitems__` fetches those of a batch in one call, unless its class
        overrides `__getitem__` alone.

        Raises:
            TypeError: `__getitems__` returned a mapping or a string.
            ValueError: `__getitems__` returned more or fewer elements than indices.
            Exception: `__getitems__` raised it.

        Source: torch's DataLoader calls `__getitems__` of map-style datasets so.
        """
        if ticket.elements is not None:
            return ticket.elements
        count = len(ticket.indices)
        if count == 1 or not _fetches_many(type(self.items)):
            return [FETCH] * count
        if self.begun <= ticket.epoch:
            self.begin(ticket.epoch)
        returned = self.items.__getitems__(list(ticket.indices))
        name = f"__getitems__ of {type(self.items).__name__}"
        if isinstance(returned, (Mapping, str, bytes)):
            raise TypeError(
                f"{name} returned {an(type(returned).__name__)}; it must return a list with one "
                "element for each index"
            )
        elements = list(returned)
        if len(elements) != count:
            raise ValueError(
                f"{name} returned {len(elements)} elements "
                f"for {count} indices; it must return one for each, in their order"
            )
        return elements

    def result(self, index: int, epoch: int, random_seed: int, element: Any = FETCH) -> Any:
        """Do the task of one element.

        Args:
            index: Index of the element.
            epoch: Number of the epoch, from 0.
            random_seed: Seed of the enqueuer.
            element: The element; by default it is fetched from the sequence.
        """
        if element is FETCH:
            if self.begun <= epoch:
                self.begin(epoch)
            element = self.items[index]
        if self.map is None:
            return element
        if self.takes_task:
            return self.map(element, Task(index, epoch, random_seed))
        return self.map(element)

    def begin(self, epoch: int) -> None:
        """Tell the sequence of all epochs before this one, and of the beginning of this one.

        The copy in each process is told, with the global generators in the same state, so that
        a sequence that shuffles itself stays the same everywhere.
        """
        while self.begun <= epoch:
            self.end(self.begun - 1)
            self._tell("on_epoch_begin", EpochBegin(self.begun, self.random_seed))
            self.begun += 1

    def end(self, epoch: int) -> None:
        """Tell the sequence of the end of this epoch, which has begun, unless that was done."""
        if self.ended <= epoch:
            self._tell("on_epoch_end", EpochEnd(epoch, self.random_seed))
            self.ended = epoch + 1

    def rewind(self) -> None:
        """Count from the first epoch again; the sequence itself stays as it is."""
        self.begun = self.ended = 0

    def _tell(self, name: str, place: EpochEnd) -> None:
        """Call a method of the sequence, if it has it."""
        method = getattr(self.items, name, None)
        if method is not None:
            with borrowed_globals(place):
                method()


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
        block: Number of consecutive batches of a sequence that a part takes at a time.
    """

    shuffle: bool
    drop_last: bool
    rank: int
    world_size: int
    part: int = 0
    parts: int = 1
    block: int = 1

    def own(self, steps: int) -> Sequence[int]:
        """Return which of so many batches of the rank are read.

        Example:
            >>> list(Reading(False, False, 0, 1, part=1, parts=2, block=3).own(11))
            [3, 4, 5, 9, 10]
        """
        if self.block == 1:
            return range(self.part, steps, self.parts)
        return [step for step in range(steps) if step // self.block % self.parts == self.part]


class Reader:
    """Reads one epoch of a source into tickets, each when it is asked for.

    An exception out of a signal handler loses no element, unless it strikes inside the iterable's
    own code: `next` gives the same ticket again until `advance`, and elements are kept in C.

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
        self._reading = reading
        self._epoch = epoch
        self._number = first + start.number
        self._stateful: Stateful | None = None
        self._size = source.batch_size or 1
        self._runs = False  # the iterable's own code, or it has raised
        source.begin(epoch)
        self._is_sequence = source.is_sequence
        if source.is_sequence:
            self._indices = order_of(source, reading, epoch)
            steps = steps_in(len(self._indices), self._size, reading.drop_last)
            self._steps = reading.own(steps)[start.number :]
            self._at = 0
            return
        items, self._stateful = iterate(source.items, start.state)
        numbered = enumerate(items)
        self._left_out, self._behind, had = reading.part, 0, start.number * reading.parts
        if start.state is None:
            _skip(numbered, had * self._size, reading)
        else:  # it stands after the last batch that was had
            had = max(0, had - reading.parts + reading.part + 1)
            self._left_out = reading.parts - 1 if had else reading.part
            self._behind = had * self._size * reading.world_size
        self._numbered = itertools.chain(numbered, itertools.repeat(None))  # None: it has ended
        self._read: deque[tuple[int, Any] | None] = deque()  # of the next batch, of all ranks

    @property
    def has_failed(self) -> bool:
        """Whether an exception came out of the iterable's own code."""
        return self._runs and len(self._read) < self._size * self._reading.world_size

    def next(self) -> Ticket | None:
        """Return the next ticket, until `advance` the same; None at the end of the epoch."""
        if self._is_sequence:
            if self._at == len(self._steps):
                return None
            step = self._steps[self._at]
            part = self._indices[step * self._size : (step + 1) * self._size]
            return Ticket(self._number, self._epoch, tuple([int(index) for index in part]))
        while True:
            self._fill()
            own = self._own()
            if not own:
                return None
            is_whole = len(own) == self._size or not self._reading.drop_last
            if is_whole and not self._left_out:
                indices = tuple([index + self._behind for index, _ in own])
                elements = tuple([element for _, element in own])
                return Ticket(self._number, self._epoch, indices, elements)
            fresh = deque[tuple[int, Any] | None]()
            self._read, self._left_out = fresh, max(0, self._left_out - 1)

    def advance(self, number: int) -> None:
        """Go on behind the ticket of this number; again does nothing."""
        if number != self._number:
            return
        # No call comes between these stores, and so no signal handler runs.
        if self._is_sequence:
            self._at += 1
            self._number = number + 1
        else:
            fresh: deque[tuple[int, Any] | None] = deque()
            self._read, self._left_out = fresh, self._reading.parts - 1
            self._number = number + 1

    def _fill(self) -> None:
        """Read the elements of the next batch, those of other ranks too."""
        missing = self._size * self._reading.world_size - len(self._read)
        more = itertools.islice(self._numbered, missing)
        self._runs = True
        self._read.extend(more)
        self._runs = False

    def _own(self) -> list[tuple[int, Any]]:
        """Return this rank's elements of the next batch: one of each `world_size`."""
        reading = self._reading
        there = [pair for pair in self._read if pair is not None]
        if reading.drop_last:
            there = there[: len(there) - len(there) % reading.world_size]
        return there[reading.rank :: reading.world_size]

    def state(self) -> Any:
        """Return the state of the iterator as it is now; None if it tells none."""
        # a copy, as it may be the iterator's own, which goes on
        return None if self._stateful is None else copy.deepcopy(self._stateful.state_dict())


def places_of(source: TaskSource, reading: Reading) -> range:
    """Return which places of an epoch's order a rank is dealt."""
    count = source.length
    kept = count - count % reading.world_size if reading.drop_last else count
    return range(reading.rank, kept, reading.world_size)


def order_of(source: TaskSource, reading: Reading, epoch: int) -> range | np.ndarray:
    """Return the indices of a rank in an epoch, in the order in which they are dealt out."""
    places = places_of(source, reading)
    if not reading.shuffle:
        return places
    order = permutation(source.length, source.random_seed, epoch)
    return order[places.start : places.stop : places.step]


def permutation(count: int, random_seed: int, epoch: int) -> np.ndarray:
    """Return the order of so many elements in an epoch, the same for whoever asks."""
    seeds = np.random.SeedSequence(random_seed, spawn_key=(epoch,))
    return np.random.default_rng(seeds).permutation(count)


def steps_in(count: int, size: int, drop_last: bool) -> int:
    """Return how many batches so many elements make."""
    return count // size if drop_last else -(-count // size)


def _skip(numbered: Iterator[tuple[int, Any]], count: int, reading: Reading) -> None:
    """Pass over elements of which a rank has had so many."""
    last = deque(itertools.islice(numbered, count * reading.world_size), maxlen=1)
    read = last[0][0] + 1 if last else 0
    if reading.drop_last:
        read -= read % reading.world_size
    had = len(range(reading.rank, read, reading.world_size))
    if had < count:
        raise StateMismatch(
            f"the iterable ended after {had} elements when it was read again, but {count} had "
            "come of it before: it does not repeat itself"
        )


def _fetches_many(kind: type) -> bool:
    """Return whether elements of a sequence of this class come by its `__getitems__`.

    A class that overrides `__getitem__` alone, or hands unknown names on to another sequence,
    would otherwise lose its own work on the elements.
    """
    for base in kind.__mro__:
        if "__getitems__" in vars(base):
            return callable(vars(base)["__getitems__"])
        if "__getitem__" in vars(base):
            return False
    return False


# --- what is handed over -----------------------------------------------------------------------


def is_sequence(items: object) -> bool:
    """Tell whether workers can fetch single elements, by their index.

    A `PyDataset` of Keras 3 may have `num_batches` instead of `__len__`.
    """
    if is_indexable(items):
        return True
    try:
        return has_elements(items) and hasattr(items, "num_batches")
    except NotImplementedError:  # The class defines neither, which Keras says by this error.
        return False


def length_of(sequence: Any) -> int | None:
    """Return how many elements a sequence has; None if it is endless."""
    if hasattr(sequence, "__len__"):
        return len(sequence)
    number: int | None = sequence.num_batches
    return number


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

    Mappings, tuples and lists are gone into, and keep their class. What is neither an array, a
    tensor nor a number stays in a list, as do results of which one is None.

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
    if any(result is None for result in results):
        return results
    if isinstance(first, (np.ndarray, np.generic)):
        shapes = {getattr(result, "shape", ()) for result in results}
        if len(shapes) > 1:
            raise ValueError(
                f"the results of a batch differ in shape ({', '.join(map(str, sorted(shapes)))}); "
                "give them one in map, or give collate= a function that can join them"
            )
        return join(results)
    if isinstance(first, (bool, int, float, complex)):
        array = np.array(results)
        return array if array.dtype.kind in "biufc" else results  # texts were among them
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(first, torch.Tensor):
        return torch.stack(results)
    if isinstance(first, Mapping):
        return with_items(
            first, {key: stack([result[key] for result in results], join) for key in first}
        )
    if isinstance(first, (tuple, list)):
        columns = [stack(list(column), join) for column in zip(*results, strict=True)]
        if hasattr(first, "_fields"):
            return type(first)(*columns)
        return type(first)(columns)
    return results


def with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return `items` in a mapping of the same class as `mapping`; a dict if that is impossible.

    Args:
        mapping: The model, which is not changed.
        items: New values for all keys of the model.

    Example:
        >>> from collections import Counter
        >>> with_items(Counter(x=1), {"x": 2})
        Counter({'x': 2})
    """
    if type(mapping) is dict:
        return items
    if isinstance(mapping, (dict, UserDict)):
        twin = copy.copy(mapping)  # a defaultdict keeps its factory, for example
        for key, value in items.items():  # some classes forbid update()
            twin[key] = value
        return twin
    # A copy of another class may share its values with the original.
    kind: Any = type(mapping)
    try:
        twin = kind(items)
    except Exception:  # an archive that numpy has opened, for example
        return items
    return twin if isinstance(twin, Mapping) else items
