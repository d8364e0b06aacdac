"""A user's own generator, measured: as a plain loop, then on more and more threads and processes.

    the GIL -> plain loop -> 1, 2, 4 .. threads -> 1, 2, 4 .. processes -> the best choice

A report follows each of these settings, so an interrupt loses only the current one. The number of
workers is doubled as long as that helps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Literal

from enqueuer.common.sizes import size_of
from enqueuer.common.text import ratio
from enqueuer.enqueuers.generator import GeneratorEnqueuer
from enqueuer.errors import BatchTimeout, EnqueuerWarning
from enqueuer.monitoring import usage
from enqueuer.monitoring.gil import Probe
from enqueuer.monitoring.headroom import epochs
from enqueuer.monitoring.stats import HARDLY_WAITS, Stats, cpus_used, total
from enqueuer.tools.bench_report import DEFAULT_QUEUE, HELPS, Measurement, Report
from enqueuer.workers.shards import Shard, fresh_seed
from enqueuer.workers.sources import FunctionSource, as_source, close, name_of

# At least this many workers are tried on any machine: workers that wait need no CPU.
_FEWEST_MOST = 16
# Most characters of an error in the report.
_LONGEST_ERROR = 200

clock = time.perf_counter


class Unmeasurable(Exception):
    """A generator function cannot be measured; the message says why."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop that takes batches, in place of a training loop.

    Attributes:
        seconds: Shortest time to measure.
        wait_s: Seconds that it waits with each batch, as for a GPU.
        compute_s: Seconds of CPU time that it computes in Python with each batch.
    """

    seconds: float
    wait_s: float = 0.0
    compute_s: float = 0.0

    def take(
        self, batches: Iterator[Any], workers: int, note: Callable[[], object]
    ) -> dict[str, Any]:
        """Take batches until the measurement is long enough; return its numbers.

        Whole rounds are counted, one batch of each worker, since the batches of a round may arrive
        together. The first round only warms up.

        Args:
            batches: An endless iterator.
            workers: Number of workers that make the batches.
            note: Called when measuring begins, and when it ends.

        Raises:
            Unmeasurable: There are too few batches.
        """
        began = asked = clock()
        first_s = waited_s = 0.0
        nbytes = weighed = 0
        for seen, batch in enumerate(batches, 1):
            now = clock()
            first_s = first_s or now - asked
            # Walking through a large batch takes long, so only the 1st, 2nd, 4th .. is weighed.
            if not seen & (seen - 1):
                nbytes += size_of(batch)
                weighed += 1
            # Otherwise the batch stays alive while the next one is made.
            del batch
            counted = seen - workers
            waited_s += now - asked if counted > 0 else 0.0
            if counted > 0 and not counted % workers and now - began >= self.seconds:
                note()
                return {
                    "batches": counted,
                    "seconds": now - began,
                    "batch_bytes": ratio(nbytes, weighed),
                    "first_batch_s": first_s,
                    "waiting_share": min(1.0, ratio(waited_s, now - began)),
                }
            if not counted:
                note()
                began = clock()
            self._step()
            asked = clock()
        raise Unmeasurable("it yields no batch")

    def _step(self) -> None:
        if self.wait_s:
            time.sleep(self.wait_s)
        if self.compute_s:
            # CPU time is the same amount of work, however few CPUs are free.
            end = time.thread_time() + self.compute_s
            while time.thread_time() < end:
                pass


def bench(
    source: Any,
    loop: Loop,
    *,
    name: str | None = None,
    max_workers: int | None = None,
    backends: Sequence[Literal["thread", "process"]] = ("thread", "process"),
    wait_limit_s: float = 60.0,
    announce: Callable[[str], object] = str,
) -> Iterator[Report]:
    """Measure a generator function; yield a report after each setting.

    Args:
        source: A generator function of no argument or of a shard, as for `GeneratorEnqueuer`.
        loop: Loop that takes the batches. It measures longer if not even one batch of each worker
            came in its time.
        name: Name of the generator in the report; by default its own name.
        max_workers: Largest number of workers; by default twice the number of CPUs, at least 16.
        backends: Backends to try.
        wait_limit_s: Seconds that a batch may take; a minute by default.
        announce: Function that is called with the name of the next setting.

    Raises:
        Unmeasurable: `source` is no generator function, yields nothing, or no batch in time.

    Example:
        >>> import time
        >>> def batches(shard):
        ...     while True:
        ...         time.sleep(0.005)
        ...         yield bytes(1000)
        >>> *_, report = bench(batches, Loop(0.3), max_workers=4, backends=["thread"])
        >>> report.best.backend, report.gain > 1.5
        ('thread', True)
    """
    plain_source = _repeatable(source, name)
    announce("the GIL")
    report = Report(
        name=name or name_of(source),
        takes_shard=plain_source.takes_shard,
        cpus=usage.cpus(),
        seconds=loop.seconds,
        max_workers=max_workers or max(_FEWEST_MOST, math.ceil(2 * usage.cpus())),
        step_s=loop.wait_s + loop.compute_s,
        # Also finds, on a thread that can be left behind, what cannot be measured.
        gil_share=gil_share(source, loop.seconds, wait_limit_s),
    )
    yield report
    announce("the plain loop")
    report = dataclasses.replace(report, measured=(measure_plain(plain_source, loop),))
    yield report
    for backend in backends:
        fastest = 0.0
        for workers in ladder(report.max_workers):
            # One batch of each worker can wait, and one more of each.
            setting = Measurement(backend, workers, max(DEFAULT_QUEUE, 2 * workers))
            announce(setting.name)
            found = measure_enqueued(source, setting, loop, wait_limit_s)
            report = dataclasses.replace(report, measured=(*report.measured, found))
            yield report
            loop_limits = report.step_s and found.waiting_share < HARDLY_WAITS
            if found.failed or loop_limits or found.batches_per_s < HELPS * fastest:
                break
            fastest = max(fastest, found.batches_per_s)


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


def ladder(most: int) -> list[int]:
    """Return the numbers of workers to try, up to the largest.

    Example:
        >>> ladder(1), ladder(8), ladder(12)
        ([1], [1, 2, 4, 8], [1, 2, 4, 8, 12])
    """
    return [*(2**power for power in range((most - 1).bit_length())), most]


def gil_share(source: Any, seconds: float, wait_limit_s: float) -> float | None:
    """Return the share of its time that a source holds the GIL; None if it is not known.

    Raises:
        Unmeasurable: The source yields nothing, or no batch in time.
    """
    try:
        with _running(source, Measurement("thread", 1, DEFAULT_QUEUE), wait_limit_s) as enqueuer:
            batches = epochs(itertools.repeat(enqueuer))
            # What is done once, before it, does not count.
            next(batches, None)
            with Probe() as probe:
                Loop(seconds).take(batches, 1, note=lambda: None)
    except BatchTimeout as error:
        # Its last line is about iterating again.
        raise Unmeasurable(str(error).rpartition("\n")[0]) from None
    return probe.share


def measure_plain(source: FunctionSource, loop: Loop) -> Measurement:
    """Measure a source in a plain loop; raise Unmeasurable if it yields nothing."""
    cpu_s: list[float] = []
    with contextlib.closing(_plain(source)) as batches:
        numbers = loop.take(batches, 1, note=lambda: cpu_s.append(time.process_time()))
    used = ratio(cpu_s[1] - cpu_s[0], numbers["seconds"])
    return Measurement("none", 0, 0, cpus_used=used, **numbers)


def _plain(source: FunctionSource) -> Generator[Any, None, None]:
    """Yield the batches of one epoch after the other, as an enqueuer does."""
    seed = fresh_seed()
    return epochs(_made(source, Shard(0, 1, number, seed)) for number in itertools.count())


def _made(source: FunctionSource, shard: Shard) -> Iterator[Any]:
    items = iter(source.open(shard))
    try:
        yield from filter(lambda batch: batch is not None, items)
    finally:
        close(items)


def measure_enqueued(
    source: Any, setting: Measurement, loop: Loop, wait_limit_s: float
) -> Measurement:
    """Return a setting with its numbers, or with its error.

    Args:
        source: A generator function of no argument or of a shard.
        setting: Backend, number of workers and queue size.
        loop: Loop that takes the batches.
        wait_limit_s: Seconds that a batch may take.
    """
    noted: list[Stats] = []
    try:
        with _running(source, setting, wait_limit_s) as enqueuer:
            batches = epochs(itertools.repeat(enqueuer))
            numbers = loop.take(batches, setting.workers, lambda: noted.append(enqueuer.stats()))
    except Exception as error:
        failed = f"{type(error).__name__}: {error}".splitlines()[0]
        return dataclasses.replace(setting, failed=failed[:_LONGEST_ERROR])
    before, after = noted
    return dataclasses.replace(setting, **(numbers | _worker_numbers(before, after)))


@contextlib.contextmanager
def _running(
    source: Any, setting: Measurement, wait_limit_s: float
) -> Iterator[GeneratorEnqueuer[Any]]:
    """Run an enqueuer; its warnings are for a training, and the report has its own."""
    assert setting.backend != "none"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EnqueuerWarning)
        with GeneratorEnqueuer[Any](
            source,
            workers=setting.workers,
            backend=setting.backend,
            max_queue_size=setting.max_queue_size,
            timeout=wait_limit_s,
        ) as enqueuer:
            yield enqueuer


def _worker_numbers(before: Stats, after: Stats) -> dict[str, Any]:
    """Return CPU time and memory between two snapshots of the statistics."""
    during = after.since(before)
    cpu_s, cpu_wait_s = total(during, "cpu_s"), total(during, "cpu_wait_s")
    return {
        "first_batch_s": after.first_batch_s or 0.0,
        "cpus_used": cpus_used(during) if cpu_s else None,
        "cpu_wait_share": cpu_wait_s / (cpu_s + cpu_wait_s) if cpu_wait_s else None,
        "rss_bytes": total(after, "rss_bytes") or None,
        "block_bytes": after.block_bytes,
    }
