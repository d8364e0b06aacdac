"""The position of a DataLoader: the random numbers before its epoch, and the batches given.

    begin()            notes the streams, then step += 1 for each batch, then end()
    state_dict()       -> the streams before the epoch, the seed of the workers, the step
    load_state_dict(), resuming(), begin(), reopened() -> the same order of indices again

Resuming an epoch leaves the global streams as they are: the epoch has drawn from them before. The
following epochs draw from a continuation of their own, as the undisturbed run did, unless the
program has set or used the global streams since: then they draw from these, as torch does.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from enqueuer.adapters.torch import index_order
from enqueuer.adapters.torch.index_order import DrawnIndices
from enqueuer.common import checks
from enqueuer.common.extras import framework
from enqueuer.enqueuers.enqueuer import BaseEnqueuer
from enqueuer.errors import EnqueuerWarning, InvalidState, StateMismatch

torch = framework("torch", "torch", "2.1")

_VERSION = 1
_MOST_EPOCHS = 2**32


class Position:
    """The position of one DataLoader, which its latest iterator moves on.

    Args:
        loader: The DataLoader; only read here, and not kept.

    Attributes:
        epoch: Number of the epoch for the workers.
        step: Number of batches of the epoch that the loop was given.
        is_restored: Whether the program had the global streams of a loaded state when it began.
        iterator: Returns the latest iterator; None if it was dropped.
        ended: Enqueuer of the last whole epoch, which has no workers any more; or None.
    """

    def __init__(self, loader: Any) -> None:
        self.epoch = self.step = 0
        self.is_restored = False
        self.ended: BaseEnqueuer[Any] | None = None
        self._streams = index_order.streams_of(loader)
        self._sampler = index_order.name_of(loader)
        self._identity = _identity_of(loader)
        self._ranks = index_order.ranks_of(loader)
        self._is_persistent = loader.persistent_workers
        # States before the epoch; None between epochs.
        self._before: dict[str, Any] | None = None
        # Whether torch has drawn the seed of the workers between these and the order of indices.
        self._draws_seed = False
        # Seed of the workers; None before the first epoch.
        self._seed: int | None = None
        self._loaded: dict[str, Any] | None = None
        self.iterator: Callable[[], Any] = lambda: None
        # Whether an earlier iterator has given batches since the latest one began.
        self._is_shared = False
        # Reason for which the latest state has no position.
        self._why_none = ""
        # Indices of the epoch; None before the first one.
        self._drawn: DrawnIndices | None = None
        # Number of batches that a resumed epoch has drawn, and their fingerprint.
        self._expected: tuple[int, int] | None = None
        # Of global streams: the mark of the program's own state, and the state from which later
        # epochs of a resumed run draw for as long as that mark stays.
        self._continued: dict[str, tuple[int, Any]] = {}
        # Marks of the global streams before the epoch, and those of them from which something was
        # drawn at its start; all until the first batch.
        self._marks_before: dict[str, int] = {}
        self._used: Collection[str] = index_order.GLOBAL
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
        if self.goes_on:
            return index_order.kept(self._streams)
        self._note_marks()
        return self._continuing()

    def _note_marks(self) -> None:
        with self._continuing():
            self._marks_before = index_order.marks(index_order.GLOBAL)

    @property
    def has_own_numbers(self) -> bool:
        """Whether the next epoch draws from the continuation of a resumed run."""
        return bool(self._continued)

    @contextlib.contextmanager
    def _continuing(self) -> Iterator[None]:
        """Draw from the continuations of global streams that the program leaves alone."""
        own = {n: of for n, of in self._continued.items() if index_order.mark(n) == of[0]}
        self._continued = own
        streams = {name: index_order.GLOBAL[name] for name in own}
        with index_order.kept(streams):
            index_order.restore(streams, {name: state for name, (_, state) in own.items()})
            yield
            states = index_order.save(streams)
        self._continued = {name: (mark, states[name]) for name, (mark, _) in own.items()}

    def _continue_from(self, states: Mapping[str, Any], saved: Mapping[str, int]) -> None:
        """Draw later epochs from these states, except where the program has restored its own."""
        now = index_order.marks(saved)
        changed = (name for name in saved if name in states and saved[name] != now[name])
        self._continued = {name: (now[name], states[name]) for name in changed}

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
        self._why_none = ""
        self.iterator, self._is_shared = weakref.ref(iterator), False
        self._loaded = self._enqueuer = None
        try:
            if loaded is None or not within:
                self.epoch = 0 if is_first else self.epoch + 1
                if loaded is not None and goes_on:
                    self.epoch = loaded["epoch"] + 1
                self.step, self._draws_seed, self._expected = 0, False, None
                if not is_first:
                    self._note_marks()
                with self._continuing():
                    self._before = index_order.save(self._streams)
                    self._used = index_order.GLOBAL
                    yield None
                return
            self.epoch, self.step, self._before = loaded["epoch"], loaded["step"], loaded["before"]
            self._draws_seed, self._expected = loaded["draws_seed"], tuple(loaded["drawn"])
            self._used = marks = loaded.get("marks", {})
            self.is_restored = bool(marks) and index_order.marks(marks) == marks
            with index_order.kept(index_order.GLOBAL):
                index_order.restore(self._streams, loaded["before"])
                yield loaded
                after = index_order.save(index_order.GLOBAL)
            self._continue_from(after, marks)
        except BaseException:
            # The next iterator begins there.
            self._loaded = loaded
            raise

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

    def streams(self, used: Collection[str] = index_order.GLOBAL) -> dict[str, Any]:
        """Return the states of streams, of the global ones only these, for the next epoch."""
        with self._continuing():
            states = index_order.save(self._streams)
        return {n: s for n, s in states.items() if n in used or n not in index_order.GLOBAL}

    def ask(self, enqueuer: BaseEnqueuer[Any]) -> None:
        """Ask this enqueuer for its position as well, from now on."""
        self._enqueuer = weakref.ref(enqueuer)

    def advance(self, iterator: object) -> None:
        """Note that an iterator has given a batch."""
        if self._is_of(iterator):
            self.step += 1
            if self._used is index_order.GLOBAL:
                now, before = index_order.marks(index_order.GLOBAL), self._marks_before
                self._used = [name for name in now if now[name] != before.get(name)]

    def _is_of(self, iterator: object) -> bool:
        if self.iterator() is iterator:
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

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that the loop was given.

        Trainers call it unasked, so what cannot be saved is a warning, and an error where the
        state is loaded.
        """
        if self._loaded is not None:
            return dict(self._loaded)
        if self._is_shared:
            return self._none(
                "two iterators of this DataLoader were in use, so it had no position; use another "
                "DataLoader for the inner loop"
            )
        enqueuer = None if self._enqueuer is None else self._enqueuer()
        if self._enqueuer is not None and enqueuer is None:
            return self._none(
                "the iterator was dropped in the middle of an epoch, and with it the position "
                "of its workers; keep the iterator until state_dict() was called"
            )
        state = {
            "version": _VERSION,
            "kind": "DataLoader",
            **self._identity,
            "epoch": self.epoch,
            "step": self.step,
            "seed": self._seed,
            "before": self._before,
            "draws_seed": self._draws_seed,
            "persistent": self._is_persistent,
            "now": None if self._before is not None else self.streams(self._used),
            "marks": index_order.marks(self._used),
        }
        if self._ranks is not None:
            state["ranks"] = self._ranks
        count = 0 if self._identity["iterable"] else self.step
        if enqueuer is not None:
            state["workers"] = enqueuer.state_dict()
            if not self._identity["iterable"]:
                # Batches that were left out were drawn as well.
                count = sum(number for _, number in state["workers"]["positions"] or ())
        state["drawn"] = [count, self._drawn.fingerprint(count) if self._drawn is not None else 0]
        return state

    def _none(self, reason: str) -> dict[str, Any]:
        """Return a state that has no position, and warn once an epoch."""
        if reason != self._why_none:
            self._why_none = reason
            warnings.warn(
                f"the state of this DataLoader has no position, and cannot be loaded: {reason}",
                EnqueuerWarning,
                stacklevel=5,
            )
        return {"version": _VERSION, "kind": "DataLoader", **self._identity, "none": reason}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position at the next iteration.

        Raises:
            StateMismatch: The state is of another loader, or damaged.
            InvalidState: It has no position, as a warning said when it was saved.
        """
        try:
            if "none" in state:
                raise InvalidState(f"this state has no position: {state['none']}")
            if state["kind"] != "DataLoader" or state["version"] != _VERSION:
                raise StateMismatch("this is not the state of a DataLoader of this version")
            differences = [
                f"{name} is {state[name]!r} in the state and {value!r} here"
                for name, value in self._identity.items()
                if state[name] != value
            ]
            ranks = state.get("ranks", self._ranks)
            if (ranks is None) != (self._ranks is None) or list(ranks or ()) != (self._ranks or []):
                differences.append(_difference_of(ranks, self._ranks))
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
            marks = {str(name): int(mark) for name, mark in state.get("marks", {}).items()}
        except (InvalidState, StateMismatch):
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise StateMismatch(f"this is not the state of a DataLoader: {error!r}") from error
        own = {name: s for name, s in states.items() if name not in index_order.GLOBAL}
        index_order.restore(self._streams, own)
        self._loaded = loaded
        self._continued = {}
        if state["before"] is None:
            self._continue_from(states, marks)


def _difference_of(saved: Any, here: Any) -> str:
    """Return the difference of two pairs of rank and world size, or None, in words."""
    one, other = (
        "of no rank" if ranks is None else "of rank {} of {}".format(*ranks)
        for ranks in (saved, here)
    )
    return f"the sampler is {one} in the state and {other} here"


def _identity_of(loader: Any) -> dict[str, Any]:
    """Return what must be the same where a state of a loader is loaded."""
    is_iterable = loader._dataset_kind == torch.utils.data._DatasetKind.Iterable
    return {
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "iterable": is_iterable,
        # An iterable dataset divides its samples by their number.
        "num_workers": loader.num_workers if is_iterable else None,
        "samples": None if is_iterable else _length_of(loader.dataset),
        "sampler": type(loader.sampler).__name__,
    }


def _length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None
