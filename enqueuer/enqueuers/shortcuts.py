"""prefetch() and imap(): an enqueuer for one loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Iterator
from typing import Any, TypeVar, overload

from enqueuer.enqueuers.enqueuer import BaseEnqueuer, Batch
from enqueuer.enqueuers.generator import GeneratorEnqueuer, GeneratorLike
from enqueuer.enqueuers.options import (
    ShardOptions,
    TaskOptions,
    Unpack,
    passes_options,
)
from enqueuer.enqueuers.ordered import Collate, Elements, OrderedEnqueuer
from enqueuer.workers.shards import Task
from enqueuer.workers.sources import is_plain_collection

T = TypeVar("T")

# Arguments of the enqueuers that a function for one loop does not take, or not by this name.
_NOT_HERE = ("epochs", "sequence", "map", "wait_time", "pickle_safe")


class _MapOptions(TaskOptions, total=False):
    """Types of the options of `imap` that do not change the type of a batch."""

    shuffle: bool


@overload
def prefetch(
    generator: GeneratorLike[Batch], max_queue_size: int = 2, **options: Unpack[ShardOptions]
) -> Iterator[Batch]: ...
@overload
def prefetch(
    generator: GeneratorLike[Any],
    max_queue_size: int = 2,
    *,
    batch_size: int | None,
    collate: Callable[[list[Any]], Batch] | None = None,
    **options: Unpack[ShardOptions],
) -> Iterator[Batch]: ...
@passes_options(GeneratorEnqueuer, lacks=_NOT_HERE)
def prefetch(  # noqa: D417, as passes_options() adds them
    generator: GeneratorLike[Any], max_queue_size: int = 2, **options: Any
) -> Iterator[Any]:
    """Iterate over one epoch of `generator`, made ahead in the background.

    The workers start with the first `next()`, and stop when the iterator ends, is closed, or is
    dropped after a `break`.

    Args:
        generator: As for `GeneratorEnqueuer`; also any iterable, such as a list or a loader.
        max_queue_size: Largest number of finished batches that wait; 2 by default, which is
            enough to overlap steady work.
        use_multiprocessing: Keras' name for `backend="process"`.
        random_seed: As for `GeneratorEnqueuer`; without `shards`, the batches depend on `workers`.
        shards: As for `GeneratorEnqueuer`, like the three that follow.
        batch_size: Number of samples in a batch; None, the default: the generator yields batches.
        collate: Function that makes one batch of a list of samples.
        shuffle_buffer: Number of samples of each shard that are shuffled among each other.
        {options}

    Raises:
        TypeError: An argument has the wrong type (at once, not at the first `next()`).
        ValueError: An argument is out of its range (at once as well).

    Example:
        >>> for batch in prefetch(lambda: (n * n for n in range(3))):
        ...     print(batch)
        0
        1
        4
    """
    if is_plain_collection(generator):
        generator = iter(generator)
    _check_names(options)
    return _iterated(GeneratorEnqueuer(generator, max_queue_size=max_queue_size, **options))


@overload
def imap(
    function: Callable[[T], Awaitable[Batch | None]] | Callable[[T, Task], Awaitable[Batch | None]],
    elements: Elements[T],
    max_queue_size: int = 10,
    **options: Unpack[_MapOptions],
) -> Iterator[Batch]: ...
@overload
def imap(
    function: Callable[[T], Batch | None] | Callable[[T, Task], Batch | None],
    elements: Elements[T],
    max_queue_size: int = 10,
    **options: Unpack[_MapOptions],
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
@passes_options(OrderedEnqueuer, lacks=_NOT_HERE)
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
    _check_names(options)
    made = OrderedEnqueuer(elements, function, max_queue_size=max_queue_size, **options)
    return _iterated(made)


def _check_names(options: Container[str]) -> None:
    """Raise TypeError for an option that only the classes have."""
    if "epochs" in options:
        raise TypeError(
            "prefetch() and imap() give one epoch; give epochs=... to an enqueuer, and iterate "
            "over that once for each"
        )
    for name in _NOT_HERE:
        if name in options:
            raise TypeError(
                f"prefetch() and imap() take no {name}=...: only the enqueuers have it. "
                "prefetch() takes a generator, and imap() a function and its elements"
            )


def _iterated(enqueuer: BaseEnqueuer[Batch]) -> Iterator[Batch]:
    with enqueuer:
        yield from enqueuer
