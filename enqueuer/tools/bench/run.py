"""A user's own generator, measured: as a plain loop, then on more and more threads and processes.

    plain loop -> the GIL -> 1, 2, 4 .. threads -> 1, 2, 4 .. processes -> the best choice

A report follows each of these settings, so an interrupt loses only the current one. The number of
workers is doubled as long as that helps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from enqueuer.backends.job import BackendName
from enqueuer.monitoring import usage
from enqueuer.monitoring.bottleneck import HARDLY_WAITS
from enqueuer.tools.bench.enqueued import measure_enqueued
from enqueuer.tools.bench.loop import BatchLoop, TrainingStep, Unmeasurable
from enqueuer.tools.bench.plain import gil_share, measure_plain
from enqueuer.tools.bench.report import DEFAULT_QUEUE, HELPS, Measurement, Report
from enqueuer.workers.sources import FunctionSource, as_source, name_of

# At least this many workers are tried on any machine: workers that wait need no CPU.
_FEWEST_MOST = 16


def bench(
    source: Any,
    *,
    name: str | None = None,
    seconds: float = 2.5,
    max_workers: int | None = None,
    backends: Sequence[BackendName] = ("thread", "process"),
    consume_s: float = 0.0,
    consume_cpu_s: float = 0.0,
    wait_limit_s: float = 60.0,
    announce: Callable[[str], object] = str,
) -> Iterator[Report]:
    """Measure a generator function; yield a report after each setting.

    Args:
        source: A generator function of no argument or of a shard, as for `GeneratorEnqueuer`.
        name: Name of the generator in the report; by default its own name.
        seconds: Time to measure each setting after its first batches, 2.5 by default. It takes
            longer if not even one batch of each worker came in that time.
        max_workers: Largest number of workers; by default twice the number of CPUs, at least 16.
        backends: Backends to try.
        consume_s: Seconds that the loop waits with each batch, in place of a training step on a
            GPU; 0 by default.
        consume_cpu_s: Seconds that the loop computes in Python with each batch.
        wait_limit_s: Seconds that the first batch may take; a minute by default.
        announce: Function that is called with the name of the next setting.

    Raises:
        Unmeasurable: `source` is no generator function, yields nothing, or no batch in time.

    Example:
        >>> import time
        >>> def batches(shard):
        ...     while True:
        ...         time.sleep(0.005)
        ...         yield bytes(1000)
        >>> *_, report = bench(batches, seconds=0.1, max_workers=4, backends=["thread"])
        >>> report.best.backend, report.gain > 1.5
        ('thread', True)
    """
    plain_source = _repeatable(source, name)
    step = TrainingStep(consume_s, consume_cpu_s)
    report = Report(
        name=name or name_of(source),
        takes_shard=plain_source.takes_shard,
        cpus=usage.cpus(),
        seconds=seconds,
        max_workers=max_workers or default_most_workers(),
        step_s=consume_s + consume_cpu_s,
    )
    announce("the plain loop")
    report = _with(report, measure_plain(plain_source, BatchLoop(step, seconds), wait_limit_s))
    yield report
    announce("the GIL")
    held = gil_share(plain_source, BatchLoop(TrainingStep(), seconds), wait_limit_s)
    report = dataclasses.replace(report, gil_share=held)
    yield report

    def measure(setting: Measurement) -> Measurement:
        announce(setting.name)
        loop = BatchLoop(step, seconds, setting.workers)
        return measure_enqueued(source, setting, loop, wait_limit_s)

    for backend in backends:
        for measured in _climb(backend, report.max_workers, bool(report.step_s), measure):
            report = _with(report, measured)
            yield report


def _repeatable(source: Any, name: str | None) -> FunctionSource:
    """Return a source that can be opened again and again."""
    try:
        known = as_source(source)
    except TypeError as error:
        raise Unmeasurable(str(error)) from error
    if not isinstance(known, FunctionSource):
        raise Unmeasurable(
            f"{name or 'it'} can be run through only once, or not split: pass a function that "
            "makes it anew, `def batches(): return ...`"
        )
    return known


def _with(report: Report, measured: Measurement) -> Report:
    return dataclasses.replace(report, measured=(*report.measured, measured))


def _climb(
    backend: BackendName, most: int, has_step: bool, measure: Callable[[Measurement], Measurement]
) -> Iterator[Measurement]:
    """Measure more and more workers, as long as they help."""
    fastest = 0.0
    for workers in ladder(most):
        # One batch of each worker can wait, and one more of each.
        queue_size = max(DEFAULT_QUEUE, 2 * workers)
        measured = measure(Measurement(backend, workers, queue_size))
        yield measured
        is_slower = measured.batches_per_s < HELPS * fastest
        loop_is_bottleneck = has_step and measured.waiting_share < HARDLY_WAITS
        if measured.failed is not None or is_slower or loop_is_bottleneck:
            return
        fastest = max(fastest, measured.batches_per_s)


def default_most_workers() -> int:
    """Return the default of the largest number of workers."""
    return max(_FEWEST_MOST, math.ceil(2 * usage.cpus()))


def ladder(most: int) -> list[int]:
    """Return the numbers of workers to try, up to the largest.

    Example:
        >>> ladder(1), ladder(8), ladder(12)
        ([1], [1, 2, 4, 8], [1, 2, 4, 8, 12])
    """
    return [*(2**power for power in range((most - 1).bit_length())), most]


def longest_s(seconds: float, max_workers: int, backends: int) -> float:
    """Return the seconds that all settings take together if none is slow to start."""
    return seconds * (2 + backends * len(ladder(max_workers)))
