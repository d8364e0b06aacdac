"""A line on the terminal that shows how it goes, drawn by tqdm; on a pipe nothing is shown.

bar():    of a long command
Shown:    of an iterator over an enqueuer: rate, queue, workers
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from enqueuer.formats import percent, pluralize
from enqueuer.frameworks import framework
from enqueuer.meters import clock
from enqueuer.stats import Stats

T = TypeVar("T")

_MOST_WORKERS = 16  # that fit into a line
_LOOK_NS = (
    500_000_000  # between two looks at the statistics; reading takes a tenth of a millisecond
)

Progress = bool | Callable[..., Any]
"""Whether to show a bar, or what to make it of: tqdm's class, or one with its methods."""


class _Measured(Protocol):
    """What has statistics: an enqueuer."""

    def stats(self) -> Stats:
        """Return them."""


@contextlib.contextmanager
def bar(
    title: str, total: int | None, unit: str, shown: Progress = True
) -> Iterator[Callable[..., object]]:
    """Show a progress bar on standard error, if that is a terminal.

    Args:
        title: What it is about.
        total: How many there are; None: nobody knows.
        unit: Of what.
        shown: Whether to show it at all, or a class to make it of, which decides for itself.

    Yields:
        A function that is told how many more are done, and some text to show beside it.

    Raises:
        FrameworkUnavailable: tqdm is not installed.
    """
    kind = bar_class(shown)
    if kind is None:
        yield lambda more, text="": None
        return
    with contextlib.closing(kind(total=total, unit=unit, desc=title)) as made:

        def tell(more: int, text: str = "") -> None:
            if text:
                made.set_postfix_str(text, refresh=False)
            made.update(more)

        yield tell


def bar_class(shown: Progress) -> Callable[..., Any] | None:
    """Return what makes a bar; None if none is to be shown."""
    if shown is not True:
        return shown or None
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    return _quiet_tqdm()


@functools.cache
def _quiet_tqdm() -> Callable[..., Any]:
    tqdm: Any = framework("tqdm", "progress", "4.64", user="progress=True").tqdm

    class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
        """Shows the rate that was measured, if it is told one."""

        # Its monitor is a thread for the whole process, for bars that skip updates; ours do not.
        monitor_interval = 0
        measured_rate: float | None = None

        @property
        def format_dict(self) -> dict[str, Any]:
            known: dict[str, Any] = super().format_dict
            return known if self.measured_rate is None else known | {"rate": self.measured_rate}

    return functools.partial(Bar, miniters=1)


class Shown(Iterator[T], Generic[T]):
    """An iterator over batches that shows how it goes, until its end or until it is dropped.

    Args:
        batches: What it gives.
        enqueuer: Where they come from.
        kind: What makes the bar.
        done: How many there were before.
        total: How many there will be; None: nobody knows.
    """

    def __init__(
        self,
        batches: Iterator[T],
        enqueuer: _Measured,
        kind: Callable[..., Any],
        done: int,
        total: int | None,
    ) -> None:
        self._batches = batches
        self._enqueuer = enqueuer
        self._began = enqueuer.stats()
        title = f"epoch {self._began.epoch}"
        self._bar = kind(total=total, initial=done, unit="batch", desc=title)
        self._due = clock() + _LOOK_NS

    def __next__(self) -> T:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._look()  # what stays on the terminal is of all of it
            self.close()
            raise
        except BaseException:
            self.close()
            raise
        if clock() >= self._due:
            self._look()
        self._bar.update(1)
        return batch

    def _look(self) -> None:
        stats = self._enqueuer.stats().since(self._began)
        with contextlib.suppress(AttributeError):  # a class of the user's has its own rate
            self._bar.measured_rate = stats.items_per_s
        self._bar.set_postfix_str(postfix(stats), refresh=False)
        self._due = clock() + _LOOK_NS

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter ends, or there was no bar yet
            self._bar.close()


def postfix(stats: Stats) -> str:
    """Return what is shown beside the bar: the loop's waits, the queue, how busy the workers are.

    Example:
        >>> from enqueuer import GeneratorEnqueuer
        >>> from enqueuer.progress import postfix
        >>> postfix(GeneratorEnqueuer(lambda: iter("abc")).stats())
        'waiting 0 %, queue 0/10'
    """
    text = (
        f"waiting {percent(stats.waiting_share)}, queue {stats.queue_size}/{stats.max_queue_size}"
    )
    if stats.workers:
        busy = [worker.busy_share for worker in stats.workers]
        shares = " ".join(f"{100 * share:.0f}" for share in busy[:_MOST_WORKERS])
        more = " ..." if len(busy) > _MOST_WORKERS else ""
        text += f", {pluralize(len(busy), 'worker')} busy {shares}{more} %"
    if stats.restart_count:
        text += f", {stats.restart_count} restarted"
    return text
