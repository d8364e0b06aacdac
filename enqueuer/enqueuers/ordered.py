"""OrderedEnqueuer, tasks over the elements of a sequence or an iterable; imap(), for one loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar, overload

import numpy as np

from enqueuer.common import checks
from enqueuer.enqueuers.core import Endless
from enqueuer.enqueuers.enqueuer import BaseEnqueuer, Batch, core_of, iterated
from enqueuer.enqueuers.epoch_reader import Outcome
from enqueuer.enqueuers.options import (
    Concurrency,
    EnqueuerOptions,
    NoBatches,
    Options,
    Seed,
    TaskOptions,
    Unpack,
    check_for_one_loop,
    passes_options,
    takes_options,
)
from enqueuer.enqueuers.tasks import TaskWorkload
from enqueuer.workers.arrays import stack
from enqueuer.workers.plan import MAX_THREADS
from enqueuer.workers.shards import Task
from enqueuer.workers.sources import (
    is_async,
    is_indexable,
    is_sequence,
    name_of,
)
from enqueuer.workers.task_loop import ASYNC_CONCURRENCY
from enqueuer.workers.tasks import Counted, Indexable, TaskSource, length_of, why_no_elements

T = TypeVar("T")

Elements = Iterable[T] | Indexable[T] | Counted[T]
"""The elements of tasks."""
Collate = Callable[[list[Any]], T] | Callable[[list[Any], list[Task]], T]
"""A function that makes a batch of a list of results."""


class OrderedOptions(TaskOptions, EnqueuerOptions, total=False):
    """Types of the options that do not change the type of a batch."""


class _ResultOptions(OrderedOptions, NoBatches, total=False):
    """The same where each result comes alone."""


@takes_options
class OrderedEnqueuer(BaseEnqueuer[Batch]):
    """Keep the results of tasks ready: one for each element of a sequence, or for each batch.

    Each element is given to the next free worker, exactly once per epoch, and the results come
    in the order of the elements. Each element has its own seed, so that the same sequence and
    `random_seed` give the same results, bit for bit, for any number of workers and any backend.
    A slow task delays only itself, until `max_queue_size` later results wait.

    Args:
        sequence: Object with `__len__` and `__getitem__`: a list of paths, an array, a torch
            dataset, a Keras `Sequence` or `PyDataset`, whose `on_epoch_begin` and `on_epoch_end`
            are called before and after each epoch. `num_batches` may replace `__len__`; if it is
            None, the sequence is endless, and so is its epoch. Workers fetch the elements
            themselves, processes from their own copy. They fetch the elements of a batch by one
            call of `__getitems__`, if the sequence has it, as Hugging Face datasets do. Or any
            other iterable, with `map`: the loop's thread reads its elements when it asks for a
            batch, never further ahead than `max_queue_size` allows.
        map: Function of the element, or of the element and its `Task`, which has random numbers
            for this element; it may be async. None, the default: the element itself is the
            result, so that `__getitem__` does all work. Results that are None are left out. (As
            in Keras, True or False at this position is `use_multiprocessing`.)
        shuffle: Whether each epoch has a new order, drawn from the seed; False by default. It
            needs a sequence.
        use_multiprocessing: Keras' name for `backend="process"`.
        batch_size: Number of results in a batch. None, the default: each result comes alone,
            as for elements that are already batches.
        collate: Function that makes one batch of a list of results. By default arrays, tensors
            and numbers are stacked along a new first axis, inside of dicts, tuples and lists,
            too. Without `map`, it gets the list of the elements, so that it can work on all
            elements of a batch at once. If it takes two arguments, or one named `tasks`, it also
            gets the list of their `Task` objects.
        concurrency: Number of elements that each worker runs at once, those of one batch too, in
            threads. For elements that wait, for a network or a disk: threads cost far less memory
            than processes. `map` and the sequence must be thread-safe, and draw random numbers
            from the `Task`: the global generators are not seeded for each element. `"auto"`, with
            `workers="auto"`: begins with 1, and lets elements that wait run at once before it adds
            workers. None, the default: 1; but `"auto"` for batches that automatic threads make,
            as threads seed no global generators; and 16 for an async function.
        random_seed: Non-negative int, from which all seeds derive. None, the default, draws one;
            the attribute `random_seed` has it.
        {options}

    Attributes:
        queue: View of the finished batches, with the methods of `queue.Queue`, as in Keras.

    Raises:
        TypeError: `sequence` or `map` is none of these, or an argument has the wrong type.
        ValueError: An argument is out of its range, or an iterable is to be shuffled.

    Example:
        >>> def augmented(number, task):
        ...     return number + task.rng.integers(10)
        >>> with OrderedEnqueuer(range(5), str, batch_size=2, workers=2) as enqueuer:
        ...     list(enqueuer)
        [['0', '1'], ['2', '3'], ['4']]
        >>> one = list(OrderedEnqueuer(range(9), augmented, random_seed=7))
        >>> one == list(OrderedEnqueuer(range(9), augmented, workers=3, random_seed=7))
        True
    """

    # The type of an array says nothing of its elements.
    @overload
    def __init__(
        self: OrderedEnqueuer[Any],
        sequence: np.ndarray[Any, Any],
        map: bool | None = None,
        shuffle: bool = False,
        **options: Unpack[_ResultOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        sequence: Elements[Batch],
        map: bool | None = None,
        shuffle: bool = False,
        **options: Unpack[_ResultOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        sequence: Elements[T],
        map: Callable[[T], Awaitable[Batch | None]] | Callable[[T, Task], Awaitable[Batch | None]],
        shuffle: bool = False,
        **options: Unpack[_ResultOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        sequence: Elements[T],
        map: Callable[[T], Batch | None] | Callable[[T, Task], Batch | None],
        shuffle: bool = False,
        **options: Unpack[_ResultOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        sequence: Elements[Any],
        map: Callable[..., Any] | bool | None = None,
        shuffle: bool = False,
        *,
        batch_size: int | None,
        collate: Collate[Batch] | None = None,
        **options: Unpack[OrderedOptions],
    ) -> None: ...
    def __init__(
        self,
        sequence: Elements[Any],
        map: Callable[..., Any] | bool | None = None,
        shuffle: bool = False,
        *,
        use_multiprocessing: bool = False,
        batch_size: int | None = None,
        collate: Callable[..., Any] | None = None,
        concurrency: Concurrency = None,
        random_seed: int | None = None,
        **options: Unpack[EnqueuerOptions],
    ) -> None:
        if isinstance(map, bool):
            use_multiprocessing, map = use_multiprocessing or map, None
        _check_elements(sequence, map, shuffle, collate)
        checks.function("collate", collate, "of a list of results")
        if collate is not None and batch_size is None:
            raise ValueError("collate makes a batch of results; give batch_size with it")
        if is_async(collate):
            raise TypeError("collate must not be async: the results are there already")
        checked = Options.of(OrderedEnqueuer, use_multiprocessing, options)
        concurrency = _checked_concurrency(concurrency, checked.is_auto)
        seed = Seed.of(random_seed, checked.world_size)
        size = None if batch_size is None else checks.positive("batch_size", batch_size)
        collate = stack if collate is None else collate
        source = TaskSource(sequence, map, size, collate, seed.value)
        if isinstance(concurrency, int):
            source.concurrency = concurrency
        elif source.is_async:
            source.concurrency = ASYNC_CONCURRENCY
        self._tasks = TaskWorkload(source, checked, seed, bool(shuffle), concurrency)
        super().__init__(self._tasks, OrderedEnqueuer)

    @property
    def sequence(self) -> Any:
        """The sequence or iterable of the enqueuer."""
        return self._tasks.source.items

    def join_end_of_epoch(self) -> None:
        """Call `on_epoch_end` of the sequence, if all batches of the epoch were taken.

        As in Keras, the call is complete when this method returns. If batches are left, it waits
        for the next one, does not take it, and makes no call.

        Raises:
            InvalidState: The enqueuer was not started, or was stopped.
        """
        core = core_of(self)
        reader = core.started_reader("wait for the end of its epoch")
        is_known = False
        while not is_known:
            with core.locks.reading():
                is_item = reader.outcome(None) is Outcome.ITEM
                # Another thread may have taken it.
                is_known = not is_item or reader.known_outcome() is not None

    def __len__(self) -> int:
        """Return the number of batches in an epoch.

        Raises:
            TypeError: The source is an iterable, or an endless sequence.
        """
        if not self._tasks.source.is_sequence:
            raise TypeError("an iterable has no length; a sequence has one")
        steps = self._tasks.steps()
        if steps is None:
            raise TypeError("the sequence is endless, as its num_batches is None; count the steps")
        return steps

    def get(self) -> Iterator[Batch]:
        """Return an iterator over this epoch and all that follow, without an end, as in Keras.

        It ends only after `stop()`, or if an epoch is empty. `iter()` gives one epoch.

        The workers begin the next epoch before the last batch of this one is taken, unless the
        sequence has its own `on_epoch_begin` or `on_epoch_end`, or is an iterable.

        Raises:
            InvalidState: The enqueuer was not started, or was stopped.
        """
        core = core_of(self)
        return Endless(core, core.started_reader("get() from it"))


def _checked_concurrency(value: object, is_auto: bool) -> Concurrency:
    if value is None:
        return None
    if value == "auto":
        if not is_auto:
            raise ValueError("concurrency='auto' needs workers='auto'; or give it as an int")
        return "auto"
    if isinstance(value, str):
        raise ValueError(f"concurrency must be an int, 'auto' or None, got {value!r}")
    concurrency = checks.positive("concurrency", value)
    if concurrency > MAX_THREADS:
        raise ValueError(f"concurrency must be <= {MAX_THREADS}, got {concurrency}")
    return concurrency


def _check_elements(sequence: object, map: object, shuffle: object, collate: object) -> None:
    """Raise TypeError or ValueError unless tasks can be made of these."""
    if why := why_no_elements(sequence):
        raise TypeError(f"OrderedEnqueuer needs elements by their place, {why}")
    checks.function("map", map, "of an element")
    if is_indexable(sequence):
        return
    if is_sequence(sequence):
        length = length_of(sequence)
        if length is not None:
            checks.integer("num_batches of the sequence", length, least=0)
        elif shuffle:
            raise ValueError(
                "shuffle needs the number of elements, but num_batches of the sequence is None; "
                "draw a random element in its __getitem__ instead"
            )
        return
    if not isinstance(sequence, Iterable):
        if callable(sequence):
            raise TypeError(
                f"OrderedEnqueuer needs a sequence or an iterable, got the function "
                f"{name_of(sequence)}; call it, or use GeneratorEnqueuer"
            )
        if hasattr(sequence, "__getitem__"):
            raise TypeError(
                f"OrderedEnqueuer needs the length of its sequence, and {sequence!r} has no "
                "__len__; give it one, or num_batches. Is it endless? Then num_batches is None"
            )
        raise TypeError(f"OrderedEnqueuer needs a sequence or an iterable, got {sequence!r}")
    if map is None and collate is None:
        raise ValueError(
            "an iterable without __len__ and __getitem__ needs map, the work to be done on each "
            "element, or collate, the work to be done on each batch; to read it ahead as it is, "
            "use GeneratorEnqueuer or prefetch"
        )
    if shuffle:
        raise ValueError("shuffle needs __len__ and __getitem__; an iterable comes as it is")


class _MapOptions(TaskOptions, total=False):
    """Types of the options of `imap` that do not change the type of a batch."""

    shuffle: bool


class _AloneOptions(_MapOptions, NoBatches, total=False):
    """The same where each result comes alone."""


@overload
def imap(
    function: Callable[[T], Awaitable[Batch | None]] | Callable[[T, Task], Awaitable[Batch | None]],
    elements: Elements[T],
    max_queue_size: int = 10,
    **options: Unpack[_AloneOptions],
) -> Iterator[Batch]: ...
@overload
def imap(
    function: Callable[[T], Batch | None] | Callable[[T, Task], Batch | None],
    elements: Elements[T],
    max_queue_size: int = 10,
    **options: Unpack[_AloneOptions],
) -> Iterator[Batch]: ...
@overload
def imap(
    function: Callable[..., Any],
    elements: Elements[Any],
    max_queue_size: int = 10,
    *,
    batch_size: int | None,
    collate: Collate[Batch] | None = None,
    **options: Unpack[_MapOptions],
) -> Iterator[Batch]: ...
@passes_options(OrderedEnqueuer)
def imap(  # noqa: D417, as passes_options() adds them
    function: Callable[..., Any], elements: Elements[Any], max_queue_size: int = 10, **options: Any
) -> Iterator[Any]:
    """Iterate over `function` of each element, in order, made ahead in the background.

    It works like `Pool.imap` of `multiprocessing`, but with a limit on the waiting results. The
    workers start with the first `next()`, and stop when the iterator ends, is closed, or is
    dropped after a `break`. Results that are None are left out.

    Args:
        function: Function that is called with an element; with the element and its `Task` if it
            takes two arguments.
        elements: A sequence, or any iterable, which is read in your own thread.
        max_queue_size: Largest number of results that wait; 10 by default. Each worker may hold
            one more.
        shuffle: As for `OrderedEnqueuer`, like the five that follow.
        use_multiprocessing: Keras' name for `backend="process"`.
        batch_size: Number of results in a batch; None, the default: each comes alone.
        collate: Function that makes one batch of a list of results.
        concurrency: Number of elements that each worker runs at once, in threads, or `"auto"`.
        random_seed: Non-negative int, from which all seeds derive; drawn by default.
        {options}

    Raises:
        TypeError: An argument has the wrong type (at once, not at the first `next()`).
        ValueError: An argument is out of its range (at once as well).

    Example:
        >>> for length in imap(len, ["one", "three"], workers=2):
        ...     print(length)
        3
        5
    """
    if not callable(function):
        raise TypeError(f"imap needs a function and then its elements, got {function!r}")
    check_for_one_loop(imap, options)
    made = OrderedEnqueuer(elements, function, max_queue_size=max_queue_size, **options)
    return iterated(made)
