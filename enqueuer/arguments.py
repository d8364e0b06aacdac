"""The arguments of an enqueuer, checked at the door: each error names argument, rule and value."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Mapping, Set
from multiprocessing.context import BaseContext
from typing import TypeVar

from enqueuer.backends import METHODS, BackendName, Cluster, default_method
from enqueuer.formats import an
from enqueuer.logs import MULTIPROCESSING_LOGGING
from enqueuer.progress import Progress
from enqueuer.sources import LiveSource, Source, is_indexable, name_of
from enqueuer.tasks import TaskSource, is_sequence, length_of
from enqueuer.worker import OnError

T = TypeVar("T")


def positive(name: str, value: object) -> int:
    """Return a count; raise TypeError or ValueError unless it is an int >= 1."""
    return _int(name, value, least=1)


def workers(value: object) -> int:
    """Return how many workers to begin with: of "auto" 1; raise TypeError or ValueError."""
    if value == "auto":
        return 1
    if isinstance(value, str):
        raise ValueError(f"workers must be an int or 'auto', got {value!r}")
    return positive("workers", value)


def max_workers(value: object, is_auto: bool) -> int | None:
    """Return how many workers "auto" may have; raise TypeError or ValueError."""
    if value is None:
        return None
    if not is_auto:
        raise ValueError("max_workers is about workers='auto'; give that with it")
    return positive("max_workers", value)


def either(name: str, value: T | None, old_name: str, old: T | None) -> T | None:
    """Return what was given by its name or its old one; raise TypeError if both were."""
    if old is None:
        return value
    if value is not None:
        raise TypeError(f"{old_name} is the old name of {name}; give one of them")
    return old


def count(name: str, value: object) -> int:
    """Return a number of things; raise TypeError or ValueError unless it is an int >= 0."""
    return _int(name, value, least=0)


def rank(rank: object, world_size: object) -> tuple[int, int]:
    """Return rank and world size; raise TypeError or ValueError unless they fit."""
    size, own = positive("world_size", world_size), count("rank", rank)
    if own >= size:
        raise ValueError(f"rank must be < world_size, got rank={own} with world_size={size}")
    return own, size


def on_error(value: object) -> OnError:
    """Return what to do about an error; raise TypeError or ValueError if it is nothing of it."""
    if callable(value):
        return value
    if not isinstance(value, str):
        raise TypeError(f"on_error must be 'raise', 'skip' or a callable, got {value!r}")
    match value:
        case "raise":
            return "raise"
        case "skip":
            return "skip"
        case _:
            raise ValueError(f"on_error must be 'raise', 'skip' or a callable, got {value!r}")


def function(name: str, value: object, of: str) -> None:
    """Raise TypeError unless a value is None or can be called."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a function {of} or None, got {value!r}")


def elements(sequence: object, map: object, shuffle: object) -> None:
    """Raise TypeError or ValueError unless tasks can be made of these."""
    if isinstance(sequence, (Mapping, Set)):
        raise TypeError(
            f"OrderedEnqueuer needs elements with an order, got {an(type(sequence).__name__)}; "
            "pass sorted(...) or list(...) of it"
        )
    function("map", map, "of an element")
    if is_indexable(sequence):
        return
    if is_sequence(sequence):
        length = length_of(sequence)
        if length is not None:
            _int("num_batches of the sequence", length, least=0)
        elif shuffle:
            raise ValueError(
                "shuffle needs the number of elements, but num_batches of the sequence is None; "
                "draw a random element in its __getitem__ instead"
            )
        return
    if not isinstance(sequence, Iterable):
        if callable(sequence):
            raise TypeError(
                f"OrderedEnqueuer needs a sequence or an iterable, got the function "
                f"{name_of(sequence)}; call it, or use GeneratorEnqueuer"
            )
        if hasattr(sequence, "__getitem__"):
            raise TypeError(
                f"OrderedEnqueuer needs the length of its sequence, and {sequence!r} has no "
                "__len__; give it one, or num_batches. Is it endless? Then num_batches is None"
            )
        raise TypeError(f"OrderedEnqueuer needs a sequence or an iterable, got {sequence!r}")
    if map is None:
        raise ValueError(
            "an iterable without __len__ and __getitem__ needs map, the work to be done on each "
            "element; to read it ahead as it is, use GeneratorEnqueuer or prefetch"
        )
    if shuffle:
        raise ValueError("shuffle needs __len__ and __getitem__; an iterable comes as it is")


def seed(value: object) -> int:
    """Return a random seed; raise TypeError or ValueError unless it is an int >= 0."""
    return _int("random_seed", value, least=0, kind="an int or None")


def seconds(name: str, value: float) -> float:
    """Return a time; raise TypeError or ValueError unless it is a number >= 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be seconds or None, got {value!r}")
    if math.isnan(value) or value < 0:
        raise ValueError(f"{name} must be >= 0 seconds, got {value!r}")
    return min(float(value), threading.TIMEOUT_MAX / 2)


def wait_limit(name: str, value: float | None) -> float | None:
    """Return how long to wait at most; raise TypeError or ValueError unless None or a time > 0."""
    if value is None:
        return None
    limit = seconds(name, value)
    if limit == 0:
        raise ValueError(f"{name} must be > 0 seconds or None, got {value!r}")
    return limit


def backend_name(backend: object, use_multiprocessing: object) -> BackendName:
    """Return the backend that the modern option, or the Keras one, asks for."""
    if not isinstance(use_multiprocessing, bool):
        raise TypeError(
            f"use_multiprocessing must be True or False, got {use_multiprocessing!r}; "
            "options such as workers go by name"
        )
    match backend:
        case None:
            return "process" if use_multiprocessing else "thread"
        case "thread" if use_multiprocessing:
            raise ValueError("use_multiprocessing=True and backend='thread' contradict each other")
        case "thread":
            return "thread"
        case "process":
            return "process"
        case "ray" if use_multiprocessing:
            raise ValueError("use_multiprocessing=True and backend='ray' contradict each other")
        case "ray":
            return "ray"
        case _:
            raise ValueError(f"backend must be 'thread', 'process' or 'ray', got {backend!r}")


def cluster(
    backend: BackendName, address: object, ray_options: object, writable: object
) -> Cluster:
    """Return what Ray is told; raise TypeError or ValueError if that cannot be."""
    for name, value in (("address", address), ("ray_options", ray_options)):
        if value is not None and backend != "ray":
            raise ValueError(f"{name} is about Ray; give backend='ray' with it")
    if address is not None and not isinstance(address, str):
        raise TypeError(f"address must be a string or None, got {address!r}")
    if address is not None and address.startswith("ray://"):
        raise ValueError(
            f"address={address!r} is that of Ray Client, which cannot stream; run the program on a "
            "node of the cluster, with address='auto'"
        )
    if ray_options is not None and not isinstance(ray_options, Mapping):
        raise TypeError(f"ray_options must be a mapping or None, got {ray_options!r}")
    options = {} if ray_options is None else dict(ray_options)
    taken = sorted(_NOT_FOR_ACTORS & set(options))
    if taken:
        raise ValueError(
            f"ray_options cannot set {', '.join(taken)}, which the enqueuer needs itself; it takes "
            "what says where actors run and with what: num_cpus, num_gpus, memory, resources, "
            "scheduling_strategy, runtime_env ..."
        )
    return Cluster(address, options, bool(writable))


_NOT_FOR_ACTORS = frozenset(
    {
        *("concurrency_groups", "max_concurrency", "max_restarts", "max_task_retries"),
        *("name", "namespace", "get_if_exists", "lifetime", "max_pending_calls"),
    }
)


def start_method(mp_context: object, source: Source | TaskSource, backend: BackendName) -> str:
    """Return how processes are started; "" for threads and Ray."""
    if mp_context is not None and backend != "process":
        raise ValueError("mp_context is about processes; give backend='process' with it")
    method: object = mp_context
    if isinstance(mp_context, BaseContext):
        method = mp_context.get_start_method(allow_none=True)
    if backend != "process":
        return ""
    if method is None:
        return "fork" if isinstance(source, LiveSource) else default_method()
    if method not in METHODS:
        raise ValueError(
            f"mp_context must be one of {', '.join(map(repr, METHODS))}, or a context of "
            f"multiprocessing, got {mp_context!r}"
        )
    return str(method)


def threads_per_worker(value: object, backend: BackendName) -> int | None:
    """Return the limit of native threads; raise TypeError or ValueError if that cannot be."""
    if value is None:
        return None
    if backend != "process":
        raise ValueError("threads_per_worker is about processes; give backend='process' with it")
    return positive("threads_per_worker", value)


def progress(value: Progress) -> Progress:
    """Return what is to be shown; raise TypeError if it is neither a bool nor a class."""
    if isinstance(value, bool) or callable(value):
        return value
    raise TypeError(f"progress must be True, False or a class such as tqdm, got {value!r}")


def forward_logs(value: object, start_method: str) -> bool | str:
    """Return how logs travel; raise ValueError if that cannot be."""
    if isinstance(value, bool):
        return value
    if value != MULTIPROCESSING_LOGGING:
        raise ValueError(
            f"forward_logs must be True, False or '{MULTIPROCESSING_LOGGING}', got {value!r}"
        )
    if start_method != "fork":
        raise ValueError(
            f"forward_logs='{MULTIPROCESSING_LOGGING}' works with forked processes only "
            "(backend='process', mp_context='fork'); leave it True for all others"
        )
    return MULTIPROCESSING_LOGGING


def path(name: str, value: object) -> str | None:
    """Return the name of a file; raise TypeError unless it is one, or None."""
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise TypeError(f"{name} must be the path of a file or None, got {value!r}")
    return str(os.fspath(value))


def _int(name: str, value: object, least: int, kind: str = "an int") -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be {kind}, got {value!r}")
    number = int(value.__index__())
    if number < least:
        raise ValueError(f"{name} must be >= {least}, got {number}")
    return number
