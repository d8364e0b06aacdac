"""A user's own generator, measured: as a plain loop, then on more and more threads and processes.

    plain loop -> the GIL -> 1, 2, 4 .. threads -> 1, 2, 4 .. processes -> the best choice

A report of what is known so far comes after each of these, so that whoever is interrupted keeps
it. The number of workers is doubled as long as that helps.

The plain loop runs in a thread, or a generator that hangs could not be left.
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
from dataclasses import dataclass
from typing import Any, Literal

from enqueuer import usage
from enqueuer.backends import BackendName
from enqueuer.bottleneck import HARDLY_WAITS
from enqueuer.enqueuers import GeneratorEnqueuer
from enqueuer.formats import duration, percent, rate, size, table
from enqueuer.gil import Probe
from enqueuer.reach import epochs
from enqueuer.shards import Shard, fresh_seed
from enqueuer.sizes import size_of
from enqueuer.sources import FunctionSource, as_source, iterate, name_of
from enqueuer.stats import Stats

HELPS = 1.15  # times as fast; twice the workers for less are not worth it
AS_GOOD = 0.95  # of the best; it takes the fewest workers for that
FEWEST_MOST = 16  # workers are tried at least on any machine: those that wait need no CPU
STARVED = 0.3  # of what the workers could have run, without a CPU
FREE = 0.6  # of the CPUs; who lacks some while using less than this does so because of others
LEAVING_S = 2.0  # for a plain loop that was asked to end, until it is left behind
SAID_OF_AN_ERROR = 200  # characters
_WEIGHED_EVERY = 64  # batches, of the first ones the 1st, 2nd, 4th ..; to look at each takes long
_DEFAULT_QUEUE = 10  # of GeneratorEnqueuer

_clock = time.perf_counter


class Unmeasurable(Exception):
    """It cannot be measured; the message says why."""


@dataclass(frozen=True)
class Measured:
    """How one way of running a generator did.

    Attributes:
        backend: `"none"` for the plain loop, `"thread"` or `"process"`.
        workers: How many; 0 for the plain loop.
        max_queue_size: Of the enqueuer.
        batches: How many came, after the first ones of all workers.
        seconds: In which these came.
        batch_bytes: Of one, on average.
        first_batch_s: Seconds until the first one came, with starting the workers.
        waiting_share: How much of its time the loop waited for batches, from 0 to 1; of the plain
            loop, made them.
        cpus_used: How many CPUs were busy with it, on average; None if the system does not tell.
        starved_share: How much of the time in which the workers could have run they had no CPU;
            None if the system does not tell.
        rss_bytes: Memory of all worker processes, at the end, with what they share with others;
            None for threads.
        block_bytes: Of the shared memory that batches lie in.
        failed: What went wrong, if it could not be measured; the numbers are 0 then.
    """

    backend: Literal["none", "thread", "process", "ray"]
    workers: int
    max_queue_size: int
    batches: int = 0
    seconds: float = 0.0
    batch_bytes: float = 0.0
    first_batch_s: float = 0.0
    waiting_share: float = 0.0
    cpus_used: float | None = None
    starved_share: float | None = None
    rss_bytes: int | None = None
    block_bytes: int = 0
    failed: str | None = None

    @property
    def batches_per_s(self) -> float:
        """How many batches a second came."""
        return self.batches / self.seconds if self.seconds > 0 else 0.0

    @property
    def bytes_per_s(self) -> float:
        """How many bytes a second came."""
        return self.batches_per_s * self.batch_bytes

    @property
    def name(self) -> str:
        """Such as `"4 threads"`."""
        if self.backend == "none":
            return "plain loop"
        kind = {"thread": "threads", "process": "processes", "ray": "Ray actors"}[self.backend]
        return f"{self.workers} {kind if self.workers > 1 else self.backend}"


@dataclass(frozen=True)
class Report:
    """What is known of a generator.

    Attributes:
        name: Of the generator function.
        takes_shard: Whether it takes a `Shard`; if not, all workers make the same batches.
        cpus: How many CPUs there are for it.
        seconds: For which each was measured, at least.
        max_workers: The most workers that were to be tried.
        step_s: Seconds that the loop took for each batch, in place of a training step.
        gil_share: How much of its time the generator holds the GIL, from 0 to 1; it is met to some
            tenths only if it takes and releases it several times a millisecond. None if that is
            not known.
        measured: The plain loop, then each setting, in the order in which they were tried.
    """

    name: str
    takes_shard: bool
    cpus: float
    seconds: float
    max_workers: int
    step_s: float
    gil_share: float | None = None
    measured: tuple[Measured, ...] = ()

    @property
    def plain(self) -> Measured | None:
        """The plain loop."""
        return next((one for one in self.measured if one.backend == "none"), None)

    @property
    def best(self) -> Measured | None:
        """The fewest workers that are within 5 % of the fastest; threads rather than processes."""
        settings = [one for one in self.measured if one.workers and one.batches]
        enough = AS_GOOD * max((one.batches_per_s for one in settings), default=0.0)
        good = [one for one in settings if one.batches_per_s >= enough]
        return min(good, key=lambda one: (one.workers, one.backend != "thread"), default=None)

    @property
    def gain(self) -> float:
        """How many times as fast as the plain loop the best choice is; 0 if that is not known."""
        best, plain = self.best, self.plain
        if best is None or plain is None or not plain.batches_per_s:
            return 0.0
        return best.batches_per_s / plain.batches_per_s

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
        """Whether workers lacked CPUs that they did not use themselves: others did."""
        return any(
            (one.starved_share or 0.0) > STARVED and (one.cpus_used or 0.0) < FREE * self.cpus
            for one in self.measured
        )

    def _may_grow(self, best: Measured) -> bool:
        """Return whether the last doubling still helped, and the loop still waits."""
        fewer = [
            one.batches_per_s
            for one in self.measured
            if one.backend == best.backend and one.workers < best.workers
        ]
        return (
            best.workers == self.max_workers
            and best.waiting_share > HARDLY_WAITS
            and best.batches_per_s >= HELPS * max(fewer, default=math.inf)
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain data, for JSON."""
        best = self.best
        measured = [
            dataclasses.asdict(one)
            | {"batches_per_s": one.batches_per_s, "bytes_per_s": one.bytes_per_s}
            for one in self.measured
        ]
        return dataclasses.asdict(self) | {
            "measured": measured,
            "best": None if best is None else self.measured.index(best),
            "gain": self.gain,
            "line": self.line,
            "is_disturbed": self.is_disturbed,
        }

    def __str__(self) -> str:
        """Return a table, and what follows from it."""
        head = (
            *("", "batches/s", "bytes/s", "a batch", "first", "waiting", "CPUs", "memory"),
            "shared",
        )
        lines = table([head, *(_cells(one) for one in self.measured if one.failed is None)])
        lines += [f"{one.name}: {one.failed}" for one in self.measured if one.failed is not None]
        return "\n".join([*lines, *self._conclusions()])

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
        if self.gain >= 1 / AS_GOOD:
            waits = f"; the loop waits {percent(best.waiting_share)} of its time"
            yield (
                f"Best: {best.name}, {self.gain:.1f} times the plain loop"
                f"{waits if self.step_s else ''}."
            )
        elif self.gain:
            yield (
                f"No setting is faster than the plain loop; best of them: {best.name}."
                + ("" if self.step_s else " It makes batches while your step runs: try --consume.")
            )
        yield f"    {self.line}"
        if self._may_grow(best):
            yield f"More might help: try --max-workers {2 * self.max_workers}."
        if self.is_disturbed:
            yield "Other programs kept the CPUs busy: measure again when they do not."


def bench(
    source: Any,
    *,
    name: str | None = None,
    seconds: float = 2.5,
    max_workers: int | None = None,
    backends: Sequence[BackendName] = ("thread", "process"),
    consume_s: float = 0.0,
    consume_cpu_s: float = 0.0,
    patience_s: float = 60.0,
    tell: Callable[[str], object] = str,
) -> Iterator[Report]:
    """Measure a generator function; yield what is known so far after each setting.

    Args:
        source: A generator function of no argument or of a shard, as for `GeneratorEnqueuer`.
        name: What to call it; by default its own name.
        seconds: For which each setting runs after its first batches, 2.5 by default; longer if
            not even one batch of each worker came in that time.
        max_workers: The most workers; twice as many as there are CPUs by default, at least 16.
        backends: What to try.
        consume_s: Seconds that the loop waits with each batch, in place of a training step on a
            GPU; 0 by default.
        consume_cpu_s: Seconds that it computes in Python with each batch.
        patience_s: Seconds that the first batch may take; a minute by default.
        tell: Called with a word on what is measured next.

    Raises:
        Unmeasurable: It is no generator function, yields nothing, or no batch in time.

    Example:
        >>> def batches(shard):
        ...     while True:
        ...         time.sleep(0.005)
        ...         yield bytes(1000)
        >>> *_, report = bench(batches, seconds=0.1, max_workers=4, backends=["thread"])
        >>> report.best.backend, report.gain > 1.5
        ('thread', True)
    """
    try:
        as_it_is = as_source(source)
    except TypeError as error:
        raise Unmeasurable(str(error)) from error
    if not isinstance(as_it_is, FunctionSource):
        raise Unmeasurable(
            f"{name or 'it'} can be run through only once, or not split: pass a function that "
            "makes it anew, `def batches(): return ...`"
        )
    most = max_workers or most_workers()
    step = _Step(consume_s, consume_cpu_s)
    report = Report(
        name=name or name_of(source),
        takes_shard=as_it_is.takes_shard,
        cpus=usage.cpus(),
        seconds=seconds,
        max_workers=most,
        step_s=consume_s + consume_cpu_s,
    )
    tell("the plain loop")
    report = dataclasses.replace(
        report, measured=(_measure_plain(as_it_is, _Loop(step, seconds), patience_s),)
    )
    yield report
    tell("the GIL")
    report = dataclasses.replace(
        report, gil_share=_gil_share(as_it_is, _Loop(_Step(), seconds), patience_s)
    )
    yield report
    for backend in backends:
        fastest = 0.0
        for workers in ladder(most):
            queue_size = max(_DEFAULT_QUEUE, 2 * workers)  # a batch of each may wait, and one more
            one = Measured(backend, workers, queue_size)
            tell(one.name)
            one = _measure(source, one, _Loop(step, seconds, workers), patience_s)
            report = dataclasses.replace(report, measured=(*report.measured, one))
            yield report
            if one.batches_per_s < HELPS * fastest or one.failed is not None:
                break
            if report.step_s and one.waiting_share < HARDLY_WAITS:
                break  # the loop itself is the bottleneck
            fastest = max(fastest, one.batches_per_s)


def most_workers() -> int:
    """Return how many workers are tried at most, if nobody says."""
    return max(FEWEST_MOST, math.ceil(2 * usage.cpus()))


def ladder(most: int) -> list[int]:
    """Return the numbers of workers to try, up to the most.

    Example:
        >>> ladder(1), ladder(8), ladder(12)
        ([1], [1, 2, 4, 8], [1, 2, 4, 8, 12])
    """
    return [*(2**power for power in range((most - 1).bit_length())), most]


def longest_s(seconds: float, max_workers: int, backends: int) -> float:
    """Return how many seconds it all takes if every setting is tried, and none is slow to start."""
    return seconds * (2 + backends * len(ladder(max_workers)))


@dataclass(frozen=True)
class _Step:
    """What stands for a training step."""

    waits_s: float = 0.0
    computes_s: float = 0.0

    def __call__(self) -> None:
        if self.waits_s:
            time.sleep(self.waits_s)
        if self.computes_s:
            end = time.thread_time() + self.computes_s  # as much work, however few CPUs are free
            while time.thread_time() < end:
                pass


class _Loop:
    """A loop that takes batches, and counts and weighs them.

    It looks at whole rounds, a batch of each worker: those of a round may come all at once.

    Args:
        step: What it does with each.
        seconds: How long it is measured, at least.
        workers: How many make them.

    Attributes:
        began: When the first round was over, and measuring begins.
        ended: When the last batch came.
        count: How many came since then.
        waited_s: How long the loop waited for these.
        first_batch: Set when the first one came, or if none will.
        left: Whether nobody is interested any more.
    """

    def __init__(self, step: _Step, seconds: float, workers: int = 1) -> None:
        self.step, self.at_least_s, self.workers = step, seconds, workers
        self.began = self.ended = self.waited_s = 0.0
        self.count = 0
        self.first_batch = threading.Event()
        self.left = False
        self._bytes = self._weighed = 0

    @property
    def seconds(self) -> float:
        """How long it was measured."""
        return self.ended - self.began

    @property
    def batch_bytes(self) -> float:
        """Of a batch, on average."""
        return self._bytes / max(1, self._weighed)

    @property
    def waiting_share(self) -> float:
        """How much of its time it waited."""
        return min(1.0, self.waited_s / self.seconds) if self.seconds > 0 else 0.0

    def run(self, batches: Iterator[Any], note: Callable[[], object]) -> None:
        """Take batches for as long as it takes.

        Args:
            batches: Without an end.
            note: Called when measuring begins and ends.
        """
        workers, step, asked = self.workers, self.step, _clock()
        for seen, batch in enumerate(batches, 1):
            now = _clock()
            if not seen & (seen - 1) or not seen % _WEIGHED_EVERY:
                self._bytes += size_of(batch)
                self._weighed += 1
            del batch  # or it lives on while the next one is made
            if self.began:
                self.waited_s += now - asked
                self.count, self.ended = self.count + 1, now
                is_round = not self.count % workers
                if self.left or (is_round and now - self.began >= self.at_least_s):
                    note()
                    return
            else:
                self.first_batch.set()
                if seen == workers:
                    note()
                    self.began = now = _clock()
            step()
            asked = _clock()


def _measure_plain(source: FunctionSource, loop: _Loop, patience_s: float) -> Measured:
    began, cpu_s = _clock(), []
    with _plain(source, loop, patience_s, lambda: cpu_s.append(time.process_time())) as finish:
        first_batch_s = _clock() - began
        finish()
    return Measured(
        backend="none",
        workers=0,
        max_queue_size=0,
        batches=loop.count,
        seconds=loop.seconds,
        batch_bytes=loop.batch_bytes,
        first_batch_s=first_batch_s,
        waiting_share=loop.waiting_share,
        cpus_used=(cpu_s[1] - cpu_s[0]) / loop.seconds,
    )


def _gil_share(source: FunctionSource, loop: _Loop, patience_s: float) -> float | None:
    with _plain(source, loop, patience_s, lambda: None) as finish, Probe() as probe:
        finish()
    return probe.share


@contextlib.contextmanager
def _plain(
    source: FunctionSource, loop: _Loop, patience_s: float, note: Callable[[], object]
) -> Generator[Callable[[], None], None, None]:
    """Run a plain loop in a thread; give a function that waits for its end after a first batch."""
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
        thread.join(loop.at_least_s + patience_s)
        if errors:
            raise errors.pop()
        if thread.is_alive():
            raise _late(thread, "the second batch", patience_s)

    thread = threading.Thread(target=run, name="enqueuer-plain", daemon=True)
    thread.start()
    try:
        if not loop.first_batch.wait(patience_s):
            raise _late(thread, "the first batch", patience_s)
        yield finish
    finally:
        loop.left = True
        thread.join(LEAVING_S)


def _epochs(source: FunctionSource, loop: _Loop) -> Generator[Any, None, None]:
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
                elif loop.left:  # else nothing but None would have no end
                    return
        finally:
            if hasattr(items, "close"):
                items.close()  # here, in the thread that ran it


def _late(thread: threading.Thread, what: str, patience_s: float) -> Unmeasurable:
    frame = sys._current_frames().get(thread.ident or 0)
    frames = traceback.extract_stack(frame) if frame is not None else []
    theirs = itertools.dropwhile(lambda one: one.filename != __file__, frames)
    shown = [one for one in theirs if one.filename != __file__]
    return Unmeasurable(
        f"{what} did not come within {duration(patience_s)}; the generator is here:\n"
        + "".join(traceback.format_list(shown)).rstrip()
    )


def _measure(source: Any, one: Measured, loop: _Loop, patience_s: float) -> Measured:
    """Return a setting with its numbers, or with what went wrong."""
    assert one.backend != "none"
    enqueuer = GeneratorEnqueuer[Any](
        source, workers=one.workers, backend=one.backend, max_queue_size=one.max_queue_size
    )
    noted: list[Stats] = []
    late = threading.Event()

    def give_up() -> None:
        late.set()
        enqueuer.stop()

    timer = threading.Timer(loop.at_least_s + patience_s, give_up)
    timer.daemon = True
    try:
        with enqueuer:
            timer.start()
            loop.run(_without_end(enqueuer), lambda: noted.append(enqueuer.stats()))
    except Exception as error:
        failed = f"{type(error).__name__}: {error}".splitlines()[0]
        if late.is_set():
            failed = f"a batch of each did not come within {duration(loop.at_least_s + patience_s)}"
        return dataclasses.replace(one, failed=failed[:SAID_OF_AN_ERROR])
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()
    before, after = noted
    did = after.since(before)
    # what threads use is the loop's process's, too
    cpu_s = [worker.cpu_s for worker in did.workers if worker.cpu_s is not None]
    others_s = 0.0 if one.backend == "thread" else sum(cpu_s)
    starved_s = [worker.starved_s for worker in did.workers if worker.starved_s is not None]
    could_run_s = sum(cpu_s) + sum(starved_s)
    memory = [worker.rss_bytes for worker in after.workers if worker.rss_bytes is not None]
    return dataclasses.replace(
        one,
        batches=loop.count,
        seconds=loop.seconds,
        batch_bytes=loop.batch_bytes,
        first_batch_s=after.first_batch_s or 0.0,
        waiting_share=loop.waiting_share,
        cpus_used=(did.loop_cpu_s + others_s) / did.seconds if cpu_s else None,
        starved_share=sum(starved_s) / could_run_s if starved_s and could_run_s else None,
        rss_bytes=sum(memory) if memory else None,
        block_bytes=after.block_bytes,
    )


def _without_end(enqueuer: GeneratorEnqueuer[Any]) -> Iterator[Any]:
    yield from epochs(enqueuer)
    raise Unmeasurable("its epochs have no batch")


def _cells(one: Measured) -> tuple[str, ...]:
    """Return a row of the table."""
    return (
        one.name,
        rate(one.batches_per_s),
        size(one.bytes_per_s) if one.batch_bytes else "-",
        size(one.batch_bytes) if one.batch_bytes else "-",
        duration(one.first_batch_s),
        percent(one.waiting_share),
        "-" if one.cpus_used is None else f"{one.cpus_used:.1f}",
        "-" if one.rss_bytes is None else size(one.rss_bytes),
        size(one.block_bytes) if one.block_bytes else "-",
    )
