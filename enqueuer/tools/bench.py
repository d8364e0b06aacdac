"""A user's own generator, measured: as a plain loop, then on more and more threads and processes.

    plain loop -> the GIL -> 1, 2, 4 .. threads -> 1, 2, 4 .. processes -> the best choice

A report follows each of these settings, so an interrupt loses only the current one. The number of
workers is doubled as long as that helps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from enqueuer.backends.job import BackendName
from enqueuer.common.sizes import size_of
from enqueuer.common.text import duration, ratio
from enqueuer.enqueuers.generator import GeneratorEnqueuer
from enqueuer.errors import BatchTimeout
from enqueuer.monitoring import usage
from enqueuer.monitoring.gil import Probe
from enqueuer.monitoring.headroom import epochs
from enqueuer.monitoring.stats import HARDLY_WAITS, Stats
from enqueuer.tools.bench_report import DEFAULT_QUEUE, HELPS, Measurement, Report
from enqueuer.workers.shards import Shard, fresh_seed
from enqueuer.workers.sources import FunctionSource, as_source, close, iterate, name_of

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
    step = training_step(consume_s, consume_cpu_s)
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
    held = gil_share(plain_source, BatchLoop(training_step(0, 0), seconds), wait_limit_s)
    report = dataclasses.replace(report, gil_share=held)
    yield report

    def measure(setting: Measurement) -> Measurement:
        announce(setting.name)
        loop = BatchLoop(step, seconds, setting.workers)
        return measure_enqueued(source, setting, loop, wait_limit_s)

    for backend in backends:
        for measured in _climb(backend, report, measure):
            report = _with(report, measured)
            yield report


def _climb(
    backend: BackendName, report: Report, measure: Callable[[Measurement], Measurement]
) -> Iterator[Measurement]:
    """Measure more and more workers, as long as they help."""
    fastest = 0.0
    for workers in ladder(report.max_workers):
        # One batch of each worker can wait, and one more of each.
        measured = measure(Measurement(backend, workers, max(DEFAULT_QUEUE, 2 * workers)))
        yield measured
        is_slower = measured.batches_per_s < HELPS * fastest
        loop_is_bottleneck = report.step_s and measured.waiting_share < HARDLY_WAITS
        if measured.failed is not None or is_slower or loop_is_bottleneck:
            return
        fastest = max(fastest, measured.batches_per_s)


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


# Walking through a large batch takes long, so the 1st, 2nd, 4th, 8th .. batch are weighed, and
# one in this many batches.
_WEIGHED_EVERY = 64

clock = time.perf_counter


class Unmeasurable(Exception):
    """A generator function cannot be measured; the message says why."""


def training_step(waits_s: float, computes_s: float) -> Callable[[], None]:
    """Return a function that stands in for a training step.

    Args:
        waits_s: Seconds that a step waits, as for a GPU.
        computes_s: Seconds of CPU time that a step computes in Python.
    """

    def step() -> None:
        if waits_s:
            time.sleep(waits_s)
        if computes_s:
            # CPU time is the same amount of work, however few CPUs are free.
            end = time.thread_time() + computes_s
            while time.thread_time() < end:
                pass

    return step


class BatchLoop:
    """Take batches, count them and weigh some of them.

    Whole rounds are counted, one batch of each worker, since the batches of a round may arrive
    together.

    Args:
        step: Function that runs after each batch.
        seconds: Shortest time to measure.
        workers: Number of workers that make the batches.

    Attributes:
        first_batch: Event that is set with the first batch, or when there will be none.
        is_left: Whether the result is no longer needed; the loop ends at the next batch.
    """

    def __init__(self, step: Callable[[], None], seconds: float, workers: int = 1) -> None:
        self.step, self.at_least_s, self.workers = step, seconds, workers
        self.first_batch = threading.Event()
        self.is_left = False
        self._seconds = self._waited_s = 0.0
        self._count = self._bytes = self._weighed = 0

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of the measurement."""
        return {
            "batches": self._count,
            "seconds": self._seconds,
            "batch_bytes": ratio(self._bytes, self._weighed),
            "waiting_share": min(1.0, ratio(self._waited_s, self._seconds)),
        }

    def run(self, batches: Iterator[Any], note: Callable[[], object]) -> None:
        """Take batches until the measurement is long enough.

        Args:
            batches: An endless iterator.
            note: Called when measuring begins, and when it ends.
        """
        began = asked = clock()
        for seen, batch in enumerate(batches, 1):
            now = clock()
            is_power_of_two = not seen & (seen - 1)
            if is_power_of_two or not seen % _WEIGHED_EVERY:
                self._bytes += size_of(batch)
                self._weighed += 1
            # Otherwise the batch stays alive while the next one is made.
            del batch
            # The first round only warms up.
            self._count = seen - self.workers
            if self._count > 0:
                self._seconds = now - began
                self._waited_s += now - asked
                is_long = not self._count % self.workers and self._seconds >= self.at_least_s
                if is_long or self.is_left:
                    note()
                    return
            self.first_batch.set()
            if not self._count:
                note()
                began = clock()
            self.step()
            asked = clock()


# Seconds that a loop gets to end after it was asked to; then its thread is left behind.
_LEAVING_S = 2.0


def measure_plain(source: FunctionSource, loop: BatchLoop, wait_limit_s: float) -> Measurement:
    """Measure a source in a plain loop.

    Raises:
        Unmeasurable: The source yields nothing, or no batch in time.
    """
    began, cpu_s = clock(), []
    with _running(source, loop, wait_limit_s, lambda: cpu_s.append(time.process_time())) as finish:
        first_batch_s = clock() - began
        finish()
    numbers = loop.numbers()
    used = ratio(cpu_s[1] - cpu_s[0], numbers["seconds"])
    return Measurement("none", 0, 0, first_batch_s=first_batch_s, cpus_used=used, **numbers)


def gil_share(source: FunctionSource, loop: BatchLoop, wait_limit_s: float) -> float | None:
    """Return the share of its time that a source holds the GIL; None if it is not known.

    Raises:
        Unmeasurable: The source yields nothing, or no batch in time.
    """
    with _running(source, loop, wait_limit_s, lambda: None) as finish, Probe() as probe:
        finish()
    return probe.share


@contextlib.contextmanager
def _running(
    source: FunctionSource, loop: BatchLoop, wait_limit_s: float, note: Callable[[], object]
) -> Generator[Callable[[], None], None, None]:
    """Run a plain loop in a thread; once it has a batch, give a function that waits for its end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with contextlib.closing(_epochs(source, loop)) as batches:
                loop.run(batches, note)
        except BaseException as error:
            errors.append(error)
        finally:
            loop.first_batch.set()

    def finish() -> None:
        thread.join(loop.at_least_s + wait_limit_s)
        if errors:
            raise errors.pop()
        if thread.is_alive():
            raise _too_late(thread, "the second batch", wait_limit_s)

    thread = threading.Thread(target=run, name="enqueuer-plain", daemon=True)
    thread.start()
    try:
        if not loop.first_batch.wait(wait_limit_s):
            raise _too_late(thread, "the first batch", wait_limit_s)
        yield finish
    finally:
        loop.is_left = True
        thread.join(_LEAVING_S)


def _epochs(source: FunctionSource, loop: BatchLoop) -> Generator[Any, None, None]:
    """Yield the batches of one epoch after the other, without None, as an enqueuer does."""
    seed, is_empty = fresh_seed(), False
    for epoch in itertools.count():
        if is_empty:
            raise Unmeasurable("it yields no batch")
        is_empty = True
        items, _ = iterate(source.open(Shard(0, 1, epoch, seed)))
        try:
            for batch in items:
                if batch is not None:
                    is_empty = False
                    yield batch
                    del batch
                elif loop.is_left:
                    # A source that yields nothing but None has no other end.
                    return
        finally:
            # A generator is closed by the thread that ran it.
            close(items)


def _too_late(thread: threading.Thread, what: str, wait_limit_s: float) -> Unmeasurable:
    """Return an error that shows the place of the generator."""
    frame = sys._current_frames().get(thread.ident or 0)
    frames = traceback.extract_stack(frame) if frame is not None else []
    shown = [frame for frame in frames if frame.filename not in (__file__, threading.__file__)]
    return Unmeasurable(
        f"{what} did not come within {duration(wait_limit_s)}; the generator is here:\n"
        + "".join(traceback.format_list(shown)).rstrip()
    )


# Most characters of an error in the report.
_LONGEST_ERROR = 200


def measure_enqueued(
    source: Any, setting: Measurement, loop: BatchLoop, wait_limit_s: float
) -> Measurement:
    """Return a setting with its numbers, or with its error.

    Args:
        source: A generator function of no argument or of a shard.
        setting: Backend, number of workers and queue size.
        loop: A loop for as many workers.
        wait_limit_s: Seconds that a batch may take.
    """
    assert setting.backend != "none"
    enqueuer = GeneratorEnqueuer[Any](
        source,
        workers=setting.workers,
        backend=setting.backend,
        max_queue_size=setting.max_queue_size,
        timeout=wait_limit_s,
    )
    noted: list[Stats] = []
    try:
        with enqueuer:
            loop.run(_endless(enqueuer), lambda: noted.append(enqueuer.stats()))
    except Exception as error:
        failed = f"{type(error).__name__}: {error}".splitlines()[0]
        if isinstance(error, BatchTimeout):
            failed = f"a batch did not come within {duration(wait_limit_s)}"
        return dataclasses.replace(setting, failed=failed[:_LONGEST_ERROR])
    before, after = noted
    workers = _worker_numbers(before, after, are_threads=setting.backend == "thread")
    return dataclasses.replace(setting, **loop.numbers(), **workers)


def _endless(enqueuer: GeneratorEnqueuer[Any]) -> Iterator[Any]:
    yield from epochs(enqueuer)
    raise Unmeasurable("its epochs have no batch")


def _worker_numbers(before: Stats, after: Stats, are_threads: bool) -> dict[str, Any]:
    """Return CPU time and memory between two snapshots of the statistics."""
    during = after.since(before)
    cpu_s = [worker.cpu_s for worker in during.workers if worker.cpu_s is not None]
    cpu_wait_s = [worker.cpu_wait_s for worker in during.workers if worker.cpu_wait_s is not None]
    could_run_s = sum(cpu_s) + sum(cpu_wait_s)
    memory = [worker.rss_bytes for worker in after.workers if worker.rss_bytes is not None]
    # The CPU time of threads is in that of the loop's process.
    used_s = during.loop_cpu_s + (0.0 if are_threads else sum(cpu_s))
    return {
        "first_batch_s": after.first_batch_s or 0.0,
        "cpus_used": used_s / during.seconds if cpu_s else None,
        "cpu_wait_share": sum(cpu_wait_s) / could_run_s if cpu_wait_s and could_run_s else None,
        "rss_bytes": sum(memory) if memory else None,
        "block_bytes": after.block_bytes,
    }
