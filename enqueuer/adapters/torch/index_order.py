"""The order of indices of an epoch: the random numbers that decide it, and whether it is the same.

    streams_of(loader) -> its generators, and the global ones
    save(), restore()  <-> plain numbers and strings
    kept(streams)      puts the global ones back at its end

A sampler gives the same order again if it is iterated from the same states. So a position needs
these states and a number of batches, and no list of indices.

    sampler --DrawnIndices--> batches of indices, one fingerprint each
    resumed: the fingerprint at the position differs -> StateMismatch

Only random numbers that the loader finds are saved. A sampler that has others would give another
order after resuming, and the epoch would repeat some samples and miss others.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import itertools
import operator
import random
import types
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np

from enqueuer.common.catching import raised_here
from enqueuer.common.extras import framework
from enqueuer.errors import StateMismatch

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
        # Batches that were drawn and not read, and the error that came behind them.
        self._ahead = deque[Any]()
        self._error: Exception | None = None

    def __next__(self) -> Any:
        if self._ahead:
            return self._ahead.popleft()
        if self._error is None:
            return self._draw()
        error, self._error = self._error, None
        try:
            raise error
        finally:
            # Otherwise its traceback would refer to itself, through this frame.
            del error

    def draw(self, count: int) -> None:
        """Draw so many batches ahead, if there are as many; an error comes at its place."""
        if self._error is not None:
            return
        try:
            # In C, in one step, so that no exception loses indices.
            self._ahead.extend(map(DrawnIndices._draw, itertools.repeat(self, count)))
        except raised_here(Exception) as error:
            self._error = error

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
        self._error = None
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
_MOST_OWNERS = 100
# Objects of a dataset that are looked at for generators, and items of each container.
_MOST_OBJECTS, _MOST_ITEMS = 1000, 100


@dataclasses.dataclass(frozen=True)
class Stream:
    """A source of random numbers.

    Attributes:
        get: Returns its state, as plain numbers and strings.
        put: Sets its state.
    """

    get: Callable[[], Any]
    put: Callable[[Any], object]


def marks(names: Iterable[str]) -> dict[str, int]:
    """Return the marks of some global streams."""
    return {name: mark(name) for name in names if name in GLOBAL}


def mark(name: str) -> int:
    """Return a number that stays the same until a global stream is drawn from, or set."""
    match name:
        case "torch":
            return zlib.crc32(torch.get_rng_state().numpy())
        case "numpy":
            state: Any = np.random.get_state(legacy=False)
            return zlib.crc32(state["state"]["key"], state["state"]["pos"])
    return zlib.crc32(repr(random.getstate()).encode())


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
        if path and hasattr(owner, "set_epoch") and isinstance(_epoch_of(owner), int):
            streams[f"{path}set_epoch"] = Stream(
                functools.partial(_epoch_of, owner), owner.set_epoch
            )
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
def kept(streams: Mapping[str, Stream]) -> Iterator[None]:
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
    while pending and len(seen) < _MOST_OWNERS:
        path, owner = pending.pop(0)
        if id(owner) in seen:
            continue
        seen[id(owner)] = owner
        yield path, owner
        inner = [(name, getattr(owner, name, None)) for name in _INNER]
        pending += [(f"{path}{name}.", one) for name, one in inner if one is not None]


def holds_generator(dataset: Any) -> bool:
    """Return whether a dataset, or an object in it, such as a transform, has a random generator."""
    pending, seen = deque([dataset]), dict[int, Any]()
    while pending and len(seen) < _MOST_OBJECTS:
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
                pending += value[:_MOST_ITEMS]
            case dict():
                pending += itertools.islice(value.values(), _MOST_ITEMS)
            case _:
                pending += getattr(value, "__dict__", {}).values()
    return False


def ranks_of(loader: Any) -> list[int] | None:
    """Return the rank and the world size of the samplers of a DataLoader; None without them."""
    for _, owner in _owners(loader):
        for names in (("rank", "num_replicas"), ("process_index", "num_processes")):
            ranks = [
                one for one in (getattr(owner, name, None) for name in names) if type(one) is int
            ]
            if len(ranks) == len(names):
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
    return Stream(
        lambda: _text_of(generator.get_state()), lambda text: generator.set_state(_state(text))
    )


def _epoch_of(sampler: Any) -> Any:
    return getattr(sampler, "epoch", None)


def _text_of(state: Any) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _state(text: str) -> Any:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)


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
