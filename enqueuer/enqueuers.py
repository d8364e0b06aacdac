"""The enqueuers that users make, prefetch, imap: what each takes, what its data depend on."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from enqueuer import arguments, interrupts, state
from enqueuer.backends import Backend, BackendName, Job, TaskBackend
from enqueuer.base import BaseEnqueuer, Batch, Endless, State
from enqueuer.bottleneck import HARDLY_WAITS
from enqueuer.duplicates import FirstItems
from enqueuer.errors import (
    DuplicateDataWarning,
    InvalidState,
    ItemNotPicklable,
    StateMismatch,
    WorkerDied,
)
from enqueuer.formats import percent
from enqueuer.merging import AsTheyCome, Order, RoundRobin, TaskOrder
from enqueuer.messages import Epoch, Failure, Item, Start, Ticket
from enqueuer.progress import Progress
from enqueuer.replaying import Origin, item_of, redo, refuse
from enqueuer.shards import Shard
from enqueuer.sources import (
    FunctionSource,
    LiveSource,
    as_source,
    is_plain_collection,
    name_of,
)
from enqueuer.stalls import level_of_user
from enqueuer.stats import Stats
from enqueuer.tasks import (
    Counted,
    Indexable,
    Reader,
    Reading,
    TaskSource,
    order_of,
    places_of,
    stack,
    steps_in,
)
from enqueuer.worker import OnError

if TYPE_CHECKING:
    from enqueuer.autoscaler import Autoscaler

_log = logging.getLogger("enqueuer")

_AUTO_SHARDS = 16  # as many for 1, 2, 4, 8 and 16 workers each, and not too many open at once


class GeneratorEnqueuer(BaseEnqueuer[Batch]):
    """Keep the batches of a generator ready, made ahead by threads, processes or Ray actors.

    The same generator, `random_seed` and `shards` give the same batches in the same order, bit
    for bit, for any number of workers and any backend. A finite generator ends the iteration;
    iterating again runs it anew (an epoch) on the same workers. After a `break`, iterating
    again goes on with the next batch.

    Args:
        generator: A generator function that takes no argument or one, the `Shard`, and is
            called once a shard and epoch, in the worker; or a live iterator, which one thread
            reads, or of which each forked process goes on with its own copy.
        use_multiprocessing: Keras' name for `backend="process"`.
        wait_time: Accepted for Keras' sake and needless: nothing polls.
        random_seed: A non-negative int, from which every shard's seed derives. None, the
            default, draws one, which the attribute `random_seed` then tells.
        workers: How many threads, processes or Ray actors; 1 by default. `"auto"` begins with 1,
            and adds or retires some while it runs, until the loop no longer waits or more do not
            help.
            Shards that a change moves in the middle of an epoch are run again up to where they
            were, so their generators must repeat themselves, as for `max_restarts`.
        max_workers: How many `"auto"` may have. By default as many as help and find room, at
            most 64: for workers that compute a tenth of their time, ten times as many as there
            are CPUs, as far as memory goes; of Ray actors as many as the cluster has CPUs. Never
            more than shards.
        backend: `"thread"`, the default: cheap, and enough where the work waits (files,
            network) or leaves Python (numpy, PIL); `"process"`, for work in Python; or `"ray"`,
            for more than this machine has: each worker is a Ray actor, wherever the cluster has
            room (extra `ray`).
        shards: How many logical runs the work is split into. By default as many as workers;
            give it a number of its own, and the batches do not depend on `workers`. With
            `workers="auto"` it is 16, on any machine; or 1 of a function that takes no shard,
            since all of them would give the same data, and then there is 1 worker.
        max_queue_size: The most finished batches that may wait, over all workers; 10 by
            default, as in Keras. Each worker may hold one more in hand.
        max_queue_bytes: The most bytes that may wait, over all workers; None, the default, sets
            no such bound. The bound is dealt out evenly; a batch larger than a worker's share
            stays in its hand until it is wanted. Processes count what they send. Threads count
            arrays, tensors, texts, numbers and PIL images, also in attributes, as of dataclasses.
        ordered: True, the default, takes one batch of each shard in turn; False takes whichever
            is first, which is faster when shards differ in speed, and is not repeatable.
        mp_context: How processes are started: `"fork"`, `"forkserver"`, `"spawn"` or a context
            of `multiprocessing`. By default forkserver for a function (spawn where there is
            none), since it is safe beside threads and CUDA, and fork for a live iterator, which
            nothing else can hand over. With another backend it is refused.
        threads_per_worker: How many threads OpenMP, BLAS, torch and OpenCV may each run in a
            worker process. None, the default: the number of CPUs divided by `workers` (with
            `"auto"` by `max_workers`), at least 1, so that workers do not take the CPUs from each
            other; but `OMP_NUM_THREADS` and the like in the environment come first. A library that
            was loaded before a fork runs on 1 thread, but for OpenBLAS. With another backend it
            is refused.
        forward_logs: True, the default: what a worker process, or an actor, logs comes out of
            this process's handlers. False leaves it in the worker. `"multiprocessing-logging"`
            uses that package instead, for forked workers only.
        on_error: What to do about an exception of the generator's. `"raise"`, the default:
            raise it in the loop, in its turn. `"skip"`: log it with its traceback, count it
            (`error_count`), and go on without it; a generator that raised is over, and so is
            its shard for this epoch. A callable: the same, without the log line, but it is
            called with the exception, in the worker, and what it returns comes in place of the
            item, if it is not None. An item that cannot be sent between processes is skipped
            alone.
        max_errors: How many errors may be skipped; the next one is raised. None, the default:
            any number.
        max_restarts: How many worker processes, or actors, that died are replaced, in all. 0,
            the default: the first death is raised as `WorkerDied`. The new worker runs its
            shards again, up to the first item that had not come, so that nothing is lost or
            comes twice. A new actor is started wherever there is room.
        rank: Which of `world_size` training processes this one is, from 0. It gets the shards
            `rank`, `rank + world_size` and so on; give all of them the same `random_seed`.
        world_size: How many training processes share the data; 1 by default. `shards`, which
            counts those of all ranks, is then `workers * world_size` by default.
        drop_last: Whether to have fewer shards if they cannot be dealt out evenly, so that each
            rank has equally many; False by default. With one rank it does nothing: the generator
            makes the batches, and an incomplete last one is for it to leave out.
        progress: Whether a `for` loop over it shows a bar: batches, rate, how long the loop waits,
            the queue, how busy the workers are. True shows it if standard error is a terminal,
            and needs tqdm; a class, such as `tqdm.notebook.tqdm`, is used as it is. False by
            default.
        stall_timeout: Seconds that the loop waits for one batch before a `StallWarning` shows
            what each worker does, with the Python stack of those that are busy, also if they are
            processes; then it waits on. 60 by default, which is longer than most batches take;
            None: never.
        timeout: Seconds that the loop waits for one batch at most; then `BatchTimeout` is raised,
            with the same text. Nothing is lost: iterating again goes on with the next batch.
            None, the default: for ever.
        trace: A file to which is written what each worker and the loop did, and when: a timeline
            for Perfetto, chrome://tracing and `enqueuer report`. None, the default: nothing is
            recorded, and that costs nothing. A trace that is there is replaced, at `start()`; any
            other file is a `FileExistsError`. After 256 MB nothing more is recorded. With
            `world_size`, or in workers of a DataLoader, each has a file of its own:
            `run.1-of-4.json`. Of Ray actors, those on this machine are recorded.
        address: Of the Ray cluster, as `ray.init` takes it: `"auto"`, or `"host:6379"`. None, the
            default, is the Ray that this process is connected to, else what `ray.init()` finds
            or starts. What was connected or started for it is shut down when the last enqueuer
            that uses it stops.
        ray_options: What an actor gets and where it runs, as for `Actor.options()` of Ray:
            `num_cpus`, `num_gpus`, `memory`, `resources`, `runtime_env`, `scheduling_strategy`
            (by default `"SPREAD"`). None, the default, is what Ray gives any actor: it takes no
            CPU away from others.
        writable: Whether large arrays from an actor can be written to, which takes a copy of
            each; False by default: they lie, read-only, in Ray's object store. With the other
            backends all arrays are writable anyway.
        pickle_safe: Old name of `use_multiprocessing`, in Keras until 2.0.5.

    Attributes:
        queue: What waits, with the names of `queue.Queue`, as in Keras.

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
    """

    def __init__(
        self,
        generator: Callable[[Shard], Iterable[Batch]]
        | Callable[[], Iterable[Batch]]
        | Iterable[Batch],
        use_multiprocessing: bool = False,
        wait_time: float | None = None,
        random_seed: int | None = None,
        *,
        workers: int | Literal["auto"] = 1,
        max_workers: int | None = None,
        backend: BackendName | None = None,
        shards: int | None = None,
        max_queue_size: int = 10,
        max_queue_bytes: int | None = None,
        ordered: bool = True,
        mp_context: str | BaseContext | None = None,
        threads_per_worker: int | None = None,
        forward_logs: bool | str = True,
        on_error: OnError = "raise",
        max_errors: int | None = None,
        max_restarts: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        progress: Progress = False,
        stall_timeout: float | None = 60.0,
        timeout: float | None = None,
        trace: str | os.PathLike[str] | None = None,
        address: str | None = None,
        ray_options: Mapping[str, Any] | None = None,
        writable: bool = False,
        pickle_safe: bool | None = None,
    ) -> None:
        self._source = as_source(generator)
        if pickle_safe is not None:
            if use_multiprocessing:
                raise TypeError(
                    "pickle_safe is the old name of use_multiprocessing; give one of them"
                )
            use_multiprocessing = pickle_safe
        super().__init__(
            self._source,
            use_multiprocessing=use_multiprocessing,
            backend=backend,
            random_seed=random_seed,
            workers=workers,
            max_workers=max_workers,
            max_queue_size=max_queue_size,
            max_queue_bytes=max_queue_bytes,
            ordered=ordered,
            mp_context=mp_context,
            threads_per_worker=threads_per_worker,
            forward_logs=forward_logs,
            on_error=on_error,
            max_errors=max_errors,
            max_restarts=max_restarts,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            progress=progress,
            stall_timeout=stall_timeout,
            timeout=timeout,
            trace=trace,
            address=address,
            ray_options=ray_options,
            writable=writable,
        )
        self._shards = None if shards is None else arguments.positive("shards", shards)
        self._shards_are_given = shards is not None
        self._is_limit_told = False
        self._is_compared = False  # one shard with the others
        if isinstance(self._source, LiveSource) and self._shards not in (None, 1):
            raise ValueError(
                f"a live iterator cannot be split into {self._shards} shards; "
                "pass the generator function itself"
            )
        if isinstance(self._source, LiveSource) and self._world_size > 1:
            raise ValueError(
                f"a live iterator cannot be split over {self._world_size} ranks; "
                "pass the generator function itself"
            )
        self._own_shards()  # a lack of them shows at once

    # --- inside ---

    def _made_of(self) -> tuple[Callable[..., GeneratorEnqueuer[Batch]], tuple[Any, ...]]:
        source = self._source
        generator = source.iterable if isinstance(source, LiveSource) else source.function
        make = functools.partial(GeneratorEnqueuer, shards=self._shards, **self._options())
        return make, (generator, False, None, self._random_seed)

    def _all_shards(self) -> int:
        """Return how many shards there are, over all ranks."""
        if isinstance(self._source, LiveSource):
            return 1 if self._backend_name == "thread" else self._workers
        shards = self._shards or self._shards_of_a_rank() * self._world_size
        return shards - shards % self._world_size if self._drop_last else shards

    def _shards_of_a_rank(self) -> int:
        """Return into how many shards the work of a rank is split if nobody has said so."""
        if not self._is_auto:
            return self._workers
        can_split = isinstance(self._source, FunctionSource) and self._source.takes_shard
        return _AUTO_SHARDS if can_split else 1

    def _own_shards(self) -> range:
        shards = self._all_shards()
        if shards < self._world_size:
            raise ValueError(
                f"shards={self._shards} cannot be dealt out over world_size={self._world_size} "
                "ranks; give at least as many shards as ranks"
            )
        return range(self._rank, shards, self._world_size)

    def _out_of_order(self, parts: int) -> str:
        own = len(self._own_shards())
        # Without shards= the data themselves depend on how many share them.
        is_promised = self._ordered and self._shards_are_given
        if not is_promised or own % parts == 0:
            return ""
        return f"the {own} shards of the enqueuer cannot be dealt out evenly over {parts}"

    def _has_kept_order(self) -> bool:
        order = self._order
        return not (self._shards_are_given and isinstance(order, RoundRobin)) or order.is_even

    def _check_repeats(self) -> None:
        super()._check_repeats()
        if isinstance(self._source, LiveSource):
            raise ValueError(
                "a live iterator cannot be read by each of them; pass the generator function itself"
            )

    def _portion(
        self, rank: int, world_size: int, part: int = 0, parts: int = 1, block: int = 1
    ) -> GeneratorEnqueuer[Batch]:
        assert block == 1, "shards are dealt out one by one"
        make, given = self._made_of()
        if parts > 1 and self._shards is not None:
            # which shards are left out depends on the ranks, and not on how many share one
            left_out = self._shards % world_size if self._drop_last else 0
            make = functools.partial(make, shards=self._shards - left_out, drop_last=False)
        # of the rank's shards every `parts`-th
        ranks, rank, world_size = world_size, rank + world_size * part, world_size * parts
        return self._handed_on(make(*given, rank=rank, world_size=world_size), ranks)

    def _needs_common_seed(self) -> bool:
        return isinstance(self._source, FunctionSource) and self._source.takes_shard

    def _why_empty(self) -> str | None:
        source = self._source
        is_live = isinstance(source, LiveSource) and isinstance(source.iterable, Iterator)
        if is_live and self._is_whole and self._taken_before:
            return (
                "the iterator was read to its end in an earlier epoch, and cannot begin anew; "
                "pass the generator function itself, GeneratorEnqueuer(batches) instead of "
                "GeneratorEnqueuer(batches()), which is called for each epoch"
            )
        return super()._why_empty()

    def _job(self) -> Job:
        if isinstance(self._source, LiveSource) and self._all_shards() > 1:
            _warn_of_duplicates(self._workers)
        return self._job_of(self._source, self._all_shards(), tuple(self._own_shards()))

    def _job_with(self, workers: int) -> Job | None:
        if isinstance(self._source, LiveSource):
            if self._backend_name == "thread":
                return None  # it is read by one thread, whatever `workers` says
            raise InvalidState(
                "processes that share a live iterator cannot be reconfigured, as their copies "
                "of it have gone on; pass the generator function itself"
            )
        if self._shards is None:
            self._shards = self._all_shards()  # what they have been so far
        return dataclasses.replace(self._job(), workers=workers)

    def _new_autoscaler(self) -> Autoscaler:
        shards = len(self._own_shards())
        most = min(self._most_workers(), shards)
        return self._autoscaler_for(most, shards)

    def _again_s(self, stats: Stats) -> float | None:
        if any(start.state is not None for start in self._order.rest().values()):
            return 0.0  # they are resumed, and not run again
        since = stats if self._epoch_began is None else stats.since(self._epoch_began)
        return sum(worker.making_s for worker in since.workers)

    def _tell_of_limit(self, autoscaler: Autoscaler) -> None:
        waits = autoscaler.waiting_share >= HARDLY_WAITS and autoscaler.wanted > 1
        if self._is_limit_told or not waits or len(self._own_shards()) > 1:
            return
        self._is_limit_told = True
        what = (
            "an iterator cannot be split: pass the generator function itself"
            if isinstance(self._source, LiveSource)
            else f"{name_of(self._source.function)} is one shard: let it take a shard and do its "
            "share of the work (shard.split), or give shards= if each run of it gives other data"
        )
        _log.warning(
            "workers='auto' stays at 1, though the loop waits %s of its time: %s",
            percent(autoscaler.waiting_share),
            what,
        )

    def _order_of(self, epoch: Epoch) -> Order:
        starts = epoch.starts
        if starts is None:
            starts = dict.fromkeys(self._own_shards(), Start())
        recent = self._max_queue_size + 2  # more are never taken and not given away
        return RoundRobin(starts, recent) if self._ordered else AsTheyCome(starts, recent)

    def _next_epoch(self) -> Epoch:
        epoch = super()._next_epoch()
        if epoch.starts is None:
            return epoch
        # a shard that had ended when a state was saved has not told its own since
        starts = dict.fromkeys(self._own_shards(), Start()) | dict(epoch.starts)
        return dataclasses.replace(epoch, starts=starts)

    def _begin(self, epoch: Epoch, goes_on: bool = False) -> None:
        super()._begin(epoch, goes_on)
        shards = len(self._own_shards())
        self._first_items = None
        if self._is_compared or epoch.starts is not None or shards == 1:
            return
        self._is_compared = True
        if isinstance(self._source, FunctionSource):
            self._first_items = FirstItems(shards, self._source.takes_shard)

    def _compare(self, first: FirstItems) -> None:
        for item in self._ready.copy():
            twins = first.saw(item.shard, item.value)
            if first.done:
                self._first_items = None
            if twins is not None:
                assert isinstance(self._source, FunctionSource)
                _warn_of_twins(*twins, self._source.takes_shard)

    def _origin_of(self, failure: Failure) -> Origin:
        return Origin(
            self._random_seed,
            self._epoch,
            failure.number,
            failure.shard,
            self._all_shards(),
            failure.worker,
        )

    def _again(self, origin: Origin) -> Callable[[], Any]:
        if origin.shard is None:
            raise ValueError("the error came from a task of an OrderedEnqueuer, not from a shard")
        make_shard = functools.partial(
            Shard, origin.shard, origin.shards, origin.epoch, origin.random_seed
        )
        seed = self._backend_name != "thread"
        return functools.partial(item_of, self._source, make_shard, origin.item, seed)

    def _hand_over(self, old: Backend, new: Backend) -> None:
        if not self._order.done:
            new.begin(Epoch(self._epoch, self._order.rest()))

    def _identity(self) -> dict[str, Any]:
        return {
            "kind": "GeneratorEnqueuer",
            "random_seed": self._random_seed,
            "shards": self._all_shards(),
            "rank": self._rank,
            "world_size": self._world_size,
            "ordered": self._ordered,
        }

    def _given(self) -> dict[str, bool]:
        is_live = isinstance(self._source, LiveSource)
        return {"random_seed": self._seed_is_given, "shards": is_live or self._shards_are_given}

    def _adopt(self, state_dict: Mapping[str, Any], epoch: Epoch) -> None:
        if isinstance(self._source, LiveSource) and self._state is State.STOPPED:
            raise InvalidState(
                "a live iterator that was read cannot be rewound; make a new enqueuer with a "
                "fresh one, or pass the generator function itself"
            )
        seed, shards = state_dict["random_seed"], state_dict["shards"]
        own = range(self._rank, shards, self._world_size)
        state.check_shards(state_dict, epoch, own)
        self._random_seed = seed
        if not isinstance(self._source, LiveSource):
            self._shards = shards


class OrderedEnqueuer(BaseEnqueuer[Any]):
    """Keep the results of tasks ready: one for each element of a sequence, or for each batch.

    The elements are dealt out to whichever worker is free, each exactly once an epoch, and the
    results come in the order of the elements. Each element has its own seed, so that the same
    sequence and `random_seed` give the same results, bit for bit, for any number of workers and
    any backend. A task that is slow delays only itself, until `max_queue_size` later ones wait.

    Args:
        sequence: Anything with `__len__` and `__getitem__`: a list of paths, an array, a torch
            dataset, a Keras `Sequence` or `PyDataset`, whose `on_epoch_begin` and `on_epoch_end`
            are called before and after each epoch. `num_batches` may stand for `__len__`; if it
            is None, the sequence is endless, and so is its epoch. Workers fetch its elements
            themselves, processes from their own copy; those of a batch by one call of
            `__getitems__`, if it has that, as torch's DataLoader does and as datasets of Hugging
            Face want it. Or any other iterable, with `map`: its
            elements are read one after the other in the loop's thread, when a batch is asked for,
            and never further ahead than results may wait.
        map: A function of the element, or of the element and its `Task`, whose `rng` is the
            element's own. None, the default: the element itself is the result, so that all work
            is in `__getitem__`. Results that are None are left out. (As in Keras, True or False
            in this place is `use_multiprocessing`.)
        shuffle: Whether each epoch has an order of its own, drawn from the seed; False by
            default. Needs a sequence.
        use_multiprocessing: Keras' name for `backend="process"`.
        batch_size: How many results are made into one. None, the default: each comes alone,
            which is right if the elements are batches already.
        collate: Makes one batch of a list of results. By default arrays, tensors and numbers are
            stacked along a new first axis, inside of dicts, tuples and lists, too.
        drop_last: Whether to leave out an incomplete last batch, and elements that cannot be
            dealt out evenly over ranks, so that each has equally many; False by default.
        random_seed: A non-negative int, from which all seeds derive. None, the default, draws
            one, which the attribute `random_seed` then tells.
        workers: How many threads, processes or Ray actors; 1 by default. `"auto"` begins with 1,
            and adds or retires some while it runs, until the loop no longer waits or more do not
            help.
        max_workers: How many `"auto"` may have. By default as many as help and find room, at
            most 64: for workers that compute a tenth of their time, ten times as many as there
            are CPUs, as far as memory goes; of Ray actors as many as the cluster has CPUs.
        backend: `"thread"`, the default, `"process"` or `"ray"`.
        max_queue_size: The most results that may wait; 10 by default. Each worker may have one
            more in hand.
        max_queue_bytes: The most bytes that may wait, judged by the largest result so far; None,
            the default, sets no such bound. Counted are arrays, tensors, texts, numbers and PIL
            images, also in attributes, as of dataclasses.
        ordered: True, the default; False takes whichever result is first.
        mp_context: How processes are started: `"fork"`, `"forkserver"`, `"spawn"` or a context
            of `multiprocessing`; by default forkserver, where there is one, else spawn. With
            another backend it is refused.
        threads_per_worker: How many threads OpenMP, BLAS, torch and OpenCV may each run in a
            worker process, as for `GeneratorEnqueuer`. None, the default: the number of CPUs
            divided by `workers`, unless the environment says otherwise.
        forward_logs: As for `GeneratorEnqueuer`.
        on_error: What to do about an exception of one element. `"raise"`, the default: raise it
            in the loop, in its turn. `"skip"`: log it with its traceback, count it
            (`error_count`), and go on without that element; its batch is smaller. A callable:
            the same, without the log line, but it is called with the exception, in the worker,
            and what it returns stands for the element's result, if it is not None.
        max_errors: How many errors may be skipped; the next one is raised. None, the default:
            any number.
        max_restarts: How many worker processes, or actors, that died are replaced, in all. 0,
            the default: the first death is raised as `WorkerDied`. The tasks that it had are
            done by its successor.
        rank: Which of `world_size` training processes this one is, from 0. It gets every
            `world_size`-th element of the epoch's order; give all of them the same
            `random_seed`.
        world_size: How many training processes share the data; 1 by default.
        progress: Whether a `for` loop over it shows a bar: batches, rate, how long the loop waits,
            the queue, how busy the workers are. True shows it if standard error is a terminal,
            and needs tqdm; a class, such as `tqdm.notebook.tqdm`, is used as it is. False by
            default.
        stall_timeout: Seconds that the loop waits for one batch before a `StallWarning` shows
            what each worker does; 60 by default; None: never. See `GeneratorEnqueuer`.
        timeout: Seconds that the loop waits for one batch at most; then `BatchTimeout` is raised.
            An iterable is read in the loop's own thread, which nothing can cut short. None, the
            default: for ever.
        trace: A file for a timeline of what each worker and the loop did, as for
            `GeneratorEnqueuer`.
        address: Of the Ray cluster, as for `GeneratorEnqueuer`.
        ray_options: What an actor gets and where it runs, as for `GeneratorEnqueuer`.
        writable: Whether large arrays from an actor can be written to, which takes a copy of
            each; False by default.

    Attributes:
        queue: What waits, with the names of `queue.Queue`, as in Keras.

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

    def __init__(
        self,
        sequence: Iterable[Any] | Indexable | Counted,
        map: Callable[..., Any] | bool | None = None,
        shuffle: bool = False,
        *,
        use_multiprocessing: bool = False,
        batch_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        random_seed: int | None = None,
        workers: int | Literal["auto"] = 1,
        max_workers: int | None = None,
        backend: BackendName | None = None,
        max_queue_size: int = 10,
        max_queue_bytes: int | None = None,
        ordered: bool = True,
        mp_context: str | BaseContext | None = None,
        threads_per_worker: int | None = None,
        forward_logs: bool | str = True,
        on_error: OnError = "raise",
        max_errors: int | None = None,
        max_restarts: int = 0,
        rank: int = 0,
        world_size: int = 1,
        progress: Progress = False,
        stall_timeout: float | None = 60.0,
        timeout: float | None = None,
        trace: str | os.PathLike[str] | None = None,
        address: str | None = None,
        ray_options: Mapping[str, Any] | None = None,
        writable: bool = False,
    ) -> None:
        if isinstance(map, bool):
            use_multiprocessing, map = use_multiprocessing or map, None
        arguments.elements(sequence, map, shuffle)
        arguments.function("collate", collate, "of a list of results")
        if collate is not None and batch_size is None:
            raise ValueError("collate makes a batch of results; give batch_size with it")
        self._source = TaskSource(
            sequence,
            map,
            None if batch_size is None else arguments.positive("batch_size", batch_size),
            stack if collate is None else collate,
            0,
        )
        super().__init__(
            self._source,
            use_multiprocessing=use_multiprocessing,
            backend=backend,
            random_seed=random_seed,
            workers=workers,
            max_workers=max_workers,
            max_queue_size=max_queue_size,
            max_queue_bytes=max_queue_bytes,
            ordered=ordered,
            mp_context=mp_context,
            threads_per_worker=threads_per_worker,
            forward_logs=forward_logs,
            on_error=on_error,
            max_errors=max_errors,
            max_restarts=max_restarts,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            progress=progress,
            stall_timeout=stall_timeout,
            timeout=timeout,
            trace=trace,
            address=address,
            ray_options=ray_options,
            writable=writable,
        )
        self._source.random_seed = self._random_seed
        self._reading = Reading(bool(shuffle), self._drop_last, self._rank, self._world_size)
        self._reader: Reader | None = None
        self._unread: Failure | None = None  # why nothing more could be read
        self._number = 0  # of the next task to be handed out; goes on over epochs
        self._pending: tuple[Ticket, Any] | None = None  # read and not handed out yet
        self._start = Start()  # of this epoch
        self._is_read = False  # to its end

    @property
    def sequence(self) -> Any:
        """The sequence, or the iterable, that was given."""
        return self._source.items

    def join_end_of_epoch(self) -> None:
        """Have the sequence told of the end of the epoch, if all its batches were taken.

        So its `on_epoch_end` has been called when this returns, as in Keras. If batches are left,
        it waits for the next one, takes nothing and tells nothing.

        Raises:
            InvalidState: It was not started, or was stopped.
        """
        with self._lock:
            self._check_started("wait for the end of its epoch")
            self._peek(None)

    def __len__(self) -> int:
        """Return how many batches an epoch has.

        Raises:
            TypeError: The source is an iterable, or an endless sequence.
        """
        source, reading = self._source, self._reading
        if not source.is_sequence:
            raise TypeError("an iterable does not tell how many steps it has; a sequence does")
        if not source.is_finite:
            raise TypeError("the sequence is endless, as its num_batches is None; count the steps")
        count = len(places_of(source, reading))
        steps = steps_in(count, source.batch_size or 1, self._drop_last)
        return len(reading.own(steps))

    def _steps(self) -> tuple[int, int | None]:
        with self._lock:
            assert isinstance(self._order, TaskOrder)
            done = self._order.next - self._order.first - len(self._ready)
        return done, len(self) if self._source.is_finite else None

    def get(self) -> Iterator[Any]:
        """Return an iterator over this epoch and all that follow, without an end, as in Keras.

        It ends only after `stop()`, or if an epoch has nothing in it. `iter()` gives one epoch.

        Raises:
            InvalidState: It was not started, or was stopped.
        """
        with self._lock:
            self._check_started("get() from it")
            return Endless(self, self._ready)

    # --- inside ---

    def _made_of(self) -> tuple[Callable[..., OrderedEnqueuer], tuple[Any, ...]]:
        source = self._source
        options = self._options() | dict(
            batch_size=source.batch_size,
            collate=None if source.collate is stack else source.collate,
            random_seed=self._random_seed,
        )
        make = functools.partial(OrderedEnqueuer, **options)
        return make, (source.items, source.map, self._reading.shuffle)

    def _deals_out(self, length: int) -> bool:
        return self._source.is_finite and len(self) == length

    def _check_repeats(self) -> None:
        super()._check_repeats()
        if isinstance(self._source.items, Iterator):
            raise ValueError("an iterator is read once; pass a sequence, or an iterable")

    def _portion(
        self, rank: int, world_size: int, part: int = 0, parts: int = 1, block: int = 1
    ) -> OrderedEnqueuer:
        make, given = self._made_of()
        twin = self._handed_on(make(*given, rank=rank, world_size=world_size), world_size)
        twin._reading = dataclasses.replace(twin._reading, part=part, parts=parts, block=block)
        twin._record_as(rank + world_size * part, world_size * parts)
        return twin

    def _needs_common_seed(self) -> bool:
        return self._reading.shuffle

    def _job(self) -> Job:
        return self._job_of(self._source, shards=0, own=())

    def _may_change(self) -> bool:
        # else those who are slow to leave could become ever more
        return not tasks_of(self._backend).is_resizing

    def _change_workers(self, workers: int) -> None:
        # in place: who has a task does it, and nothing is done again
        tasks_of(self._backend).resize(workers)
        self._workers = workers
        self._tell_of_change()

    def _most_with(self, room: int, before: int) -> int:
        return before + room

    def _job_with(self, workers: int) -> Job:
        return dataclasses.replace(self._job(), workers=workers)

    def _hand_over(self, old: Backend, new: Backend) -> None:
        for ticket in tasks_of(old).tickets():
            tasks_of(new).submit(ticket)
        if self._unread is not None:
            tasks_of(new).fail(self._unread)

    def _order_of(self, epoch: Epoch) -> TaskOrder:
        self._start = Start() if epoch.starts is None else epoch.starts[0]
        first = self._number
        self._reader, self._unread, self._is_read = None, None, False
        self._number += self._start.number
        self._pending = None
        return TaskOrder(first, self._start, epoch.done, self._ordered)

    def _begin(self, epoch: Epoch, goes_on: bool = False) -> None:
        super()._begin(epoch, goes_on)
        if goes_on:
            self._start = Start()
        # The workers begin at once. An iterable may keep start() waiting for ever.
        interrupts.interruptible(self._feed)

    def _rewind(self) -> None:
        self._source.rewind()

    def _feed(self) -> None:
        """Read elements and hand out their tasks, as many as the bound allows."""
        order, backend, source = self._order, tasks_of(self._backend), self._source
        assert isinstance(order, TaskOrder)
        reads, most = 0, self._most_out(backend)
        while not self._is_read and backend.outstanding < most:
            if self._pending is None:
                if reads > 1 and not source.is_sequence and backend.poll(order):
                    return  # who waits for a batch should not wait for a slow iterable
                reads += 1
                self._pending = self._read(order)
                if self._pending is None:
                    return
            ticket, state = self._pending
            self._number = ticket.number + 1
            order.read(ticket.number, state)
            if not order.was_taken(ticket.number):
                try:
                    backend.submit(ticket)
                except ItemNotPicklable as error:
                    self._fail(Failure(ticket.indices[0], ticket.number, error))
            if self._reader is not None:
                self._reader.advance(ticket.number)
            self._pending = None

    def _feeding_waits(self) -> bool:
        return not self._source.is_sequence

    def _read(self, order: TaskOrder) -> tuple[Ticket, Any] | None:
        """Return the next ticket, and the reader's state after it; None if there is none."""
        try:
            return self._read_on(order)
        except BaseException as error:
            if self._reader is not None and self._reader.has_failed:
                self._fail(Failure(-1, self._number, error))
                if isinstance(error, Exception):
                    return None
                raise
            if self._source.is_sequence:
                self._reader = None  # it can be read on from here
            if not isinstance(error, Exception):
                raise  # a Ctrl-C
            # An error of the source's own comes again; else a signal handler has raised it.
            try:
                self._read_on(order)
            except Exception:
                self._fail(Failure(-1, self._number, error))
                return None
            raise

    def _read_on(self, order: TaskOrder) -> tuple[Ticket, Any] | None:
        """Do what `_read` does; again, until the reader advances, does the same."""
        source = self._source
        if self._reader is None:
            start = self._start
            if source.is_sequence:
                start = Start(self._number - order.first)
            self._reader = Reader(source, self._reading, self._epoch, start, order.first)
        read = self._timed(self._reader)
        state = self._reader.state()
        if read is None:
            count, last = self._number - order.first, max(order.beyond(), default=-1)
            if last >= count:
                text = f"the iterable ended after {count} tasks when it was read again, but task "
                self._fail(Failure(-1, self._number, StateMismatch(f"{text}{last} of it was done")))
                return None
            order.end_at(self._number, state)
            self._is_read = True
            return None
        return read, state

    def _timed(self, reader: Reader) -> Ticket | None:
        """Read on, and count it as a wait of the loop if it runs code of the user's."""
        if self._source.is_sequence:
            return reader.next()
        self._loop_meter.pause(None)
        try:
            return reader.next()
        finally:
            self._loop_meter.read()

    def _fail(self, failure: Failure) -> None:
        """Let a task have failed that no worker can be given; nothing more is read."""
        self._unread = dataclasses.replace(failure, worker="the process of the loop")
        tasks_of(self._backend).fail(self._unread)
        self._is_read = True
        self._number = failure.number + 1

    def _most_out(self, backend: TaskBackend) -> int:
        """Return how many tasks may be handed out and not taken."""
        waiting = self._max_queue_size
        if self._max_queue_bytes is not None:
            largest = backend.largest_bytes
            # until the first result tells, each worker gets one task
            waiting = min(waiting, self._max_queue_bytes // largest) if largest else 0
        return waiting + self._workers

    def _ended(self) -> None:
        self._source.end(self._epoch)

    def _following(self, ready: deque[Item]) -> deque[Item] | None:
        with self._lock:
            if self._state is not State.RUNNING:
                return None
            if ready is self._ready:  # else another thread was faster
                order = self._order
                assert isinstance(order, TaskOrder)
                if not self._over or (order.items == 0 and self._start.number == 0):
                    return None  # an epoch without anything would be followed by another one
                self._begin_next()
                if ready is self._ready:
                    return None  # it is being stopped
            return self._ready

    def _waiting(self) -> int:
        return min(super()._waiting(), self._max_queue_size)  # the others count as in hand

    def _raise(self, failure: Failure) -> NoReturn:
        try:
            super()._raise(failure)
        finally:
            # The backend lives until it is stopped; what was raised has the frames of the loop,
            # and they have this object, which would then never be collected.
            assert self._failure is not None
            tasks_of(self._backend).fail(self._failure)
            del failure

    def _where(self, failure: Failure) -> str:
        assert isinstance(self._order, TaskOrder)
        task = failure.number - self._order.first
        if failure.shard < 0:
            return f"while the elements of task {task} were read"
        indices = [failure.shard]
        if isinstance(failure.error, WorkerDied):  # at any of them
            indices = self._indices_of(failure.number) or indices
        what = f"element {indices[0]}" if len(indices) == 1 else f"one of the elements {indices}"
        return f"in {failure.worker}, task {task}, {what}"

    def _indices_of(self, number: int) -> list[int]:
        tickets = tasks_of(self._backend).tickets()
        return [i for ticket in tickets if ticket.number == number for i in ticket.indices]

    def _origin_of(self, failure: Failure) -> Origin:
        assert isinstance(self._order, TaskOrder)
        return Origin(
            self._random_seed,
            self._epoch,
            failure.number - self._order.first,
            None,
            0,
            failure.worker,
            failure.shard,
        )

    def _again(self, origin: Origin) -> Callable[[], Any]:
        if origin.element is None:
            raise ValueError("the error came from a shard of a GeneratorEnqueuer, not from a task")
        if origin.element < 0:
            return functools.partial(refuse, "the error came from reading the elements")
        ticket = self._ticket_of(origin)
        if ticket is None:
            return functools.partial(
                refuse,
                "the element came from an iterable, and is gone: replay(error) takes it along "
                "only in the process of the loop",
            )
        seed, skip = self._backend_name != "thread", self._on_error != "raise"
        return functools.partial(
            redo, self._source, origin.random_seed, ticket, origin.element, seed, skip
        )

    def _ticket_of(self, origin: Origin) -> Ticket | None:
        """Return the ticket of a task: the one that is out, or for a sequence a new one."""
        if self._state in (State.RUNNING, State.FAILED) and self._epoch == origin.epoch:
            assert isinstance(self._order, TaskOrder)
            for ticket in tasks_of(self._backend).tickets():
                if ticket.number == self._order.first + origin.item:
                    return ticket
        if not self._source.is_sequence:
            return None
        size = self._source.batch_size or 1
        part = slice(origin.item * size, (origin.item + 1) * size)
        indices = order_of(self._source, self._reading, origin.epoch)[part]
        return Ticket(origin.item, origin.epoch, tuple(int(index) for index in indices))

    def _identity(self) -> dict[str, Any]:
        reading = self._reading
        part = {"part": reading.part, "parts": reading.parts} if reading.parts > 1 else {}
        return part | {
            "kind": "OrderedEnqueuer",
            "random_seed": self._random_seed,
            "length": self._source.length if self._source.is_finite else None,
            "shuffle": reading.shuffle,
            "batch_size": self._source.batch_size,
            "drop_last": self._drop_last,
            "rank": self._rank,
            "world_size": self._world_size,
            "ordered": self._ordered,
        }

    def _given(self) -> dict[str, bool]:
        return {"random_seed": self._seed_is_given}

    def _adopt(self, state_dict: Mapping[str, Any], epoch: Epoch) -> None:
        items = self._source.items
        if isinstance(items, Iterator) and self._state is State.STOPPED:
            raise InvalidState(
                "an iterator that was read cannot be rewound; make a new enqueuer with a fresh one"
            )
        if state_dict.get("parts", 1) != self._reading.parts:
            raise StateMismatch(
                f"the state is of one of {state_dict['parts']} workers of a DataLoader, "
                "not of the whole"
            )
        if epoch.starts is not None and list(epoch.starts) != [0]:
            raise StateMismatch("this is not the position of an OrderedEnqueuer")
        if epoch.starts is not None and self._source.is_finite:
            steps, last = len(self), max((epoch.starts[0].number - 1, *epoch.done))
            if last >= steps:
                raise StateMismatch(f"the state has task {last}, but an epoch has {steps} tasks")
        is_told = hasattr(items, "on_epoch_begin") or hasattr(items, "on_epoch_end")
        if is_told and self._source.ended > epoch.number:
            raise InvalidState(
                f"the sequence was told of the end of {self._source.ended} epochs, and cannot be "
                f"taken back to epoch {epoch.number}; make a new enqueuer with a new sequence"
            )
        self._random_seed = self._source.random_seed = state_dict["random_seed"]


def tasks_of(backend: Backend | None) -> TaskBackend:
    """Return a backend that was loaded for tasks as what it is."""
    return cast(TaskBackend, backend)


def prefetch(
    generator: Callable[[Shard], Iterable[Batch]] | Callable[[], Iterable[Batch]] | Iterable[Batch],
    max_queue_size: int = 2,
    **options: Any,
) -> Iterator[Batch]:
    """Iterate over one epoch of `generator`, made ahead in the background.

    The workers start with the first `next()` and are gone when the iterator ends, is closed, or
    is dropped after a `break`.

    Args:
        generator: As for `GeneratorEnqueuer`; also any iterable, such as a list or a loader.
        max_queue_size: The most finished batches that may wait; 2 by default, which is enough
            to overlap steady work.
        **options: The other options of `GeneratorEnqueuer`.

    Raises:
        TypeError: An argument has the wrong type (at once, not at the first `next()`).
        ValueError: An argument is out of its range (likewise).

    Example:
        >>> for batch in prefetch(lambda: (n * n for n in range(3))):
        ...     print(batch)
        0
        1
        4
    """
    if is_plain_collection(generator):
        generator = iter(generator)
    enqueuer = GeneratorEnqueuer(generator, max_queue_size=max_queue_size, **options)
    return _prefetched(enqueuer)


def imap(
    function: Callable[..., Any],
    elements: Iterable[Any] | Indexable,
    max_queue_size: int = 10,
    **options: Any,
) -> Iterator[Any]:
    """Iterate over `function` of each element, in order, made ahead in the background.

    As `Pool.imap` of `multiprocessing`, but no further ahead than asked for. The workers start
    with the first `next()` and are gone when the iterator ends, is closed, or is dropped after a
    `break`. A result that is None is left out.

    Args:
        function: Called with an element; with the element and its `Task` if it takes two
            arguments.
        elements: A sequence, or any iterable, which is read in your own thread.
        max_queue_size: The most results that may wait; 10 by default. Each worker may hold one
            more.
        **options: The other options of `OrderedEnqueuer`, such as `workers` and `backend`.

    Raises:
        TypeError: An argument has the wrong type (at once, not at the first `next()`).
        ValueError: An argument is out of its range (likewise).

    Example:
        >>> for length in imap(len, ["one", "three"], workers=2):
        ...     print(length)
        3
        5
    """
    if not callable(function):
        raise TypeError(f"imap needs a function and then its elements, got {function!r}")
    return _prefetched(
        OrderedEnqueuer(elements, function, max_queue_size=max_queue_size, **options)
    )


def _prefetched(enqueuer: BaseEnqueuer[Batch]) -> Iterator[Batch]:
    with enqueuer:
        yield from enqueuer


def _warn_of_twins(one: int, other: int, takes_shard: bool) -> None:
    if takes_shard:
        cause = (
            "Are random numbers drawn from a generator that was made outside (a captured "
            "numpy.random.default_rng, say)? Draw them from shard.rng. Does each shard read the "
            "same? Use shard.split for its share of the work"
        )
    else:
        cause = (
            "The generator function takes no shard, so that each shard runs all of it: let it "
            "take the shard (`def batches(shard): ...`), use shard.split for its share of the "
            "work, and draw random numbers from shard.rng"
        )
    warnings.warn(
        f"shards {one} and {other} began with the same batches, so the data seem to come "
        f"several times. {cause}",
        DuplicateDataWarning,
        stacklevel=level_of_user(),
    )


def _warn_of_duplicates(workers: int) -> None:
    warnings.warn(
        f"each of the {workers} processes goes on with its own copy of the same iterator, so "
        f"every batch comes {workers} times; pass the generator function itself "
        "(`def batches(shard): ...`, with shard.split for its share of the work), or workers=1",
        DuplicateDataWarning,
        stacklevel=4,
    )
