"""A progress bar on the terminal or in a notebook, drawn by tqdm; on a pipe nothing is shown.

bar():    of a long command
Shown:    of an iterator over an enqueuer: rate, queue, workers
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from enqueuer.common.extras import framework
from enqueuer.common.text import pluralize
from enqueuer.monitoring.meters import clock
from enqueuer.monitoring.stats import Stats, waits

T = TypeVar("T")

# Workers that fit into a line.
_MAX_WORKERS = 16
# Nanoseconds between two snapshots of the statistics; each takes a tenth of a millisecond.
_SNAPSHOT_NS = 500_000_000

Progress = bool | Callable[..., Any]
"""Whether to show a bar, or the class of the bar: tqdm's, or one with its methods."""


@contextlib.contextmanager
def bar(
    title: str, total: int | None, unit: str, shown: Progress = True
) -> Iterator[Callable[..., object]]:
    """Show a progress bar on standard error, if that is a terminal, or in a notebook.

    Args:
        title: Text before the bar.
        total: Number of units until the end; None if it is not known.
        unit: Name of the unit.
        shown: Whether to show a bar, or its class, which decides by itself.

    Yields:
        A function of the number of units that are done since the last call, and of text to be
        shown beside the bar.

    Raises:
        FrameworkUnavailable: tqdm is not installed.
    """
    kind = bar_class(shown)
    if kind is None:
        yield lambda more, text="": None
        return
    with contextlib.closing(kind(total=total, unit=unit, desc=title)) as shown_bar:

        def update(more: int, text: str = "") -> None:
            if text:
                shown_bar.set_postfix_str(text, refresh=False)
            shown_bar.update(more)

        yield update


def bar_class(shown: Progress) -> Callable[..., Any] | None:
    """Return the class of the bar; None if none is to be shown."""
    if shown is not True:
        return shown or None
    if _is_notebook():
        # It draws with widgets, if ipywidgets is installed, and else as on a terminal.
        return _quiet_tqdm("tqdm.auto")
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    return _quiet_tqdm("tqdm")


def _is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    # A kernel has imported it.
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


@functools.cache
def _quiet_tqdm(module: str) -> Callable[..., Any]:
    framework("tqdm", "progress", "4.64", user="progress=True")
    tqdm: Any = importlib.import_module(module).tqdm

    class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
        """A bar that shows the measured rate, if it has one."""

        # The monitor is a thread for the whole process, for bars that skip updates; ours do not.
        monitor_interval = 0
        measured_rate: float | None = None

        @property
        def format_dict(self) -> dict[str, Any]:
            known: dict[str, Any] = super().format_dict
            return known if self.measured_rate is None else known | {"rate": self.measured_rate}

    return functools.partial(Bar, miniters=1)


class Shown(Iterator[T], Generic[T]):
    """An iterator over batches with a bar, until its end or until it is dropped.

    Args:
        batches: Iterator over the batches.
        stats: Function that returns the statistics of the enqueuer.
        kind: Class of the bar.
        done: Number of batches before the first one.
        total: Number of all batches; None if it is not known.
    """

    def __init__(
        self,
        batches: Iterator[T],
        stats: Callable[[], Stats],
        kind: Callable[..., Any],
        done: int,
        total: int | None,
    ) -> None:
        self._batches = batches
        self._stats = stats
        self._began = stats()
        title = f"epoch {self._began.epoch}"
        self._bar = kind(total=total, initial=done, unit="batch", desc=title)
        self._due = clock() + _SNAPSHOT_NS

    def __next__(self) -> T:
        try:
            batch = next(self._batches)
        except StopIteration:
            # The line that stays on the terminal is of all batches.
            self._show_stats()
            self._bar.close()
            raise
        except BaseException:
            self._bar.close()
            raise
        if clock() >= self._due:
            self._show_stats()
        self._bar.update(1)
        return batch

    def _show_stats(self) -> None:
        stats = self._stats().since(self._began)
        # A class of the user shows its own rate.
        if hasattr(self._bar, "measured_rate"):
            self._bar.measured_rate = stats.items_per_s
        self._bar.set_postfix_str(postfix(stats), refresh=False)
        self._due = clock() + _SNAPSHOT_NS

    def __del__(self) -> None:
        # The interpreter may be ending, or there was no bar yet.
        with contextlib.suppress(Exception):
            self._bar.close()


def postfix(stats: Stats) -> str:
    """Return the text beside the bar: the loop's waits and their cause, the queue, the workers.

    Example:
        >>> from enqueuer import GeneratorEnqueuer
        >>> from enqueuer.monitoring.progress import postfix
        >>> postfix(GeneratorEnqueuer(lambda: iter("abc")).stats())
        'waiting 0 %, queue 0/10'
    """
    text = f"waiting {waits(stats)}, queue {stats.queue_size}/{stats.max_queue_size}"
    if stats.workers:
        busy = [worker.busy_share for worker in stats.workers]
        shares = " ".join(f"{100 * share:.0f}" for share in busy[:_MAX_WORKERS])
        more = " ..." if len(busy) > _MAX_WORKERS else ""
        text += f", {pluralize(len(busy), 'worker')} busy {shares}{more} %"
    if stats.restart_count:
        text += f", {stats.restart_count} restarted"
    return text
