"""GeneratorEnqueuer, the batches of a generator, by shards; prefetch(), for one loop."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from typing import Any, overload

from enqueuer.common import checks
from enqueuer.enqueuers.enqueuer import BaseEnqueuer, Batch, iterated
from enqueuer.enqueuers.options import (
    EnqueuerOptions,
    NoBatches,
    Options,
    Seed,
    ShardOptions,
    Unpack,
    check_for_one_loop,
    passes_options,
    takes_options,
)
from enqueuer.enqueuers.shards import ShardWorkload
from enqueuer.workers.shards import Shard
from enqueuer.workers.sources import Samples, as_source, is_plain_collection

GeneratorLike = (
    Callable[[Shard], Iterable[Batch]]
    | Callable[[], Iterable[Batch]]
    | Callable[[Shard], AsyncIterable[Batch]]
    | Callable[[], AsyncIterable[Batch]]
    | Iterable[Batch]
)
"""A generator function, also an async one, or an iterable of batches."""


class GeneratorOptions(EnqueuerOptions, total=False):
    """Types of the options that do not change the type of a batch."""

    shards: int | None
    shuffle_buffer: int | None


class _YieldedOptions(GeneratorOptions, NoBatches, total=False):
    """The same where the generator yields the batches."""


@takes_options
class GeneratorEnqueuer(BaseEnqueuer[Batch]):
    """Keep the batches of a generator ready, made ahead by threads, processes or Ray actors.

    The same generator, `random_seed` and `shards` give the same batches in the same order, bit
    for bit, for any number of workers and any backend. A finite generator ends the iteration;
    iterating again runs it again, as the next epoch, on the same workers. After a `break`,
    iterating again continues with the next batch.

    Args:
        generator: Generator function that takes no argument, or the `Shard`; the worker calls it
            once per shard and epoch. If it also has a parameter `first_item=0`, it can begin with
            any item, and none is made again to resume, for a restart or for other workers. If it
            is async, the shards of a worker run side by side on one event loop. Or a running
            iterator, which one thread reads, and of which each forked process continues with
            its own copy.
        use_multiprocessing: Keras' name for `backend="process"`.
        random_seed: Non-negative int, from which the seeds of all shards derive. None, the
            default, draws one; the attribute `random_seed` has it. Give `shards`, too, or the
            batches depend on `workers`.
        shards: Number of logical runs into which the work is split; by default the number of
            workers, so that other `workers` give other batches, also with `random_seed`. If you
            set it, the batches do not depend on `workers`. With
            `workers="auto"` it is 16 on any machine; or 1 for a function that takes no shard,
            because all of its runs would give the same data, and then there is 1 worker. With
            `world_size` it counts the shards of all ranks.
        batch_size: Number of items of the generator, its samples, in a batch, which the worker
            makes. None, the default: the generator yields batches. Each shard makes batches of its
            own samples, so its last batch may be smaller. Yield a new array for each sample.
        collate: Function that makes one batch of a list of samples. By default arrays, tensors
            and numbers are stacked along a new first axis, inside of dicts, tuples and lists, too;
            large arrays are stacked in shared memory.
        shuffle_buffer: Number of samples of each shard that wait in memory for their turn, which
            is drawn from the seed. None, the default: the order of the generator.
        {options}

    Attributes:
        queue: View of the finished batches, with the methods of `queue.Queue`, as in Keras.

    Raises:
        TypeError: `generator` is none of these, or an argument has the wrong type.
        ValueError: An argument is out of its range.

    Example:
        >>> def squares(shard):
        ...     for number in shard.split(range(5)):
        ...         yield number**2
        >>> with GeneratorEnqueuer(squares, workers=2) as enqueuer:
        ...     list(enqueuer)
        [0, 1, 4, 9, 16]
        >>> with GeneratorEnqueuer(squares, shards=2, batch_size=2) as enqueuer:
        ...     list(enqueuer)
        [array([0, 4]), array([1, 9]), array([16])]
    """

    @overload
    def __init__(
        self,
        generator: GeneratorLike[Batch],
        use_multiprocessing: bool = False,
        *,
        random_seed: int | None = None,
        **options: Unpack[_YieldedOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        generator: GeneratorLike[Any],
        use_multiprocessing: bool = False,
        *,
        random_seed: int | None = None,
        batch_size: int | None,
        collate: Callable[[list[Any]], Batch] | None = None,
        **options: Unpack[GeneratorOptions],
    ) -> None: ...
    def __init__(
        self,
        generator: GeneratorLike[Any],
        use_multiprocessing: bool = False,
        *,
        random_seed: int | None = None,
        shards: int | None = None,
        batch_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        shuffle_buffer: int | None = None,
        **options: Unpack[EnqueuerOptions],
    ) -> None:
        source = as_source(generator)
        checked = Options.of(GeneratorEnqueuer, use_multiprocessing, options)
        seed = Seed.of(random_seed, checked.world_size)
        samples = Samples.of(batch_size, collate, checked.drop_last, shuffle_buffer)
        if samples is not None:
            source = dataclasses.replace(source, stage=samples)
        split = None if shards is None else checks.positive("shards", shards)
        super().__init__(ShardWorkload(source, checked, seed, split), GeneratorEnqueuer)


class _PrefetchOptions(ShardOptions, NoBatches, total=False):
    """Types of the options of `prefetch` where the generator yields the batches."""


@overload
def prefetch(
    generator: GeneratorLike[Batch], max_queue_size: int = 2, **options: Unpack[_PrefetchOptions]
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
@passes_options(GeneratorEnqueuer)
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
    check_for_one_loop(prefetch, options)
    return iterated(GeneratorEnqueuer(generator, max_queue_size=max_queue_size, **options))
