"""A generator function on the workers of an enqueuer."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

from enqueuer.common.text import duration
from enqueuer.enqueuers.generator import GeneratorEnqueuer
from enqueuer.monitoring.headroom import epochs
from enqueuer.monitoring.stats import Stats
from enqueuer.tools.bench.loop import BatchLoop, Unmeasurable
from enqueuer.tools.bench.report import Measurement

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
        wait_limit_s: Seconds that the batches may take longer than the loop runs.
    """
    assert setting.backend != "none"
    enqueuer = GeneratorEnqueuer[Any](
        source,
        workers=setting.workers,
        backend=setting.backend,
        max_queue_size=setting.max_queue_size,
    )
    limit_s = loop.at_least_s + wait_limit_s
    deadline = _Deadline(limit_s, enqueuer)
    noted: list[Stats] = []
    try:
        with enqueuer, deadline:
            loop.run(_endless(enqueuer), lambda: noted.append(enqueuer.stats()))
    except Exception as error:
        failed = f"{type(error).__name__}: {error}".splitlines()[0]
        if deadline.has_passed:
            failed = f"a batch of each did not come within {duration(limit_s)}"
        return dataclasses.replace(setting, failed=failed[:_LONGEST_ERROR])
    before, after = noted
    workers = _worker_numbers(before, after, are_threads=setting.backend == "thread")
    return dataclasses.replace(setting, **_loop_numbers(loop), **workers)


def _endless(enqueuer: GeneratorEnqueuer[Any]) -> Iterator[Any]:
    yield from epochs(enqueuer)
    raise Unmeasurable("its epochs have no batch")


class _Deadline:
    """Stop an enqueuer that takes too long.

    Attributes:
        has_passed: Whether the enqueuer took too long.
    """

    def __init__(self, seconds: float, enqueuer: GeneratorEnqueuer[Any]) -> None:
        self.has_passed = False
        self._enqueuer = enqueuer
        self._timer = threading.Timer(seconds, self._stop)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *exc_info: object) -> None:
        self._timer.cancel()
        self._timer.join()

    def _stop(self) -> None:
        self.has_passed = True
        self._enqueuer.stop()


def _loop_numbers(loop: BatchLoop) -> dict[str, Any]:
    return {
        "batches": loop.count,
        "seconds": loop.seconds,
        "batch_bytes": loop.batch_bytes,
        "waiting_share": loop.waiting_share,
    }


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
