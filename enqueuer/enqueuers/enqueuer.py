"""BaseEnqueuer: the public methods that GeneratorEnqueuer and OrderedEnqueuer share."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from enqueuer.common import checks
from enqueuer.common.text import pluralize, warn
from enqueuer.enqueuers.core import Batches, Core, StatsCallback, log_line
from enqueuer.enqueuers.failures import Origin, origin_of
from enqueuer.enqueuers.keras_queue import Queue
from enqueuer.enqueuers.options import Auto
from enqueuer.enqueuers.run import STOP_S, State, next_workers
from enqueuer.enqueuers.workload import Workload
from enqueuer.errors import EnqueuerWarning, InvalidState
from enqueuer.monitoring.progress import Shown, bar_class
from enqueuer.monitoring.stats import Stats
from enqueuer.order import position, ranks
from enqueuer.order.messages import Epoch
from enqueuer.order.position import SavedPosition


def begin_at(core: Core, epoch: int | Epoch) -> None:
    """Let the next start begin with an epoch, as if those before it had been read."""
    at = epoch if isinstance(epoch, Epoch) else Epoch(epoch)
    core.saved = SavedPosition(at, is_loaded=True, total_items=core.saved.total_items)


def comes_next(core: Core, epoch: int) -> bool:
    """Return whether the next iteration is this epoch, or what is left of it in a state."""
    reader = core.reader
    if reader is None or core.is_idle:
        return core.saved.is_loaded and core.saved.epoch.number == epoch
    with core.locks.reading():
        return reader.is_over and reader.number + 1 == epoch


def epoch_after(core: Core, state: Mapping[str, Any]) -> int | None:
    """Return the epoch that comes next after a position; None if it is within an epoch.

    Args:
        core: Enqueuer of the position.
        state: Position; one behind the last batch of an epoch is not within it.
    """
    epoch: int = state["epoch"]
    if state["positions"] is None:
        return epoch
    steps = core.workload.steps(state.get("share"))
    # Tasks have one position; shards have no known end.
    is_all = steps is not None and [list(at) for at in state["positions"]] == [[0, steps]]
    return epoch + 1 if is_all else None


if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    # Of what stacking makes of samples nothing is known.
    Batch = TypeVarWithDefault("Batch", default=Any)
else:
    Batch = TypeVar("Batch")
AnyEnqueuer = TypeVar("AnyEnqueuer", bound="BaseEnqueuer[Any]")
# Attributes that are made anew with a copy; a subclass may have others.
_MADE_ANEW = {"_core", "_make", "_notifier", "queue", "_tasks"}
Self = TypeVar("Self", bound="BaseEnqueuer[Any]")


class BaseEnqueuer(Generic[Batch]):
    """The base class of the enqueuers; not to be constructed itself.

    Args:
        workload: Workload of the enqueuer: shards or tasks.
        make: Class, or function, that makes another enqueuer of the same arguments.
    """

    def __init__(self, workload: Workload, make: Callable[..., BaseEnqueuer[Any]]) -> None:
        self._core = Core(workload)
        self._make = make
        self._notifier: Any = None
        self.queue: Queue[Batch] = Queue(self._core)

    def __setattr__(self, name: str, value: object) -> None:
        # A subclass may have an attribute with the name of an option.
        is_made = vars(self).get("_make") is type(self)
        if is_made and name in inspect.signature(type(self)).parameters:
            raise AttributeError(
                f"{name} is an option of {type(self).__name__}, which cannot be changed: make "
                "another one; reconfigure(workers=...) changes the number of workers"
            )
        super().__setattr__(name, value)

    @property
    def random_seed(self) -> int:
        """The seed, given or drawn, that all other seeds derive from."""
        return self._core.workload.seed.value

    @property
    def error_count(self) -> int:
        """Number of errors that were skipped, by `on_error` or by the generator.

        Counted since the start; if a state was loaded, also those until it was saved.
        """
        run = self._core.run
        if run is None or self._core.is_idle:
            return self._core.saved.error_count
        return run.failures.count

    @property
    def skipped(self) -> list[tuple[Origin, str]]:
        """Errors that were skipped since the start, each with its origin and its text.

        They are the latest ones, at most 1000. The origin is that of `enqueuer_origin`: it has the
        epoch, the shard and the item, or the index of the element.

        Example:
            >>> from enqueuer import OrderedEnqueuer
            >>> with OrderedEnqueuer([2, 0], lambda n: 1 // n, on_error="skip") as enqueuer:
            ...     batches = list(enqueuer)
            >>> [(origin.element, text) for origin, text in enqueuer.skipped]
            [(1, "ZeroDivisionError('integer division or modulo by zero')")]
        """
        run = self._core.run
        return [] if run is None else list(run.failures.skipped)

    @property
    def restart_count(self) -> int:
        """Number of workers that died and were replaced since the start."""
        run = self._core.run
        return 0 if run is None else run.restarts.count

    # --- life cycle ---

    def start(
        self,
        workers: int | Literal["auto"] | Auto | None = None,
        max_queue_size: int | None = None,
    ) -> None:
        """Start the workers, which immediately begin to make batches of the first epoch.

        If a state was loaded, they continue from its position.

        Args:
            workers: As for the class, whose value is the default.
            max_queue_size: As for the class, whose value is the default.

        Raises:
            InvalidState: The enqueuer is already running.
            ValueError: With several ranks, the data depend on the seed, and no seed was given;
                or an argument is out of its range.
            StartError: The workers could not be started, or Ray did not respond; no worker is
                left.
            SourceNotPicklable: The generator cannot be sent to a process that is not forked, or
                to a Ray actor.
            FrameworkUnavailable: For `backend="ray"`, Ray is not installed or too old.
        """
        settings = {"workers": workers, "max_queue_size": max_queue_size}
        changed: Any = {name: value for name, value in settings.items() if value is not None}
        core = self._core
        core.start(dataclasses.replace(core.options, **changed) if changed else core.options)

    def stop(self, timeout: float | None = None) -> None:
        """Stop the workers: ask them, then terminate, then kill; do nothing if none run.

        You may call it from any thread, also inside the loop; a loop that waits for a batch ends.
        Finished batches that the loop has not taken are dropped. Generators are closed, so that
        their `finally` runs. The next `start()` begins from the start.

        Args:
            timeout: Seconds after which the last worker is killed; 2.6 by default. A thread
                cannot be killed: if it hangs, it is left behind with a `StopWarning`.

        If an exception (Ctrl-C) ends this call, call it again.
        """
        self._core.stop(checks.seconds("timeout", STOP_S if timeout is None else timeout))

    def reconfigure(self, workers: int) -> None:
        """Change the number of workers; no batch is lost, repeated or reordered.

        The new workers run the shards again up to the first batch that the loop has not taken,
        unless the iterators have their own state, and take over; then the old workers are
        stopped. You may call it from any thread. After `stop()` it sets the number for the next
        start. In both cases the number of shards stays the same, and with it the data. Before the
        first start it has the effect of `workers` of the class. It replaces `workers="auto"`.

        Args:
            workers: As for the class.

        Raises:
            InvalidState: An error was raised, or worker processes share a running iterator.
            StartError: The new workers could not be started; the old ones continue.
        """
        self._core.reconfigure(checks.count("workers", workers))

    def __repr__(self) -> str:
        core, run, reader, waiting = self._core, self._core.run, self._core.reader, ""
        # The workers may be those of another process.
        with contextlib.suppress(InvalidState):
            if reader is not None and core.state is State.RUNNING:
                waiting = f", {reader.waiting()}/{core.options.max_queue_size} waiting"
        workers = run.workers if run and not core.is_idle else next_workers(run, core.options)
        count = pluralize(workers, "worker")
        return f"<{type(self).__name__} {core.state.value} {count}{waiting}>"

    # --- statistics ---

    def stats(self) -> Stats:
        """Return statistics since the start: how long the loop waited, and why.

        You may call it at any time, from any thread. It does not wait, except for Ray actors,
        which have 0.3 s to answer. Measuring has negligible cost and is always on. After
        `stop()`, the statistics end at the stop.

        Raises:
            InvalidState: This process was forked from the one that started the workers.

        Example:
            >>> from enqueuer import GeneratorEnqueuer
            >>> with GeneratorEnqueuer(lambda: iter("abc")) as enqueuer:
            ...     _ = list(enqueuer)
            ...     enqueuer.stats().items
            3
        """
        return self._core.stats()

    def on_stats(
        self, callback: Callable[[Stats], object] | None = None, every: float = 10.0
    ) -> None:
        """Call `callback` every few seconds with the statistics since the previous call.

        The loop's thread calls it when it takes a batch, so not while it waits for one. If the
        callback raises, the exception is logged, and the callback is not called again. It may
        call any method of the enqueuer, also `stop()`.

        Args:
            callback: Function that takes the statistics. None, the default: a line is logged by
                the logger `enqueuer`, with level INFO.
            every: Seconds between two calls; 10 by default.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: `every` is negative.

        Example:
            >>> from enqueuer import GeneratorEnqueuer
            >>> seen = []
            >>> with GeneratorEnqueuer(lambda: iter("abc")) as enqueuer:
            ...     enqueuer.on_stats(seen.append, every=60)
            ...     _ = list(enqueuer)
            >>> seen  # it did not take a minute
            []
        """
        seconds = checks.seconds("every", every)
        if not (callback is None or callable(callback)):
            raise TypeError(f"on_stats() calls a function with the statistics, got {callback!r}")
        self._core.callbacks.append(StatsCallback(callback or log_line, int(seconds * 1e9)))

    # --- position ---

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loop; batches that were made ahead do not count.

        You may call it at any time, from any thread. While another thread waits for a batch, it
        waits for that batch, too. After `stop()`, it returns the position of the stop. The state
        is small and can be stored as JSON, unless the iterators of the source have their own
        state: if they have `state_dict` and `load_state_dict`, their state is saved after each
        item.

        Returns:
            A dict for `load_state_dict` of an enqueuer with the same source.

        Example:
            >>> from enqueuer import GeneratorEnqueuer
            >>> def squares(shard):
            ...     for number in shard.split(range(6)):
            ...         yield number**2
            >>> with GeneratorEnqueuer(squares, shards=2, random_seed=7) as enqueuer:
            ...     [next(enqueuer.get()) for _ in range(3)]
            ...     state = enqueuer.state_dict()
            [0, 1, 4]
            >>> later = GeneratorEnqueuer(squares, workers=2)
            >>> later.load_state_dict(state)
            >>> with later:
            ...     list(later)
            [9, 16, 25]
        """
        core = self._core
        with core.locks.reading():
            workload, saved, reader = core.workload, core.saved, core.reader
            if reader is not None and not core.is_idle:
                saved = core.position(reader, reader.ready.copy())
            identity = saved.identity or workload.identity()
            return position.save(saved, identity, workload.fingerprint)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Continue at the position of `state_dict` at the next start.

        The number of workers and the backend may differ; options that change the data may not.
        If `random_seed` or `shards` was not given to this enqueuer, it is taken from the state.

        The shards run again from their seeds up to the next item, without sending the earlier
        items; an iterator with `load_state_dict` is resumed by this method.

        Args:
            state_dict: Result of `state_dict()` of an enqueuer with the same source.
            strict: Whether another source is refused: other names of functions or classes, other
                files or rows, another length. False warns instead, and goes on with the source
                that is here. True by default.

        Raises:
            InvalidState: The enqueuer runs; call `stop()` first.
            StateMismatch: The state does not fit; the message names the value that differs.
        """
        core = self._core
        core.check_outside("load_state_dict()")
        with core.locks.state_lock, checks.reading():
            core.check_idle("load_state_dict()")
            workload = core.workload
            identity = workload.identity()
            for name, is_fixed in workload.fixed().items():
                if not is_fixed:
                    del identity[name]
            position.check_format(state_dict, identity["kind"])
            in_step = workload.options.ordered and workload.options.on_error == "raise"
            state = ranks.of_rank(state_dict, identity["rank"], identity["world_size"], in_step)
            saved, changed = position.load(state, identity, workload.fingerprint, strict)
            if changed:
                warn(changed, EnqueuerWarning)
            workload.adopt(state, saved.epoch, was_run=core.was_run)
            core.saved = saved
            workload.seed.is_shared = True

    def replay(self, error: BaseException) -> Any:
        """Make the item of an error again in this process; see `enqueuer.replay`.

        Unlike that function, it also accepts an error that was pickled, as it has the source.

        Args:
            error: Exception that this enqueuer, or one with the same source, raised.
        """
        core, origin = self._core, origin_of(error)
        reader, ticket = core.reader, None
        if reader is not None and not core.is_idle and reader.number == origin.epoch:
            ticket = reader.work.ticket(origin.item)
        return core.workload.rerun(origin, ticket)()

    def is_running(self) -> bool:
        """Return whether a batch or an error is still to come.

        False before `start()`, after `stop()`, once an error was raised, and once a finite
        generator has been read to its end.
        """
        return self._core.is_running()

    def __enter__(self: Self) -> Self:
        if self._core.is_idle:
            self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    async def __aenter__(self: Self) -> Self:
        """Start the enqueuer in a thread if it does not run; the event loop is not blocked."""
        # Only here, as asyncio takes long to import, and most programs have no event loop.
        from enqueuer.enqueuers import async_iteration

        await async_iteration.call(self._core, self.__enter__)
        return self

    async def __aexit__(self, *error: object) -> None:
        """Stop the enqueuer in a thread; the event loop is not blocked."""
        from enqueuer.enqueuers import async_iteration

        await async_iteration.call(self._core, self.stop)

    # --- iteration ---

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the rest of the current epoch, or over the next one if it has ended.

        A new enqueuer is started; garbage collection stops it, unless you stop it before.

        Raises:
            InvalidState: The enqueuer was stopped.
        """
        core = self._core
        reader = core.join()
        batches: Iterator[Batch] = Batches(core, reader, is_loop=True)
        kind = bar_class(core.options.progress)
        if kind is None:
            return batches
        with core.locks.reading():
            order = reader.work.order
            done = order.steps - len(reader.ready)
        # After a merge, what is left of the epoch was divided anew.
        total = core.workload.steps(order.epoch.division)
        return Shown(batches, self.stats, kind, done, total)

    def __aiter__(self) -> AsyncIterator[Batch]:
        """Iterate like `iter()`, with `async for`, without blocking the event loop.

        A ready batch is returned at once; otherwise one thread waits, however many tasks there
        are. This thread takes no batch, so a task that is cancelled or times out loses none, and
        the next iteration continues with the very next batch. Tasks that iterate at the same time
        share the batches.

        Raises:
            InvalidState: The enqueuer was stopped.

        Example:
            >>> import asyncio
            >>> from enqueuer import GeneratorEnqueuer
            >>> async def main():
            ...     async with GeneratorEnqueuer(lambda: iter("abc")) as enqueuer:
            ...         return [batch async for batch in enqueuer]
            >>> asyncio.run(main())
            ['a', 'b', 'c']
        """
        if self._core.state is State.STOPPED:
            self._core.check_started("iterate over it")
        # Only here, as in __aenter__.
        from enqueuer.enqueuers import async_iteration

        if self._notifier is None:
            self._notifier = async_iteration.Notifier()
        return async_iteration.AsyncBatches(self._core, self._notifier)

    def get(self) -> Iterator[Batch]:
        """Return an iterator over the rest of the running epoch, as Keras does.

        Each `next(enqueuer.get())` returns the next batch.

        Raises:
            InvalidState: The enqueuer was not started, or was stopped.
        """
        return Batches(self._core, self._core.started_reader("get() from it"))

    # --- copies ---

    def __reduce__(self) -> Any:
        """Pickle or copy a new enqueuer.

        Raises:
            TypeError: It is not new.
        """
        core = self._core
        if core.state is not State.NEW:
            raise TypeError(
                f"a {core.state.value.lower()} {type(self).__name__} cannot be pickled or copied, "
                "as it owns workers; pickle what it was made of, or a new enqueuer"
            )
        arguments, options = core.workload.arguments()
        rest = {name: value for name, value in vars(self).items() if name not in _MADE_ANEW}
        make = functools.partial(self._make, **options)
        saved = core.saved, core.workload.seed.is_shared, core.options
        return _restored, (type(self), make, arguments, saved), rest or None


def _restored(
    kind: type[AnyEnqueuer],
    make: Callable[..., Any],
    arguments: tuple[Any, ...],
    saved: tuple[Any, ...],
) -> AnyEnqueuer:
    """Return a copy of an enqueuer; its class need not take the same arguments."""
    made = kind.__new__(kind)
    vars(made).update(vars(make(*arguments)))
    core = made._core
    core.saved, core.workload.seed.is_shared, core.workload.options = saved
    return made


def core_of(enqueuer: BaseEnqueuer[Any]) -> Core:
    """Return the inside of an enqueuer, for other parts of the package."""
    return enqueuer._core


def of_rank(enqueuer: AnyEnqueuer, rank: int, world_size: int) -> AnyEnqueuer:
    """Return a new enqueuer for one rank.

    Raises:
        InvalidState: A position within an epoch was loaded.
        ValueError: There are too few shards, or they cannot be split.
    """
    core = enqueuer._core
    arguments, options = core.workload.arguments()
    made = enqueuer._make(*arguments, **options | {"rank": rank, "world_size": world_size})
    made_core, seed, saved = made._core, core.workload.seed, core.saved
    made_core.workload.seed.is_explicit = seed.is_explicit
    made_core.workload.seed.is_shared = seed.is_explicit or world_size == 1
    for callback in core.callbacks:
        made_core.callbacks.append(StatsCallback(callback.function, callback.every_ns))
    if saved.is_loaded:
        if any(start.number for start in (saved.epoch.starts or {}).values()):
            raise InvalidState(
                f"a position within epoch {saved.epoch.number} was loaded, which cannot be "
                "divided among ranks; load it after the division: into the loader or dataset of a "
                "rank"
            )
        made_core.saved = SavedPosition(saved.epoch, is_loaded=True, total_items=saved.total_items)
    return cast(AnyEnqueuer, made)


def iterated(enqueuer: BaseEnqueuer[Batch]) -> Iterator[Batch]:
    """Start an enqueuer, yield its batches, and stop it."""
    with enqueuer:
        yield from enqueuer
