"""The command `enqueuer bench`: measures a generator function, and says how to run it.

It prints the table and the choice to standard output, and what it is at to standard error, if
that is a terminal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

from enqueuer import bench, chart
from enqueuer.backends import BackendName
from enqueuer.commands import FAILED, Commands, Number, module_and_name, named, reporting
from enqueuer.errors import DataFileError, DuplicateDataWarning
from enqueuer.formats import duration

_EXAMPLES = """\
examples:
  enqueuer bench mydata:batches
      run batches(shard) of mydata.py in a plain loop, then on 1, 2, 4 ... threads and processes
  enqueuer bench mydata:batches --consume 20ms
      the same with a loop that takes 20 ms for each batch, as a training step on a GPU may
  enqueuer bench mydata:batches --backend thread --max-workers 64 --plot workers.svg
      up to 64 threads, and a picture
  enqueuer bench mydata:batches --json > bench.json
      all numbers, for other programs

The number of workers is doubled as long as that makes it 15 % faster. After Ctrl-C what is known
so far is printed.
exit codes: 0 measured, 1 failed, 2 wrong arguments, 130 after Ctrl-C, 143 after SIGTERM
"""
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}


def add_bench(commands: Commands, positive: Number) -> None:
    """Add `bench` and its options."""
    command = commands.add_parser(
        "bench",
        help="measure a generator function on threads and processes, and say what is best",
        description=(
            "Run a generator function, as it is, in a plain loop and on more and more threads and "
            "processes; show rates, sizes, CPUs and memory, how much of its time it holds the GIL, "
            "and the line of code for the best choice."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "source",
        type=module_and_name,
        metavar="MODULE:FUNCTION",
        help="a generator function of a shard, or of nothing; found from the current directory",
    )
    command.add_argument(
        "--seconds",
        type=_seconds,
        default=2.5,
        metavar="TIME",
        help="how long each setting is measured (default: 2.5s); more if batches take longer",
    )
    command.add_argument(
        "--max-workers",
        type=positive,
        metavar="N",
        help="the most workers (default: twice the CPUs, at least 16)",
    )
    command.add_argument(
        "--backend", choices=("thread", "process"), help="what a worker is (default: both)"
    )
    command.add_argument(
        "--consume",
        type=_seconds,
        default=0.0,
        metavar="TIME",
        help="what the loop waits with each batch, such as 20ms, in place of a training step",
    )
    command.add_argument(
        "--consume-cpu",
        type=_seconds,
        default=0.0,
        metavar="TIME",
        help="what the loop computes in Python with each batch, such as 5ms",
    )
    command.add_argument(
        "--patience",
        type=_seconds,
        default=60.0,
        metavar="TIME",
        help="how long the first batch may take (default: 60s)",
    )
    command.add_argument("--json", action="store_true", help="print all numbers as JSON")
    command.add_argument(
        "--plot", type=_svg, metavar="FILE.svg", help="draw batches a second over workers"
    )
    command.add_argument("--quiet", action="store_true", help="do not show what it is at")
    command.set_defaults(run=reporting(_run))


def _seconds(text: str) -> float:
    """Read a time, such as 20ms, 3s or 0.5."""
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text.strip()[len(number) :].strip() or "s"
    try:
        seconds = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise argparse.ArgumentTypeError(f"must be a time such as 20ms, 3s or 0.5, got {text!r}")
    return seconds


def _svg(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() != ".svg":
        raise argparse.ArgumentTypeError(f"must be a file that ends in .svg, got {text!r}")
    # all is measured before it is written, which may take minutes
    writable = path if path.exists() else path.parent
    if not path.parent.is_dir() or path.is_dir() or not os.access(writable, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot be written: {text!r}")
    return path


def _run(options: argparse.Namespace) -> int:
    with warnings.catch_warnings():
        # the report says so itself, and why that does not matter here
        warnings.filterwarnings("ignore", ".*takes no shard", DuplicateDataWarning)
        return _bench(options)


def _bench(options: argparse.Namespace) -> int:
    source = named(*options.source)
    backends: tuple[BackendName, ...] = ("thread", "process")
    if options.backend is not None:
        backends = (options.backend,)
    most = options.max_workers or bench.most_workers()
    shown = _Line(sys.stderr.isatty() and not options.quiet)
    at_most = bench.longest_s(options.seconds, most, len(backends))
    shown.say(
        f"enqueuer: this takes up to {duration(at_most)}, and less if more workers do not help"
    )
    known: bench.Report | None = None
    try:
        for report in bench.bench(
            source,
            name=options.source[1],
            seconds=options.seconds,
            max_workers=most,
            backends=backends,
            consume_s=options.consume,
            consume_cpu_s=options.consume_cpu,
            patience_s=options.patience,
            tell=shown.show,
        ):
            known = report
    except bench.Unmeasurable as error:
        shown.clear()
        print(f"enqueuer: {':'.join(options.source)}: {error}", file=sys.stderr)
        return FAILED
    finally:
        shown.clear()
        if known is not None:  # also after Ctrl-C
            _tell(known, options)
    return 0


def _tell(report: bench.Report, options: argparse.Namespace) -> None:
    print(json.dumps(report.as_dict(), indent=2) if options.json else report, flush=True)
    if options.plot is None:
        return
    try:
        options.plot.write_text(chart.svg(report), encoding="utf-8")
    except OSError as error:
        text = f"{options.plot}: cannot be written: {error.strerror}"
        raise DataFileError(text, str(options.plot)) from error


class _Line:
    """A line on a terminal that says what goes on; nothing on a pipe."""

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown

    def say(self, text: str) -> None:
        """Write a line that stays."""
        if self._is_shown:
            print(text, file=sys.stderr)

    def show(self, text: str) -> None:
        """Write what is measured now, in place of what was."""
        if self._is_shown:
            print(f"\r\x1b[Kmeasuring {text} ...", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Leave nothing of it."""
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
