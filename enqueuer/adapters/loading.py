"""The base of all loaders: an enqueuer, or any other iterable, as a framework's loader.

    loader -> LoaderEpochs: epochs of so many steps, a position -> Reader -> the training loop

A `Reader` gives the batches of an epoch: in the loop's thread, or from a thread that works ahead
(`prefetching`). That thread knows the epochs, and not the reader.

The owner that starts an enqueuer stops it. An enqueuer that does not run is started by the first
iteration, and stopped when its Loader and all iterators of it are dropped: these keep its reader.
One that runs already is left running.
"""

from __future__ import annotations

import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from enqueuer.backends.lifecycle import forget
from enqueuer.common import checks
from enqueuer.common.finalizers import Finalizer
from enqueuer.common.text import an
from enqueuer.enqueuers.enqueuer import BaseEnqueuer, core_of
from enqueuer.enqueuers.run import STOP_S
from enqueuer.errors import InvalidState
from enqueuer.monitoring.stats import Stats

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
        make: Callable[..., Reader[Batch]] = Reader if reader is None else reader
        self._reader = make(epochs, check, convert)
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
        self._claim: Finalizer | None = None
        # Number of batches that loops were given.
        self._count = 0
        # Whether the last iteration may have been dropped between its last batch and its end.
        self._is_left = False

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
        count, was_left, self._is_left = self._count, self._is_left, False
        try:
            yield self.read(iteration)
            if was_left and self._count == count and self._has_end():
                yield self.read(self.next_iteration())
        except GeneratorExit:
            self._is_left = True
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
            self._start_owned(loader)
        elif self._claim is None or self.is_started:
            return
        # Otherwise an exception has ended the start that was to come here.
        self.epochs.begin()
        self.is_started = True

    def _start_owned(self, loader: Any) -> None:
        # The claim comes first, as an exception may end the start at any place.
        if self._claim is None or not self._claim.alive:
            # The loader itself may hold an error and that, by its traceback, this object.
            self._claim = Finalizer(self, _forget, weakref.ref(loader))
        try:
            if isinstance(loader, Loader):
                loader._reader.start()
            else:
                loader.start()
        except Exception:
            if is_idle(loader):
                self._release()
            raise

    def stop(self, timeout: float | None = None) -> None:
        """Stop the loader if this owns it, and its reading; again completes it."""
        # This wakes a thread that reads ahead.
        self._stop_owned(timeout)
        self.end_reading(timeout)

    def _stop_owned(self, timeout: float | None) -> None:
        if self._claim is None:
            return
        try:
            self.is_started = False
            self.epochs.loader.stop(timeout)
        except BaseException:
            self.is_started = True
            raise
        self.epochs.end()
        self._is_left = False
        self._release()

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.detach()
            self._claim = None

    # --- another position ---

    def load_state_dict(self, state_dict: Mapping[str, Any], **options: bool) -> None:
        """Continue at a position; see `Loader`."""

        def load() -> None:
            self.epochs.load_state_dict(state_dict, **options)
            self._is_left = False

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
            self._is_left = True
        self.prepare()


class LoaderEpochs:
    """The epochs of a loader, each of `steps` batches if that is not None.

    Attributes:
        loader: The loader.
        steps: Number of batches in an epoch; None: as many as the loader gives.
        step: Number of batches of this epoch that were given; always 0 without `steps`.
        given: Position after the last batch that the loop was given, if a thread has read on
            since; None: that of the loader.
    """

    def __init__(self, loader: Iterable[Any], steps: int | None) -> None:
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise TypeError(f"the loader must be an enqueuer or an iterable, got {loader!r}")
        self.loader: Any = loader
        self.steps = None if steps is None else checks.positive("steps_per_epoch", steps)
        self.step = 0
        self.given: dict[str, Any] | None = None
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

    @property
    def keeps_position(self) -> bool:
        """Whether the loader continues, after a `break`, with the next batch."""
        if isinstance(self.loader, Loader):
            return self.loader._reader.epochs.keeps_position
        return isinstance(self.loader, (BaseEnqueuer, Iterator))

    def _counted(self, batch: Any) -> Any:
        self.step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's position in the loader, and the step of the epoch."""
        return self.given or self._read_so_far()

    def position(self) -> dict[str, Any] | None:
        """Return the loader's position, or None if it has none."""
        return self._read_so_far() if hasattr(self.loader, "state_dict") else None

    def _read_so_far(self) -> dict[str, Any]:
        state = dict(self.loader.state_dict())
        return state if self.steps is None else {**state, "step": self.step}

    def load_state_dict(self, state_dict: Mapping[str, Any], **options: bool) -> None:
        """Let the loader continue at a position; the options are those of its own method."""
        state = dict(state_dict)
        step = state.pop("step", 0) if self.steps is not None else 0
        self.loader.load_state_dict(state, **options)
        self.step = self._first_step = step
        self.given = None


def is_idle(loader: object) -> bool:
    """Return whether a loader has workers, and none of them run."""
    if isinstance(loader, Loader):
        return not loader._reader.is_started and is_idle(loader._reader.epochs.loader)
    return isinstance(loader, BaseEnqueuer) and core_of(loader).is_idle


def is_inline(loader: object) -> bool:
    """Return whether the loop's own thread makes the batches of a loader."""
    if isinstance(loader, Loader):
        return is_inline(loader._reader.epochs.loader)
    return isinstance(loader, BaseEnqueuer) and core_of(loader).options.is_inline


def _forget(reference: weakref.ref[Any]) -> None:
    loader = reference()
    if loader is not None:
        forget(loader.stop, STOP_S)
