"""Options that belong together: Processes and Ray, for `backend=`, and Auto, for `workers=`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from typing import Any, Literal

from enqueuer.backends.job import METHODS, RayOptions
from enqueuer.common import checks
from enqueuer.workers.logs import MULTIPROCESSING_LOGGING

# The enqueuer sets these itself, or an actor would not do what the enqueuer relies on.
_NOT_FOR_ACTORS = frozenset(
    {
        *("concurrency_groups", "max_concurrency", "max_restarts", "max_task_retries"),
        *("name", "namespace", "get_if_exists", "lifetime", "max_pending_calls"),
    }
)


def option(default: Any, check: Callable[[str, Any], Any]) -> Any:
    """Return a field of a `Checked` class.

    Args:
        default: Its default.
        check: Function of its name and a value that returns the value to keep, or raises.
    """
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True)
class Checked:
    """Options whose values are checked when they are given; all fields are made by `option`."""

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            value = one.metadata["check"](one.name, getattr(self, one.name))
            object.__setattr__(self, one.name, value)


def check_forked(forward_logs: bool | str, start_method: str) -> None:
    """Raise ValueError unless records can be forwarded so from processes that are started so."""
    if forward_logs == MULTIPROCESSING_LOGGING and start_method != "fork":
        raise ValueError(
            f"forward_logs='{MULTIPROCESSING_LOGGING}' works with forked processes only: give "
            "start_method='fork' with it, or leave it True"
        )


def _start_method(name: str, value: object) -> str | None:
    # A context is replaced by its name, so that the options can be pickled and compared.
    method = value.get_start_method(allow_none=True) if isinstance(value, BaseContext) else value
    if method is None or method in METHODS:
        return method
    raise ValueError(
        f"{name} must be one of {', '.join(map(repr, METHODS))}, or a context of "
        f"multiprocessing, got {value!r}"
    )


def _forward_logs(name: str, value: object) -> object:
    if isinstance(value, bool) or value == MULTIPROCESSING_LOGGING:
        return value
    raise ValueError(f"{name} must be True, False or '{MULTIPROCESSING_LOGGING}', got {value!r}")


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def _address(name: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} must be a string or None, got {value!r}")
    if value is not None and value.startswith("ray://"):
        raise ValueError(
            f"{name}={value!r} is that of Ray Client, which cannot stream; run the program "
            "on a node of the cluster, with address='auto'"
        )
    return value


def _actor_options(name: str, value: object) -> Mapping[str, Any] | None:
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping or None, got {value!r}")
    taken = sorted(_NOT_FOR_ACTORS.intersection(value or ()))
    if taken:
        raise ValueError(
            f"{name} cannot set {', '.join(taken)}, which the enqueuer needs itself; it "
            "takes resources and placement: num_cpus, num_gpus, memory, resources, "
            "scheduling_strategy, runtime_env ..."
        )
    return value


@dataclass(frozen=True)
class Processes(Checked):
    """Options of `backend=Processes(...)`; `backend="process"` is `Processes()`.

    Args:
        start_method: Start method of the processes: `"fork"`, `"forkserver"`, `"spawn"` or a
            context of `multiprocessing`. None, the default, selects `"forkserver"` (`"spawn"` on
            systems without it), which is safe with threads and CUDA; for a running iterator
            `"fork"`, because no other method can pass it to a process.
        threads: Number of threads that OpenMP, BLAS, torch and OpenCV may each run in a worker
            process. None, the default, divides the CPUs by the number of workers (with
            `workers=Auto(most=n)` by n), at least 1, so that workers do not compete for CPUs;
            `OMP_NUM_THREADS` and the like in the environment take precedence. A library that was
            loaded before a fork runs on 1 thread, except OpenBLAS.
        forward_logs: Whether the handlers of this process receive the log records of workers.
            True by default; False leaves the records in the worker. `"multiprocessing-logging"`
            uses that package instead, for forked workers only.
        keep_freed_memory: Whether a worker keeps up to 256 MiB of the memory that its batches
            free, instead of returning it to the system and getting it again for the next one.
            True by default; it applies to glibc, and variables such as
            `MALLOC_TRIM_THRESHOLD_` in the environment take precedence.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range.

    Example:
        >>> from enqueuer import GeneratorEnqueuer, Processes
        >>> def squares(shard):
        ...     for number in shard.split(range(4)):
        ...         yield number**2
        >>> with GeneratorEnqueuer(squares, workers=2, backend=Processes(threads=1)) as enqueuer:
        ...     list(enqueuer)
        [0, 1, 4, 9]
    """

    start_method: str | BaseContext | None = option(None, _start_method)
    threads: int | None = option(None, checks.optional(checks.positive))
    forward_logs: bool | Literal["multiprocessing-logging"] = option(True, _forward_logs)
    keep_freed_memory: bool = option(True, _flag)

    def __post_init__(self) -> None:
        super().__post_init__()
        # What it is by default depends on the source.
        if isinstance(self.start_method, str):
            check_forked(self.forward_logs, self.start_method)


@dataclass(frozen=True)
class Ray(Checked):
    """Options of `backend=Ray(...)`; `backend="ray"` is `Ray()`.

    Args:
        address: Address of the Ray cluster, as `ray.init` takes it: `"auto"`, or `"host:6379"`.
            None, the default, is the Ray that this process is connected to, else the one that
            `ray.init()` finds or starts. A Ray that the enqueuer connected to or started is shut
            down when the last enqueuer that uses it stops.
        actor_options: Resources and placement of each actor, as `Actor.options()` of Ray takes
            them: `num_cpus`, `num_gpus`, `memory`, `resources`, `runtime_env`,
            `scheduling_strategy` (`"SPREAD"` by default). None, the default, is what Ray gives
            any actor, which takes no CPU away from others.
        copy_arrays: Whether large arrays from an actor are copied on arrival, so that they are
            writable. False, the default: they lie read-only in Ray's object store. The other
            backends always deliver writable arrays.
        forward_logs: Whether the handlers of this process receive what an actor logs; True by
            default.
        keep_freed_memory: Whether an actor keeps up to 256 MiB of the memory that its batches
            free, instead of returning it to the system and getting it again for the next one.
            True by default; it applies to glibc, and variables such as
            `MALLOC_TRIM_THRESHOLD_` in the environment take precedence.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range.

    Example:
        >>> from enqueuer import Ray
        >>> Ray(actor_options={"num_cpus": 1}).address is None
        True
    """

    address: str | None = option(None, _address)
    actor_options: Mapping[str, Any] | None = option(None, _actor_options)
    copy_arrays: bool = option(False, _flag)
    forward_logs: bool = option(True, _flag)
    keep_freed_memory: bool = option(True, _flag)

    def for_job(self) -> RayOptions:
        """Return what the backend needs to know of Ray."""
        return RayOptions(self.address, dict(self.actor_options or {}), self.copy_arrays)


@dataclass(frozen=True)
class Auto(Checked):
    """Options of `workers=Auto(...)`; `workers="auto"` is `Auto()`.

    An enqueuer begins with `first` workers. It starts and ends workers while it runs, until the
    loop no longer waits or more workers do not help.

    Args:
        most: Largest number of workers. None, the default: as many as help and as memory holds,
            at most 128; of Ray actors as many as the cluster has CPUs. There are never more
            workers than shards. Where `concurrency` is chosen for threads that make batches, this
            is also the largest number of elements at once in each.
        first: Number of workers to begin with; 1 by default.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range, or `first` is more than `most`.

    Example:
        >>> from enqueuer import Auto, OrderedEnqueuer
        >>> with OrderedEnqueuer(["one", "three"], len, workers=Auto(most=4)) as enqueuer:
        ...     list(enqueuer)
        [3, 5]
    """

    most: int | None = option(None, checks.optional(checks.positive))
    first: int = option(1, checks.positive)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most is not None and self.first > self.most:
            raise ValueError(f"first={self.first} is more than most={self.most}")
