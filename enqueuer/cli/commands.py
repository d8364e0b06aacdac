"""The commands `enqueuer demo`, `enqueuer report` and `enqueuer bench`.

demo:    a small training, with the enqueuer and without it
report:  a trace -> a page, and the same in a few lines
bench:   a generator function -> its speed on threads and processes, and how to run it best

`bench` shows the current measurement if standard error is a terminal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from enqueuer.cli.arguments import (
    Commands,
    UnusableSource,
    add_backend,
    add_command,
    add_flag,
    add_number,
    add_seed,
    add_source,
    load_source,
    seconds,
)
from enqueuer.common.extras import install_command
from enqueuer.common.text import pluralize, printable
from enqueuer.errors import DataFileError
from enqueuer.monitoring import usage
from enqueuer.tools import bench, demo
from enqueuer.tools.trace_report import in_lines, numbers_of, page, read

_REPORT_EXAMPLES = """\
  enqueuer report run.json
      write run.html, and print its numbers in a few lines
  enqueuer report run.json -o pages/first.html
      write it elsewhere

To see single items and errors, open the trace itself at https://ui.perfetto.dev.
"""

_BENCH_EXAMPLES = """\
  enqueuer bench mydata:batches
      run batches(shard) of mydata.py in a plain loop, then on 1, 2, 4 ... threads and processes
  enqueuer bench mydata:batches --consume 20ms
      the same with a loop that takes 20 ms for each batch, as a training step on a GPU may
  enqueuer bench mydata:batches --json > bench.json
      all numbers, for other programs
"""


def add_demo(commands: Commands) -> None:
    """Add `demo` and its options."""
    command = commands.add_parser(
        "demo",
        help="train on images that workers read and augment, and compare with a plain loop",
        description=(
            "Train a small network on scikit-learn's handwritten digits, which workers read from "
            "image files and augment; then do the same without the enqueuer, and compare. "
            "In both, numpy multiplies matrices on one thread. "
            "Downloads nothing and leaves nothing behind. "
            f"What it needs: {install_command('demo')}"
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_number(command, "--workers", "number of threads or processes that make batches", 2)
    add_number(command, "--epochs", "number of passes through the training images", 8)
    add_number(command, "--batch-size", "number of images in a batch", 64)
    add_backend(command, default="process")
    add_seed(
        command,
        help="seed of everything random: the same seed gives the same result, with any workers",
        default=7,
    )
    command.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    """Run the demo, and print the measurements."""
    load, cpus = os.getloadavg()[0], usage.cpus()
    numbers = options.workers, options.epochs, options.batch_size
    found = demo.run(*numbers, options.backend, options.seed)
    print(
        f"{pluralize(found.images, 'image')}, {pluralize(options.epochs, 'epoch')}, "
        f"{pluralize(found.steps, 'step')}; "
        f"accuracy on {found.held_out} held-out images: {found.accuracy:.3f}"
    )
    workers = pluralize(options.workers, options.backend)
    times = {f"with the enqueuer ({workers}):": found.enqueued, "without it:": found.serial}
    for title, time in times.items():
        print(f"{title:<36}{time.total:6.2f} s, of which {time.training:.2f} s in training steps")
    print(f"{found.serial.total / found.enqueued.total:.2f} times as fast with the enqueuer")
    print("both trainings ended with the same weights, bit for bit")
    if load > cpus:
        print(
            f"NOTE: other programs used the {cpus:g} CPUs, with a load of {load:.0f} at first, "
            "so the times mean little: run it again on an idle machine"
        )
    return 0


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
        examples=_REPORT_EXAMPLES,
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


def add_bench(commands: Commands) -> None:
    """Add `bench` and its options."""
    command = add_command(
        commands,
        "bench",
        help="measure a generator function on threads and processes, and find the best choice",
        description=(
            "Run a generator function, as it is, in a plain loop and on more and more threads and "
            "processes; show what each takes, and the line of code for the best choice."
        ),
        examples=_BENCH_EXAMPLES,
    )
    add_source(command, "a generator function of a shard, or without arguments")
    times = {
        "--seconds": (2.5, "time to measure each setting; more if batches take longer"),
        "--consume": (0.0, "time that the loop waits with each batch, as for a training step"),
        "--consume-cpu": (0.0, "time that the loop computes in Python with each batch"),
        "--wait-limit": (60.0, "longest time to wait for a batch of the workers"),
    }
    for option, (default, text) in times.items():
        text = f"{text} (default: {default:g}s)"
        command.add_argument(option, type=seconds, default=default, metavar="TIME", help=text)
    add_number(
        command,
        "--max-workers",
        help="largest number of workers (default: twice the CPUs, at least 16)",
    )
    add_backend(command, default=None, help="kind of the workers (default: both)")
    add_flag(command, "--json", "print all numbers as JSON")
    add_flag(command, "--quiet", "do not show the current measurement")
    command.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    reports = bench.bench(
        load_source(*options.source),
        bench.Loop(options.seconds, options.consume, options.consume_cpu),
        name=options.source[1],
        max_workers=options.max_workers,
        backends=[options.backend] if options.backend else ["thread", "process"],
        wait_limit_s=options.wait_limit,
        announce=lambda name: _show(options, f"measuring {name} ..."),
    )
    known: bench.Report | None = None
    try:
        for report in reports:
            known = report
    except bench.Unmeasurable as error:
        raise UnusableSource(f"{':'.join(options.source)}: {error}") from error
    finally:
        _show(options, "")
        # Ctrl-C, too, leaves by this way.
        if known is not None:
            print(json.dumps(known.as_dict(), indent=2) if options.json else known, flush=True)
    return 0


def _show(options: argparse.Namespace, text: str) -> None:
    """Replace the line on a terminal that shows the current measurement; nothing on a pipe."""
    if sys.stderr.isatty() and not options.quiet:
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
