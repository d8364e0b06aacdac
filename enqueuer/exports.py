"""Statistics in other formats: a log line, Prometheus, TensorBoard.

Stats --line()--------> "40.1 batches/s, the loop waits 62 % (source: concurrency=64), ..."
Stats --prometheus()--> the text that a Prometheus server scrapes --write_prometheus()--> a file
tensorboard(writer) --> a callback for `on_stats()`
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from enqueuer.common.text import percent, rate, ratio, size
from enqueuer.monitoring.stats import Stats, waits

__all__ = ["line", "prometheus", "tensorboard", "write_prometheus"]

# Seconds; limits of the waits that a bucket counts.
_BUCKETS_S = ("0.001", "0.01", "0.1", "1", "10", "+Inf")


def line(stats: Stats) -> str:
    """Return a line for a log with the most important numbers, and the bottleneck.

    Example:
        >>> from enqueuer import GeneratorEnqueuer
        >>> from enqueuer.exports import line
        >>> line(GeneratorEnqueuer(lambda: iter("abc")).stats())
        '0 batches/s, 0 B/s, the loop waits 0 %, 0/10 in the queue, workers busy -'
    """
    sent = sum(worker.items for worker in stats.workers)
    bytes_per_s = stats.items_per_s * ratio(stats.bytes, sent)
    busy = " ".join(percent(worker.busy_share) for worker in stats.workers) or "-"
    parts = [
        f"{rate(stats.items_per_s)} batches/s",
        f"{size(bytes_per_s)}/s",
        f"the loop waits {waits(stats)}",
        f"{stats.queue_size}/{stats.max_queue_size} in the queue",
        f"workers busy {busy}",
    ]
    if stats.error_count:
        parts.append(f"{stats.error_count} errors")
    if stats.restart_count:
        parts.append(f"{stats.restart_count} restarts")
    return ", ".join(parts)


def prometheus(stats: Stats, labels: Mapping[str, str] | None = None) -> str:
    """Return the numbers in Prometheus' text format, version 0.0.4.

    Args:
        stats: Statistics since the start, not a difference, as counters must only grow.
        labels: Labels of each line, such as `{"rank": "0"}`.

    Returns:
        Text for a page that a server scrapes, or for the text-file collector of its node exporter.

    Raises:
        TypeError: `stats` is something else.

    Example:
        >>> from enqueuer import GeneratorEnqueuer
        >>> from enqueuer.exports import prometheus
        >>> text = prometheus(GeneratorEnqueuer(lambda: iter("abc")).stats(), {"rank": "0"})
        >>> print("".join(text.splitlines(keepends=True)[:3]), end="")
        # HELP enqueuer_batches_total Batches given to the loop
        # TYPE enqueuer_batches_total counter
        enqueuer_batches_total{rank="0"} 0
    """
    if not isinstance(stats, Stats):
        raise TypeError(f"prometheus() takes the result of stats(), got {stats!r}")
    lines = []
    for name, kind, text, values in _metrics(stats):
        lines += [f"# HELP enqueuer_{name} {text}", f"# TYPE enqueuer_{name} {kind}"]
        for suffix, extra, value in values:
            shown = _labels({**(labels or {}), **extra})
            lines.append(f"enqueuer_{name}{suffix}{shown} {value:.9g}")
    return "\n".join(lines) + "\n"


def write_prometheus(
    path: str | os.PathLike[str], stats: Stats, labels: Mapping[str, str] | None = None
) -> None:
    """Write the text of `prometheus()` to a file, for the text-file collector of a node exporter.

    The text is written to a draft in the same folder, which then replaces the file. So
    a reader gets all of the old text or all of the new one. If an error is raised, the file is
    left as it was, and no draft is left.

    Args:
        path: Path of the file; the collector reads files whose names end with `.prom`.
        stats: As for `prometheus()`: statistics since the start.
        labels: As for `prometheus()`.

    Raises:
        TypeError: `stats` is something else.
        OSError: The file cannot be written.

    Example:
        >>> import os, tempfile
        >>> from enqueuer import GeneratorEnqueuer
        >>> from enqueuer.exports import write_prometheus
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "training.prom")
        ...     write_prometheus(path, GeneratorEnqueuer(lambda: iter("abc")).stats())
        ...     os.listdir(folder)
        ['training.prom']
    """
    text = prometheus(stats, labels)
    # The collector reads no file of such a name, and no other writer has the same.
    draft = f"{os.fspath(path)}.{os.getpid()}.{threading.get_ident()}"
    try:
        # A name that is there may be a link of another user: "x" does not follow it.
        with contextlib.suppress(FileNotFoundError):
            os.remove(draft)
        with open(draft, "x", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(draft)
        raise


# Its name, type and text, and its values, each with the end of its name and its own labels.
_Metric = tuple[str, str, str, list[tuple[str, dict[str, str], float]]]


def _metrics(stats: Stats) -> Iterator[_Metric]:
    for name, kind, text, value in (
        ("batches_total", "counter", "Batches given to the loop", stats.items),
        ("waiting_seconds_total", "counter", "Time that the loop waited", stats.waiting_s),
        ("working_seconds_total", "counter", "Time that the loop worked", stats.working_s),
        ("loop_cpu_seconds_total", "counter", "CPU time of the loop's process", stats.loop_cpu_s),
        ("first_batch_seconds", "gauge", "Time to the first batch", stats.first_batch_s),
        ("errors_total", "counter", "Errors that were skipped", stats.error_count),
        ("restarts_total", "counter", "Workers that died and were replaced", stats.restart_count),
        ("queue_size", "gauge", "Finished batches that wait", stats.queue_size),
        ("queue_max_size", "gauge", "Finished batches that may wait", stats.max_queue_size),
        ("block_bytes", "gauge", "Shared memory of all workers", stats.block_bytes),
    ):
        yield name, kind, text, [] if value is None else [("", {}, value)]
    yield "wait_seconds", "histogram", "Waits for a batch that was not ready", _waits(stats)
    workers = [({"worker": str(worker.index)}, worker) for worker in stats.workers]
    for name, kind, text, field in (
        ("worker_items_total", "counter", "Items that a worker has sent", "items"),
        ("worker_bytes_total", "counter", "Approximate size of these items in bytes", "bytes"),
        ("worker_cpu_seconds_total", "counter", "CPU time of a worker", "cpu_s"),
        ("worker_rss_bytes", "gauge", "Memory of a worker's process", "rss_bytes"),
    ):
        found = [(labels, getattr(worker, field)) for labels, worker in workers]
        yield name, kind, text, [("", pairs, value) for pairs, value in found if value is not None]
    times = [
        ("", labels | {"on": on}, getattr(worker, f"{on}_s"))
        for labels, worker in workers
        for on in ("starting", "making", "sending", "waiting", "idle")
    ]
    yield "worker_seconds_total", "counter", "Time of a worker by its use", times


def _waits(stats: Stats) -> list[tuple[str, dict[str, str], float]]:
    """Return the values of the histogram of waits, none of which ever decreases."""
    counts = {
        bound: sum(count for length, count in stats.waits.items() if length <= float(bound))
        for bound in _BUCKETS_S
    }
    return [
        *(("_bucket", {"le": bound}, count) for bound, count in counts.items()),
        ("_sum", {}, stats.waiting_s),
        ("_count", {}, counts["+Inf"]),
    ]


def _labels(labels: Mapping[str, str]) -> str:
    def escaped(text: str) -> str:
        return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    pairs = ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def tensorboard(writer: Any, prefix: str = "data/") -> Callable[[Stats], None]:
    """Return a callback for `on_stats()` that writes scalars.

    The step of a scalar is `stats.total_items`: the number of batches that the loop was given in
    all runs. After `load_state_dict()` it goes on at the batch where the state was taken.

    Args:
        writer: `torch.utils.tensorboard.SummaryWriter`, or any object with its `add_scalar`.
        prefix: Text before each tag.

    Example:
        >>> from enqueuer import GeneratorEnqueuer
        >>> from enqueuer.exports import tensorboard
        >>> class Writer:
        ...     def add_scalar(self, tag, value, step):
        ...         print(tag, value, step)
        >>> tensorboard(Writer())(GeneratorEnqueuer(lambda: iter("abc")).stats())
        data/batches_per_s 0.0 0
        data/waiting_share 0.0 0
        data/queue_size 0 0
        data/wait_p99_s 0.0 0
    """

    def write(stats: Stats) -> None:
        for tag, value in (
            ("batches_per_s", stats.items_per_s),
            ("waiting_share", stats.waiting_share),
            ("queue_size", stats.queue_size),
            ("wait_p99_s", stats.wait_p99_s),
        ):
            writer.add_scalar(prefix + tag, value, stats.total_items)

    return write
