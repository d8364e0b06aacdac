"""The command `enqueuer report`: a trace -> a page, and the same in a few lines."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from enqueuer.cli.arguments import Commands, add_command, add_flag
from enqueuer.common.text import printable
from enqueuer.errors import DataFileError
from enqueuer.tools.trace_report import in_lines, numbers_of, page, read

_EXAMPLES = """\
  enqueuer report run.json
      write run.html, and print its numbers in a few lines
  enqueuer report run.json -o pages/first.html
      write it elsewhere

To see single items and errors, open the trace itself at https://ui.perfetto.dev.
"""


def add_report(commands: Commands) -> None:
    """Add `report` and its options."""
    command = add_command(
        commands,
        "report",
        help="sum up a trace on a page",
        description=(
            "Make a page of a trace: the bottleneck, who waited how long, and the slowest items. "
            "The page loads nothing from a network."
        ),
        examples=_EXAMPLES,
    )
    command.add_argument(
        "path", metavar="TRACE.json", help="file that trace= of an enqueuer has written"
    )
    command.add_argument(
        "-o", "--output", metavar="PAGE.html", help="the page (default: beside the trace)"
    )
    add_flag(command, "--json", "print the numbers as JSON; the page is written, too")
    command.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    target = Path(options.output or Path(options.path).with_suffix(".html"))
    recording = read(options.path)
    if os.path.exists(target) and os.path.samefile(target, options.path):
        which = "another name for the page" if options.output else "a name for the page with -o"
        raise DataFileError(f"{target}: the page would replace the trace; give {which}")
    try:
        target.write_text(page(recording), encoding="utf-8")
    except OSError as error:
        text = f"{target}: cannot be written: {error.strerror}"
        raise DataFileError(text, str(target)) from error
    if options.json:
        found = {
            "bottleneck": recording.bottleneck,
            "is_whole": recording.is_whole,
            "left_out": recording.torn,
            "page": str(target),
        }
        print(json.dumps(numbers_of(recording) | found, indent=2))
    else:
        lines = [*in_lines(recording), recording.bottleneck, str(target)]
        print("\n".join(printable(line) for line in lines if line))
    return 0
