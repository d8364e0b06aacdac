"""The commands about data files: `enqueuer pack` and `enqueuer inspect`.

Each adds its options to a parser, and runs: it prints results to standard output, progress to
standard error, and returns an exit code. h5py is imported only then, as it is an extra.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import operator
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enqueuer.errors import DataFileError, FrameworkUnavailable, InvalidState, StateMismatch
from enqueuer.formats import pluralize, printable, size, table
from enqueuer.progress import bar
from enqueuer.shards import Shard, fresh_seed

if TYPE_CHECKING:
    from enqueuer.datasets.hdf5 import Column, Description, Summary

FAILED = 1
_SHOWN_ATTRIBUTE = 60  # characters of its value

Commands = Any  # argparse has no public name for what add_subparsers returns
Number = Callable[[str], int]

_PACK_EXAMPLES = """\
examples:
  enqueuer pack mydata:batches train.h5 --workers 8 --seed 7
      run batches(shard) of mydata.py, which yields dicts of arrays, on 8 processes
  enqueuer pack mydata:batches train.h5 --dry-run
      only make the first batch, and say what would be written
  enqueuer pack mydata:samples train.h5 --samples --ragged tokens --compression gzip --merge
      one row at a time, of any length, compressed, into one self-contained file

After Ctrl-C, a crash or a power cut the same command goes on where it was.
exit codes: 0 written, 1 failed, 2 wrong arguments, 130 after Ctrl-C, 143 after SIGTERM
"""

_INSPECT_EXAMPLES = """\
examples:
  enqueuer inspect train.h5
      keys, shapes, dtypes, chunks, sizes; statistics of some of the rows
  enqueuer inspect train.h5 --full
      statistics of all rows, which reads the whole file, and so also tells whether it is whole

exit codes: 0 the file is whole as far as it was read, 1 it is not, 2 wrong arguments
"""


# --- pack ---------------------------------------------------------------------------------------


def add_pack(commands: Commands, positive: Number, not_negative: Number) -> None:
    """Add `pack` and its options."""
    command = commands.add_parser(
        "pack",
        help="run a generator function in parallel and write what it yields to an HDF5 file",
        description=(
            "Run a generator function in parallel and write what it yields to an HDF5 file, which "
            "appears when it is whole. Needs: pip install 'enqueuer[hdf5]'"
        ),
        epilog=_PACK_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "source",
        type=module_and_name,
        metavar="MODULE:FUNCTION",
        help="a generator function of a shard, or any iterable; found from the current directory",
    )
    command.add_argument("path", metavar="OUT.h5", help="the file to be written")
    command.add_argument(
        "--workers", type=positive, default=1, metavar="N", help="that write shards (default: 1)"
    )
    command.add_argument(
        "--backend",
        choices=("process", "thread"),
        default="process",
        help="what a worker is (default: process)",
    )
    command.add_argument(
        "--shards",
        type=positive,
        metavar="N",
        help="into how many parts the work is split; part of the content (default: 32)",
    )
    command.add_argument(
        "--seed",
        type=not_negative,
        metavar="N",
        help="of everything random (default: drawn; a run that goes on keeps it)",
    )
    command.add_argument(
        "--keys", type=_names, metavar="A,B", help="names of a tuple's members, or keys to take"
    )
    command.add_argument(
        "--samples", action="store_true", help="the source yields one row at a time, no batches"
    )
    command.add_argument(
        "--ragged", type=_names, default=(), metavar="A,B", help="keys with rows of any length"
    )
    command.add_argument(
        "--chunk-rows",
        type=positive,
        metavar="N",
        help="rows of a chunk (default: 1 MiB of them, at most 1024)",
    )
    command.add_argument(
        "--compression", choices=("gzip", "lzf"), help="of each chunk (default: none)"
    )
    command.add_argument(
        "--checksum", action="store_true", help="have checksums, so that flipped bits are found"
    )
    command.add_argument(
        "--merge", action="store_true", help="copy all into one self-contained file"
    )
    command.add_argument(
        "--dry-run", action="store_true", help="make the first batch only, and write nothing"
    )
    _add_progress(command)
    command.set_defaults(run=reporting(_pack))


def _add_progress(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--quiet",
        dest="progress",
        action="store_false",
        help="show no progress bar (default: one, if standard error is a terminal)",
    )


def module_and_name(text: str) -> tuple[str, str]:
    """Read MODULE:FUNCTION for argparse."""
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise argparse.ArgumentTypeError(f"must be MODULE:FUNCTION, got {text!r}")
    is_path = module.endswith(".py") and os.path.exists(module)
    if is_path or not all(part.isidentifier() for part in module.split(".")):
        folder, file = os.path.split(module.removesuffix(".py"))
        advice = f"; give {file}:{name}" if file.isidentifier() else ""
        if advice and folder:
            advice += f", with {folder} in PYTHONPATH or as the current directory"
        raise argparse.ArgumentTypeError(
            f"must be MODULE:FUNCTION, where MODULE is a name that Python imports, got {text!r}"
            + advice
        )
    return module, name


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"must be names with commas between, got {text!r}")
    return names


def reporting(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Have what a user can mend be told in one line; the rest is a traceback."""

    def told(options: argparse.Namespace) -> int:
        try:
            return run(options)
        except (
            *(DataFileError, FileExistsError, FrameworkUnavailable, InvalidState, StateMismatch),
            _NoSource,
        ) as error:
            # a message may quote names from a file; its own line breaks stay
            lines = map(printable, in_shell(str(error)).split("\n"))
            print("enqueuer:", "\n".join(lines), file=sys.stderr)
            return FAILED

    return told


# What options of Python are called here; messages advise them.
_SHELL_OPTIONS = (
    (r"\bkeys=\[(.*?)\]", r"--keys \1"),
    (r"\bkeys=", "--keys"),
    (r"\bragged=\[(.*?)\]", r"--ragged \1"),
    (r"\bbatched=False", "--samples"),
    (r"\bmerge=True", "--merge"),
    (r"\bshards=", "--shards "),
    (r"\brandom_seed (was|is)", r"--seed \1"),
    (r"\ballow_outside=False", "--refuse-outside"),
)


def in_shell(text: str) -> str:
    """Return a message that advises options of the shell instead of those of Python.

    Example:
        >>> in_shell("pad them, or give ragged=['x', 'y']")
        'pad them, or give --ragged x,y'
    """
    for python, shell in _SHELL_OPTIONS:
        for found in list(re.finditer(python, text)):
            option = found.expand(shell).replace("'", "").replace(", ", ",")
            text = text.replace(found[0], option)
    return text


class _NoSource(Exception):
    """What was named is not there."""


def _pack(options: argparse.Namespace) -> int:
    from enqueuer.datasets.h5pack import as_shards
    from enqueuer.datasets.hdf5 import pack

    source = named(*options.source)
    try:
        as_shards(source, options.shards)
    except (TypeError, ValueError) as error:
        raise _NoSource(f"{':'.join(options.source)}: {error}") from error
    form = dict(
        keys=options.keys,
        batched=not options.samples,
        ragged=options.ragged,
        chunk_rows=options.chunk_rows,
        compression=options.compression,
        checksum=options.checksum,
    )
    if options.dry_run:
        return _dry_run(options, source, form)
    try:
        rows = pack(
            source,
            options.path,
            workers=options.workers,
            backend=options.backend,
            shards=options.shards,
            random_seed=options.seed,
            merge=options.merge,
            progress=options.progress,
            **form,
        )
    except (TypeError, ValueError) as error:
        if not _is_of_packing(error):
            raise  # the source's own; the traceback tells where
        raise _NoSource(f"{':'.join(options.source)}: {error}") from error
    except KeyboardInterrupt:
        print(
            "\nenqueuer: shards that are finished are kept; the same command goes on",
            file=sys.stderr,
        )
        raise
    print(f"{options.path}: {rows:,} rows")
    return 0


def named(module: str, name: str) -> Any:
    """Import what was named, from the current directory first, as `python -m` does."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        there = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and lacks something itself
        raise _NoSource(f"there is no module {module!r}, seen from {os.getcwd()}") from None
    try:
        return operator.attrgetter(name)(there)
    except AttributeError:
        raise _NoSource(f"module {module!r} has no {name!r}") from None


def _is_of_packing(error: BaseException) -> bool:
    """Return whether packing itself refused what the source yielded."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).name in ("h5pack.py", "h5rows.py")


def _dry_run(options: argparse.Namespace, source: Any, form: dict[str, Any]) -> int:
    """Pack the first batch alone, to a temporary folder, and tell what came of it."""
    from enqueuer.datasets.h5pack import as_shards, check_target
    from enqueuer.datasets.hdf5 import describe, pack

    target = Path(options.path)
    runs, shards = as_shards(source, options.shards)
    check_target(target)
    seed = fresh_seed() if options.seed is None else options.seed
    items = runs.open(Shard(0, shards, 0, seed))
    first = list(itertools.islice((item for item in items if item is not None), 1))
    if not first:
        print(f"{target}: the first of {shards} shards yields nothing")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, target.name)
        rows = pack(first, path, merge=True, **form)
        found = describe(path)
    parts = target.with_name(target.name + ".parts")
    goes_on = f"; goes on with {parts}" if parts.exists() else ""
    print(
        f"{target}: would be written by {pluralize(options.workers, 'worker')}, "
        f"{pluralize(shards, 'shard')}{goes_on}; the first item has {rows} rows"
    )
    print("\n".join(map(printable, _table(found))))
    return 0


# --- inspect ------------------------------------------------------------------------------------


def add_inspect(commands: Commands) -> None:
    """Add `inspect` and its options."""
    command = commands.add_parser(
        "inspect",
        help="tell what is in an HDF5 file, and whether it is whole",
        description=(
            "Tell what is in an HDF5 file: keys, shapes, dtypes, chunks, sizes, statistics. "
            "Needs: pip install 'enqueuer[hdf5]'"
        ),
        epilog=_INSPECT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("path", metavar="FILE.h5", help="the file to look at")
    command.add_argument(
        "--refuse-outside",
        action="store_true",
        help="fail if the file shows data of files outside of its folder",
    )
    command.add_argument("--json", action="store_true", help="print all of it as JSON")
    command.add_argument(
        "--full",
        action="store_true",
        help="make statistics of all rows (default: of 16 chunks, evenly spread)",
    )
    _add_progress(command)
    command.set_defaults(run=reporting(_inspect))


def _inspect(options: argparse.Namespace) -> int:
    from enqueuer.datasets.hdf5 import describe

    with bar("reading", None, "row", options.progress if options.full else False) as tell:
        found = describe(options.path, options.full, tell, not options.refuse_outside)
    if options.json:
        print(json.dumps(_as_dict(found), indent=2))
        return 0
    lines = [
        f"{found.path}: {size(found.bytes)} in {pluralize(found.files, 'file')}",
        *_table(found),
        *(f"reads a file outside of its folder: {path}" for path in found.outside),
        *_attributes(found),
    ]
    # names and attributes may be anybody's
    print("\n".join(map(printable, lines)))
    return 0


def _as_dict(found: Description) -> dict[str, Any]:
    """Return what was found as plain data, for JSON."""
    own = found.column_attributes
    return {
        "path": found.path,
        "bytes": found.bytes,
        "files": found.files,
        "outside": found.outside,
        "columns": [
            dataclasses.asdict(column)
            | {"statistics": dataclasses.asdict(summary)}
            | {"attributes": _all_plain(own.get(column.name, {}))}
            for column, summary in zip(found.columns, found.summaries, strict=True)
        ],
        "attributes": _all_plain(found.attributes),
    }


def _all_plain(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in attributes.items()}


def _plain(value: Any) -> Any:
    """Return the value of an attribute, or its text if JSON has nothing like it."""
    value = value.tolist() if hasattr(value, "tolist") else value
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)
    return value


def _table(found: Description) -> Iterator[str]:
    """Yield a line for each column of a file, in columns."""
    head = ("key", "shape", "dtype", "chunk", "compression", "stored", "min", "mean", "max")
    cells = map(_cells, found.columns, found.summaries)
    yield from table([head, *cells], str.ljust)
    partly = [s.rows for c, s in zip(found.columns, found.summaries, strict=True) if _is_part(c, s)]
    if partly:
        yield f"statistics of {max(partly):,} rows; --full takes all"
    for column, summary in zip(found.columns, found.summaries, strict=True):
        if summary.not_finite:
            yield f"{column.name}: {summary.not_finite:,} numbers are NaN or infinite"


def _is_part(column: Column, summary: Summary) -> bool:
    return 0 < summary.rows < column.shape[0]


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


def _attributes(found: Description) -> Iterator[str]:
    owners = {"": found.attributes, **found.column_attributes}
    for owner, attributes in owners.items():
        for name, value in attributes.items():
            text = str(value)
            if len(text) > _SHOWN_ATTRIBUTE:
                text = text[:_SHOWN_ATTRIBUTE] + "..."
            yield f"{owner}{'@' if owner else ''}{name} = {text}"
