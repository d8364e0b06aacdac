"""The commands `enqueuer demo`, `pack`, `inspect`, `report` and `bench`.

demo:     a small training, with the enqueuer and without it
pack:     a generator function -> an HDF5 file
inspect:  an HDF5 file -> its keys, sizes and statistics, as a table or as JSON
report:   a trace -> a page, and the same in a few lines
bench:    a generator function -> its speed on threads and processes, and how to run it best

The docstring of a command's function is its help. argparse puts the option's name before the error
of a type. `bench` shows the current measurement if standard error is a terminal.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import operator
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from enqueuer.common.descriptors import open_no_link
from enqueuer.common.extras import install_command
from enqueuer.common.text import pluralize, printable, size, table
from enqueuer.errors import DataFileError
from enqueuer.monitoring import usage
from enqueuer.monitoring.progress import bar
from enqueuer.tools import bench, demo
from enqueuer.tools.trace_report import in_lines, numbers_of, page, read
from enqueuer.workers.shards import Shard, fresh_seed

if TYPE_CHECKING:
    from enqueuer.datasets.hdf5 import Column, Description, Summary

# Most characters of an attribute.
_LONGEST_VALUE = 60
_HEAD = ("key", "shape", "dtype", "chunk", "compression", "stored", "min", "mean", "max")


class UnusableSource(Exception):
    """The named source is missing, or cannot be used."""


_EXIT_CODES = "exit codes: 0 done, 1 failed, 2 wrong arguments, 130 after Ctrl-C, 143 after SIGTERM"


class Command(argparse.ArgumentParser):
    """The parser of a command; each method adds an argument."""

    def source(self, kind: str) -> None:
        """Add `MODULE:FUNCTION`, an object of this kind."""
        text = f"{kind}; found from the current directory"
        self.add_argument("source", type=module_and_name, metavar="MODULE:FUNCTION", help=text)

    def number(self, option: str, help: str, default: int | None = None, least: int = 1) -> None:
        """Add an option that takes a whole number from `least` on."""
        read = functools.partial(whole_number, least=least)
        self.add_argument(option, type=read, default=default, metavar="N", help=help)

    def names(self, option: str, help: str, default: Any = None) -> None:
        """Add an option that takes names with commas between."""
        self.add_argument(option, type=names, default=default, metavar="A,B", help=help)

    def backend(self, default: str | None, help: str = "kind of the workers") -> None:
        """Add `--backend`."""
        self.add_argument("--backend", choices=("thread", "process"), default=default, help=help)

    def flag(self, option: str, help: str) -> None:
        """Add an option that is True if it is given."""
        self.add_argument(option, action="store_true", help=help)


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add all commands to the parser of the command line."""
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Command
    )
    for add in (_add_demo, _add_pack, _add_inspect, _add_report, _add_bench):
        add(commands)


# argparse has no public name for the result of add_subparsers.
Commands: TypeAlias = Any


def _add_command(
    commands: Commands, run: Callable[[argparse.Namespace], int], extra: str = ""
) -> Command:
    """Add a command, and return its parser.

    Args:
        commands: The commands.
        run: Function that runs it. The command has its name, and its docstring is the help.
        extra: Extra of this package that the command needs.
    """
    # With -OO, Python has no docstrings.
    text, _, examples = (inspect.getdoc(run) or "").partition("\n\nExamples:\n")
    title = text.partition(".\n")[0]
    command: Command = commands.add_parser(
        run.__name__.strip("_"),
        help=title[:1].lower() + title[1:],
        description=f"{text}\nWhat it needs: {install_command(extra)}" if extra else text,
        epilog=(f"examples:\n{examples}\n\n" if examples else "") + _EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    return command


def _add_demo(commands: Commands) -> None:
    """Add `demo` and its options."""
    command = _add_command(commands, _demo, extra="demo")
    command.number("--workers", "number of threads or processes that make batches (default: 2)", 2)
    command.number("--epochs", "number of passes through the training images (default: 8)", 8)
    command.number("--batch-size", "number of images in a batch (default: 64)", 64)
    command.backend("process", "kind of the workers (default: process)")
    seed = "seed of everything random: the same seed gives the same result, with any workers"
    command.number("--seed", f"{seed} (default: 7)", 7, least=0)


def _demo(options: argparse.Namespace) -> int:
    """Train on images that workers read and augment, and compare with a plain loop.

    A small network learns scikit-learn's handwritten digits, which workers read from image files
    and augment. Then the same is done without the enqueuer. In both, numpy multiplies matrices on
    one thread. The command downloads nothing and leaves nothing behind.
    """
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


def _add_pack(commands: Commands) -> None:
    """Add `pack` and its options."""
    command = _add_command(commands, _pack, extra="hdf5")
    command.source("a generator function of a shard, or any iterable")
    command.add_argument("path", metavar="OUT.h5", help="the file to write")
    command.number("--workers", "number of workers, one shard at a time each (default: 1)", 1)
    command.backend("process", "kind of the workers (default: process)")
    command.number("--shards", "number of shards, on which the content depends (default: 32)")
    seed = "seed of everything random (default: drawn; a resumed run keeps it)"
    command.number("--seed", seed, least=0)
    command.names("--keys", "names of a tuple's members, or keys to take")
    command.names("--ragged", "keys with rows of any length", ())
    command.number("--chunk-rows", "number of rows in a chunk (default: 1 MiB, at most 1024)")
    command.add_argument(
        "--compression", choices=("gzip", "lzf"), help="compression of each chunk (default: none)"
    )
    command.flag("--samples", "the source yields single rows, not batches")
    command.flag("--checksum", "write checksums, which reveal flipped bits")
    command.flag("--merge", "copy all parts into one self-contained file")
    command.flag("--dry-run", "make the first batch only, and write nothing")
    command.flag("--quiet", "show no progress bar (default: a bar, on a terminal)")


def _pack(options: argparse.Namespace) -> int:
    """Run a generator function in parallel and write its batches to an HDF5 file.

    The file appears when it is complete.

    Examples:
      enqueuer pack mydata:batches train.h5 --workers 8 --seed 7
          run batches(shard) of mydata.py, which yields dicts of arrays, on 8 processes
      enqueuer pack mydata:batches train.h5 --dry-run
          only make the first batch, and show what would be written
      enqueuer pack mydata:samples train.h5 --samples --ragged tokens --compression gzip --merge
          one row at a time, of any length, compressed, into one self-contained file

    After Ctrl-C, a crash or a power cut the same command resumes the run.
    """
    # h5py is an extra.
    from enqueuer.datasets.hdf5 import pack
    from enqueuer.datasets.hdf5.pack import is_refusal

    given = vars(options).copy()
    for name in ("command", "run", "source", "dry_run"):
        del given[name]
    # The others have the names of the arguments of `pack`.
    given["batched"] = not given.pop("samples")
    given["random_seed"] = given.pop("seed")
    given["progress"] = not given.pop("quiet")
    source = load_source(*options.source)
    try:
        if options.dry_run:
            print("\n".join(map(printable, _dry_run(source, given))))
            return 0
        rows = pack(source, **given)
    except (TypeError, ValueError) as error:
        # An error of the source itself needs its traceback.
        if not is_refusal(error):
            raise
        raise UnusableSource(f"{':'.join(options.source)}: {error}") from error
    except KeyboardInterrupt:
        print("\nenqueuer: finished shards are kept; the same command resumes", file=sys.stderr)
        raise
    print(f"{options.path}: {rows:,} rows")
    return 0


def _dry_run(source: Any, given: dict[str, Any]) -> Iterator[str]:
    """Pack the first batch alone, to a temporary folder, and yield a description of the file."""
    from enqueuer.datasets.hdf5 import describe, pack
    from enqueuer.datasets.hdf5.pack import as_shards, check_target

    target = Path(given["path"])
    opens, shards = as_shards(source, given["shards"])
    check_target(target, given["merge"])
    seed = fresh_seed() if given["random_seed"] is None else given["random_seed"]
    items = opens.open(Shard(0, shards, 0, seed))
    first = next((item for item in items if item is not None), None)
    if first is None:
        yield f"{target}: the first of {shards} shards yields nothing"
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, target.name)
        alone = {"path": path, "shards": None, "merge": True, "progress": False}
        rows = pack([first], **given | alone)
        found = describe(path)
    parts = target.with_name(target.name + ".parts")
    resumes = f"; resumes with {parts}" if parts.exists() else ""
    yield (
        f"{target}: would be written by {pluralize(given['workers'], 'worker')}, "
        f"{pluralize(shards, 'shard')}{resumes}; the first item has {rows} rows"
    )
    yield from _table_of(found)


def _add_inspect(commands: Commands) -> None:
    """Add `inspect` and its options."""
    command = _add_command(commands, _inspect, extra="hdf5")
    command.add_argument("path", metavar="FILE.h5", help="the file to inspect")
    command.flag("--refuse-outside", "fail if it shows data of files outside of its folder")
    command.flag("--json", "print all of it as JSON")
    command.flag("--full", "statistics of all rows (default: of 16 chunks, evenly spread)")
    command.flag("--quiet", "show no progress bar (default: a bar, on a terminal)")


def _inspect(options: argparse.Namespace) -> int:
    """Show the content of an HDF5 file, and whether it is complete.

    The command shows keys, shapes, dtypes, chunks, sizes and statistics.

    Examples:
      enqueuer inspect train.h5
          keys, shapes, dtypes, chunks, sizes; statistics of some of the rows
      enqueuer inspect train.h5 --full
          statistics of all rows; this reads the whole file and so finds any broken part
    """
    # h5py is an extra.
    from enqueuer.datasets.hdf5 import describe

    with bar("reading", None, "row", options.full and not options.quiet) as advance:
        found = describe(options.path, options.full, advance, not options.refuse_outside)
    if options.json:
        print(json.dumps(_as_dict(found), indent=2))
        return 0
    # Names and attributes come from the file, which may contain control characters.
    print("\n".join(map(printable, _lines_of(found))))
    return 0


def _lines_of(found: Description) -> Iterator[str]:
    """Yield the lines that describe a file."""
    yield f"{found.path}: {size(found.bytes)} in {pluralize(found.files, 'file')}"
    yield from _table_of(found)
    yield from (f"reads a file outside of its folder: {path}" for path in found.outside)
    for owner, attributes in {"": found.attributes, **found.column_attributes}.items():
        for name, value in attributes.items():
            text = str(value)
            text = text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "..."
            yield f"{owner}{'@' if owner else ''}{name} = {text}"


def _table_of(found: Description) -> Iterator[str]:
    """Yield a line for each column of a file, and notes on the statistics."""
    yield from table([_HEAD, *map(_cells, found.columns, found.summaries)], str.ljust)
    columns = list(zip(found.columns, found.summaries, strict=True))
    sampled = [summary.rows for column, summary in columns if 0 < summary.rows < column.shape[0]]
    if sampled:
        yield f"statistics of {max(sampled):,} rows; --full takes all"
    for column, summary in columns:
        if summary.not_finite:
            yield f"{column.name}: {summary.not_finite:,} numbers are NaN or infinite"


def _cells(column: Column, summary: Summary) -> Sequence[str]:
    numbers = (summary.minimum, summary.mean, summary.maximum)
    return (
        column.name,
        " x ".join(map(str, column.shape)) or "-",
        column.dtype,
        str(column.chunk or "-"),
        column.compression or "-",
        size(column.stored),
        *("-" if number is None else f"{number:.4g}" for number in numbers),
    )


def _as_dict(found: Description) -> dict[str, Any]:
    """Return a description as plain data, for JSON."""
    plain = {**vars(found), "attributes": _plain(found.attributes)}
    own, summaries = plain.pop("column_attributes"), plain.pop("summaries")
    plain["columns"] = [
        {
            **vars(column),
            "statistics": vars(summary),
            "attributes": _plain(own.get(column.name, {})),
        }
        for column, summary in zip(found.columns, summaries, strict=True)
    ]
    return plain


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the values of attributes, or the texts of those that have nothing like it in JSON."""
    plain = {}
    for name, value in attributes.items():
        plain[name] = value.tolist() if hasattr(value, "tolist") else value
        try:
            json.dumps(plain[name], allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            plain[name] = str(plain[name])
    return plain


def _add_report(commands: Commands) -> None:
    """Add `report` and its options."""
    command = _add_command(commands, _report)
    command.add_argument(
        "path", metavar="TRACE.json", help="file that trace= of an enqueuer has written"
    )
    command.add_argument(
        "-o", "--output", metavar="PAGE.html", help="the page (default: beside the trace)"
    )
    command.flag("--json", "print the numbers as JSON; the page is written, too")


def _report(options: argparse.Namespace) -> int:
    """Sum up a trace on a page.

    The page has the bottleneck, who waited how long, and the slowest items. It loads nothing from
    a network.

    Examples:
      enqueuer report run.json
          write run.html, and print its numbers in a few lines
      enqueuer report run.json -o pages/first.html
          write it elsewhere

    To see single items and errors, open the trace itself at https://ui.perfetto.dev.
    """
    target = Path(options.output or Path(options.path).with_suffix(".html"))
    recording = read(options.path)
    if os.path.exists(target) and os.path.samefile(target, options.path):
        which = "another name for the page" if options.output else "a name for the page with -o"
        raise DataFileError(f"{target}: the page would replace the trace; give {which}")
    try:
        # The name that you did not give may be that of a link of another user.
        opener = None if options.output else open_no_link
        with open(target, "w", encoding="utf-8", opener=opener) as file:
            file.write(page(recording))
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


def _add_bench(commands: Commands) -> None:
    """Add `bench` and its options."""
    command = _add_command(commands, _bench)
    command.source("a generator function of a shard, or without arguments")
    times = {
        "--seconds": (2.5, "time to measure each setting; more if batches take longer"),
        "--consume": (0.0, "time that the loop waits with each batch, as for a training step"),
        "--consume-cpu": (0.0, "time that the loop computes in Python with each batch"),
        "--wait-limit": (60.0, "longest time to wait for a batch of the workers"),
    }
    for option, (default, text) in times.items():
        text = f"{text} (default: {default:g}s)"
        command.add_argument(option, type=seconds, default=default, metavar="TIME", help=text)
    command.number(
        "--max-workers", "largest number of workers (default: twice the CPUs, at least 16)"
    )
    command.backend(default=None, help="kind of the workers (default: both)")
    command.flag("--json", "print all numbers as JSON")
    command.flag("--quiet", "do not show the current measurement")


def _bench(options: argparse.Namespace) -> int:
    """Measure a generator function on threads and processes, and find the best choice.

    The command runs the function, as it is, in a plain loop and on more and more threads and
    processes. It shows what each takes, and the line of code for the best choice.

    Examples:
      enqueuer bench mydata:batches
          run batches(shard) of mydata.py in a plain loop, then on 1, 2, 4 ... threads and processes
      enqueuer bench mydata:batches --consume 20ms
          the same with a loop that takes 20 ms for each batch, as a training step on a GPU may
      enqueuer bench mydata:batches --json > bench.json
          all numbers, for other programs
    """
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


# --- what arguments become ---


def load_source(module: str, name: str) -> Any:
    """Import a source, from the current directory first, as `python -m` does.

    Raises:
        UnusableSource: There is no such module, or it lacks that name.
    """
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A module that exists may lack a module that it imports.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UnusableSource(f"there is no module {module!r}, seen from {os.getcwd()}") from None
    try:
        return operator.attrgetter(name)(found)
    except AttributeError:
        raise UnusableSource(f"module {module!r} has no {name!r}") from None


def whole_number(text: str, least: int) -> int:
    """Read a whole number from `least` on."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"must be a whole number >= {least}, got {text!r}")
    return number


_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_LONGEST_S = 1e6


def seconds(text: str) -> float:
    """Read a time, such as 20ms, 3s or 0.5."""
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text.strip()[len(number) :].strip() or "s"
    try:
        found = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        found = -1.0
    if not 0 <= found < _LONGEST_S:
        raise argparse.ArgumentTypeError(f"must be a time such as 20ms, 3s or 0.5, got {text!r}")
    return found


def names(text: str) -> tuple[str, ...]:
    """Read names with commas between."""
    found = tuple(name.strip() for name in text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"must be names with commas between, got {text!r}")
    return found


def module_and_name(text: str) -> tuple[str, str]:
    """Read MODULE:FUNCTION."""
    module, _, name = text.partition(":")
    parts = [*module.split("."), *name.split(".")]
    if module.endswith(".py") or not all(part.isidentifier() for part in parts):
        raise argparse.ArgumentTypeError(
            f"must be MODULE:FUNCTION, where MODULE is a name that Python imports, got {text!r}"
        )
    return module, name
