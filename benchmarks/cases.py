"""What is measured. A case has rows; a row is one number for each contestant.

Each function here runs in a fresh process, which is the consumer, and measures one row.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import machine
import sources
from contestants import METHODS, Contestant, Setup, Tasks

_MB = 1_000_000
_LARGE = 64 * 224 * 224 * 3  # bytes of a batch of images in uint8

_WAIT_S = 0.020  # of latency-bound work, for each item
_STEPS = 50_000  # of CPU-bound work: about 3 ms
_WORKERS = 4  # that start and stop
_STEP_S, _STEP_COUNT = 0.020, 50  # of the loop whose memory is measured: half as fast as training
_LOOK_S = 0.001  # between two looks at the clock
_SAMPLE_S = 0.02  # between two looks at the memory

_AHEAD = 4  # batches of images or spectrograms that may wait
_FILLED = 1_250_000  # numbers of an array that a task makes: 5 MB
_ROW = (3, 64, 64)
_EVERY, _TASK_S, _SLOW_S = 20, 0.003, 0.060  # one task of so many is slow

Measure = Callable[[Contestant, Any, float], float | None]


class Missing(Exception):
    """What is to be measured is not there."""


@dataclass(frozen=True)
class Case:
    """What is measured, and who takes part.

    Attributes:
        title: For the table.
        unit: Of the numbers.
        rows: The name of each row and what `measure` is told of it.
        measure: Takes a contestant, a row's value and the seconds that it may measure; returns
            the number, or None where there is none.
        fits: Whether a contestant can take part.
        more_is_better: Or less is.
        ratios: Whether a ratio of two such numbers means anything.
        threads: Whether the workers are threads, wherever there is a choice.
        quick: The rows of a quick run; none means all.
    """

    title: str
    unit: str
    rows: Mapping[str, Any]
    measure: Measure
    fits: Callable[[Contestant], bool]
    more_is_better: bool = True
    ratios: bool = True
    threads: bool = False
    quick: tuple[str, ...] = ()

    def takes(self, name: str, contestant: Contestant) -> bool:
        """Return whether `contestant` takes part in this case, which is called `name`."""
        if contestant.only is not None:
            return name in contestant.only
        return name not in contestant.never and self.fits(contestant)


# --- how ---


def rate(items: Iterator[Any], warm_up: int, seconds: float) -> float:
    """Return items a second, once `warm_up` items have come."""
    for _ in range(warm_up):
        next(items)
    count, some = 0, 1  # the clock is looked at about every millisecond, or else it counts, too
    start = now = time.perf_counter()
    while True:
        before = now
        deque(itertools.islice(items, some), maxlen=0)
        count += some
        now = time.perf_counter()
        if now - start >= seconds:
            break
        if now - before < _LOOK_S:
            some *= 2
    return count / (now - start)


def _throughput(contestant: Contestant, setup: Setup, seconds: float) -> float:
    with contestant.load()(setup) as items:
        return rate(items, 2 * setup.queue_size + 2, seconds)


def _bandwidth(contestant: Contestant, setup: Setup, seconds: float) -> float:
    return _throughput(contestant, setup, seconds) * setup.item_bytes / 1e9


def _in_place(contestant: Contestant, size: int, seconds: float) -> float:
    if contestant.needs == "enqueuer":
        import enqueuer

        if not hasattr(enqueuer, "empty"):
            raise Missing("this version has no enqueuer.empty")
        setup = Setup(_of(sources.in_place, size), 4, 1, None, size)
        with contestant.load()(setup) as items:
            rate(items, 0, seconds)  # by then all blocks are made: the system clears them first
            return rate(items, 0, seconds) * size / 1e9
    return _bandwidth(contestant, _ring_of(size), seconds)


def _python_work(contestant: Contestant, workers: int, seconds: float) -> float | None:
    if workers > 1 and not contestant.many:
        return None
    setup = Setup(_of(sources.python_work, _STEPS), 8, workers)
    with contestant.load()(setup) as items:
        return rate(items, 4 * workers, seconds)


def _latency(contestant: Contestant, workers: int, seconds: float) -> float | None:
    if workers > 1 and not contestant.many:
        return None
    setup = Setup(
        _of(sources.sleeping, _WAIT_S),
        queue_size=workers + 8,
        workers=workers,
        call=_of(sources.wait, _WAIT_S),
    )
    load = contestant.load_threads if contestant.threads else contestant.load
    with load()(setup) as items:
        return rate(items, 2 * workers + 4, seconds)


def _overlap(contestant: Contestant, row: tuple[str, float, float], seconds: float) -> float:
    """Return how many ms a batch takes beyond the slower of the two sides."""
    how, make_s, use_s = row
    source, use = {
        "sleep": (sources.sleeping, time.sleep),
        "busy": (sources.spinning, sources.spin),
    }[how]
    with contestant.load()(Setup(_of(source, make_s), 4)) as items:
        took = 1 / rate(_used(items, use, use_s), 10, seconds)
    return (took - max(make_s, use_s)) * 1e3


def _used(items: Iterator[Any], use: Callable[[float], None], seconds: float) -> Iterator[Any]:
    for item in items:
        use(seconds)
        yield item


def _first(contestant: Contestant, row: tuple[str | None, bool], seconds: float) -> float:
    """Return the ms from nothing to the first batch; imports of this process count only once."""
    method, is_again = row
    open_, setup = contestant.load(), _small(contestant, method)
    for _ in range(1 + is_again):
        start = time.perf_counter()
        with open_(setup) as items:
            next(items)
            took = time.perf_counter() - start
            for _ in range(2 * _WORKERS):  # torch fails if it ends while a worker still starts
                next(items)
    return took * 1e3


def _stop(contestant: Contestant, row: None, seconds: float) -> float:
    """Return the ms that it takes to end workers whose queues are full."""
    with contestant.load()(_small(contestant, None)) as items:
        for _ in range(20):
            next(items)
        time.sleep(0.3)
        start = time.perf_counter()
    return (time.perf_counter() - start) * 1e3


def _small(contestant: Contestant, method: str | None) -> Setup:
    workers = _WORKERS if contestant.many else 1
    return Setup(_of(sources.sleeping, 0.0), 2 * _WORKERS, workers, method)


def _memory(contestant: Contestant, setup: Setup, seconds: float) -> float:
    """Return the most MB that this process and its children ever had, beyond what it began with."""
    open_ = contestant.load()
    before = machine.memory_of_session()
    peak, done = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(_SAMPLE_S):
            peak = max(peak, machine.memory_of_session())

    watcher = threading.Thread(target=watch)
    with open_(setup) as items:
        watcher.start()
        for _ in range(_STEP_COUNT):
            next(items)
            time.sleep(_STEP_S)
        done.set()
        watcher.join()
    return (peak - before) / _MB


def _consumer_cpu(contestant: Contestant, size: int, seconds: float) -> float:
    """Return the ms of CPU that a batch costs the process that reads it."""
    # With threads the process's own clock would count the workers too.
    clock = time.process_time if contestant.kind == "process" else time.thread_time
    setup = _ring_of(size)
    with contestant.load()(setup) as items:
        rate(items, 2 * setup.queue_size + 2, 0.0)
        start, count = clock(), 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            next(items)
            count += 1
        return (clock() - start) / count * 1e3


def _transformed(contestant: Contestant, row: tuple[str, str, int], seconds: float) -> float:
    """Return items a second."""
    with _transforming(contestant, row) as items:
        return rate(items, 2 * _AHEAD + 2, seconds)


def _transform_cpu(contestant: Contestant, row: tuple[str, str, int], seconds: float) -> float:
    """Return the ms of CPU that an item costs all processes together."""
    with _transforming(contestant, row) as items:
        rate(items, 2 * _AHEAD + 2, 0.0)
        start, count = machine.cpu_of_session(), 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            next(items)
            count += 1
        return (machine.cpu_of_session() - start) / count * 1e3


def _transforming(
    contestant: Contestant, row: tuple[str, str, int]
) -> AbstractContextManager[Iterator[Any]]:
    source, package, workers = row
    if importlib.util.find_spec(package) is None:
        raise Missing(f"{package} is not installed")
    return contestant.load()(Setup(getattr(sources, source), _AHEAD, workers))


def _task_rate(contestant: Contestant, tasks: Tasks, seconds: float) -> float:
    """Return results a second, over whole epochs; the first one is not counted."""
    with contestant.load_tasks()(tasks) as epoch:
        came = sum(1 for _ in epoch())
        if came != tasks.steps:
            raise RuntimeError(f"{came} results came, not {tasks.steps}")
        count, start = 0, time.perf_counter()
        while True:
            deque(epoch(), maxlen=0)
            count += tasks.steps
            took = time.perf_counter() - start
            if took >= seconds:
                return count / took


def _task_bandwidth(contestant: Contestant, tasks: Tasks, seconds: float) -> float:
    return _task_rate(contestant, tasks, seconds) * _FILLED * 4 / 1e9


def _share_of_ideal(contestant: Contestant, tasks: Tasks, seconds: float) -> float:
    """Return the rate as a percentage of that of workers that never wait."""
    mean = ((_EVERY - 1) * _TASK_S + _SLOW_S) / _EVERY
    return _task_rate(contestant, tasks, seconds) / (tasks.workers / mean) * 100


def _of(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    return functools.partial(function, *arguments)  # can be pickled, if `function` can


def _ring_of(size: int) -> Setup:
    count = max(2, min(8, 128 * _MB // size))  # not too much memory
    return Setup(_of(sources.ring, (size,), "uint8", count), 4, item_bytes=size)


# --- what ---


def _is_process(contestant: Contestant) -> bool:
    return contestant.kind == "process"


def _is_ahead(contestant: Contestant) -> bool:
    return contestant.kind != "loop"


def _is_any(contestant: Contestant) -> bool:
    return True


def _has_threads(contestant: Contestant) -> bool:
    return contestant.kind != "process" or contestant.threads or _is_ours(contestant)


def _is_ours(contestant: Contestant) -> bool:
    return contestant.needs == "enqueuer"


def _has_native_threads(contestant: Contestant) -> bool:
    return contestant.name in ("enqueuer-process", "torch", "plain-loop")


def _maps(contestant: Contestant) -> bool:
    return contestant.tasks


def _chooses(method: str) -> Callable[[Contestant], bool]:
    return lambda contestant: method in contestant.methods


_large = Setup(_of(sources.ring, sources.IMAGES, "uint8", 8), 8, item_bytes=_LARGE)
_fresh = Setup(_of(sources.fresh, sources.IMAGES, "uint8"), 8, item_bytes=_LARGE)
_larger = Setup(_of(sources.ring, sources.IMAGES, "float32", 4), 4, item_bytes=4 * _LARGE)

_rows = Tasks(_of(sources.row, _ROW, 2048), 8192, 8, 2, batch_size=64)
_straggle = _of(sources.straggle, _EVERY, _TASK_S, _SLOW_S)

_overlaps = {
    f"{how}, {make}/{use} ms": (how, make / 1e3, use / 1e3)
    for how in ("sleep", "busy")
    for make, use in ((5, 5), (10, 10), (20, 20), (5, 20), (20, 5))
}

_transforms = {
    f"{title}, {workers} worker{'s' * (workers > 1)}": (source, package, workers)
    for title, source, package in (
        ("images, torch", "images_by_torch", "torch"),
        ("log-mel, numpy", "spectrograms_by_numpy", "numpy"),
        ("images, cv2", "images_by_cv2", "cv2"),
    )
    for workers in (1, 2)
}
_quick_transforms = tuple(row for row in _transforms if "2 workers" in row)

CASES = {
    "large": Case(
        "9.6 MB, uint8", "GB/s", {"": _large}, _bandwidth, lambda one: one.kind != "loop"
    ),
    "larger": Case(
        "38.5 MB, float32", "GB/s", {"": _larger}, _bandwidth, lambda one: one.kind != "loop"
    ),
    "in-place": Case(
        "made in shared memory, not filled",
        "GB/s",
        {f"{mb} MB": mb * _MB for mb in (1, 4, 16, 64, 256)},
        _in_place,
        _is_ours,
        quick=("1 MB", "16 MB", "256 MB"),
    ),
    "tiny": Case(
        "dict of 2 small arrays", "items/s", {"": Setup(sources.tiny, 256)}, _throughput, _is_any
    ),
    "ints": Case("ints", "items/s", {"": Setup(sources.ints, 256)}, _throughput, _is_any),
    "cpu": Case(
        "work in Python",
        "items/s",
        {"1 worker": 1, "2 workers": 2},
        _python_work,
        _is_any,
    ),
    "latency": Case(
        f"work that waits {_WAIT_S * 1e3:.0f} ms",
        "items/s",
        {f"{threads} thread{'s' * (threads > 1)}": threads for threads in (1, 2, 4, 8, 16, 32)},
        _latency,
        _has_threads,
        threads=True,
        quick=("1 thread", "32 threads"),
    ),
    "overlap": Case(
        "made in / used in: beyond the slower",
        "ms",
        _overlaps,
        _overlap,
        _is_any,
        more_is_better=False,
        ratios=False,  # of numbers that may be nought
        quick=("sleep, 5/5 ms", "busy, 10/10 ms"),
    ),
    **{
        f"first-{method}": Case(
            f"first batch, {_WORKERS} workers, {method}",
            "ms",
            {"at first": (method, False), "again": (method, True)},
            _first,
            _chooses(method),
            more_is_better=False,
        )
        for method in METHODS
    },
    "first-default": Case(
        f"first batch, {_WORKERS} workers, as it is",
        "ms",
        {"at first": (None, False), "again": (None, True)},
        _first,
        _is_ahead,
        more_is_better=False,
    ),
    "stop": Case(
        f"stop, {_WORKERS} workers", "ms", {"": None}, _stop, _is_ahead, more_is_better=False
    ),
    "memory": Case("most memory, 9.6 MB", "MB", {"": _fresh}, _memory, _is_any, False),
    "consumer-cpu": Case(
        "the consumer's CPU for a batch",
        "ms",
        {f"{mb} MB": mb * _MB for mb in (1, 4, 16, 64)},
        _consumer_cpu,
        _is_ahead,
        more_is_better=False,
        quick=("1 MB", "16 MB"),
    ),
    "native-threads": Case(
        "transforms by libraries with threads",
        "batches/s",
        _transforms,
        _transformed,
        _has_native_threads,
        quick=_quick_transforms,
    ),
    "native-threads-cpu": Case(
        "all processes' CPU for such a batch",
        "ms",
        _transforms,
        _transform_cpu,
        _has_native_threads,
        more_is_better=False,
        quick=_quick_transforms,
    ),
    "tasks-tiny": Case(
        "tasks without work",
        "tasks/s",
        {"": Tasks(sources.number, 5000, 64, 2)},
        _task_rate,
        _maps,
    ),
    "tasks-batch": Case("64 rows of 3x64x64", "batches/s", {"": _rows}, _task_rate, _maps),
    "tasks-cpu": Case(
        "tasks in Python, 2 workers",
        "tasks/s",
        {"": Tasks(_of(sources.work, _STEPS), 200, 8, 2)},
        _task_rate,
        _maps,
    ),
    "tasks-large": Case(
        "tasks that make 5 MB, float32",
        "GB/s",
        {"": Tasks(_of(sources.filled, _FILLED), 200, 8, 2)},
        _task_bandwidth,
        _maps,
    ),
    "tasks-straggler": Case(
        f"every {_EVERY}th task is {_SLOW_S / _TASK_S:.0f} times as slow, 4 workers",
        "% of the ideal",
        {f"queue of {size}": Tasks(_straggle, 400, size, 4) for size in (16, 64)},
        _share_of_ideal,
        _maps,
        quick=("queue of 16",),
    ),
}
