"""The options that every enqueuer takes: each is defined, checked and documented here, once.

`Processes` and `Ray`, for `backend=`, and `Auto`, for `workers=`, are options that belong together.

To add one: a field of `Options` with its check, an entry in its docstring, and a line in
`CommonOptions`, which type checkers read. The signatures and docstrings of the enqueuers follow.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, cast, get_type_hints

from enqueuer.backends.job import METHODS, BackendName, RayOptions, default_method
from enqueuer.common import checks
from enqueuer.common.text import warn
from enqueuer.errors import EnqueuerWarning
from enqueuer.monitoring.progress import Progress
from enqueuer.workers.logs import MULTIPROCESSING_LOGGING
from enqueuer.workers.plan import OnError
from enqueuer.workers.settings import Initializer
from enqueuer.workers.shards import fresh_seed
from enqueuer.workers.sources import LiveSource, Source
from enqueuer.workers.tasks import TaskSource

if sys.version_info >= (3, 11):
    from typing import Unpack as Unpack
elif TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack
else:

    class Unpack:
        """Stand-in for Python 3.10, so that `typing.get_type_hints` works."""

        def __class_getitem__(cls, options):
            return Any


# Workers; each may have a connection to a server, which may refuse more.
MAX_WORKERS = 128

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
        for entry in dataclasses.fields(self):
            value = entry.metadata["check"](entry.name, getattr(self, entry.name))
            object.__setattr__(self, entry.name, value)


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


def _initializer(name: str, value: object) -> object:
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a function or None, got {value!r}")
    return value


def _initargs(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a tuple of arguments, got {value!r}")
    return tuple(value)


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


@checks.suggests_options
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
        initializer: Function that each worker process calls before it loads the source, whatever
            its start method: it sets what the source relies on, such as a variable of a module.
            Its exceptions become `StartError`. None, the default, calls nothing. With `workers=0`
            it is not called, as the loop's process has what the program has set.
        initargs: Arguments of `initializer`; none by default.

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
    keep_freed_memory: bool = option(True, checks.flag)
    initializer: Callable[..., object] | None = option(None, _initializer)
    initargs: Iterable[Any] = option((), _initargs)

    def __post_init__(self) -> None:
        super().__post_init__()
        # What it is by default depends on the source.
        if isinstance(self.start_method, str):
            check_forked(self.forward_logs, self.start_method)


@checks.suggests_options
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
        initializer: Function that each actor calls before it loads the source: it sets what the
            source relies on, such as a variable of a module. Its exceptions become `StartError`.
            None, the default, calls nothing, and so does `workers=0`.
        initargs: Arguments of `initializer`; none by default.

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
    copy_arrays: bool = option(False, checks.flag)
    forward_logs: bool = option(True, checks.flag)
    keep_freed_memory: bool = option(True, checks.flag)
    initializer: Callable[..., object] | None = option(None, _initializer)
    initargs: Iterable[Any] = option((), _initargs)

    def for_job(self) -> RayOptions:
        """Return what the backend needs to know of Ray."""
        return RayOptions(self.address, dict(self.actor_options or {}), self.copy_arrays)


@checks.suggests_options
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


Decorated = TypeVar("Decorated", bound=Callable[..., Any])
_BY_NAME = inspect.Parameter.KEYWORD_ONLY
# Arguments of the enqueuers that a function for one loop does not take, or not by this name.
_NOT_FOR_ONE_LOOP = ("epochs", "sequence", "map")

Backends = BackendName | Processes | Ray
Workers = int | Literal["auto"] | Auto
Concurrency = int | Literal["auto"] | None


class CommonOptions(TypedDict, total=False):
    """Types of the options of every enqueuer, and of `prefetch` and `imap`; see `Options`."""

    workers: Workers
    backend: Backends | None
    max_queue_bytes: int | None
    ordered: bool
    on_error: OnError
    max_errors: int | None
    max_restarts: int
    rank: int
    world_size: int
    drop_last: bool
    progress: Progress
    stall_timeout: float | None
    timeout: float | None
    element_timeout: float | None
    trace: str | os.PathLike[str] | None


class EnqueuerOptions(CommonOptions, total=False):
    """The same with what `prefetch` and `imap` lack, or have a default of their own for."""

    max_queue_size: int
    epochs: float | None


# Type checkers read these in the overloads, which differ only in what decides the type of a batch.
class NoBatches(TypedDict, total=False):
    """Types of the options where each item, or result, comes alone."""

    batch_size: None
    collate: None


class ShardOptions(CommonOptions, total=False):
    """Types of the options of `prefetch` that do not change the type of a batch."""

    use_multiprocessing: bool
    random_seed: int | None
    shards: int | None
    shuffle_buffer: int | None


class TaskOptions(CommonOptions, total=False):
    """Types of the options of `imap` that do not change the type of a batch."""

    use_multiprocessing: bool
    concurrency: Concurrency
    random_seed: int | None


def _checked_workers(name: str, value: object) -> int | Auto:
    if isinstance(value, Auto):
        return value
    if value == "auto":
        return Auto()
    if isinstance(value, str):
        raise ValueError(f"{name} must be an int, 'auto' or Auto(...), got {value!r}")
    return checks.count(name, value)


def _checked_backend(name: str, value: object) -> Literal["thread"] | Processes | Ray:
    match value:
        case None | "thread":
            return "thread"
        case "process":
            return Processes()
        case "ray":
            return Ray()
        case Processes() | Ray():
            return value
    raise ValueError(
        f"{name} must be 'thread', 'process', 'ray', Processes(...) or Ray(...), got {value!r}"
    )


def on_error(name: str, value: object) -> OnError:
    """Return a reaction to errors; raise TypeError or ValueError if it is none."""
    if callable(value):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{name} must be 'raise', 'skip' or a callable, got {value!r}")
    if value not in ("raise", "skip"):
        raise ValueError(f"{name} must be 'raise', 'skip' or a callable, got {value!r}")
    return cast(OnError, value)


def _truth(name: str, value: object) -> bool:
    return bool(value)


def checked_order(name: str, value: object) -> bool:
    """Return whether items come in order; raise TypeError unless it is True or False."""
    # That of numpy has one of these names, too.
    if type(value).__name__ not in ("bool", "bool_"):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def _checked_epochs(name: str, value: object) -> float | None:
    if value is None or value == math.inf:
        return value
    return checks.integer(name, value, 1, "an int, math.inf or None")


def _checked_progress(name: str, value: Progress) -> Progress:
    if isinstance(value, bool) or callable(value):
        return value
    raise TypeError(f"{name} must be True, False or a class such as tqdm, got {value!r}")


@dataclass
class Seed:
    """The seed of an enqueuer.

    Attributes:
        value: Seed from which all others derive.
        is_explicit: Whether the user gave it.
        is_shared: Whether all ranks are known to have the same seed.
    """

    value: int
    is_explicit: bool
    is_shared: bool

    @classmethod
    def of(cls, number: int | None, world_size: int) -> Seed:
        """Return the seed that was given, or draw one.

        Raises:
            TypeError: It is not an int.
            ValueError: It is negative.
        """
        is_explicit = number is not None
        value = fresh_seed() if number is None else checks.seed(number)
        return cls(value, is_explicit, is_explicit or world_size == 1)


@dataclass(frozen=True)
class Options(Checked):
    """The options of an enqueuer, checked.

    Args:
        workers: Number of threads, processes or Ray actors; 1 by default. Without `shards`, the
            batches of a generator function depend on this number. 0 makes each batch in
            the loop's own thread when the loop asks for it, for debuggers; the batches are the
            same as with workers, and nothing is made ahead. `"auto"`, or
            `Auto(most=...)`, begins with 1 and changes the number while the enqueuer runs. Such
            a change in the middle of an epoch runs shards again up to their positions, so their
            generators must be deterministic, as for `max_restarts`.
        backend: `"thread"`, the default: cheap, and enough if the work waits (files, network) or
            releases the GIL (numpy, PIL). `"process"`, or `Processes(...)`: for work in Python.
            `"ray"`, or `Ray(...)`: for more than one machine; each worker is a Ray actor, on any
            node with free resources (extra `ray`).
        max_queue_size: Largest number of finished batches that wait, over all workers; 10 by
            default, as in Keras. Each worker may hold one more that it cannot send yet.
        max_queue_bytes: Largest number of bytes that wait, over all workers. None, the default:
            no limit. Shards: each worker has an equal part of the limit, and a larger batch
            stays in the worker until the loop needs it. Tasks: the limit is divided by the size
            of the largest result so far. Processes count the bytes that they send; threads count
            arrays, tensors, strings, numbers and PIL images, also in attributes.
        ordered: True, the default, gives batches in an order that does not depend on timing: one
            of each shard in turn, or tasks in the order of their elements. False takes any
            batch that is ready, so that none that takes long holds up others.
        on_error: Reaction to an exception of the generator, or of one element. `"raise"`, the
            default: the loop raises it, at the place of the item. `"skip"`: the enqueuer logs it
            with its traceback, counts it in `error_count`, and continues without the item. A
            generator that raised has ended, and with it its shard for this epoch; a batch of
            elements is smaller. A callable: like `"skip"` without the log record; the worker
            calls it with the exception, and its result, unless None, replaces the item. If an
            item cannot be sent between processes, only this item is skipped.
        max_errors: Number of errors that may be skipped; the next one is raised. None, the
            default: no limit.
        max_restarts: Number of dead worker processes, or actors, that are replaced, in total. 0,
            the default: the first death raises `WorkerDied`. The new worker runs its shards again
            up to the first item that has not arrived, or the tasks that the dead worker had, so
            that no batch is lost or comes twice.
        rank: Index of this training process, from 0, among `world_size`. It gets the shards, or
            the elements of the epoch's order, `rank`, `rank + world_size` and so on; all
            processes need the same `random_seed`.
        world_size: Number of training processes that share the data; 1 by default.
        drop_last: Whether each rank gets the same number of shards or elements, and an incomplete
            last batch, of elements or of the samples of a shard, is left out; False by default.
        epochs: Number of epochs that the loop reads, counted from epoch 0; `math.inf` if it reads
            on without an end. The workers then begin an epoch while the loop reads the one before,
            within the limits of the queue, so the source must not change between epochs. They
            begin none after the last. Iterables, sequences with `on_epoch_begin` or
            `on_epoch_end`, and shards with `ordered=False` or on Ray actors wait for the loop.
            None, the default: nothing of a further epoch is made ahead.
        progress: Whether a `for` loop over the enqueuer shows a progress bar with batches, rate,
            waiting time, queue and workers; False by default. True shows it on a terminal and in
            a notebook, and needs tqdm. A class, such as `tqdm.rich.tqdm`, is used instead of
            tqdm's default.
        stall_timeout: Seconds without a batch after which a `StallWarning` shows the Python
            stack of each busy worker; the loop continues to wait. 60 by default, which is longer
            than most batches take. None: no warning.
        timeout: Seconds without a batch after which the loop raises `BatchTimeout`, with the same
            text. No batch is lost: iterating again continues with the next one. None, the
            default: no timeout.
        element_timeout: Seconds that one element may take in a worker process, or one item of a
            shard, until it is asked for the next one. Then the worker is killed and replaced,
            which is no restart of `max_restarts`, and `on_error` decides about an
            `ElementTimeout`. Only processes can be ended, so it needs `backend="process"`. None,
            the default: no limit.
        trace: Path of a file for a timeline of each worker and the loop, for Perfetto and
            chrome://tracing. None, the default: nothing is recorded, at no cost. `start()`
            replaces an older trace; any other existing file raises `FileExistsError`. Recording
            ends at 256 MB. Each rank, and each worker of a DataLoader, writes its own file:
            `run.1-of-4.json`. Ray actors are recorded only on this machine.

    Example:
        >>> options = Options(workers="auto", backend="process")
        >>> options.is_auto, options.first_workers, options.backend_name
        (True, 1, 'process')
        >>> Options(max_queue_size=0)
        Traceback (most recent call last):
            ...
        ValueError: max_queue_size must be >= 1, got 0
    """

    workers: Workers = option(1, _checked_workers)
    backend: Backends | None = option(None, _checked_backend)
    max_queue_size: int = option(10, checks.positive)
    max_queue_bytes: int | None = option(None, checks.optional(checks.positive))
    ordered: bool = option(True, checked_order)
    on_error: OnError = option("raise", on_error)
    max_errors: int | None = option(None, checks.optional(checks.count))
    max_restarts: int = option(0, checks.count)
    rank: int = option(0, checks.count)
    world_size: int = option(1, checks.positive)
    drop_last: bool = option(False, _truth)
    epochs: float | None = option(None, _checked_epochs)
    progress: Progress = option(False, _checked_progress)
    stall_timeout: float | None = option(60.0, checks.wait_limit)
    timeout: float | None = option(None, checks.wait_limit)
    element_timeout: float | None = option(None, checks.wait_limit)
    trace: str | os.PathLike[str] | None = option(None, checks.path)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.rank(self.rank, self.world_size)
        if self.element_timeout is not None and (self.is_inline or self.backend_name != "process"):
            raise ValueError(
                f"element_timeout={self.element_timeout:g} needs backend='process' and workers: "
                "a thread that hangs cannot be killed, nor can an element of a Ray actor be told. "
                "timeout=... limits the wait of the loop with any workers"
            )

    @classmethod
    def of(
        cls, made: Callable[..., Any], use_multiprocessing: object, keywords: EnqueuerOptions
    ) -> Options:
        """Return the options of a constructor that also takes Keras' `use_multiprocessing`.

        Args:
            made: Class of the enqueuer, whose options a wrong name is answered with.
            use_multiprocessing: Keras' name for `backend="process"`.
            keywords: Options by name.

        Raises:
            TypeError: An option has the wrong type, or does not exist.
            ValueError: An option is out of its range, or two contradict each other.
        """
        if not isinstance(use_multiprocessing, bool):
            raise TypeError(
                f"use_multiprocessing must be True or False, got {use_multiprocessing!r}; "
                "options such as workers go by name"
            )
        checks.names(made, keywords, {entry.name for entry in dataclasses.fields(cls)})
        if use_multiprocessing and keywords.get("backend") is None:
            return cls(**cast(EnqueuerOptions, {**keywords, "backend": "process"}))
        options = cls(**keywords)
        if options.max_restarts and options.backend_name == "thread":
            warn(
                "max_restarts has no effect with threads, which do not die apart from the "
                "program; give backend='process' with it, or leave it out",
                EnqueuerWarning,
            )
        if use_multiprocessing and options.backend_name != "process":
            raise ValueError(
                f"use_multiprocessing=True and backend={options.backend_name!r} contradict each "
                "other: use_multiprocessing is Keras' name for backend='process'; leave it out"
            )
        return options

    @property
    def backend_name(self) -> BackendName:
        """The kind of the workers."""
        match self.backend:
            case Processes():
                return "process"
            case Ray():
                return "ray"
        return "thread"

    @property
    def is_auto(self) -> bool:
        """Whether the number of workers changes by itself."""
        return isinstance(self.workers, Auto)

    @property
    def is_inline(self) -> bool:
        """Whether the loop's own thread makes the batches."""
        return self.workers == 0

    @property
    def has_globals(self) -> bool:
        """Whether workers have global random states of their own, which are seeded."""
        return self.backend_name != "thread"

    def max_workers(self, cpus: float) -> int:
        """Return the largest number of workers that `workers="auto"` may start.

        Args:
            cpus: Number of CPUs that the backend has.
        """
        if isinstance(self.workers, Auto) and self.workers.most is not None:
            return self.workers.most
        if self.backend_name == "ray":
            # How much of their machines the actors use is not known here.
            return max(1, int(cpus))
        # How many of these help is measured: the time that they compute, and their memory.
        return MAX_WORKERS

    @property
    def first_workers(self) -> int:
        """The number of workers to begin with."""
        if isinstance(self.workers, Auto):
            return self.workers.first
        return self.workers if isinstance(self.workers, int) else 1

    @property
    def forward_logs(self) -> bool | str:
        """How logs of workers reach this process; threads log here anyway."""
        return True if isinstance(self.backend, (str, type(None))) else self.backend.forward_logs

    @property
    def initializer(self) -> Initializer | None:
        """What workers in other processes call before they load the source."""
        backend = self.backend
        if not isinstance(backend, (Processes, Ray)) or backend.initializer is None:
            return None
        return Initializer(backend.initializer, tuple(backend.initargs))

    def start_method(self, source: Source | TaskSource) -> str:
        """Return how processes are started; "" for threads and Ray."""
        if not isinstance(self.backend, Processes):
            return ""
        default = "fork" if isinstance(source, LiveSource) else default_method()
        method = cast("str | None", self.backend.start_method) or default
        check_forked(self.backend.forward_logs, method)
        return method

    def explicit(self) -> dict[str, Any]:
        """Return the arguments that make another enqueuer with the same options.

        The bar is left out: only the enqueuer that the loop iterates over shows one.
        """
        names = [entry.name for entry in dataclasses.fields(self) if entry.name != "progress"]
        return {name: getattr(self, name) for name in names}


def takes_options(made: Decorated) -> Decorated:
    """Write the options into the signature and the docstring of a class.

    The docstring has a line `{options}` where their descriptions belong. Options that the class
    itself names in its signature are left out.
    """
    # Evaluated, as the names of these types say nothing to a reader of the signature.
    types = get_type_hints(Options)
    options = [
        inspect.Parameter(o.name, _BY_NAME, default=o.default, annotation=types[o.name])
        for o in dataclasses.fields(Options)
    ]
    return _written(made, made.__init__, options)


def passes_options(kind: type) -> Callable[[Decorated], Decorated]:
    """Return `takes_options` for a function that makes an enqueuer for one loop.

    Args:
        kind: Class of the enqueuer, most of whose arguments the function takes by name.
    """
    arguments = inspect.signature(kind).parameters.values()
    options = [
        named.replace(kind=_BY_NAME) for named in arguments if named.name not in _NOT_FOR_ONE_LOOP
    ]
    return lambda made: _written(made, made, options)


def check_for_one_loop(made: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise TypeError for an option that a function does not take, or that only the classes have.

    Args:
        made: The function, which makes an enqueuer for one loop.
        options: Options that it was given.
    """
    if "epochs" in options:
        raise TypeError(
            "prefetch() and imap() give one epoch; give epochs=... to an enqueuer, and iterate "
            "over that once for each"
        )
    for name in _NOT_FOR_ONE_LOOP:
        if name in options:
            raise TypeError(
                f"prefetch() and imap() take no {name}=...: only the enqueuers have it. "
                "prefetch() takes a generator, and imap() a function and its elements"
            )
    checks.names(made, options)


def _written(made: Decorated, function: Any, options: list[inspect.Parameter]) -> Decorated:
    *named, last = (p for p in inspect.signature(function).parameters.values() if p.name != "self")
    assert last.kind is inspect.Parameter.VAR_KEYWORD, "it ends with **options"
    types = get_type_hints(function)
    named = [parameter.replace(annotation=types[parameter.name]) for parameter in named]
    names = {parameter.name for parameter in named}
    options = [option for option in options if option.name not in names]
    signature = inspect.Signature(
        [*named, *options],
        return_annotation=inspect.Signature.empty if function is not made else types["return"],
    )
    # setattr, as type checkers know no such attribute of a function.
    setattr(made, "__signature__", signature)  # noqa: B010
    # With `python -OO` there are no docstrings.
    if made.__doc__ is not None:
        added = {option.name for option in options}
        described = "\n".join(text for name, text in _descriptions() if name in added)
        before, after = made.__doc__.split("{options}")
        # Python 3.13 strips the indent of docstrings, so it is taken from the line itself.
        indent = " " * (len(before) - before.rindex("\n") - 1)
        made.__doc__ = before + described.replace("\n", f"\n{indent}") + after
    return made


@functools.cache
def _descriptions() -> list[tuple[str, str]]:
    """Return the name and the description of each option, as the docstring of `Options` has it."""
    text = inspect.cleandoc(Options.__doc__ or "").split("Args:\n", 1)[1].split("\n\n", 1)[0]
    # Each begins with a line that is not indented.
    entries = re.split(r"\n(?! )", textwrap.dedent(text))
    return [(entry.split(":", 1)[0], entry) for entry in entries]
