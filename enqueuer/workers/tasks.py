"""The elements of a source: the order in which an epoch has them, and the work for each.

    the loop:   length, seed, epoch -> order_of() -> indices of a rank
    a worker:   ticket -> elements_of() -> result() of each -> collate -> one item

The functions of the order are pure: they keep nothing and wait for nothing. An element has its own
random numbers (`Task`), so a result depends neither on the worker nor on the order. The ticket of
a sequence has indices; that of an iterable has the elements themselves.

A long list of constants, such as paths, is packed into two buffers, which many processes can share:

    a list of paths -> packed() -> PackedList -> pickle protocol 5, buffers out of band -> workers

A list of a million strings is a million objects. Each process that unpickles it has its own copy,
and a forked process copies a page as soon as it counts a reference there. Buffers hold no objects,
so that one copy of them serves all processes.
"""

from __future__ import annotations

import copy
import operator
import os
import pickle
import reprlib
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from enqueuer.common.text import an
from enqueuer.order.messages import Ticket
from enqueuer.order.position import fingerprint_of, named
from enqueuer.workers.arrays import stack
from enqueuer.workers.event_loop import result_of
from enqueuer.workers.shards import EpochSeeds, Task, borrowed_globals, has_labels
from enqueuer.workers.sources import (
    is_async,
    is_indexable,
    is_sequence,
    takes_two,
)

Element = TypeVar("Element", covariant=True)


class Indexable(Protocol[Element]):
    """The methods of a sequence that are used here."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Element: ...


class Counted(Protocol[Element]):
    """The members of a `PyDataset` of Keras 3 without `__len__` that are used here."""

    @property
    def num_batches(self) -> int | None: ...
    def __getitem__(self, index: Any, /) -> Element: ...


# Elements of a list by which a change of it is noticed.
_MAX_SAMPLED = 4096
# Methods by which a sequence follows the epochs; those of Keras' base classes do nothing.
_FOR_EPOCHS = ("on_epoch_begin", "on_epoch_end")
_KERAS = frozenset({"keras", "tf_keras", "tensorflow"})
_BASES = frozenset({"PyDataset", "Sequence"})
# An element may be a long text.
_PATHS = reprlib.Repr()
_PATHS.maxstring = 200
# Stands for an element that is still to be fetched.
FETCH: Any = object()


class WrongElements(TypeError, ValueError):
    """The method `__getitems__` of a sequence did not return a list of elements."""


_NEEDED = (
    "it must return a list with one element for each index, in their order. If it makes whole "
    "batches, give lists of indices, and the method as map: OrderedEnqueuer(lists_of_indices, "
    "map=sequence.__getitems__), without batch_size"
)


@dataclass
class TaskSource:
    """A sequence, or an iterable, and the work for each element.

    Attributes:
        items: A sequence (`is_sequence`), or an iterable that only the reader sees.
        map: Function of the element, and of its `Task` if it takes two arguments; or None.
        batch_size: Number of results that are collated into one; None if each comes alone.
        collate: Function that makes one batch of a list of results.
        random_seed: Seed of the enqueuer.
        begin_worker: Function that a worker in another process calls once, with its index. It
            returns the function that seeds before each task; None: as for other sources.
        is_round_robin: Whether worker i of n does the elements i, i + n and so on of an epoch, as
            the results depend on what a worker did before. Not with threads.
        max_pending: Largest number of tasks that are submitted and not taken; None: by the queue.
        concurrency: Number of elements that each worker runs at once.
        takes_task: Whether `map` takes the `Task` as well.
        takes_tasks: Whether `collate` takes the `Task` of each result as well.
        is_async: Whether `map` is an async function.
        is_sequence: Whether workers can fetch single elements, by their index.
        has_labels: Whether an index of the sequence is a label, and `iloc` takes the place.
        has_none: Whether a result was None, which is logged once.
        begun: Number of epochs whose beginning was announced to the sequence.
        ended: Number of epochs whose end was announced to the sequence.
    """

    items: Any
    map: Callable[..., Any] | None
    batch_size: int | None
    collate: Callable[..., Any]
    random_seed: int
    begin_worker: Callable[[int], Callable[[Task], None] | None] | None = None
    is_round_robin: bool = False
    max_pending: int | None = None
    concurrency: int = 1
    takes_task: bool = field(init=False)
    takes_tasks: bool = field(init=False)
    is_async: bool = field(init=False)
    is_sequence: bool = field(init=False)
    has_labels: bool = field(init=False)
    has_none: bool = field(init=False, default=False)
    # These two travel with the sequence, so that each epoch is announced to every copy exactly
    # once.
    begun: int = field(init=False, default=0)
    ended: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.takes_task = self.map is not None and takes_two(self.map)
        self.is_async = is_async(self.map)
        # The second parameter of `stack` is for other kinds of arrays.
        self.takes_tasks = self.collate is not stack and takes_two(
            self.collate, "collate", "list of results", "tasks"
        )
        self.is_sequence = is_sequence(self.items)
        self.has_labels = has_labels(self.items)

    @property
    def is_finite(self) -> bool:
        """Whether the number of elements is known."""
        return self.is_sequence and length_of(self.items) is not None

    @property
    def length(self) -> int:
        """Number of elements of a sequence; if it is endless, the largest length of a range."""
        length = length_of(self.items)
        return sys.maxsize if length is None else length

    def sample(self, length: int | None = None) -> tuple[int, ...]:
        """Return the length of a list, and the identities of elements from all over it.

        Args:
            length: Number of its first elements; None, the default: all.
        """
        if type(self.items) is not list:
            return ()
        count = len(self.items) if length is None else length
        return count, *map(id, self.items[: count : count // _MAX_SAMPLED + 1])

    @property
    def may_overlap(self) -> bool:
        """Whether an epoch may begin while the loop still reads the one before.

        Not if the elements may change at the end of an epoch, or come from an iterable.
        """
        return self.is_sequence and not self.follows_epochs

    @property
    def follows_epochs(self) -> bool:
        """Whether the sequence has methods of its own for the beginning or end of an epoch."""
        methods = (getattr(self.items, name, None) for name in _FOR_EPOCHS)
        return not all(map(_does_nothing, methods))

    @property
    def tickets_at_once(self) -> int:
        """Number of tickets over which the elements extend that a worker runs at once.

        Example:
            >>> def of(concurrency, size=None):
            ...     source = TaskSource([], None, size, stack, 0, concurrency=concurrency)
            ...     return source.tickets_at_once
            >>> of(1), of(8), of(1, size=4), of(8, size=4), of(8, size=64)
            (1, 8, 1, 3, 2)
        """
        return 1 - (1 - self.concurrency) // (self.batch_size or 1)

    @property
    def has_threads(self) -> bool:
        """Whether a worker has threads for the elements; one for coroutines runs them on a loop."""
        return self.concurrency > 1 or self.is_async

    @property
    def runs_code(self) -> bool:
        """Whether the user's code runs, which might draw from the global generators."""
        is_custom = self.map is not None or self.collate is not stack
        plain = (list, tuple, range, str, bytes, np.ndarray, PackedList)
        return is_custom or type(self.items) not in plain

    def __getstate__(self) -> dict[str, Any]:
        """Leave out an iterable, as its elements come with the tickets; pack a long list."""
        return {**self.__dict__, "items": packed(self.items) if self.is_sequence else None}

    def packed(self) -> TaskSource:
        """Return this source with a long list packed, for workers that inherit this memory."""
        items = packed(self.items)
        if items is self.items:
            return self
        inherited = copy.copy(self)
        inherited.items = items
        return inherited

    def elements_of(self, ticket: Ticket) -> Sequence[Any]:
        """Return the elements of a ticket, with `FETCH` for those that `result` must fetch.

        A sequence that has `__getitems__` fetches those of a batch in one call, unless its class
        overrides `__getitem__` alone.

        Raises:
            WrongElements: `__getitems__` returned a mapping or a string, or more or fewer elements
                than indices.
            Exception: `__getitems__` raised it.

        Source: torch's DataLoader calls `__getitems__` of map-style datasets so.
        """
        if ticket.elements is not None:
            return ticket.elements
        count = len(ticket.indices)
        if not self.fetches_many(ticket):
            return [FETCH] * count
        self.begin(ticket.epoch)
        returned = self.items.__getitems__(list(ticket.indices))
        name = f"__getitems__ of {type(self.items).__name__}"
        if isinstance(returned, (Mapping, str, bytes)):
            raise WrongElements(f"{name} returned {an(type(returned).__name__)}; {_NEEDED}")
        elements = list(returned)
        if len(elements) != count:
            raise WrongElements(
                f"{name} returned {len(elements)} elements for {count} indices; {_NEEDED}"
            )
        return elements

    @property
    def is_of_files(self) -> bool:
        """Whether its elements are paths, and a worker has several at once."""
        has_many = self.has_threads or (self.batch_size or 1) > 1
        return has_many and bool(self.path_of(0))

    def path_of(self, index: int) -> str:
        """Return the path that an element of a list is, or begins with, for an error; or ""."""
        if type(self.items) not in (list, tuple, PackedList) or index >= len(self.items):
            return ""
        element = self.items[index]
        path = element[0] if isinstance(element, (tuple, list)) and element else element
        return f" ({_PATHS.repr(str(path))})" if isinstance(path, (str, os.PathLike)) else ""

    def fetches_many(self, ticket: Ticket) -> bool:
        """Return whether `elements_of` calls the sequence's `__getitems__` for a ticket."""
        is_batch = ticket.elements is None and len(ticket.indices) > 1
        return is_batch and _fetches_many(type(self.items))

    def result(self, index: int, epoch: int, random_seed: int, element: Any = FETCH) -> Any:
        """Return the result of one element.

        Args:
            index: Index of the element.
            epoch: Number of the epoch, from 0.
            random_seed: Seed of the enqueuer.
            element: The element; by default it is fetched from the sequence.
        """
        if element is FETCH:
            if self.begun <= epoch:
                self.begin(epoch)
            element = (self.items.iloc if self.has_labels else self.items)[index]
        if self.map is None:
            return element
        if self.takes_task:
            result = self.map(element, Task(index, epoch, random_seed))
        else:
            result = self.map(element)
        return result_of(result) if self.is_async else result

    def results_of(
        self,
        ticket: Ticket,
        elements: Iterable[Any],
        note: Callable[[Iterable[Any]], Iterable[Any]] | None = None,
    ) -> Iterable[Any]:
        """Return an iterator of the results of a ticket.

        Args:
            ticket: The ticket.
            elements: What `elements_of` returned.
            note: Function that records which element runs, if that is to be known.
        """
        epoch = ticket.epoch
        if next(iter(elements)) is FETCH:
            if self.begun <= epoch:
                self.begin(epoch)
            items = self.items.iloc if self.has_labels else self.items
            elements = map(operator.getitem, repeat(items), ticket.indices)
        if note is not None:
            elements = note(elements)
        if self.map is None:
            return elements
        arguments: list[Iterable[Any]] = [elements]
        if self.takes_task:
            arguments.append(map(Task, ticket.indices, repeat(epoch), repeat(self.random_seed)))
        results = map(self.map, *arguments)
        return map(result_of, results) if self.is_async else results

    def item_of(self, ticket: Ticket, results: list[Any], random_seed: int) -> Any:
        """Return the item of a ticket: its only result, or a batch of those that are not None.

        Args:
            ticket: The ticket.
            results: Result of each element.
            random_seed: Seed of the enqueuer.
        """
        if self.batch_size is None:
            return results[0]
        usable = [result for result in results if result is not None]
        if not usable:
            return None
        if not self.takes_tasks:
            return self.collate(usable)
        places = zip(ticket.indices, results, strict=True)
        indices = [index for index, result in places if result is not None]
        return self.collate(usable, [Task(i, ticket.epoch, random_seed) for i in indices])

    @property
    def is_plain(self) -> bool:
        """Whether a result needs nothing but the index of its element."""
        return self.is_sequence and self.batch_size is None and not self.takes_task

    def begin(self, epoch: int) -> None:
        """Announce to the sequence all epochs up to the beginning of this one, each once.

        The copy in each process is called with the global generators in the same state, so that
        a sequence that shuffles itself stays the same everywhere.
        """
        if self.begun < epoch and not self.follows_epochs:
            # A position may be far from the first epoch.
            self.begun = self.ended = epoch
        while self.begun <= epoch:
            self.end(self.begun - 1)
            self._announce("on_epoch_begin", self.begun, EpochSeeds.BEGIN)
            self.begun += 1

    def end(self, epoch: int) -> None:
        """Announce to the sequence the end of an epoch that has begun, unless that was done."""
        if self.ended <= epoch:
            self._announce("on_epoch_end", epoch, EpochSeeds.END)
            self.ended = epoch + 1

    def rewind(self) -> None:
        """Set the number of announced epochs to 0; the sequence itself stays as it is."""
        self.begun = self.ended = 0

    def _announce(self, name: str, epoch: int, key: int) -> None:
        """Call a method of the sequence, if it has it."""
        method = getattr(self.items, name, None)
        if method is not None:
            with borrowed_globals(EpochSeeds(epoch, self.random_seed, key)):
                method()


@fingerprint_of.register
def _of_tasks(source: TaskSource) -> dict[str, Any]:
    """Return the names alone: a sequence has its length in the state, and its own batches not."""
    return named(name=source.items, map=source.map)


def _does_nothing(method: Any) -> bool:
    """Return whether a method is missing, or is that of a base class of Keras."""
    module = str(getattr(method, "__module__", None)).partition(".")[0]
    kind = str(getattr(method, "__qualname__", None)).partition(".")[0]
    return method is None or (module in _KERAS and kind in _BASES)


def _fetches_many(kind: type) -> bool:
    """Return whether elements of a sequence of this class come by its `__getitems__`.

    Other classes would lose their own work on the elements: those that override `__getitem__`
    alone, and those that forward unknown attributes to another sequence.
    """
    for base in kind.__mro__:
        if "__getitems__" in vars(base):
            return callable(vars(base)["__getitems__"])
        if "__getitem__" in vars(base):
            return False
    return False


def why_no_elements(items: Any) -> str | None:
    """Return why `[i]` of an object is not its element i; None if it may be.

    No class of a table is imported: they are known by their methods.
    """
    kind = type(items)
    if isinstance(items, (str, bytes)):
        return (
            f"got the text {reprlib.repr(items)}, of which [i] is one character; pass a list: "
            "[text], or read_list(path) of enqueuer.datasets.files for the lines of a file"
        )
    if isinstance(items, Set):
        return f"got {an(kind.__name__)}, which has no order; pass sorted(...) or list(...) of it"
    if (has_labels(items) and items.ndim != 1) or hasattr(kind, "itercolumns"):
        return (
            f"got {an(kind.__name__)}, of which [i] is a column and the length that of the rows; "
            "pass its rows, such as frame.to_dict('records') or table.to_pylist(), or "
            "range(len(frame)) with a map that takes row i (frame.iloc[i])"
        )
    is_like_dict = isinstance(items, Mapping)
    has_keys = (
        is_indexable(items) and hasattr(kind, "__iter__") and callable(getattr(kind, "keys", None))
    )
    if has_keys and not (is_like_dict or has_labels(items)):
        # Some tables have keys as well, and iterate over their rows.
        first, key = next(iter(items), None), next(iter(items.keys()), None)
        is_like_dict = key is not None and type(first) is type(key) and bool(first == key)
    if is_like_dict:
        return (
            f"got {an(kind.__name__)}, of which [i] takes a key and not a place; pass list(...) of "
            "its keys, values() or items()"
        )
    return None


def length_of(sequence: Any) -> int | None:
    """Return the number of elements of a sequence; None if it is endless."""
    if hasattr(sequence, "__len__"):
        return len(sequence)
    number: int | None = sequence.num_batches
    return number


class Reading(NamedTuple):
    """The rules by which the elements of an epoch are divided among ranks.

    Attributes:
        shuffle: Whether each epoch has an order of its own, drawn from the seed.
        drop_last: Whether an incomplete batch is left out, and elements that cannot be divided
            evenly.
        rank: Rank of this reader.
        world_size: Number of ranks, of which each reads its own elements.
    """

    shuffle: bool
    drop_last: bool
    rank: int
    world_size: int


# Of tasks; see `enqueuer/order/`.
Division = Sequence[int]


def places_of(
    source: TaskSource, reading: Reading, division: Division = (0,)
) -> range | np.ndarray:
    """Return the places of an epoch's order that belong to a rank."""
    begin, *done = division
    count = max(0, source.length - begin - len(done))
    usable = count - count % reading.world_size if reading.drop_last else count
    part = range(reading.rank, usable, reading.world_size)
    if not done:
        return range(begin + part.start, begin + part.stop, part.step)
    remaining = np.setdiff1d(np.arange(begin, source.length), done, assume_unique=True)
    return remaining[part.start : part.stop : part.step]


def order_of(
    source: TaskSource, reading: Reading, epoch: int, division: Division = (0,)
) -> range | np.ndarray:
    """Return the indices of a rank in an epoch, in its order."""
    places = places_of(source, reading, division)
    if not reading.shuffle:
        return places
    order = permutation(source.length, source.random_seed, epoch)
    if isinstance(places, range):
        return order[places.start : places.stop : places.step]
    part: np.ndarray = order[places]
    return part


def permutation(count: int, random_seed: int, epoch: int) -> np.ndarray:
    """Return the order of so many elements in an epoch, which is the same in every process."""
    seeds = np.random.SeedSequence(random_seed, spawn_key=(epoch,))
    return np.random.default_rng(seeds).permutation(count)


def steps_in(count: int, size: int, drop_last: bool) -> int:
    """Return the number of batches that so many elements make."""
    return count // size if drop_last else -(-count // size)


# --- packed elements ------------------------------------------------------------------------------

# Elements; a shorter list costs each worker less than a tenth of a percent of its memory.
FEWEST_PACKED = 10_000
# Elements that are pickled together. More take longer to unpickle for one of them, fewer take
# longer to pack.
PACKED_CHUNK = 16


class PackedList(Sequence[Any]):
    """A list that cannot change, of which single elements are unpickled when they are asked for.

    Elements are unpickled in chunks, and the chunk that was read last is kept for its neighbours.

    Args:
        data: The pickles of all chunks, one after the other.
        ends: End of each chunk in `data`, in bytes: 64-bit integers in a buffer.
        length: Number of elements.

    Example:
        >>> paths = PackedList.of([f"{number:06}.jpg" for number in range(20)])
        >>> len(paths), paths[3], paths[-1], paths[17:]
        (20, '000003.jpg', '000019.jpg', ['000017.jpg', '000018.jpg', '000019.jpg'])
    """

    def __init__(self, data: Any, ends: Any, length: int) -> None:
        self._data = memoryview(data)
        self._ends = memoryview(ends).cast("B").cast("q")
        self._length = length
        # A chunk that was read and its number, in one tuple: other threads may read as well.
        self._last: tuple[int, list[Any]] = (-1, [])

    @classmethod
    def of(cls, items: Sequence[Any]) -> PackedList:
        """Pack the elements of a list or a tuple."""
        starts = range(0, len(items), PACKED_CHUNK)
        chunks = [pickle.dumps(items[at : at + PACKED_CHUNK], protocol=5) for at in starts]
        return cls(b"".join(chunks), array("q", accumulate(map(len, chunks))), len(items))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(self._length)[index]]
        # A range knows what is no index, and what a negative one means.
        chunk, at = divmod(range(self._length)[index], PACKED_CHUNK)
        last = self._last
        if last[0] != chunk:
            self._last = last = chunk, self._chunk(chunk)
        return last[1][at]

    def __iter__(self) -> Any:
        return chain.from_iterable(map(self._chunk, range(len(self._ends))))

    def __repr__(self) -> str:
        return f"<PackedList of {self._length} elements>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        buffers = (self._data, self._ends)
        kind: Any = pickle.PickleBuffer if protocol >= 5 else bytes
        return PackedList, (*map(kind, buffers), self._length)

    def _chunk(self, number: int) -> Any:
        start = self._ends[number - 1] if number else 0
        return pickle.loads(self._data[start : self._ends[number]])


def packed(items: Any) -> Any:
    """Return a long list or tuple of constants packed, and everything else as it is.

    Constants are strings, bytes, numbers, None, paths, and tuples of these.

    Example:
        >>> packed(["a", "b"]), packed([("a.jpg", 1)] * 10_000)
        (['a', 'b'], <PackedList of 10000 elements>)
    """
    if type(items) not in (list, tuple) or len(items) < FEWEST_PACKED:
        return items
    types = set(map(type, items))
    if tuple in types:
        within = chain.from_iterable(item for item in items if type(item) is tuple)
        types = types - {tuple} | set(map(type, within))
    return PackedList.of(items) if types <= _constants() else items


def _constants() -> set[type]:
    """Return types whose values are alike in each process, and refer to nothing else.

    Not other classes: a class of the main module can only be pickled by value, which is slow.
    """
    # Its import takes milliseconds, also in a fork server, which never needs it.
    import pathlib

    paths = {pathlib.PosixPath, pathlib.PurePosixPath}
    return {str, bytes, int, float, complex, bool, type(None), *paths}
