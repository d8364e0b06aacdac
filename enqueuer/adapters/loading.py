"""What the adapters share: an enqueuer, or any other iterable, as a framework's loader.

    Loader:  loader -> convert -> the training loop
    PrefetchLoader:   loader -> [a thread: change, up to queue_size batches] -> receive -> the loop

Who starts an enqueuer stops it: one that does not run yet is started by the first iteration and
stopped when its Loader is dropped; one that runs already is its owner's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from enqueuer import arguments, backends
from enqueuer.base import STOP_S, BaseEnqueuer
from enqueuer.enqueuers import GeneratorEnqueuer
from enqueuer.errors import InvalidState
from enqueuer.finalizers import Finalizer
from enqueuer.formats import an
from enqueuer.tasks import with_items

Batch = TypeVar("Batch")
Self = TypeVar("Self", bound="Loader[Any]")


class Loader(Generic[Batch]):
    """A loader over an enqueuer or any other iterable; one iteration is one epoch.

    Args:
        loader: An enqueuer, or anything that can be iterated once an epoch.
        steps_per_epoch: How many batches an epoch has. None, the default: as many as `loader`
            gives. A number serves a generator without an end; where `loader` ends earlier, it
            is iterated again.
    """

    state_dict: Callable[[], dict[str, Any]]
    """Return the position, which is what the loop was given and not what was made ahead.

    It exists only if `loader` has it, as an enqueuer does, and so does `load_state_dict`.
    """

    load_state_dict: Callable[[Mapping[str, Any]], None]
    """Go on where a state was taken, at the next iteration.

    Raises InvalidState while this runs (call `stop()` first), and StateMismatch if the state is
    of another source.
    """

    def __init__(self, loader: Iterable[Any], steps_per_epoch: int | None = None) -> None:
        self._loader = loader
        self._epochs = Epochs(loader, steps_per_epoch)
        self._finalizer: Finalizer | None = None
        # Attributes, as libraries look for methods of these names and call what they find.
        # They do not know this object, or it would be part of a circle and not end at once.
        if hasattr(loader, "state_dict"):
            self.state_dict = self._epochs.state_dict
        if hasattr(loader, "load_state_dict"):
            self.load_state_dict = self._epochs.load_state_dict

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in ("state_dict", "load_state_dict") and "_loader" in vars(self):
                kind = an(type(self._loader).__name__)
                raise AttributeError(f"{kind} tells no position: it has no {name}", name=name)
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over an epoch, or over the rest of one if the last iteration broke off."""
        self._start()
        return self._iterator()

    def __len__(self) -> int:
        """Return how many batches an epoch has.

        Raises:
            TypeError: Nobody knows: give `steps_per_epoch`.
        """
        return len(self._epochs)

    def __bool__(self) -> bool:
        return True  # also if nobody knows the length

    def stop(self, timeout: float | None = None) -> None:
        """Stop the enqueuer, if this has started it; iterating again begins anew.

        Args:
            timeout: As for the enqueuer's `stop`.
        """
        finalizer, self._finalizer = self._finalizer, None
        if finalizer is not None:
            try:
                self._loader.stop(timeout)  # type: ignore[attr-defined]  # as it was started
            except BaseException:
                self._finalizer = finalizer  # so that another call completes it
                raise
            finalizer.detach()

    def __enter__(self: Self) -> Self:
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _iterator(self) -> Iterator[Batch]:
        """Return what `iter()` does; start nothing."""
        # it keeps this object, and so the workers, alive; and of a batch it keeps nothing
        return map(self._convert, self._epochs)

    def _convert(self, batch: Any) -> Batch:
        """Return what the framework's loop gets for a batch."""
        raise NotImplementedError

    def _start(self) -> None:
        is_owned = self._finalizer is not None
        # A loader within may have been stopped by itself, and is started again as if it were alone.
        if (is_owned and not isinstance(self._loader, Loader)) or not is_idle(self._loader):
            return
        start(self._loader)
        self._epochs.begin()
        if not is_owned:
            # Not the loader itself: it may hold an error, and that, by its traceback, this object.
            self._finalizer = Finalizer(self, _forget, weakref.ref(self._loader))


class PrefetchLoader(Loader[Batch]):
    """A loader that keeps changed batches ready, made by a thread of its own.

    After a `break` it does what `loader` does. An enqueuer goes on with the next batch, and so
    does this, with what was ready, which it keeps until then. Anything else begins a new epoch;
    of that nothing is kept.

    Args:
        loader: As for `Loader`.
        change: What the thread does with each batch; it must not know this object.
        queue_size: How many batches are kept ready; the thread holds one more.
        steps_per_epoch: As for `Loader`.
        running: Gives what the thread enters before it takes the first batch of an epoch, and
            leaves at the end, or when it is stopped before.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        change: Callable[[Any], Any],
        queue_size: int,
        steps_per_epoch: int | None = None,
        running: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        super().__init__(loader, steps_per_epoch)
        self._queue_size = arguments.positive("queue_size", queue_size)
        self._change = change
        self._running = running
        self._ahead: _Run | None = None  # the epoch that is under way
        self._given = 0  # batches of it

    def _iterator(self) -> Iterator[Batch]:
        epochs = self._epochs
        if not epochs.keeps_position or self._given == epochs.steps:
            if self._ahead is not None:
                self._ahead.is_replaced = not epochs.keeps_position
            self._end(threading.TIMEOUT_MAX)  # `loader` cannot be iterated before that
        if self._ahead is None:
            epochs.given, self._given = epochs.position(), 0
            run = functools.partial(_run, epochs, self._change, self._running)
            ahead = GeneratorEnqueuer(
                run,
                max_queue_size=self._queue_size,
                stall_timeout=None,  # an enqueuer within says so itself, and knows why
            )
            self._ahead = _Run(ahead)
            ahead.start()
        return self._received(self._ahead)

    def stop(self, timeout: float | None = None) -> None:
        """End the thread, and stop the enqueuer if this has started it.

        Iterating again begins anew.

        Args:
            timeout: As for the enqueuer's `stop`.
        """
        super().stop(timeout)  # wakes the thread
        self._end(timeout)

    def _receive(self, changed: Any) -> Batch:
        """Return what the loop gets of what the thread has made; called by the loop's thread."""
        raise NotImplementedError

    def _received(self, run: _Run) -> Iterator[Batch]:
        is_left = True
        try:
            if run is self._ahead:
                yield from map(self._taken, run.enqueuer.get())
            is_left = False
        finally:
            # After a `break` what is ready goes, unless it is what comes next. The thread may
            # wait for a batch and ends after that.
            if is_left and run is self._ahead and not self._epochs.keeps_position:
                run.let_go()
        if run.is_replaced:
            raise InvalidState(
                "another iteration of this loader has begun, which ended this one: a "
                f"{type(self._loader).__name__} is read once at a time; make a loader for each "
                "loop, or end the first loop before the second begins"
            )
        if run is self._ahead:  # else another iterator has come to the end of this epoch
            self._end()
            self._epochs.given = None

    def _taken(self, made: tuple[Any, dict[str, Any] | None]) -> Batch:
        changed, position = made
        if not isinstance(changed, _Raised):
            self._epochs.given = position
            self._given += 1
            return self._receive(changed)
        self._end()
        self._epochs.given = None
        error = changed.error
        del made, changed  # these and the traceback would be a circle
        try:
            raise error
        finally:
            del error

    def _end(self, timeout: float | None = None) -> None:
        if self._ahead is not None:
            run, self._ahead = self._ahead, None
            run.enqueuer.stop(timeout)


@dataclasses.dataclass(eq=False)
class _Run:
    """An epoch of a loader that works ahead.

    Attributes:
        enqueuer: What runs the thread.
        is_replaced: Whether another iteration has ended this one.
    """

    enqueuer: GeneratorEnqueuer[Any]
    is_replaced: bool = False

    def let_go(self) -> None:
        """Drop what is ready, and have the thread end after its batch, without waiting for it."""
        if self.enqueuer._backend is not None:
            self.enqueuer._backend.close()


class Epochs:
    """The epochs of a loader, each of `steps` batches if that is not None.

    Attributes:
        steps: How many batches an epoch has; None: as many as the loader gives.
        step: How many of them this epoch has given; always 0 without `steps`.
        given: Position after the last batch that the loop was given, if a thread has read on
            since; None: as the loader says.
    """

    def __init__(self, loader: Iterable[Any], steps: int | None) -> None:
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise TypeError(f"the loader must be an enqueuer or an iterable, got {loader!r}")
        self._loader = loader
        self.steps = None if steps is None else arguments.positive("steps_per_epoch", steps)
        self.step = 0
        self.given: dict[str, Any] | None = None
        self._is_loaded = False

    def begin(self) -> None:
        """Forget the step, as the loader has begun anew, unless it was loaded."""
        if not self._is_loaded:
            self.step = 0
        self._is_loaded = False

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch, or of the rest of one that was broken off."""
        if self.steps is None:
            yield from self._pass()
            return
        if not self.keeps_position or self.step >= self.steps:
            self.step = 0
        passes, is_first = 0, True  # without a batch: one may be the end of the loader's epoch
        while self.step < self.steps and passes < 2:
            before = self.step
            try:
                yield from map(self._counted, itertools.islice(self._pass(), self.steps - before))
            except InvalidState:
                if is_first or not is_idle(self._loader):
                    raise
                return  # it was stopped, and that was the end of the pass before
            passes, is_first = passes + 1 if self.step == before else 0, False
        self.step = 0

    def _pass(self) -> Iterator[Any]:
        """Iterate over an epoch of the loader's, or the rest of one.

        Whoever stops a loader while a thread works ahead of it wants no other workers: so here a
        loader is not started.
        """
        loader = self._loader
        return loader._iterator() if isinstance(loader, Loader) else iter(loader)

    def __len__(self) -> int:
        if self.steps is not None:
            return self.steps
        try:
            return len(self._loader)  # type: ignore[arg-type]  # it says so itself
        except TypeError as error:
            kind = an(type(self._loader).__name__)
            raise TypeError(
                f"{kind} does not tell how many batches it has ({error}); give steps_per_epoch"
            ) from None

    @property
    def keeps_position(self) -> bool:
        """Whether the loader goes on, after a `break`, with the next batch."""
        loader = self._loader
        if isinstance(loader, Loader):
            return loader._epochs.keeps_position
        return isinstance(loader, (BaseEnqueuer, Iterator))

    def _counted(self, batch: Any) -> Any:
        self.step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's position in the loader, and the step of the epoch."""
        return self.given or self._read_so_far()

    def position(self) -> dict[str, Any] | None:
        """Return the loader's position, or None if it tells none."""
        return self._read_so_far() if hasattr(self._loader, "state_dict") else None

    def _read_so_far(self) -> dict[str, Any]:
        state = dict(self._loader.state_dict())  # type: ignore[attr-defined]  # it has one
        return state if self.steps is None else {**state, "step": self.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Have the loader go on at a position."""
        state = dict(state_dict)
        step = state.pop("step", 0) if self.steps is not None else 0
        self._loader.load_state_dict(state)  # type: ignore[attr-defined]  # as above
        self.step, self._is_loaded, self.given = step, True, None


class _Raised:
    """An error of the loader's, on its way from the thread to the loop."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _run(
    epochs: Epochs,
    change: Callable[[Any], Any],
    running: Callable[[], AbstractContextManager[Any]],
) -> Iterator[Any]:
    """Yield changed batches of an epoch, each with the position after it; runs in the thread."""
    try:
        with running():
            for batch in epochs:
                position = epochs.position()
                changed = change(batch)
                del batch  # its memory goes back while the loop is busy
                yield changed, position
                del changed
    except Exception as error:  # itself, not as the failure of a worker: it may have an origin
        yield _Raised(error), None


def is_idle(loader: object) -> bool:
    """Tell whether a loader has workers, and none of them run."""
    if isinstance(loader, Loader):
        return loader._finalizer is None and is_idle(loader._loader)
    return isinstance(loader, BaseEnqueuer) and loader._is_idle()


def start(loader: Any) -> None:
    """Start the workers of a loader that is idle."""
    if isinstance(loader, Loader):
        loader._start()
    else:
        loader.start()


def _forget(reference: weakref.ref[Any]) -> None:
    loader = reference()
    if loader is not None:
        backends.forget(loader, STOP_S)


def tree_map(function: Callable[[Any], Any], nest: Any) -> Any:
    """Return a nest of the same build with `function` of each leaf.

    Mappings, tuples, named tuples, lists and dataclasses are gone into. An object that moves
    itself to a GPU is a leaf.

    Example:
        >>> tree_map(str, {"x": (1, 2), "y": [3]})
        {'x': ('1', '2'), 'y': ['3']}
    """
    if _moves_itself(nest):
        return function(nest)
    if isinstance(nest, Mapping):
        return with_items(nest, {key: tree_map(function, value) for key, value in nest.items()})
    if isinstance(nest, (tuple, list)):
        values = (tree_map(function, value) for value in nest)
        return type(nest)(*values) if hasattr(nest, "_fields") else type(nest)(values)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        fields = [field.name for field in dataclasses.fields(nest) if field.init]
        values_of = {name: tree_map(function, getattr(nest, name)) for name in fields}
        return dataclasses.replace(nest, **values_of)
    return function(nest)


def _moves_itself(nest: Any) -> bool:
    """Tell whether a nest must not be taken apart.

    A TensorDict or a graph of PyTorch Geometric knows of streams. A PackedSequence is a tuple of
    which one part must stay on the CPU.
    """
    kind = type(nest)
    return hasattr(kind, "record_stream") or (
        isinstance(nest, (tuple, list)) and hasattr(kind, "to")
    )
