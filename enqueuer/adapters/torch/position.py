"""The position of a DataLoader: the random numbers before its epoch, and the batches given.

    begin()            notes the streams, then step += 1 for each batch, then end()
    state_dict()       -> the streams before the epoch, the seed of the workers, the step
    load_state_dict(), resuming(), begin(), reopened() -> the same order of indices again

Resuming an epoch leaves the global streams as they are: the epoch has drawn from them before.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from enqueuer.adapters.torch import index_order
from enqueuer.adapters.torch.drawn_indices import DrawnIndices
from enqueuer.common import checks
from enqueuer.common.extras import framework
from enqueuer.enqueuers.enqueuer import BaseEnqueuer
from enqueuer.errors import InvalidState, StateMismatch

torch = framework("torch", "torch", "2.1")

_VERSION = 1
_MOST_EPOCHS = 2**32


class Position:
    """The position of one DataLoader, which its latest iterator moves on.

    Args:
        loader: The DataLoader; only read here, and not kept.

    Attributes:
        step: Number of batches of the epoch that the loop was given.
        ended: Enqueuer of the last whole epoch, which has no workers any more; or None.
    """

    def __init__(self, loader: Any) -> None:
        self.step = 0
        self.ended: BaseEnqueuer[Any] | None = None
        self._streams = index_order.streams_of(loader)
        self._sampler = index_order.name_of(loader)
        is_iterable = loader._dataset_kind == torch.utils.data._DatasetKind.Iterable
        self._identity = {
            "batch_size": loader.batch_size,
            "drop_last": loader.drop_last,
            "iterable": is_iterable,
            # An iterable dataset divides its samples by their number.
            "num_workers": loader.num_workers if is_iterable else None,
            "samples": None if is_iterable else _length_of(loader.dataset),
            "sampler": type(loader.sampler).__name__,
        }
        self._is_persistent = loader.persistent_workers
        # States before the epoch; None between epochs.
        self._before: dict[str, Any] | None = None
        # Whether torch has drawn the seed of the workers between these and the order of indices.
        self._draws_seed = False
        # Seed of the workers, and the number of the epoch for them; None before the first epoch.
        self._seed: int | None = None
        self._epoch = 0
        self._loaded: dict[str, Any] | None = None
        # The latest iterator, and whether an earlier one has given batches since it began.
        self._iterator: weakref.ref[object] | None = None
        self._is_shared = False
        # Indices of the epoch; None before the first one.
        self._drawn: DrawnIndices | None = None
        # Number of batches that a resumed epoch has drawn, and their fingerprint.
        self._expected: tuple[int, int] | None = None
        # Enqueuer whose own position is needed as well.
        self._enqueuer: weakref.ref[BaseEnqueuer[Any]] | None = None

    # --- a new iterator ---

    @property
    def is_within_epoch(self) -> bool:
        """Whether a state was loaded whose epoch is not over."""
        return self._loaded is not None and self._loaded["before"] is not None

    @property
    def goes_on(self) -> bool:
        """Whether the next iterator goes on with the seed of a loaded state."""
        loaded = self._loaded
        if loaded is None or loaded["seed"] is None:
            return False
        return self.is_within_epoch or (self._is_persistent and loaded["persistent"])

    def resuming(self) -> AbstractContextManager[None]:
        """Return the context in which torch's iterator is made: one that resumes draws nothing."""
        if not self.goes_on:
            return contextlib.nullcontext()
        return index_order.kept(self._streams)

    def seed(self, drawn: int) -> int:
        """Return the seed of the workers: the one that torch has drawn, or that of a state."""
        self._seed = self._loaded["seed"] if self._loaded and self.goes_on else drawn
        return self._seed

    @contextlib.contextmanager
    def begin(self, iterator: object, is_first: bool) -> Iterator[dict[str, Any] | None]:
        """Begin an epoch.

        Args:
            iterator: Iterator that moves the position on.
            is_first: Whether it is the first one of its iterator.

        Yields:
            The loaded state of the epoch; None if all of the epoch is left.
        """
        loaded, within, goes_on = self._loaded, self.is_within_epoch, self.goes_on
        self._iterator, self._is_shared = weakref.ref(iterator), False
        self._loaded = self._enqueuer = None
        try:
            with self._epoch_of(loaded, within, goes_on, is_first) as resumed:
                yield resumed
        except BaseException:
            # The next iterator begins there.
            self._loaded = loaded
            raise

    @contextlib.contextmanager
    def _epoch_of(
        self, loaded: dict[str, Any] | None, within: bool, goes_on: bool, is_first: bool
    ) -> Iterator[dict[str, Any] | None]:
        if loaded is None or not within:
            self._epoch = 0 if is_first else self._epoch + 1
            if loaded is not None and goes_on:
                self._epoch = loaded["epoch"] + 1
            self.step, self._draws_seed, self._expected = 0, False, None
            self._before = index_order.save(self._streams)
            yield None
            return
        self._epoch, self.step, self._before = loaded["epoch"], loaded["step"], loaded["before"]
        self._draws_seed, self._expected = loaded["draws_seed"], tuple(loaded["drawn"])
        shared = {name: stream for name, stream in self._streams.items() if stream.is_global}
        with index_order.kept(shared):
            index_order.restore(self._streams, loaded["before"])
            yield loaded

    def reopened(self, loader: Any) -> Iterator[Any]:
        """Return the sampler's iterator as it was at the start of a resumed epoch."""
        # torch has iterated over the sampler, which may have drawn from its generator.
        if self._before is not None:
            index_order.restore(self._streams, self._before)
        indices: Iterator[Any] = iter(loader._index_sampler)
        if self._draws_seed:
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        return indices

    def draw(self, indices: Iterator[Any]) -> DrawnIndices:
        """Return the iterator over the indices of the epoch, which records them.

        A resumed epoch raises StateMismatch where it has drawn other indices than before.
        """
        self._drawn = DrawnIndices(indices, self._sampler, self._expected)
        return self._drawn

    def note(self, before: dict[str, Any]) -> None:
        """Note the states from before torch's iterator was made, which has drawn a seed since."""
        self._before, self._draws_seed = before, True

    def streams(self) -> dict[str, Any]:
        """Return the states of all streams as they are now."""
        return index_order.save(self._streams)

    def ask(self, enqueuer: BaseEnqueuer[Any]) -> None:
        """Ask this enqueuer for its position as well, from now on."""
        self._enqueuer = weakref.ref(enqueuer)

    def advance(self, iterator: object) -> None:
        """Note that an iterator has given a batch."""
        if self._is_of(iterator):
            self.step += 1

    def _is_of(self, iterator: object) -> bool:
        if self._iterator is not None and self._iterator() is iterator:
            return True
        # An earlier iterator goes on.
        self._is_shared = True
        return False

    def end(self, iterator: object) -> None:
        """Note that the epoch of an iterator is over."""
        if not self._is_of(iterator):
            return
        self.step, self._before, self._enqueuer = 0, None, None

    # --- states ---

    @property
    def epoch(self) -> int:
        """Number of the epoch for the workers."""
        return self._epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that the loop was given.

        Raises:
            InvalidState: It depends on an iterator that was dropped, or two iterators are in use.
        """
        if self._loaded is not None:
            return dict(self._loaded)
        if self._is_shared:
            raise InvalidState(
                "two iterators of this DataLoader are in use, so it has no position; use another "
                "DataLoader for the inner loop"
            )
        own = {name: stream for name, stream in self._streams.items() if not stream.is_global}
        state = {
            "version": _VERSION,
            "kind": "DataLoader",
            **self._identity,
            "epoch": self._epoch,
            "step": self.step,
            "seed": self._seed,
            "before": self._before,
            "draws_seed": self._draws_seed,
            "persistent": self._is_persistent,
            "now": None if self._before is not None else index_order.save(own),
        }
        count = 0 if self._identity["iterable"] else self.step
        if self._enqueuer is not None:
            enqueuer = self._enqueuer()
            if enqueuer is None:
                raise InvalidState(
                    "the iterator was dropped in the middle of an epoch, and with it the position "
                    "of its workers; keep the iterator until state_dict() was called"
                )
            state["workers"] = enqueuer.state_dict()
            if not self._identity["iterable"]:
                # Batches that were left out were drawn as well.
                count = sum(number for _, number in state["workers"]["positions"] or ())
        state["drawn"] = [count, self._drawn.fingerprint(count) if self._drawn is not None else 0]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position at the next iteration.

        Raises:
            StateMismatch: The state is of another loader, or damaged.
        """
        try:
            if state["kind"] != "DataLoader" or state["version"] != _VERSION:
                raise StateMismatch("this is not the state of a DataLoader of this version")
            differences = [
                f"{name} is {state[name]!r} in the state and {value!r} here"
                for name, value in self._identity.items()
                if state[name] != value
            ]
            if differences:
                raise StateMismatch(f"the state does not fit: {'; '.join(differences)}")
            for name in ("step", "epoch"):
                checks.count(name, state[name])
            if state["epoch"] > _MOST_EPOCHS:
                raise ValueError(f"epoch is out of range: {state['epoch']}")
            step, fingerprint = state["drawn"]
            checks.count("drawn", step), checks.count("drawn", fingerprint)
            states = dict(state["now"] if state["before"] is None else state["before"])
            loaded = {name: state[name] for name in state}
            for name in ("seed", "draws_seed", "persistent"):
                state[name]
        except StateMismatch:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise StateMismatch(f"this is not the state of a DataLoader: {error!r}") from error
        own = {name: stream for name, stream in self._streams.items() if not stream.is_global}
        index_order.restore(own, states)
        self._loaded = loaded


def _length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None


def advanced(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    """Return an iterator behind its first items, which has drawn its random numbers."""
    deque(itertools.islice(iterator, count), maxlen=0)
    return itertools.chain(list(itertools.islice(iterator, 1)), iterator)
