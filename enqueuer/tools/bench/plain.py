"""A generator function in a plain loop, without workers.

The loop runs in a thread of its own, so that a generator that hangs can be left behind.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from typing import Any

from enqueuer.common.text import duration
from enqueuer.monitoring.gil import Probe
from enqueuer.tools.bench.loop import BatchLoop, Unmeasurable, clock
from enqueuer.tools.bench.report import Measurement
from enqueuer.workers.shards import Shard, fresh_seed
from enqueuer.workers.sources import FunctionSource, iterate

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
    return Measurement(
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
            if hasattr(items, "close"):
                items.close()


def _too_late(thread: threading.Thread, what: str, wait_limit_s: float) -> Unmeasurable:
    """Return an error that shows the place of the generator."""
    frame = sys._current_frames().get(thread.ident or 0)
    frames = traceback.extract_stack(frame) if frame is not None else []
    inner = itertools.dropwhile(lambda frame: not _is_ours(frame), frames)
    shown = [frame for frame in inner if not _is_ours(frame)]
    return Unmeasurable(
        f"{what} did not come within {duration(wait_limit_s)}; the generator is here:\n"
        + "".join(traceback.format_list(shown)).rstrip()
    )


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename in (__file__, BatchLoop.run.__code__.co_filename)
