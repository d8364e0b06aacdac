"""A progress bar on standard error, for whatever takes long; tqdm draws it, and is an extra."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from enqueuer.frameworks import framework


@contextlib.contextmanager
def bar(
    title: str, total: int | None, unit: str, shown: bool | None = None
) -> Iterator[Callable[..., object]]:
    """Show a progress bar.

    Args:
        title: What it is about.
        total: How many there are; None: nobody knows.
        unit: Of what.
        shown: Whether to show it. None, the default: if standard error is a terminal.

    Yields:
        A function that is told how many more are done, and some text to show beside it.

    Raises:
        FrameworkUnavailable: It is to be shown, and tqdm is not installed.
    """
    if not (_is_terminal() if shown is None else shown):
        yield lambda more, text="": None
        return
    tqdm = framework("tqdm", "hdf5", "4.64", user="a progress bar").tqdm
    with tqdm(total=total, unit=unit, desc=title) as shown_bar:

        def tell(more: int, text: str = "") -> None:
            shown_bar.set_postfix_str(text, refresh=False)
            shown_bar.update(more)

        yield tell


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()  # there is none without a console
