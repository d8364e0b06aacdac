"""What the adapters share: an enqueuer, or any other iterable, as a framework's loader.

    Loader:  loader -> convert -> the training loop
    Ahead:   loader -> [a thread: change, up to queue_size batches] -> receive -> the loop

Who starts an enqueuer stops it: one that does not run yet is started by the first iteration and
stopped when its Loader is dropped; one that runs already is its owner's.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, TypeVar

from enqueuer import arguments, backends
from enqueuer.base import STOP_S, BaseEnqueuer
from enqueuer.enqueuers import GeneratorEnqueuer
from enqueuer.errors import InvalidState

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

    def __init__(self, loader: Iterable[Any], steps_per_epoch: int | None = None) -> None:
        self._loader = loader
        self._epochs = Epochs(loader, steps_per_epoch)
        self._finalizer: weakref.finalize[Any, Any] | None = None

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

    def state_dict(self) -> dict[str, Any]:
        """Return the position: what has been given to the loop, not what was made ahead."""
        return self._epochs.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, at the next iteration.

        Raises:
            InvalidState: It runs; call `stop()` first.
            StateMismatch: The state is of another source.
        """
        self._epochs.load_state_dict(state_dict)

    def stop(self, timeout: float | None = None) -> None:
        """Stop the enqueuer, if this has started it; iterating again begins anew.

        Args:
            timeout: As for the enqueuer's `stop`.
        """
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
            self._loader.stop(timeout)  # type: ignore[attr-defined]  # as it was started

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
            self._finalizer = weakref.finalize(self, _forget, weakref.ref(self._loader))


class Ahead(Loader[Batch]):
    """A loader that keeps changed batches ready, made by a thread of its own.

    After a `break` it does what `loader` does: an enqueuer goes on with the next batch, and so
    does this, with what was ready; anything else begins a new epoch.

    Args:
        loader: As for `Loader`.
        change: What the thread does with each batch; it must not know this object.
        queue_size: How many batches are kept ready; the thread holds one more.
        steps_per_epoch: As for `Loader`.
        finish: What the thread does at the end of an epoch, or when it is stopped before.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        change: Callable[[Any], Any],
        queue_size: int,
        steps_per_epoch: int | None = None,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(loader, steps_per_epoch)
        self._queue_size = arguments.positive("queue_size", queue_size)
        self._change = change
        self._finish = finish
        self._ahead: GeneratorEnqueuer[Any] | None = None  # of the epoch that is under way
        self._position: dict[str, Any] | None = None  # where the loop is, of that epoch
        self._given = 0  # batches of it

    def _iterator(self) -> Iterator[Batch]:
        epochs = self._epochs
        if not epochs.keeps_position or self._given == epochs.steps:
            self._end(threading.TIMEOUT_MAX)  # `loader` cannot be iterated before that
        ahead = self._ahead
        if ahead is None:
            self._position, self._given = epochs.position(), 0
            run = functools.partial(_run, epochs, self._change, self._finish)
            ahead = self._ahead = GeneratorEnqueuer(
                run,
                max_queue_size=self._queue_size,
                stall_timeout=None,  # an enqueuer within says so itself, and knows why
            )
            ahead.start()
        return self._received(ahead)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: what has been given to the loop, not what was made ahead."""
        return self._position or self._epochs.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, at the next iteration.

        Raises:
            InvalidState: It runs; call `stop()` first.
            StateMismatch: The state is of another source.
        """
        super().load_state_dict(state_dict)
        self._position = None

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

    def _received(self, ahead: GeneratorEnqueuer[Any]) -> Iterator[Batch]:
        if ahead is not self._ahead:
            return  # another iterator has come to the end of this epoch
        yield from map(self._taken, ahead.get())
        if ahead is self._ahead:
            self._end()
            self._position = None

    def _taken(self, made: tuple[Any, dict[str, Any] | None]) -> Batch:
        changed, position = made
        if not isinstance(changed, _Raised):
            self._position = position
            self._given += 1
            return self._receive(changed)
        self._end()
        self._position = None
        error = changed.error
        del made, changed  # these and the traceback would be a circle
        try:
            raise error
        finally:
            del error

    def _end(self, timeout: float | None = None) -> None:
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            ahead.stop(timeout)


class Epochs:
    """The epochs of a loader, each of `steps` batches if that is not None.

    Attributes:
        steps: How many batches an epoch has; None: as many as the loader gives.
        step: How many of them this epoch has given; always 0 without `steps`.
    """

    def __init__(self, loader: Iterable[Any], steps: int | None) -> None:
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise TypeError(f"the loader must be an enqueuer or an iterable, got {loader!r}")
        self._loader = loader
        self.steps = None if steps is None else arguments.positive("steps_per_epoch", steps)
        self.step = 0
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
            raise TypeError(
                f"a {type(self._loader).__name__} does not tell how many batches it has ({error}); "
                "give steps_per_epoch"
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
        """Return the loader's position, and the step of the epoch."""
        try:
            tell = self._loader.state_dict  # type: ignore[attr-defined]  # a loader may have one
        except AttributeError:
            raise TypeError(
                f"a {type(self._loader).__name__} tells no position: it has no state_dict"
            ) from None
        return dict(tell()) if self.steps is None else {**tell(), "step": self.step}

    def position(self) -> dict[str, Any] | None:
        """Return the position, or None if the loader tells none."""
        return self.state_dict() if self._tells_position else None

    @property
    def _tells_position(self) -> bool:
        if isinstance(self._loader, Loader):
            return self._loader._epochs._tells_position
        return hasattr(self._loader, "state_dict")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Have the loader go on at a position."""
        state = dict(state_dict)
        step = state.pop("step", 0) if self.steps is not None else 0
        try:
            load = self._loader.load_state_dict  # type: ignore[attr-defined]  # as above
        except AttributeError:
            raise TypeError(
                f"a {type(self._loader).__name__} cannot be resumed: it has no load_state_dict"
            ) from None
        load(state)
        self.step, self._is_loaded = step, True


class _Raised:
    """An error of the loader's, on its way from the thread to the loop."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _run(epochs: Epochs, change: Callable[[Any], Any], finish: Callable[[], None]) -> Iterator[Any]:
    """Yield changed batches of an epoch, each with the position after it; runs in the thread."""
    try:
        for batch in epochs:
            position = epochs.position()
            changed = change(batch)
            del batch  # its memory goes back while the loop is busy
            yield changed, position
            del changed
    except Exception as error:  # itself, not as the failure of a worker: it may have an origin
        yield _Raised(error), None
    finally:
        finish()


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


def mapped(function: Callable[[Any], Any], nest: Any) -> Any:
    """Return a nest of the same build with `function` of each leaf.

    Dicts, tuples, named tuples, lists and dataclasses are gone into.

    Example:
        >>> mapped(str, {"x": (1, 2), "y": [3]})
        {'x': ('1', '2'), 'y': ['3']}
    """
    if isinstance(nest, dict):
        items = ((key, mapped(function, value)) for key, value in nest.items())
        return dict(items) if type(nest) is dict else _like(nest, dict(items))
    if isinstance(nest, (tuple, list)):
        values = (mapped(function, value) for value in nest)
        return type(nest)(*values) if hasattr(nest, "_fields") else type(nest)(values)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        fields = [field.name for field in dataclasses.fields(nest) if field.init]
        values_of = {name: mapped(function, getattr(nest, name)) for name in fields}
        return dataclasses.replace(nest, **values_of)
    return function(nest)


def _like(nest: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    twin = nest.copy()  # a defaultdict keeps its factory, for example
    twin.update(items)
    return twin
