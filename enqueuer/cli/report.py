"""The command `enqueuer report`: a trace -> a page, and the same in a few lines."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from enqueuer.cli.arguments import Commands, add_command
from enqueuer.cli.user_errors import in_one_line
from enqueuer.common.text import duration, percent, pluralize, printable, rate
from enqueuer.errors import DataFileError
from enqueuer.tools.trace import Recording, page, read, totals_of

_EXAMPLES = """\
examples:
  enqueuer report run.json
      write run.html, and print its numbers in a few lines
  enqueuer report run.json -o pictures/first.html
      write it elsewhere
  enqueuer report run.json --json > numbers.json
      write run.html, and print the numbers for other programs

The trace comes from trace="run.json" of an enqueuer. If the enqueuer still runs, or was killed,
the page shows the part that was written. To see single items, open the trace itself at
https://ui.perfetto.dev.
exit codes: 0 written, 1 failed, 2 wrong arguments
"""


def add_report(commands: Commands) -> None:
    """Add `report` and its options."""
    command = add_command(
        commands,
        "report",
        help="make a page with pictures of a trace",
        description=(
            "Make a page of a trace: the timeline of each worker, the queue depth, and how long "
            "the loop waited. The page loads nothing from a network."
        ),
        examples=_EXAMPLES,
    )
    command.add_argument(
        "path", metavar="TRACE.json", help="file that trace= of an enqueuer has written"
    )
    command.add_argument(
        "-o", "--output", metavar="PAGE.html", help="the page (default: beside the trace)"
    )
    command.add_argument(
        "--json", action="store_true", help="print the numbers as JSON; the page is written, too"
    )
    command.set_defaults(run=in_one_line(_report))


def _report(options: argparse.Namespace) -> int:
    target = Path(options.output or Path(options.path).with_suffix(".html"))
    try:
        if target.exists() and target.samefile(options.path):
            which = "another name for the page" if options.output else "a name for the page with -o"
            raise DataFileError(f"{target}: the page would replace the trace; give {which}")
        recording = read(options.path)
        target.write_text(page(recording), encoding="utf-8")
    except DataFileError:
        raise
    except OSError as error:
        text = f"{target}: cannot be written: {error.strerror}"
        raise DataFileError(text, str(target)) from error
    if options.json:
        print(json.dumps(_as_dict(recording, target), indent=2))
    else:
        print("\n".join(_lines(recording)))
        print(printable(str(target)))
    return 0


def _as_dict(recording: Recording, target: Path) -> dict[str, Any]:
    return dataclasses.asdict(totals_of(recording)) | {
        "bottleneck": recording.bottleneck,
        "is_whole": recording.is_whole,
        "left_out": recording.torn,
        "page": str(target),
    }


def _lines(recording: Recording) -> Iterator[str]:
    """Put the numbers into words, a line each."""
    numbers = totals_of(recording)
    yield (
        f"{numbers.items:,} items in {duration(numbers.seconds)}, "
        f"{rate(numbers.items_per_second)} a second after the first"
    )
    if numbers.first_batch is not None:
        waits = ", ".join(f"p{rank} {duration(at)}" for rank, at in numbers.percentiles.items())
        yield f"first batch after {duration(numbers.first_batch)}"
        yield f"after that the loop waited {percent(numbers.waited_share)} of its time ({waits})"
    yield (
        f"workers: {percent(numbers.making)} making, {percent(numbers.sending)} sending, "
        f"{percent(numbers.waiting)} waiting"
    )
    yield (
        f"{pluralize(numbers.errors, 'error')}, {numbers.skipped} skipped, "
        f"{pluralize(numbers.restarts, 'restart')}"
    )
    if recording.torn:
        yield f"{pluralize(recording.torn, 'event')} could not be read and left out"
    if recording.bottleneck:
        yield recording.bottleneck
