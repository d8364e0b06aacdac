"""The cases of a benchmark. A case has rows; a row has one number for each contestant."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import measures
import sources
from contestants import METHODS, Contestant, Setup, Tasks

_LARGE = 64 * 224 * 224 * 3  # bytes of a batch of images in uint8
_ROW = (3, 64, 64)
_TIMES_AS_SLOW = measures.SLOW_S / measures.TASK_S

Measure = Callable[[Contestant, Any, float], float | None]


@dataclass(frozen=True)
class Case:
    """A measurement of several contestants.

    Attributes:
        title: Title in the table.
        unit: Unit of the numbers.
        rows: Name and value of each row.
        measure: Function of a contestant, the value of a row and the seconds to measure; returns
            the number, or None if there is none.
        fits: Whether a contestant can take part.
        more_is_better: Whether larger numbers are better.
        ratios: Whether the ratio of two numbers has a meaning.
        threads: Whether the workers are threads, wherever there is a choice.
        quick: Rows of a quick run; if empty, all.
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


def _shares_a_list(contestant: Contestant) -> bool:
    return contestant.name in ("enqueuer-process", "torch")


def _has_positions(contestant: Contestant) -> bool:
    return _is_ours(contestant) or contestant.needs == "torchdata"


def _chooses(method: str) -> Callable[[Contestant], bool]:
    return lambda contestant: method in contestant.methods


def _sample(name: str, *args: Any) -> Any:
    """Return a sample; torch is imported only where samples are made."""
    import samples

    return getattr(samples, name)(*args)


_large = Setup(functools.partial(sources.ring, sources.IMAGES, "uint8", 8), 8, item_bytes=_LARGE)
_fresh = Setup(functools.partial(sources.fresh, sources.IMAGES, "uint8"), 8, item_bytes=_LARGE)
_larger = Setup(
    functools.partial(sources.ring, sources.IMAGES, "float32", 4), 4, item_bytes=4 * _LARGE
)

_rows = Tasks(functools.partial(sources.row, _ROW, 2048), 8192, 8, 2, batch_size=64)
_straggle = functools.partial(sources.straggle, measures.EVERY, measures.TASK_S, measures.SLOW_S)

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

_samples = {
    f"{title}, {workers} worker{'s' * (workers > 1)}": Tasks(
        functools.partial(_sample, name, *args), size * batches, 2 * workers, workers, size
    )
    for title, name, args, size, batches in (
        ("64 uint8 images", "image", ("uint8",), 64, 100),
        ("16 rows of tokens", "tokens", (), 16, 1000),
        ("64 float images", "image", ("float32",), 64, 40),
        ("256 small rows", "small", (), 256, 400),
        ("64 JPEG files", "jpeg", (), 64, 8),
    )
    for workers in (1, 2)
}

# A step with images takes as long as many batches of rows.
_trained = {
    row: dataclasses.replace(tasks, count=tasks.count // parts)
    for row, tasks in _samples.items()
    for title, parts in (("64 uint8", 5), ("256 small", 1))
    if row.startswith(title)
}

CASES = {
    "large": Case(
        "9.6 MB, uint8", "GB/s", {"": _large}, measures.bandwidth, lambda one: one.kind != "loop"
    ),
    "larger": Case(
        "38.5 MB, float32",
        "GB/s",
        {"": _larger},
        measures.bandwidth,
        lambda one: one.kind != "loop",
    ),
    "in-place": Case(
        "made in shared memory, not filled",
        "GB/s",
        {f"{mb} MB": mb * measures.MB for mb in (1, 4, 16, 64, 256)},
        measures.in_place,
        _is_ours,
        quick=("1 MB", "16 MB", "256 MB"),
    ),
    "tiny": Case(
        "dict of 2 small arrays",
        "items/s",
        {"": Setup(sources.tiny, 256)},
        measures.throughput,
        _is_any,
    ),
    "many-arrays": Case(
        f"{sources.MANY} arrays of 1 KiB in a batch",
        "% of the rate of one array",
        {f"{ms} ms of work": ms / 1e3 for ms in (0, 10, 20)},
        measures.many_arrays,
        _is_process,
        ratios=False,
        quick=("20 ms of work",),
    ),
    "queue": Case(
        "dict of 2 small arrays, by length of the queue",
        "items/s",
        {f"queue {size}": size for size in (1, 2, 10)},
        measures.short_queue,
        _is_ahead,
    ),
    "queue-cpu": Case(
        "all processes' CPU for such an item",
        "us",
        {f"queue {size}": size for size in (1, 2, 10)},
        measures.short_queue_cpu,
        _is_ahead,
        more_is_better=False,
    ),
    "arrival": Case(
        "from yield to next, where the loop waits",
        "us",
        {
            f"queue {size}, p{percent}": (size, percent / 100)
            for size in (1, 2)
            for percent in (50, 99)
        },
        measures.arrival,
        _is_ahead,
        more_is_better=False,
    ),
    "ints": Case("ints", "items/s", {"": Setup(sources.ints, 256)}, measures.throughput, _is_any),
    "cpu": Case(
        "work in Python",
        "items/s",
        {"1 worker": 1, "2 workers": 2},
        measures.python_work,
        _is_any,
    ),
    "latency": Case(
        f"work that waits {measures.WAIT_S * 1e3:.0f} ms",
        "items/s",
        {f"{threads} thread{'s' * (threads > 1)}": threads for threads in (1, 2, 4, 8, 16, 32)},
        measures.latency,
        _has_threads,
        threads=True,
        quick=("1 thread", "32 threads"),
    ),
    "overlap": Case(
        "made in / used in: beyond the slower",
        "ms",
        _overlaps,
        measures.overlap,
        _is_any,
        more_is_better=False,
        # The numbers may be 0.
        ratios=False,
        quick=("sleep, 5/5 ms", "busy, 10/10 ms"),
    ),
    **{
        f"first-{method}": Case(
            f"first batch, {measures.WORKERS} workers, {method}",
            "ms",
            {"at first": (method, False), "again": (method, True)},
            measures.first,
            _chooses(method),
            more_is_better=False,
        )
        for method in METHODS
    },
    "first-default": Case(
        f"first batch, {measures.WORKERS} workers, as it is",
        "ms",
        {"at first": (None, False), "again": (None, True)},
        measures.first,
        _is_ahead,
        more_is_better=False,
    ),
    "stop": Case(
        f"stop, {measures.WORKERS} workers",
        "ms",
        {"": None},
        measures.stop,
        _is_ahead,
        more_is_better=False,
    ),
    "paths": Case(
        "first item of 1.2 million paths, 32 workers",
        "ms",
        {"": measures.PATH_WORKERS},
        measures.first_of_paths,
        _shares_a_list,
        more_is_better=False,
    ),
    "paths-memory": Case(
        "memory of a worker that has 1.2 million paths",
        "MB",
        {"": measures.PATH_WORKERS},
        measures.memory_of_paths,
        _shares_a_list,
        more_is_better=False,
    ),
    "resume-files": Case(
        "first batch of 1.2 million files, and resumed",
        "ms",
        {"from the start": 0.0, "at 90 %": 0.9},
        measures.resumed_files,
        _has_positions,
        more_is_better=False,
    ),
    "resume-items": Case(
        f"resumed at 90 % of {sources.RESUMED_COUNT:,} items of 1 ms, 8 shards, 2 workers",
        "ms",
        {"made again": "made_again", "with first_item": "begun_anywhere"},
        measures.resumed_items,
        _is_ours,
        more_is_better=False,
    ),
    "memory": Case("most memory, 9.6 MB", "MB", {"": _fresh}, measures.memory, _is_any, False),
    "consumer-cpu": Case(
        "the consumer's CPU for a batch",
        "ms",
        {f"{mb} MB": mb * measures.MB for mb in (1, 4, 16, 64)},
        measures.consumer_cpu,
        _is_ahead,
        more_is_better=False,
        quick=("1 MB", "16 MB"),
    ),
    "native-threads": Case(
        "transforms by libraries with threads",
        "batches/s",
        _transforms,
        measures.transformed,
        _has_native_threads,
        quick=_quick_transforms,
    ),
    "native-threads-cpu": Case(
        "all processes' CPU for such a batch",
        "ms",
        _transforms,
        measures.transform_cpu,
        _has_native_threads,
        more_is_better=False,
        quick=_quick_transforms,
    ),
    "loader": Case(
        "a DataLoader of samples",
        "batches/s",
        _samples,
        measures.task_rate,
        lambda one: one.name == "torch",
    ),
    "loader-training": Case(
        "a DataLoader, and a training step on the CPU",
        "steps/s",
        _trained,
        measures.trained_rate,
        lambda one: one.name == "torch",
    ),
    "tasks-tiny": Case(
        "tasks without work",
        "tasks/s",
        {"": Tasks(sources.number, 5000, 64, 2)},
        measures.task_rate,
        _maps,
    ),
    "tasks-batch": Case("64 rows of 3x64x64", "batches/s", {"": _rows}, measures.task_rate, _maps),
    "tasks-cpu": Case(
        "tasks in Python, 2 workers",
        "tasks/s",
        {"": Tasks(functools.partial(sources.work, measures.STEPS), 200, 8, 2)},
        measures.task_rate,
        _maps,
    ),
    "tasks-large": Case(
        "tasks that make 5 MB, float32",
        "GB/s",
        {"": Tasks(functools.partial(sources.filled, measures.FILLED), 200, 8, 2)},
        measures.task_bandwidth,
        _maps,
    ),
    "tasks-straggler": Case(
        f"every {measures.EVERY}th task is {_TIMES_AS_SLOW:.0f} times as slow, 4 workers",
        "% of the ideal",
        {f"queue of {size}": Tasks(_straggle, 400, size, 4) for size in (16, 64)},
        measures.share_of_ideal,
        _maps,
        quick=("queue of 16",),
    ),
}
