"""The random numbers that decide the order of indices: read, saved, and put back.

    streams_of(loader) -> its generators, and the global ones
    save(), restore()  <-> plain numbers and strings
    kept(streams)      puts the global ones back at its end

A sampler gives the same order again if it is iterated from the same states. So a position needs
these states and a number of batches, and no list of indices.
"""

from __future__ import annotations

import base64
import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from enqueuer.common.extras import framework

torch = framework("torch", "torch", "2.1")

# Attributes by which one sampler refers to another.
_INNER = ("batch_sampler", "sampler", "base_sampler")


@dataclass(frozen=True)
class Stream:
    """A source of random numbers.

    Attributes:
        get: Returns its state, as plain numbers and strings.
        put: Sets its state.
        is_global: Whether other code draws from it as well.
    """

    get: Callable[[], Any]
    put: Callable[[Any], object]
    is_global: bool = False


def streams_of(loader: Any) -> dict[str, Stream]:
    """Return the random numbers that may decide the order of a DataLoader, by name."""
    streams = dict(_GLOBAL)
    for path, owner in _owners(loader):
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            stream = _stream(value)
            if stream is not None:
                streams[f"{path}{name}"] = stream
        # The order of a sampler with an epoch depends on that. The `state_dict` of torchdata's
        # StatefulDistributedSampler has a position instead: after an epoch, that of its end.
        if path and hasattr(owner, "set_epoch") and isinstance(_epoch_of(owner), int):
            streams[f"{path}set_epoch"] = Stream(_EpochOf(owner), owner.set_epoch)
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
    pending, seen = [("", loader)], set[int]()
    while pending:
        path, owner = pending.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        yield path, owner
        inner = [(name, getattr(owner, name, None)) for name in _INNER]
        pending += [(f"{path}{name}.", one) for name, one in inner if one is not None]


def _stream(value: object) -> Stream | None:
    match value:
        case torch.Generator():
            return Stream(lambda: _text_of(value.get_state()), lambda t: value.set_state(_state(t)))
        case np.random.Generator():
            bits = value.bit_generator
            return Stream(lambda: _plain(bits.state), lambda state: _set_bits(bits, state))
        case np.random.RandomState():
            return Stream(lambda: _plain(value.get_state(legacy=False)), value.set_state)
        case random.Random():
            return Stream(lambda: _plain(value.getstate()), lambda s: value.setstate(_tuples(s)))
    return None


def _set_bits(bits: Any, state: Any) -> None:
    bits.state = state


@dataclass(frozen=True)
class _EpochOf:
    sampler: Any

    def __call__(self) -> int:
        return int(self.sampler.epoch)


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


_GLOBAL = {
    "torch": Stream(
        lambda: _text_of(torch.get_rng_state()),
        lambda text: torch.set_rng_state(_state(text)),
        is_global=True,
    ),
    "numpy": Stream(
        lambda: _plain(np.random.get_state(legacy=False)), np.random.set_state, is_global=True
    ),
    "random": Stream(
        lambda: _plain(random.getstate()),
        lambda state: random.setstate(_tuples(state)),
        is_global=True,
    ),
}
