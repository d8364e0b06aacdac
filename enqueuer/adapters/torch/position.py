"""The position of a DataLoader: the random numbers before its epoch, and the batches given.

    streams_of(loader) -> its generators, and the global ones; save() and restore() their states
    begin()            notes the streams, then step += 1 for each batch, then end()
    state_dict()       -> the streams before the epoch, the seed of the workers, the step
    load_state_dict(), making(), begin(), draw() -> the same order of indices again

A sampler gives the same order again if it is iterated from the same states. So a position needs
these states and a number of batches, and no list of indices.

    sampler --DrawnIndices--> batches of indices, one fingerprint each
    resumed: the fingerprint at the position differs -> StateMismatch

Only random numbers that the loader finds are saved. A sampler that has others would give another
order after resuming, and the epoch would repeat some samples and miss others.

Resuming an epoch leaves the global streams as they are: the epoch has drawn from them before. The
following epochs draw from them, as torch does.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import itertools
import operator
import random
import types
import warnings
import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np

from enqueuer.common import checks
from enqueuer.common.extras import framework
from enqueuer.enqueuers.enqueuer import BaseEnqueuer
from enqueuer.errors import EnqueuerWarning, InvalidState, StateMismatch
from enqueuer.workers.plan import Raised

torch = framework("torch", "torch", "2.1")

# Their text is the same in each process.
_PLAIN = (str, bytes, float)
_END = object()


class DrawnIndices(Iterator[Any]):
    """An iterator over batches of indices that records one number for each, and can draw ahead.

    Args:
        iterator: Iterator of torch's sampler.
        sampler: Name of the sampler, for the error.
        expected: Number of batches that were drawn before, and their fingerprint; None: the epoch
            is not resumed.

    Raises:
        StateMismatch: The batches drawn before were others; at the last of them, and from then on.

    Example:
        >>> drawn = DrawnIndices(iter([[4, 1], [3, 0]]), "Mine")
        >>> next(drawn), next(drawn)
        ([4, 1], [3, 0])
        >>> state = 1, drawn.fingerprint(1)
        >>> next(DrawnIndices(iter([[1, 4], [3, 0]]), "Mine", state))
        Traceback (most recent call last):
        enqueuer.StateMismatch: Mine gave another order than before the state was saved. ...
    """

    def __init__(
        self, iterator: Iterator[Any], sampler: str, expected: tuple[int, int] | None = None
    ) -> None:
        self._iterator = iterator
        self._sampler = sampler
        self._step, self._expected = expected or (0, 0)
        # Four bytes for each batch of the epoch.
        self._fingerprints = array("I")
        self._latest = 0
        # Batches that were drawn and not read.
        self._ahead = deque[Any]()

    def __next__(self) -> Any:
        return self._ahead.popleft() if self._ahead else self._draw()

    def draw(self, count: int) -> None:
        """Draw so many batches ahead, if there are as many; an error comes at its place."""
        try:
            for _ in range(count):
                self._ahead.append(self._draw())
        except StopIteration:
            pass
        except Exception as error:
            # If more is drawn ahead, it comes here again.
            first = map(Raised.reraise, [Raised(error)])
            self._iterator = itertools.chain(first, self._iterator)

    def _draw(self) -> Any:
        fingerprints = self._fingerprints
        indices = next(self._iterator, _END)
        if indices is _END:
            # Outside of an `except`: the frames of a context would keep the enqueuer alive.
            if len(fingerprints) < self._step:
                self._fail(f"ended after {len(fingerprints)} batches, and gave {self._step}")
            raise StopIteration
        self._latest = zlib.crc32(_bytes_of(indices), self._latest)
        fingerprints.append(self._latest)
        if len(fingerprints) == self._step and self._latest != self._expected:
            self._fail("gave another order than")
        return indices

    def cut(self, keeps_drawn: bool) -> None:
        """End the epoch here, or behind what was drawn ahead."""
        if not keeps_drawn:
            self._ahead.clear()
        self._iterator, self._step = iter(()), 0

    def fingerprint(self, count: int) -> int:
        """Return the fingerprint of the first batches; 0 if that many were never drawn."""
        return self._fingerprints[count - 1] if 0 < count <= len(self._fingerprints) else 0

    def _fail(self, reason: str) -> NoReturn:
        message = (
            f"{self._sampler} {reason} before the state was saved. A likely cause is a random "
            "generator that the DataLoader does not find: keep it in an attribute of the "
            "sampler, or give the sampler a fixed seed, set_epoch(), or state_dict() and "
            "load_state_dict()"
        )
        # Reading on raises it again, as the epoch must not continue.
        self._iterator, self._step = map(_raise, itertools.repeat(message)), 0
        _raise(message)


def _raise(message: str) -> NoReturn:
    raise StateMismatch(message)


def _bytes_of(indices: Any) -> bytes:
    """Return the number, the first and the last of some indices as bytes.

    All of them would cost more than drawing some of them.
    """
    if type(indices) not in (list, tuple):
        return _index_text(indices).encode()
    if not indices:
        return b"0"
    return f"{len(indices)} {_index_text(indices[0])} {_index_text(indices[-1])}".encode()


def _index_text(index: Any) -> str:
    """Return an index as text; that of its type unless each process has the same text."""
    try:
        return str(operator.index(index))
    except TypeError:
        return repr(index) if isinstance(index, _PLAIN) else type(index).__name__


# Attributes by which one sampler refers to another.
_INNER = ("batch_sampler", "sampler", "base_sampler")
_MAX_OWNERS = 100
# Objects of a dataset that are looked at for generators, and items of each container.
_MAX_OBJECTS, _MAX_ITEMS = 1000, 100


class Stream(NamedTuple):
    """A source of random numbers.

    Attributes:
        get: Returns its state, as plain numbers and strings.
        put: Sets its state.
    """

    get: Callable[[], Any]
    put: Callable[[Any], object]


def streams_of(loader: Any) -> dict[str, Stream]:
    """Return the random numbers that may decide the order of a DataLoader, by name."""
    streams = dict(GLOBAL)
    for path, owner in _owners(loader):
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            stream = _stream(value)
            if stream is not None:
                streams[f"{path}{name}"] = stream
        # The order of a sampler with an epoch depends on that. The `state_dict` of torchdata's
        # StatefulDistributedSampler has a position instead: after an epoch, that of its end.
        epoch_of = functools.partial(getattr, owner, "epoch", None)
        if path and hasattr(owner, "set_epoch") and isinstance(epoch_of(), int):
            streams[f"{path}set_epoch"] = Stream(epoch_of, owner.set_epoch)
        elif path and hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict"):
            streams[f"{path}state_dict"] = Stream(owner.state_dict, owner.load_state_dict)
    return streams


def name_of(loader: Any) -> str:
    """Return the class of the sampler that decides the order of a DataLoader."""
    sampler = loader._index_sampler
    is_torchs = type(sampler) is torch.utils.data.BatchSampler
    return type(sampler.sampler if is_torchs else sampler).__name__


def samplers_of(loader: Any) -> list[Any]:
    """Return the samplers of a DataLoader, and those inside them, each once."""
    return [owner for path, owner in _owners(loader) if path]


def save(streams: Mapping[str, Stream]) -> dict[str, Any]:
    """Return the states of some streams."""
    return {name: stream.get() for name, stream in streams.items()}


def restore(streams: Mapping[str, Stream], states: Mapping[str, Any]) -> None:
    """Set the states of those streams that were saved."""
    for name, state in states.items():
        if name in streams:
            streams[name].put(state)


@contextlib.contextmanager
def preserved(streams: Mapping[str, Stream]) -> Iterator[None]:
    """Put the streams back at the end, as if nothing had been drawn."""
    before = save(streams)
    try:
        yield
    finally:
        restore(streams, before)


def _owners(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield a loader and its samplers, each with its path."""
    # By number, as the owners are kept alive, and an id stays theirs.
    pending, seen = [("", loader)], dict[int, Any]()
    # An object may invent its attributes, such as a mock.
    while pending and len(seen) < _MAX_OWNERS:
        path, owner = pending.pop(0)
        if id(owner) in seen:
            continue
        seen[id(owner)] = owner
        yield path, owner
        inner = [(name, getattr(owner, name, None)) for name in _INNER]
        pending += [(f"{path}{name}.", found) for name, found in inner if found is not None]


def holds_generator(dataset: Any) -> bool:
    """Return whether a dataset, or an object in it, such as a transform, has a random generator."""
    pending, seen = deque([dataset]), dict[int, Any]()
    while pending and len(seen) < _MAX_OBJECTS:
        value = pending.popleft()
        if id(value) in seen or isinstance(value, (str, bytes, type, types.ModuleType)):
            continue
        seen[id(value)] = value
        if _stream(value) is not None:
            return True
        match value:
            case torch.Tensor() | np.ndarray():
                continue
            case list() | tuple():
                pending += value[:_MAX_ITEMS]
            case dict():
                pending += itertools.islice(value.values(), _MAX_ITEMS)
            case _:
                pending += getattr(value, "__dict__", {}).values()
    return False


# Functions by which a dataset may make a generator in each worker, when it is first asked.
_OF_WORKERS = frozenset({"get_worker_info", "initial_seed"})


def asks_for_worker(dataset: Any) -> bool:
    """Return whether the code of a dataset asks in which worker it runs, or for its seed."""
    for _ in range(_MAX_OWNERS):
        for kind in type(dataset).__mro__:
            functions = [f for f in vars(kind).values() if isinstance(f, types.FunctionType)]
            if any(not _OF_WORKERS.isdisjoint(f.__code__.co_names) for f in functions):
                return True
        # Of a subset, for example.
        dataset = getattr(dataset, "__dict__", {}).get("dataset")
    return False


def ranks_of(loader: Any) -> list[int] | None:
    """Return the rank and the world size of the samplers of a DataLoader; None without them."""
    for _, owner in _owners(loader):
        for names in (("rank", "num_replicas"), ("process_index", "num_processes")):
            ranks: list[Any] = [getattr(owner, name, None) for name in names]
            if all(type(found) is int for found in ranks):
                return ranks
    return None


def _stream(value: object) -> Stream | None:
    match value:
        case np.random.Generator():
            bits = value.bit_generator
            return Stream(lambda: _plain(bits.state), functools.partial(setattr, bits, "state"))
        case np.random.RandomState():
            return Stream(lambda: _plain(value.get_state(legacy=False)), value.set_state)
        case random.Random():
            return Stream(lambda: _plain(value.getstate()), lambda s: value.setstate(_tuples(s)))
        case torch.Generator():
            return _torch_stream(value)
    return None


def _torch_stream(generator: Any) -> Stream:
    def get() -> str:
        return base64.b64encode(generator.get_state().numpy().tobytes()).decode("ascii")

    def put(text: str) -> None:
        generator.set_state(torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8))

    return Stream(get, put)


def _plain(state: Any) -> Any:
    """Return a state of numpy or `random` as dicts, lists, numbers and strings."""
    match state:
        case np.ndarray():
            return state.tolist()
        case dict():
            return {key: _plain(value) for key, value in state.items()}
        case tuple() | list():
            return [_plain(value) for value in state]
    return state


def _tuples(state: Any) -> Any:
    return tuple(map(_tuples, state)) if isinstance(state, list) else state


# Of the generators behind the functions of these modules, from which other code draws as well. The
# build of the docs has no torch, and so no class of its generators.
GLOBAL: dict[str, Any] = {
    "torch": _torch_stream(torch.default_generator),
    "numpy": _stream(getattr(np.random.get_state, "__self__")),  # noqa: B009, as stubs lack it
    "random": _stream(getattr(random.getstate, "__self__")),  # noqa: B009
}


def _of_loader(streams: Mapping[str, Any]) -> dict[str, Any]:
    """Return those that are not global, which belong to the loader."""
    return {name: stream for name, stream in streams.items() if name not in GLOBAL}


_VERSION = 1
_MAX_EPOCHS = 2**32


class Position:
    """The position of one DataLoader, which its latest iterator moves on.

    Args:
        loader: The DataLoader; only read here, and not kept.

    Attributes:
        epoch: Number of the epoch for the workers.
        step: Number of batches of the epoch that the loop was given.
        needs_workers: Whether the position of the iterator's enqueuer is needed as well.
        iterator: Returns the latest iterator; None if it was dropped.
        iterators: All that were not dropped.
        epoch_set: Epoch that was set for the dataset since an iteration began; or None.
        ended: Enqueuer of the last whole epoch, which has no workers any more; or None.
    """

    def __init__(self, loader: Any) -> None:
        self.epoch = self.step = 0
        self.needs_workers = False
        self.ended: BaseEnqueuer[Any] | None = None
        self._streams = streams_of(loader)
        self._sampler = name_of(loader)
        self._identity = _identity_of(loader)
        self._ranks = ranks_of(loader)
        self._is_persistent = loader.persistent_workers
        # States before the latest iterator was made, and before the epoch; None between epochs.
        self._made_from: dict[str, Any] = {}
        self._before: dict[str, Any] | None = None
        # Whether torch has drawn the seed of the workers between these and the order of indices.
        self._draws_seed = False
        # Seed of the workers; None before the first epoch.
        self._seed: int | None = None
        self._loaded: dict[str, Any] | None = None
        self.iterator: Callable[[], Any] = lambda: None
        self.epoch_set: int | None = None
        self.iterators = weakref.WeakSet[Any]()
        # Whether an earlier iterator has given batches since the latest one began.
        self._is_shared = False
        # Reason for which the latest state has no position.
        self._why_none = ""
        # Indices of the epoch; None before the first one.
        self._drawn: DrawnIndices | None = None
        # Number of batches that a resumed epoch has drawn, and their fingerprint.
        self._expected: tuple[int, int] | None = None

    # --- a new iterator ---

    @property
    def _goes_on(self) -> bool:
        """Whether the next iterator goes on with the seed of a loaded state."""
        loaded = self._loaded
        if loaded is None or loaded["seed"] is None:
            return False
        return loaded["before"] is not None or (self._is_persistent and loaded["persistent"])

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Give the context in which torch's iterator is made: one that resumes draws nothing."""
        with preserved(self._streams) if self._goes_on else contextlib.nullcontext():
            self._made_from = save(self._streams)
            yield

    def seed(self, drawn: int) -> int:
        """Return the seed of the workers: the one that torch has drawn, or that of a state."""
        self._seed = self._loaded["seed"] if self._loaded and self._goes_on else drawn
        return self._seed

    @contextlib.contextmanager
    def begin(
        self, iterator: object, is_first: bool, draws_seed: bool = False
    ) -> Iterator[dict[str, Any] | None]:
        """Begin an epoch.

        Args:
            iterator: Iterator that moves the position on.
            is_first: Whether it is the first one of its iterator.
            draws_seed: Whether the epoch has begun before torch drew the seed of the workers.

        Yields:
            The loaded state of the epoch; None if all of the epoch is left.
        """
        loaded, goes_on = self._loaded, self._goes_on
        self._why_none = ""
        self.iterator, self._is_shared = weakref.ref(iterator), False
        self.iterators.add(iterator)
        self._loaded, self.needs_workers = None, False
        try:
            if loaded is None or loaded["before"] is None:
                number = loaded["epoch"] if loaded is not None and goes_on else self.epoch
                self.epoch = number + 1 if goes_on or not is_first else 0
                self.step, self._draws_seed, self._expected = 0, draws_seed, None
                self._before = self._made_from if draws_seed else save(self._streams)
                yield None
                return
            self.epoch, self.step, self._before = loaded["epoch"], loaded["step"], loaded["before"]
            self._draws_seed, self._expected = loaded["draws_seed"], tuple(loaded["drawn"])
            with preserved(GLOBAL):
                restore(self._streams, loaded["before"])
                yield loaded
        except BaseException:
            # The next iterator begins there.
            self._loaded = loaded
            raise

    def draw(self, indices: Iterator[Any], loader: Any) -> DrawnIndices:
        """Return the iterator over the indices of the epoch, which records them.

        A resumed epoch draws them from its start again, and raises StateMismatch where they are
        others than before.
        """
        if self._expected is not None:
            # torch has iterated over the sampler, which may have drawn from its generator.
            restore(self._streams, self._before or {})
            indices = iter(loader._index_sampler)
            if self._draws_seed:
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        self._drawn = DrawnIndices(indices, self._sampler, self._expected)
        return self._drawn

    def advance(self, iterator: object) -> None:
        """Note that an iterator has given a batch."""
        if self._is_of(iterator):
            self.step += 1

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
        self.step, self._before, self.needs_workers = 0, None, False

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
        iterator = self.iterator()
        if self.needs_workers and iterator is None:
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
            "now": None if self._before is not None else save(_of_loader(self._streams)),
        }
        if self._ranks is not None:
            state["ranks"] = self._ranks
        count = 0 if self._identity["iterable"] else self.step
        if self.needs_workers:
            state["workers"] = iterator.enqueuer.state_dict()
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
        with checks.reading("a DataLoader"):
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
            step, fingerprint = state["drawn"]
            checks.count("drawn", step), checks.count("drawn", fingerprint)
            if state["epoch"] > _MAX_EPOCHS:
                raise ValueError(f"epoch is out of range: {state['epoch']}")
            states = dict(state["now"] if state["before"] is None else state["before"])
            loaded = {name: state[name] for name in ("seed", "draws_seed", "persistent", *state)}
            if state["seed"] is not None:
                checks.seed(state["seed"])
            is_plain = not state["iterable"] and "workers" not in state
            if is_plain and step != state["step"]:
                raise ValueError(f"step is {state['step']}, and {step} batches were drawn")
            # Whether all can be restored, so that otherwise nothing has changed.
            with preserved(self._streams):
                restore(self._streams, states)
        restore(self._streams, _of_loader(states))
        self._loaded = loaded


def _difference_of(saved: Any, here: Any) -> str:
    """Return the difference of two pairs of rank and world size, or None, in words."""
    found, other = (
        "of no rank" if ranks is None else "of rank {} of {}".format(*ranks)
        for ranks in (saved, here)
    )
    return f"the sampler is {found} in the state and {other} here"


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
