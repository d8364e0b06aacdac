"""The command `enqueuer bench`: measure a generator function, and print how to run it best.

The table and the choice go to standard output. If standard error is a terminal, it shows the
current measurement.
"""

from __future__ import annotations

import argparse
import json
import sys

from enqueuer.cli.arguments import (
    Commands,
    UnusableSource,
    add_backend,
    add_command,
    add_flag,
    add_number,
    add_source,
    load_source,
    seconds,
)
from enqueuer.tools import bench
from enqueuer.tools.bench_report import Report

_EXAMPLES = """\
  enqueuer bench mydata:batches
      run batches(shard) of mydata.py in a plain loop, then on 1, 2, 4 ... threads and processes
  enqueuer bench mydata:batches --consume 20ms
      the same with a loop that takes 20 ms for each batch, as a training step on a GPU may
  enqueuer bench mydata:batches --json > bench.json
      all numbers, for other programs
"""


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
        examples=_EXAMPLES,
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
    known: Report | None = None
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
