"""A user's own generator, measured: as a plain loop, then on more and more threads and processes.

    the GIL -> plain loop -> 1, 2, 4 .. threads -> 1, 2, 4 .. processes -> the best choice

A report follows each of these settings, so an interrupt loses only the current one. The number of
workers is doubled as long as that helps. A report is a table, JSON, and a line of code for the best
choice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

from enqueuer.common.sizes import size_of
from enqueuer.common.text import duration, percent, pluralize, rate, ratio, size, table
from enqueuer.enqueuers.generator import GeneratorEnqueuer
from enqueuer.errors import BatchTimeout, EnqueuerWarning
from enqueuer.monitoring import usage
from enqueuer.monitoring.headroom import epochs
from enqueuer.monitoring.stats import HARDLY_WAITS, cpus_used, total
from enqueuer.workers.shards import Shard, fresh_seed
from enqueuer.workers.sources import FunctionSource, as_source, close, name_of

# At least this many workers are tried on any machine: workers that wait need no CPU.
_FEWEST_MOST = 16
# Most characters of an error in the report.
_LONGEST_ERROR = 200

# Twice the workers are worth it if they are this many times as fast.
_HELPS = 1.15
# The best choice is the one with the fewest workers among those that reach this share of the
# fastest rate.
_AS_GOOD = 0.95
# Workers that lack a CPU for this share of the time in which they could run, while all of them
# together use less than the second share of the CPUs, do so because of other programs.
_MUCH_CPU_WAIT = 0.3
_FREE_CPUS = 0.6
_HEAD = ("", "batches/s", "bytes/s", "a batch", "first", "waiting", "CPUs", "memory", "shared")
# Default max_queue_size of GeneratorEnqueuer.
_DEFAULT_QUEUE = 10

# Seconds between two probes of the GIL, on average; several fit into the 5 ms of a switch interval.
_GAP_S = 0.001

clock = time.perf_counter
T = TypeVar("T")


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
        self, batches: Iterator[Any], workers: int, measure: Callable[[], T]
    ) -> tuple[dict[str, Any], T, T]:
        """Take batches until the measurement is long enough.

        Whole rounds are counted, one batch of each worker, since the batches of a round may arrive
        together. The first round only warms up.

        Args:
            batches: An endless iterator.
            workers: Number of workers that make the batches.
            measure: Function that is called when measuring begins, and when it ends.

        Returns:
            The numbers, and what the function returned.

        Raises:
            Unmeasurable: There are too few batches.
        """
        before = measure()
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
                numbers = {
                    "batches": counted,
                    "seconds": now - began,
                    "batch_bytes": ratio(nbytes, weighed),
                    "first_batch_s": first_s,
                    "waiting_share": min(1.0, ratio(waited_s, now - began)),
                }
                return numbers, before, measure()
            if not counted:
                before = measure()
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
        ...         time.sleep(0.03)
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
            setting = Measurement(backend, workers, max(_DEFAULT_QUEUE, 2 * workers))
            announce(setting.name)
            found = measure_enqueued(source, setting, loop, wait_limit_s)
            report = dataclasses.replace(report, measured=(*report.measured, found))
            yield report
            loop_limits = report.step_s and found.waiting_share < HARDLY_WAITS
            if found.failed or loop_limits or found.batches_per_s < _HELPS * fastest:
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
        with _running(source, Measurement("thread", 1, _DEFAULT_QUEUE), wait_limit_s) as enqueuer:
            batches = epochs(itertools.repeat(enqueuer))
            # What is done once, before it, does not count.
            next(batches, None)
            with Probe() as probe:
                Loop(seconds).take(batches, 1, list)
    except BatchTimeout as error:
        # Its last line is about iterating again.
        raise Unmeasurable(str(error).rpartition("\n")[0]) from None
    return probe.share


class Probe:
    """A thread that measures within a `with` block how often the GIL is held.

        the code:    ===== held =====......released......====== held ======
        the probe:      ^blocks-----|   ^does not block   ^blocks---------|

    Python has one lock that only one of its threads holds at a time. Code that computes in C, or
    waits, may release it. More threads make a generator faster only as far as it does.

    The probe sleeps for about a millisecond, again and again, and asks for the lock whenever it
    wakes, as any thread does. The kernel counts whether it had to wait: `ru_nvcsw` of getrusage(2)
    is how often a thread gave up its CPU to wait for something. Once is the sleep; twice means that
    the lock was held (`take_gil` in CPython's Python/ceval_gil.c waits on a condition). So no time
    is compared with another one, and other programs on the same CPUs hardly matter. The probe
    itself takes the lock for some microseconds of each millisecond.

    A probe that waits cannot ask for the lock. It counts the times at which it would have asked as
    times at which the lock was held. The times are random, as a generator with a rhythm of its own
    would otherwise always be probed in the same phase.

    Example:
        >>> with Probe() as probe:
        ...     time.sleep(0.05)
        >>> share = probe.share
        >>> share is None or share < 0.5
        True
    """

    def __init__(self) -> None:
        self._asked = 0
        self._held = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="enqueuer-probe", daemon=True)

    @property
    def share(self) -> float | None:
        """Share of the time in which it was held, from 0 to 1; None if that is not known."""
        if usage.switch_s() is None:
            return 0.0
        return self._held / self._asked if self._asked else None

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            from resource import RUSAGE_THREAD, getrusage
        except ImportError:
            # Only Linux counts the waits of one thread.
            return
        draw = random.Random(7).uniform
        at, was_held = time.perf_counter(), False
        while not self._done.is_set():
            at += draw(0.5, 1.5) * _GAP_S
            left = at - time.perf_counter()
            if left > 0:
                before = getrusage(RUSAGE_THREAD).ru_nvcsw
                time.sleep(left)
                was_held = getrusage(RUSAGE_THREAD).ru_nvcsw - before > 1
            self._asked += 1
            self._held += was_held


def measure_plain(source: FunctionSource, loop: Loop) -> Measurement:
    """Measure a source in a plain loop; raise Unmeasurable if it yields nothing."""
    seed = fresh_seed()
    # One epoch after the other, as an enqueuer runs them.
    each = (_made(source, Shard(0, 1, number, seed)) for number in itertools.count())
    with contextlib.closing(epochs(each)) as batches:
        numbers, before_s, after_s = loop.take(batches, 1, time.process_time)
    used = ratio(after_s - before_s, numbers["seconds"])
    return Measurement("none", 0, 0, cpus_used=used, **numbers)


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
    try:
        with _running(source, setting, wait_limit_s) as enqueuer:
            batches = epochs(itertools.repeat(enqueuer))
            numbers, before, after = loop.take(batches, setting.workers, enqueuer.stats)
    except Exception as error:
        failed = f"{type(error).__name__}: {error}".splitlines()[0]
        return dataclasses.replace(setting, failed=failed[:_LONGEST_ERROR])
    during = after.since(before)
    cpu_s, cpu_wait_s = total(during, "cpu_s"), total(during, "cpu_wait_s")
    numbers |= {
        "first_batch_s": after.first_batch_s or 0.0,
        "cpus_used": cpus_used(during) if cpu_s else None,
        "cpu_wait_share": cpu_wait_s / (cpu_s + cpu_wait_s) if cpu_wait_s else None,
        "rss_bytes": total(after, "rss_bytes") or None,
        "block_bytes": after.block_bytes,
    }
    return dataclasses.replace(setting, **numbers)


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


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The rates of one way to run a generator.

    Attributes:
        backend: `"none"` for the plain loop, `"thread"` or `"process"`.
        workers: Number of workers; 0 for the plain loop.
        max_queue_size: Queue size of the enqueuer.
        batches: Number of batches after the first round of all workers.
        seconds: Time in which these batches arrived.
        batch_bytes: Average size of a batch.
        first_batch_s: Seconds until the first batch, starting the workers included.
        waiting_share: Share of its time that the loop waited for batches, from 0 to 1. The plain
            loop makes the batches in this time.
        cpus_used: Average number of busy CPUs; None if the system does not provide it.
        cpu_wait_share: Share of the time in which the workers could have run that they had no
            CPU; None if the system does not provide it.
        rss_bytes: Memory of all worker processes at the end, memory that they share included;
            None for threads.
        block_bytes: Size of the shared memory that holds batches.
        failed: The error, if this way could not be measured; the numbers are 0 then.
    """

    backend: Literal["none", "thread", "process"]
    workers: int
    max_queue_size: int
    batches: int = 0
    seconds: float = 0.0
    batch_bytes: float = 0.0
    first_batch_s: float = 0.0
    waiting_share: float = 0.0
    cpus_used: float | None = None
    cpu_wait_share: float | None = None
    rss_bytes: int | None = None
    block_bytes: int = 0
    failed: str | None = None

    @property
    def batches_per_s(self) -> float:
        """Number of batches a second."""
        return ratio(self.batches, self.seconds)

    @property
    def bytes_per_s(self) -> float:
        """Number of bytes a second."""
        return self.batches_per_s * self.batch_bytes

    @property
    def name(self) -> str:
        """A name such as `"4 threads"`."""
        if self.backend == "none":
            return "plain loop"
        return pluralize(self.workers, self.backend)


@dataclasses.dataclass(frozen=True)
class Report:
    """All measurements of a generator so far.

    Attributes:
        name: Name of the generator function.
        takes_shard: Whether it takes a `Shard`; if not, all workers make the same batches.
        cpus: Number of available CPUs.
        seconds: Shortest time of a measurement.
        max_workers: Largest number of workers to try.
        step_s: Seconds that the loop took for each batch, in place of a training step.
        gil_share: Share of its time that the generator holds the GIL, from 0 to 1. It is precise
            to some tenths only if the generator takes and releases the GIL several times a
            millisecond. None if it is not known.
        measured: The plain loop, then each setting in the order in which they were tried.
    """

    name: str
    takes_shard: bool
    cpus: float
    seconds: float
    max_workers: int
    step_s: float
    gil_share: float | None = None
    measured: tuple[Measurement, ...] = ()

    @property
    def best(self) -> Measurement | None:
        """The fewest workers that are within 5 % of the fastest; threads rather than processes."""
        settings = [found for found in self.measured if found.workers and found.batches]
        enough = _AS_GOOD * max((found.batches_per_s for found in settings), default=0.0)
        good = [found for found in settings if found.batches_per_s >= enough]
        return min(good, key=lambda found: (found.workers, found.backend != "thread"), default=None)

    @property
    def gain(self) -> float:
        """Rate of the best choice as a multiple of the plain loop's; 0 if it is not known."""
        return self.best.batches_per_s / self.measured[0].batches_per_s if self.best else 0.0

    @property
    def line(self) -> str | None:
        """The line of code that makes the best choice."""
        best = self.best
        if best is None:
            return None
        options = [f"workers={best.workers}", f'backend="{best.backend}"']
        if best.max_queue_size != _DEFAULT_QUEUE:
            options.append(f"max_queue_size={best.max_queue_size}")
        return f"GeneratorEnqueuer({self.name}, {', '.join(options)})"

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs took CPUs from the workers."""
        return any(
            (found.cpu_wait_share or 0.0) > _MUCH_CPU_WAIT
            and (found.cpus_used or 0.0) < _FREE_CPUS * self.cpus
            for found in self.measured
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain data, for JSON."""
        best = self.best
        measured = [
            dataclasses.asdict(found)
            | {"batches_per_s": found.batches_per_s, "bytes_per_s": found.bytes_per_s}
            for found in self.measured
        ]
        return dataclasses.asdict(self) | {
            "measured": measured,
            "best": None if best is None else self.measured.index(best),
            "gain": self.gain,
            "line": self.line,
            "is_disturbed": self.is_disturbed,
        }

    def __str__(self) -> str:
        """Return a table, and the conclusions from it."""
        rows = [_cells(found) for found in self.measured if found.failed is None]
        failures = (
            f"{found.name}: {found.failed}" for found in self.measured if found.failed is not None
        )
        return "\n".join([*table([_HEAD, *rows]), *failures, *self._conclusions()])

    def _conclusions(self) -> Iterator[str]:
        if self.gil_share is not None:
            yield (
                f"{self.name} holds the GIL for about {percent(self.gil_share)} of its time, and "
                f"there are {self.cpus:g} CPUs."
            )
        best = self.best
        if best is None:
            return
        if not self.takes_shard and best.workers > 1:
            yield (
                f"{self.name} takes no shard, so each worker makes the same batches: let it take "
                "one, and do its share of the work, before you train with several."
            )
        if self.gain >= 1 / _AS_GOOD:
            waits = f"; the loop waits {percent(best.waiting_share)} of its time"
            waits = waits if self.step_s else ""
            yield f"Best: {best.name}, {self.gain:.1f} times the plain loop{waits}."
        else:
            yield f"No setting is faster than the plain loop; best of them: {best.name}."
            if not self.step_s:
                yield "It makes batches while your step runs: try --consume."
        yield f"    {self.line}"
        if self.is_disturbed:
            yield "Other programs kept the CPUs busy: measure again when they do not."


def _cells(found: Measurement) -> tuple[str, ...]:
    """Return a row of the table."""
    return (
        found.name,
        rate(found.batches_per_s),
        size(found.bytes_per_s) if found.batch_bytes else "-",
        size(found.batch_bytes) if found.batch_bytes else "-",
        duration(found.first_batch_s),
        percent(found.waiting_share),
        "-" if found.cpus_used is None else f"{found.cpus_used:.1f}",
        "-" if found.rss_bytes is None else size(found.rss_bytes),
        size(found.block_bytes) if found.block_bytes else "-",
    )
