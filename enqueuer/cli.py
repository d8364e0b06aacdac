"""The command line: `enqueuer demo`, `pack` and `inspect`.

    demo:     a small training, with workers and without them
    pack:     a generator function -> an HDF5 file
    inspect:  an HDF5 file -> its keys, and how they are stored

Each command has a parser and a function that prints; other modules do the work. Results go to
standard output, progress and errors to standard error. Exit codes: 0 done, 1 failed, 2 wrong
arguments, 130 interrupted by Ctrl-C, 143 ended by SIGTERM.

The docstring of a command's function is its help. argparse puts the option's name before the error
of a type.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import operator
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

from enqueuer import __version__, demo
from enqueuer.common.extras import install_command
from enqueuer.common.text import pluralize, printable, size, table
from enqueuer.errors import DataFileError, FrameworkUnavailable, InvalidState, StateMismatch
from enqueuer.monitoring import usage
from enqueuer.workers.shards import Shard, fresh_seed

if TYPE_CHECKING:
    from enqueuer.datasets.hdf5 import Column

_HEAD = ("key", "shape", "dtype", "chunk", "compression", "stored")


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

    def backend(self) -> None:
        """Add `--backend`."""
        text = "kind of the workers (default: process)"
        self.add_argument("--backend", choices=("thread", "process"), default="process", help=text)

    def flag(self, option: str, help: str) -> None:
        """Add an option that is True if it is given."""
        self.add_argument(option, action="store_true", help=help)


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
    command.backend()
    seed = "seed of everything random: the same seed gives the same result, with any workers"
    command.number("--seed", f"{seed} (default: 7)", 7, least=0)


def _demo(options: argparse.Namespace) -> int:
    """Train on images that workers read and augment, and compare with a loop without them.

    A small network learns scikit-learn's handwritten digits, which workers read from image files
    and augment. Then the same is done without workers. In both, numpy multiplies matrices on
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
    times = {f"with {workers}:": found.enqueued, "without workers:": found.serial}
    for title, time in times.items():
        print(f"{title:<36}{time.total:6.2f} s, of which {time.training:.2f} s in training steps")
    print("both trainings ended with the same weights, bit for bit")
    if load <= cpus:
        print(f"{found.serial.total / found.enqueued.total:.2f} times as fast with workers")
    else:
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
    command.backend()
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
    """Run a generator function on workers, and write its batches to an HDF5 file.

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

    arguments = vars(options).copy()
    for name in ("command", "run", "source", "dry_run"):
        del arguments[name]
    # The others have the names of the arguments of `pack`.
    arguments["batched"] = not arguments.pop("samples")
    arguments["random_seed"] = arguments.pop("seed")
    arguments["progress"] = not arguments.pop("quiet")
    source = load_source(*options.source)
    try:
        if options.dry_run:
            print("\n".join(map(printable, _dry_run(source, arguments))))
            return 0
        rows = pack(source, **arguments)
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


def _dry_run(source: Any, arguments: dict[str, Any]) -> Iterator[str]:
    """Pack the first batch alone, to a temporary folder, and yield a description of the file."""
    from enqueuer.datasets.hdf5 import describe, pack
    from enqueuer.datasets.hdf5.pack import as_shards, check_target

    target = Path(arguments["path"])
    opens, shards = as_shards(source, arguments["shards"])
    check_target(target, arguments["merge"])
    seed = fresh_seed() if arguments["random_seed"] is None else arguments["random_seed"]
    items = opens.open(Shard(0, shards, 0, seed))
    first = next((item for item in items if item is not None), None)
    if first is None:
        yield f"{target}: the first of {shards} shards yields nothing"
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, target.name)
        alone = {"path": path, "shards": None, "merge": True, "progress": False}
        rows = pack([first], **arguments | alone)
        found = describe(path)
    parts = target.with_name(target.name + ".parts")
    resumes = f"; resumes with {parts}" if parts.exists() else ""
    yield (
        f"{target}: would be written by {pluralize(arguments['workers'], 'worker')}, "
        f"{pluralize(shards, 'shard')}{resumes}; the first item has {rows} rows"
    )
    yield from _table_of(found)


def _add_inspect(commands: Commands) -> None:
    """Add `inspect` and its options."""
    command = _add_command(commands, _inspect, extra="hdf5")
    command.add_argument("path", metavar="FILE.h5", help="the file to inspect")


def _inspect(options: argparse.Namespace) -> int:
    """Show the datasets of an HDF5 file, and whether all of its parts are there.

    Examples:
      enqueuer inspect train.h5
          keys, shapes, dtypes, chunks, compressions and sizes
    """
    # h5py is an extra.
    from enqueuer.datasets.hdf5 import describe

    # Names come from the file, which may contain control characters.
    print("\n".join(map(printable, _table_of(describe(options.path)))))
    return 0


def _table_of(columns: Iterable[Column]) -> list[str]:
    """Return a line for each dataset of a file."""
    return table([_HEAD, *map(_cells, columns)], str.ljust)


def _cells(column: Column) -> Sequence[str]:
    return (
        column.name,
        " x ".join(map(str, column.shape)) or "-",
        column.dtype,
        str(column.chunk or "-"),
        column.compression or "-",
        size(column.stored),
    )


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


# --- the command line -----------------------------------------------------------------------------

# Errors that the user can fix; those of the source itself need their traceback.
_USER_ERRORS = (
    DataFileError,
    FileExistsError,
    FrameworkUnavailable,
    InvalidState,
    StateMismatch,
    UnusableSource,
)
# Messages advise options of Python, which have other names on the command line.
_SHELL_OPTIONS = {
    "keys=": "--keys ",
    "ragged=": "--ragged ",
    "batched=False": "--samples",
    "merge=True": "--merge",
    "shards=": "--shards ",
    "random_seed ": "--seed ",
}
# Shells report a death by a signal by these numbers.
_INTERRUPTED = 128 + signal.SIGINT
_TERMINATED = 128 + signal.SIGTERM


class _Terminated(KeyboardInterrupt):
    """SIGTERM arrived. Code that lets Ctrl-C through lets this through, too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        argv: The arguments without the program's name; by default those of the process.

    Raises:
        SystemExit: From argparse, after `--help`, `--version` or wrong arguments.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    # So that `with` blocks remove temporary files and workers. Only the main thread can set
    # handlers.
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminate) if is_main else None
    try:
        code: int = options.run(options)
        return code
    except _USER_ERRORS as error:
        # A message may quote names from a file. Its own line breaks stay.
        lines = map(printable, _in_shell(str(error)).split("\n"))
        print("enqueuer:", "\n".join(lines), file=sys.stderr)
        return 1
    except _Terminated:
        print("\nenqueuer: terminated", file=sys.stderr)
        return _TERMINATED
    except KeyboardInterrupt:
        print("\nenqueuer: interrupted", file=sys.stderr)
        return _INTERRUPTED
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


def _in_shell(text: str) -> str:
    """Return a message with the options of the command line in place of those of Python.

    Example:
        >>> _in_shell("pad them, or give ragged=['x', 'y']")
        'pad them, or give --ragged x,y'
    """
    for found in re.findall(r"\b(?:keys|ragged)=\[.*?\]", text):
        text = text.replace(found, re.sub(r"[\[\]']|(?<=,) ", "", found))
    for python, shell in _SHELL_OPTIONS.items():
        text = text.replace(python, shell)
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="enqueuer",
        description="Run any Python generator ahead of the loop that consumes it.",
    )
    parser.add_argument("--version", action="version", version=f"enqueuer {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Command)
    for add in (_add_demo, _add_pack, _add_inspect):
        add(commands)
    return parser


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated
