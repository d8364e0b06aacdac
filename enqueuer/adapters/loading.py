"""The base of all loaders: an enqueuer, or any other iterable, as a framework's loader.

    loader -> LoaderEpochs: epochs of so many steps, a position -> Reader -> the training loop

A `Reader` gives the batches of an epoch in the loop's thread; a `PrefetchReader` from a thread that
works ahead. That thread knows the epochs, and not the reader.

    loader -> [a thread: change, up to queue_size batches] -> convert -> the training loop

With `workers=0` of the enqueuer, the thread of the loop changes a batch when the loop asks for it.

The owner that starts an enqueuer stops it. An enqueuer that does not run is started by the first
iteration, and stopped when its Loader and all iterators of it are dropped: these keep its reader.
One that runs already is left running.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from enqueuer.backends.pool import forget
from enqueuer.common import checks
from enqueuer.common.interrupts import Finalizer
from enqueuer.common.text import an
from enqueuer.enqueuers.enqueuer import BaseEnqueuer, core_of
from enqueuer.enqueuers.generator import GeneratorEnqueuer
from enqueuer.enqueuers.run import STOP_S
from enqueuer.errors import InvalidState
from enqueuer.monitoring.stats import Stats
from enqueuer.workers.plan import Raised

Batch = TypeVar("Batch")


Self = TypeVar("Self", bound="Loader[Any]")


class Loader(Generic[Batch]):
    """A loader over an enqueuer or any other iterable; one iteration is one epoch.

    Args:
        loader: An enqueuer, or any object that can be iterated once an epoch.
        steps_per_epoch: Number of batches in an epoch. None, the default: as many as `loader`
            gives. A number serves a generator without an end; where `loader` ends earlier, it
            is iterated again.
        convert: Function that the loop's thread calls with each batch; the loop gets its result.
            None, the default: the loop gets the batch.
        check: Function that is called before each iteration, and raises if there must be none.
        reader: Makes the reader of the epochs, with `check` and `convert`.

    The functions must not know this object, which would then not end at once when it is dropped.
    """

    state_dict: Callable[[], dict[str, Any]]
    """Return the position after the last batch given to the loop, not after those made ahead.

    It exists only if `loader` has it, as an enqueuer does, and so does `load_state_dict`.
    """

    load_state_dict: Callable[..., None]
    """Continue where a state was taken, at the next iteration.

    It takes `strict=False` if that of `loader` does, as an enqueuer's.

    So does an iteration that has begun, if its loop has taken no batch. Raises InvalidState if the
    loop has taken one, or if the caller has started the enqueuer: call `stop()` first. Raises
    StateMismatch if the state is of another source.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        steps_per_epoch: int | None = None,
        *,
        convert: Callable[[Any], Batch] | None = None,
        check: Callable[[], object] | None = None,
        reader: Callable[..., Reader[Batch]] | None = None,
    ) -> None:
        epochs = LoaderEpochs(loader, steps_per_epoch)
        self._reader: Reader[Batch] = (reader or Reader)(epochs, check, convert)
        # Libraries check for methods of these names, and call those that exist. So these are
        # attributes, and exist only if the loader has a position.
        if hasattr(loader, "state_dict"):
            self.state_dict = epochs.state_dict
        if hasattr(loader, "load_state_dict"):
            self.load_state_dict = self._reader.load_state_dict

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in ("state_dict", "load_state_dict") and "_reader" in vars(self):
                kind = an(type(self._reader.epochs.loader).__name__)
                raise AttributeError(f"{kind} has no position: it has no {name}", name=name)
            # A property that has raised AttributeError raises its own message again.
            return super().__getattribute__(name)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over an epoch, or over the rest of one if the last iteration was left.

        If this has a length, a loop that took as many batches has ended its epoch.
        """
        return self._reader.iterate()

    def __len__(self) -> int:
        """Return the number of batches in an epoch.

        Raises:
            TypeError: It is not known: give `steps_per_epoch`.
        """
        return len(self._reader.epochs)

    def __bool__(self) -> bool:
        # The length need not be known.
        return True

    def stats(self) -> Stats:
        """Return the statistics of the enqueuer; with several ranks, of this rank's enqueuer.

        Raises:
            TypeError: The loader has no enqueuer, but another iterable, which measures nothing.
        """
        loader = self._reader.epochs.loader
        if not hasattr(loader, "stats"):
            raise TypeError(f"stats() needs an enqueuer in the loader, which has {loader!r}")
        found: Stats = loader.stats()
        return found

    def stop(self, timeout: float | None = None) -> None:
        """Stop the enqueuer if this has started it; the next iteration begins anew.

        Args:
            timeout: As for the enqueuer's `stop`.
        """
        self._reader.stop(timeout)

    def __enter__(self: Self) -> Self:
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def reader_of(loader: Loader[Batch]) -> Reader[Batch]:
    """Return the reader of a loader, for other parts of the package."""
    return loader._reader


class Reader(Generic[Batch]):
    """The iterations of a loader, read in the loop's thread; the owner of what it has started.

    The loader is stopped when this object is dropped.

    Args:
        epochs: Epochs of the loader: an enqueuer, a Loader, or an iterable that needs no start.
        check: Function that is called before each start, and raises if there must be none.
        convert: Function of a batch, which the loop's thread calls; None leaves the batch.

    Attributes:
        is_started: Whether this has started the loader.
        is_entered: Whether a loop has asked for a batch of the latest iteration.
        iteration: Number of the latest iteration.
    """

    def __init__(
        self,
        epochs: LoaderEpochs,
        check: Callable[[], object] | None,
        convert: Callable[[Any], Batch] | None,
    ) -> None:
        self.epochs = epochs
        self.is_started = self.is_entered = False
        self.iteration = 0
        self._check = check
        self._convert = convert
        # Stops the loader when this is dropped, while this owns it.
        self._claim: Any = None
        # Number of batches that loops were given.
        self._count = 0
        # Whether the last iteration may have been dropped between its last batch and its end.
        self._is_at_end = False

    # --- what a thread that works ahead does in another way ---

    def prepare(self) -> None:
        """Prepare an iteration, before its loop asks for a batch; start no enqueuer."""

    def read(self, iteration: int) -> Iterator[Batch]:
        """Return an iterator over the epoch that was prepared, or over the rest of one."""
        # The bound method keeps this object, and so the workers, alive. `map` is no frame that an
        # error would keep, and holds no batch.
        return map(self.converted, self.epochs)

    def end_reading(self, timeout: float | None) -> None:
        """End the thread that reads ahead, if there is one."""

    # --- iterations ---

    def iterate(self) -> Iterator[Batch]:
        """Return an iterator over the rest of an epoch, or the next one if there is no rest.

        A loop that counts its batches does not see the end of the epoch.
        """
        self.start()
        self.is_entered = False
        # `chain` is no frame that an error would keep, and holds no batch.
        return itertools.chain.from_iterable(self._parts(self.next_iteration()))

    def next_iteration(self) -> int:
        """Prepare another iteration, and return its number."""
        self.iteration += 1
        self.prepare()
        return self.iteration

    def _parts(self, iteration: int) -> Iterator[Iterator[Batch]]:
        self.is_entered = True
        count, was_left, self._is_at_end = self._count, self._is_at_end, False
        try:
            yield self.read(iteration)
            if was_left and self._count == count and self._has_end():
                yield self.read(self.next_iteration())
        except GeneratorExit:
            self._is_at_end = True
            raise

    def _has_end(self) -> bool:
        """Return whether epochs have a length, and continue after a `break`."""
        epochs = self.epochs
        return epochs.steps is None and epochs.keeps_position and operator.length_hint(epochs) > 0

    def converted(self, batch: Any) -> Batch:
        """Return a batch as the loop gets it, and count it."""
        self._count += 1
        return batch if self._convert is None else self._convert(batch)

    # --- the right to stop the loader ---

    def start(self) -> None:
        """Start the loader if it is idle, and own it from then on."""
        if self._check is not None:
            self._check()
        loader = self.epochs.loader
        # A Loader within may have been stopped by itself. It is started again, as if it were alone.
        if self.is_started and not isinstance(loader, Loader):
            return
        if is_idle(loader):
            # The claim comes first, as an exception may end the start at any place.
            if not self._is_owner:
                # The loader itself may hold an error and that, by its traceback, this object.
                self._claim = Finalizer(self, _forget, weakref.ref(loader))
            try:
                # This starts enqueuers and Loaders.
                loader.__enter__()
            except Exception:
                if is_idle(loader):
                    self._claim.detach()
                raise
        elif not self._is_owner or self.is_started:
            return
        # A start that was to come here may have been ended by an exception.
        self.epochs.begin()
        self.is_started = True

    @property
    def _is_owner(self) -> bool:
        return self._claim is not None and self._claim.alive

    def stop(self, timeout: float | None = None) -> None:
        """Stop the loader if this owns it, and its reading. Idempotent."""
        # This wakes a thread that reads ahead.
        self._stop_owned(timeout)
        self.end_reading(timeout)

    def _stop_owned(self, timeout: float | None) -> None:
        if not self._is_owner:
            return
        try:
            self.is_started = False
            self.epochs.loader.stop(timeout)
        except BaseException:
            self.is_started = True
            raise
        self.epochs.end()
        self._is_at_end = False
        self._claim.detach()

    # --- another position ---

    def load_state_dict(self, state_dict: Mapping[str, Any], **options: bool) -> None:
        """Continue at a position; see `Loader`."""

        def load() -> None:
            self.epochs.load_state_dict(state_dict, **options)
            self._is_at_end = False

        # Libraries begin an iteration to see whether that is possible, and load the position then.
        if self.is_entered:
            load()
        else:
            self.restart(load)

    def restart(self, change: Callable[[], None]) -> None:
        """Stop the loader, unless its caller runs it, and call a function.

        An iteration that has begun, without a batch for the loop, begins again.
        """
        was_started = self.is_started
        is_of_caller = self.epochs.keeps_position and not was_started
        if not is_of_caller:
            self._stop_owned(None)
            # The thread may be starting the workers of a DataLoader, which is not to be changed
            # under it.
            self.end_reading(threading.TIMEOUT_MAX)
        change()
        if self.is_entered or is_of_caller:
            return
        if was_started:
            self.start()
            # Libraries begin an iteration before they load a position, and count batches. They
            # save a position before they see the end of an epoch, and begin the next one.
            self._is_at_end = True
        self.prepare()


class LoaderEpochs:
    """The epochs of a loader, each of `steps` batches if that is not None.

    Attributes:
        loader: The loader.
        source: The same, or what a Loader is made of: an enqueuer, or another iterable.
        keeps_position: Whether the loader continues, after a `break`, with the next batch.
        has_steps: Whether the steps of this, or of a Loader within, are counted.
        steps: Number of batches in an epoch; None: as many as the loader gives.
        step: Number of batches of this epoch that were given; always 0 without `steps`.
        delivered: Position after the last batch that the loop was given, if a thread has read on
            since; None: that of the loader.
    """

    def __init__(self, loader: Iterable[Any], steps: int | None) -> None:
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise TypeError(f"the loader must be an enqueuer or an iterable, got {loader!r}")
        self.loader: Any = loader
        within = loader._reader.epochs if isinstance(loader, Loader) else None
        self.source: Any = loader if within is None else within.source
        self.steps = None if steps is None else checks.positive("steps_per_epoch", steps)
        self.has_steps: bool = steps is not None or (within is not None and within.has_steps)
        self.keeps_position = isinstance(self.source, (BaseEnqueuer, Iterator))
        self.step = 0
        self.delivered: dict[str, Any] | None = None
        # Step at which the next start begins: that of a loaded position, or 0.
        self._first_step = 0

    def begin(self) -> None:
        """Set the step, as the loader was started; repeated calls for one start do no harm."""
        self.step = self._first_step

    def end(self) -> None:
        """Forget a loaded step, as the loader was stopped."""
        self._first_step = 0

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch, or of the rest of one that was left."""
        self._first_step = 0
        if self.steps is None:
            yield from self._pass()
            return
        if not self.keeps_position or self.step >= self.steps:
            self.step = 0
        # One pass without a batch may be the end of the loader's epoch.
        empty_passes, is_first = 0, True
        while self.step < self.steps and empty_passes < 2:
            before = self.step
            try:
                yield from map(self._counted, itertools.islice(self._pass(), self.steps - before))
            except InvalidState:
                if is_first or not is_idle(self.loader):
                    raise
                # The loader was stopped, which was the end of the pass before.
                return
            empty_passes = empty_passes + 1 if self.step == before else 0
            is_first = False
        self.step = 0

    def _pass(self) -> Iterator[Any]:
        """Iterate over an epoch of the loader's, or the rest of one, without starting the loader.

        After a loader was stopped while a thread works ahead of it, the thread must not start it.
        """
        if not isinstance(self.loader, Loader):
            return iter(self.loader)
        reader = self.loader._reader
        return reader.read(reader.next_iteration())

    def __len__(self) -> int:
        if self.steps is not None:
            return self.steps
        try:
            return len(self.loader)
        except TypeError as error:
            kind = an(type(self.loader).__name__)
            raise TypeError(
                f"the number of batches of {kind} is unknown ({error}); give steps_per_epoch"
            ) from None

    def _counted(self, batch: Any) -> Any:
        self.step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's position in the loader, and the step of the epoch."""
        return self.delivered or self._read_so_far()

    def position(self) -> dict[str, Any] | None:
        """Return the loader's position, or None if it has none."""
        return self._read_so_far() if hasattr(self.loader, "state_dict") else None

    def _read_so_far(self) -> dict[str, Any]:
        state = dict(self.loader.state_dict())
        return state if self.steps is None else {**state, "step": self.step}

    def load_state_dict(self, state_dict: Mapping[str, Any], **options: bool) -> None:
        """Let the loader continue at a position; the options are those of its own method."""
        with checks.reading():
            state = dict(state_dict)
            step = state.pop("step", 0) if self.steps is not None else 0
            if checks.count("step", step) > (self.steps or 0):
                raise ValueError(f"step must be <= steps_per_epoch={self.steps}, got {step}")
        self.loader.load_state_dict(state, **options)
        self.step = self._first_step = step
        self.delivered = None


def is_idle(loader: object) -> bool:
    """Return whether a loader has workers, and none of them run."""
    if isinstance(loader, Loader):
        return not loader._reader.is_started and is_idle(loader._reader.epochs.loader)
    return isinstance(loader, BaseEnqueuer) and core_of(loader).is_idle


def _forget(reference: weakref.ref[Any]) -> None:
    loader = reference()
    if loader is not None:
        forget(loader.stop, STOP_S)


class PrefetchReader(Reader[Batch]):
    """The reader of a loader that keeps changed batches ready, made by a thread of its own.

    After a `break`, an enqueuer continues with the next batch. So does this reader, which keeps
    the batches that were ready. Any other loader begins a new epoch, and batches of the old one
    are dropped.

    Args:
        of_reader: Arguments of `Reader`; `convert` gets each changed batch.
        change: Function that the thread calls with each batch.
        queue_size: Number of batches that are kept ready; the thread holds one more.
        running: Makes the context in which the thread reads an epoch.
    """

    def __init__(
        self,
        *of_reader: Any,
        change: Callable[[Any], Any],
        queue_size: int,
        running: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        super().__init__(*of_reader)
        queue_size = checks.positive("queue_size", queue_size)
        # The function must not know this object, which would then not end when it is dropped.
        epochs = self.epochs

        def make() -> GeneratorEnqueuer[Any]:
            # `reconfigure()` may have changed it since the last epoch.
            source = epochs.source
            is_here = isinstance(source, BaseEnqueuer) and core_of(source).options.is_inline
            run = functools.partial(_changed, epochs, change, running, is_here)
            # An enqueuer that is the loader gives its own warning of a stall, and knows its cause.
            # After Ctrl-C, the generator function would not repeat the same batches.
            made = GeneratorEnqueuer[Any](
                run() if is_here else run,
                workers=0 if is_here else 1,
                max_queue_size=queue_size,
                stall_timeout=None,
            )
            # And of an empty epoch.
            core_of(made).workload.may_be_empty = isinstance(source, BaseEnqueuer)
            return made

        self._make = make
        # Enqueuer that runs the thread of the epoch, and number of its batches that were given.
        self._thread: GeneratorEnqueuer[Any] | None = None
        self._delivered = 0
        # Number of the iteration for which the thread was made.
        self._since = 0

    def prepare(self) -> None:
        """See `Reader`."""
        epochs = self.epochs
        if not epochs.keeps_position or self._delivered == epochs.steps:
            # The loader cannot be iterated before the thread has ended.
            self.end_reading(threading.TIMEOUT_MAX)
        if self._thread is None:
            self._thread, self._delivered, self._since = self._make(), 0, self.iteration
            # Any other loader draws the random numbers of an epoch when it is iterated over.
            # Libraries begin an iteration and drop it, and the thread would have drawn them by
            # then, or not.
            if epochs.keeps_position:
                self._start_thread(self._thread)

    def _start_thread(self, thread: GeneratorEnqueuer[Any]) -> None:
        self.epochs.delivered = self.epochs.position()
        thread.start()

    def end_reading(self, timeout: float | None) -> None:
        """See `Reader`."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop(timeout)

    def read(self, iteration: int) -> Iterator[Batch]:
        """See `Reader`."""
        thread = self._thread
        # An iteration that has not begun ends with the epoch for which it was to begin.
        if thread is not None and iteration >= self._since and not self._is_replaced(iteration):
            yield from self._batches(thread)
        if self._is_replaced(iteration):
            raise InvalidState(
                "another iteration of this loader has begun, which ended this one: a "
                f"{type(self.epochs.loader).__name__} is read once at a time; make a loader for "
                "each loop, or end the first loop before the second begins"
            )

    def _is_replaced(self, iteration: int) -> bool:
        return iteration != self.iteration and not self.epochs.keeps_position

    def _batches(self, thread: GeneratorEnqueuer[Any]) -> Iterator[Batch]:
        try:
            if core_of(thread).is_idle:
                self._start_thread(thread)
            yield from map(self._received, thread.get())
        except BaseException:
            # After a `break` the ready batches are dropped, unless the next iteration gives them.
            run = core_of(thread).run
            if thread is self._thread and not self.epochs.keeps_position and run is not None:
                # The thread ends after its batch, and this does not wait for it.
                run.close()
            raise
        # If there is another thread, another iterator has come to the end of this epoch.
        if thread is self._thread:
            self.end_reading(None)
            self.epochs.delivered = None

    def _received(self, result: tuple[Any, dict[str, Any] | None]) -> Batch:
        changed, position = result
        if not isinstance(changed, Raised):
            self.epochs.delivered = position
            self._delivered += 1
            return self.converted(changed)
        self.end_reading(None)
        self.epochs.delivered = None
        changed.reraise()


def _changed(
    epochs: LoaderEpochs,
    change: Callable[[Any], Any],
    running: Callable[[], AbstractContextManager[Any]],
    is_here: bool,
) -> Iterator[Any]:
    """Yield changed batches of an epoch, each with the position after it, or what was raised."""
    of_epoch, of_batch = running, contextlib.nullcontext
    if is_here:
        # The state of the loop's thread must not change between batches.
        of_epoch, of_batch = of_batch, of_epoch
    try:
        with of_epoch():
            for batch in epochs:
                position = epochs.position()
                with of_batch():
                    changed = change(batch)
                # Without this, the batch keeps its memory while the loop is busy.
                del batch
                yield changed, position
                del changed
    # As a worker's failure the error would get an origin in this thread.
    except Exception as error:
        yield Raised(error), None
