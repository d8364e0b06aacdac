"""The base of all loaders: an enqueuer, or any other iterable, as a framework's loader.

    loader -> LoaderEpochs: epochs of so many steps, a position -> BatchReader -> the training loop

A `BatchReader` gives the batches of an epoch: in the loop's thread, or from a thread that works
ahead (`prefetching`).

The owner that starts an enqueuer stops it. An enqueuer that does not run is started by the first
iteration, and stopped when its Loader and all iterators of it are dropped. One that runs already
is left running.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from enqueuer.backends.lifecycle import forget
from enqueuer.common import checks
from enqueuer.common.finalizers import Finalizer
from enqueuer.common.text import an
from enqueuer.enqueuers.enqueuer import BaseEnqueuer, core_of
from enqueuer.enqueuers.run import STOP_S
from enqueuer.errors import InvalidState

Batch = TypeVar("Batch")


class BatchReader(Protocol[Batch]):  # type: ignore[misc]
    """The batches of one epoch after the other."""

    def read(self) -> Iterator[Batch]:
        """Return an iterator over an epoch, or over the rest of one; start no enqueuer."""

    def stop(self, timeout: float | None) -> None:
        """End the thread that reads ahead, if there is one."""

    def restart(self) -> None:
        """Begin an iteration that was stopped before its first batch again."""


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
        reader: Makes the reader, in the place of one that reads in the loop's thread.

    The functions must not know this object, which would then not end at once when it is dropped.
    """

    state_dict: Callable[[], dict[str, Any]]
    """Return the position after the last batch given to the loop, not after those made ahead.

    It exists only if `loader` has it, as an enqueuer does, and so does `load_state_dict`.
    """

    load_state_dict: Callable[[Mapping[str, Any]], None]
    """Continue where a state was taken, at the next iteration.

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
        reader: Callable[[LoaderEpochs, Ownership], BatchReader[Batch]] | None = None,
    ) -> None:
        self._loader = loader
        self._epochs = epochs = LoaderEpochs(loader, steps_per_epoch)
        self._ownership = Ownership(epochs, check)
        self._reader: BatchReader[Batch] = (
            _DirectReader(epochs, self._ownership, convert)
            if reader is None
            else reader(epochs, self._ownership)
        )
        # Libraries check for methods of these names, and call those that exist. So these are
        # attributes, and exist only if the loader has a position.
        if hasattr(loader, "state_dict"):
            self.state_dict = epochs.state_dict
        if hasattr(loader, "load_state_dict"):
            self.load_state_dict = functools.partial(_load, epochs, self._ownership, self._reader)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in ("state_dict", "load_state_dict") and "_loader" in vars(self):
                kind = an(type(self._loader).__name__)
                raise AttributeError(f"{kind} has no position: it has no {name}", name=name)
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over an epoch, or over the rest of one if the last iteration was left.

        If this has a length, a loop that took as many batches has ended its epoch.
        """
        self._ownership.start()
        return self._epochs.iterate(self._reader)

    def __len__(self) -> int:
        """Return the number of batches in an epoch.

        Raises:
            TypeError: It is not known: give `steps_per_epoch`.
        """
        return len(self._epochs)

    def __bool__(self) -> bool:
        # The length need not be known.
        return True

    def stop(self, timeout: float | None = None) -> None:
        """Stop the enqueuer if this has started it; the next iteration begins anew.

        Args:
            timeout: As for the enqueuer's `stop`.
        """
        # This wakes a thread that reads ahead.
        self._ownership.stop(timeout)
        self._reader.stop(timeout)

    def __enter__(self: Self) -> Self:
        self._ownership.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def inside_of(loader: Loader[Any]) -> tuple[LoaderEpochs, Ownership]:
    """Return the epochs and the ownership of a loader, for other parts of the package."""
    return loader._epochs, loader._ownership


def restarted_by(loader: Loader[Any], change: Callable[[], None]) -> None:
    """Stop a loader, unless its caller runs it, and call a function; begin again if it had."""
    loader._epochs.restart(loader._reader, loader._ownership, change)


class _DirectReader(Generic[Batch]):
    """Read in the loop's thread."""

    def __init__(
        self, epochs: LoaderEpochs, ownership: Ownership, convert: Callable[[Any], Batch] | None
    ) -> None:
        self._epochs = epochs
        self._ownership = ownership
        self._convert = convert

    def read(self) -> Iterator[Batch]:
        """See `BatchReader`."""
        # The bound method keeps the ownership, and so the workers, alive. `map` is no frame that
        # an error would keep, and holds no batch.
        return map(self._converted, self._epochs)

    def stop(self, timeout: float | None) -> None:
        """See `BatchReader`."""

    def restart(self) -> None:
        """See `BatchReader`."""

    def _converted(self, batch: Any) -> Batch:
        self._epochs.count += 1
        return batch if self._convert is None else self._convert(batch)


class Ownership:
    """The right to stop a loader, which goes with having started it.

    The loader is stopped when this object is dropped.

    Args:
        epochs: Epochs of the loader: an enqueuer, a Loader, or an iterable that needs no start.
        check: Function that is called before each start, and raises if there must be none.

    Attributes:
        is_started: Whether this has started the loader.
    """

    def __init__(self, epochs: LoaderEpochs, check: Callable[[], object] | None = None) -> None:
        self.is_started = False
        self._epochs = epochs
        self._loader = epochs.loader
        self._check = check
        self._claim: Finalizer | None = None

    def start(self) -> None:
        """Start the loader if it is idle, and own it from then on."""
        if self._check is not None:
            self._check()
        # A Loader within may have been stopped by itself. It is started again, as if it were alone.
        if self.is_started and not isinstance(self._loader, Loader):
            return
        if is_idle(self._loader):
            self._start()
        elif self._claim is None or self.is_started:
            return
        # Otherwise an exception of a signal handler has ended the start that was to come here.
        self._epochs.begin()
        self.is_started = True

    def _start(self) -> None:
        # The claim comes first, as an exception of a signal handler may end the start at any place.
        if self._claim is None or not self._claim.alive:
            # The loader itself may hold an error and that, by its traceback, this object.
            self._claim = Finalizer(self, _forget, weakref.ref(self._loader))
        try:
            _start(self._loader)
        except Exception:
            if is_idle(self._loader):
                self._release()
            raise

    @property
    def is_of_caller(self) -> bool:
        """Whether the caller decides when the loader stops."""
        return self._epochs.keeps_position and not self.is_started

    def stop(self, timeout: float | None = None) -> None:
        """Stop the loader if this owns it; an interrupted call can be repeated."""
        if self._claim is None:
            return
        try:
            self.is_started = False
            self._loader.stop(timeout)
        except BaseException:
            self.is_started = True
            raise
        self._epochs.end()
        self._release()

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.detach()
            self._claim = None


class LoaderEpochs:
    """The epochs of a loader, each of `steps` batches if that is not None.

    Attributes:
        loader: The loader.
        steps: Number of batches in an epoch; None: as many as the loader gives.
        step: Number of batches of this epoch that were given; always 0 without `steps`.
        given: Position after the last batch that the loop was given, if a thread has read on
            since; None: that of the loader.
        count: Number of batches that loops were given.
        is_entered: Whether a loop has asked for a batch of the latest iteration.
        is_left: Whether the last iteration may have been dropped between its last batch and its
            end.
    """

    def __init__(self, loader: Iterable[Any], steps: int | None) -> None:
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise TypeError(f"the loader must be an enqueuer or an iterable, got {loader!r}")
        self.loader: Any = loader
        self.steps = None if steps is None else checks.positive("steps_per_epoch", steps)
        self.step = 0
        self.given: dict[str, Any] | None = None
        self.count = 0
        self.is_entered = self.is_left = False
        # Step at which the next start begins: that of a loaded position, or 0.
        self._first_step = 0

    def begin(self) -> None:
        """Set the step, as the loader was started; repeated calls for one start do no harm."""
        self.step = self._first_step

    def end(self) -> None:
        """Forget a loaded step, as the loader was stopped."""
        self._first_step = 0
        self.is_left = False

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
        loader = self.loader
        return loader._reader.read() if isinstance(loader, Loader) else iter(loader)

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
            return self.loader._epochs.keeps_position
        return isinstance(self.loader, (BaseEnqueuer, Iterator))

    def iterate(self, reader: BatchReader[Batch]) -> Iterator[Batch]:
        """Return an iterator over the rest of an epoch, or the next one if there is no rest.

        A loop that counts its batches does not see the end of the epoch.

        Args:
            reader: Reader of the batches.
        """
        self.is_entered = False
        # The reader may begin to read ahead now, and the generator begins with the first batch.
        # `chain` is no frame that an error would keep, and holds no batch.
        return itertools.chain.from_iterable(self._parts(reader, reader.read()))

    def _parts(
        self, reader: BatchReader[Batch], rest: Iterator[Batch]
    ) -> Iterator[Iterator[Batch]]:
        self.is_entered = True
        count, was_left, self.is_left = self.count, self.is_left, False
        try:
            yield rest
            if was_left and self.count == count and self._has_end():
                yield reader.read()
        except GeneratorExit:
            self.is_left = True
            raise

    def _has_end(self) -> bool:
        """Return whether epochs have a length, and continue after a `break`."""
        try:
            return self.steps is None and self.keeps_position and len(self) > 0
        except TypeError:
            return False

    def restart(
        self, reader: BatchReader[Any], ownership: Ownership, change: Callable[[], None]
    ) -> None:
        """Stop a loader, unless its caller runs it, and call a function.

        An iteration that has begun, without a batch for the loop, begins again.
        """
        was_started, is_of_caller = ownership.is_started, ownership.is_of_caller
        if not is_of_caller:
            # This wakes a thread that reads ahead.
            ownership.stop()
            # The thread may be starting the workers of a DataLoader, which is not to be changed
            # under it.
            reader.stop(threading.TIMEOUT_MAX)
        change()
        if self.is_entered or is_of_caller:
            return
        if was_started:
            ownership.start()
            # Libraries begin an iteration before they load a position, and count batches. They
            # save a position before they see the end of an epoch, and begin the next one.
            self.is_left = True
        reader.restart()

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

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the loader continue at a position."""
        state = dict(state_dict)
        step = state.pop("step", 0) if self.steps is not None else 0
        self.loader.load_state_dict(state)
        self.step = self._first_step = step
        self.given = None
        self.is_left = False


def _load(
    epochs: LoaderEpochs, ownership: Ownership, reader: BatchReader[Any], state: Mapping[str, Any]
) -> None:
    load = functools.partial(epochs.load_state_dict, state)
    # Libraries begin an iteration to see whether that is possible, and load the position then.
    if epochs.is_entered:
        load()
    else:
        epochs.restart(reader, ownership, load)


def is_idle(loader: object) -> bool:
    """Return whether a loader has workers, and none of them run."""
    if isinstance(loader, Loader):
        return not loader._ownership.is_started and is_idle(loader._loader)
    return isinstance(loader, BaseEnqueuer) and core_of(loader).is_idle


def is_inline(loader: object) -> bool:
    """Return whether the loop's own thread makes the batches of a loader."""
    if isinstance(loader, Loader):
        return is_inline(loader._loader)
    return isinstance(loader, BaseEnqueuer) and core_of(loader).options.is_inline


def _start(loader: Any) -> None:
    """Start the workers of a loader that is idle."""
    if isinstance(loader, Loader):
        loader._ownership.start()
    else:
        loader.start()


def _forget(reference: weakref.ref[Any]) -> None:
    loader = reference()
    if loader is not None:
        forget(loader.stop, STOP_S)
