"""The commands `enqueuer pack` and `enqueuer inspect`.

pack:     a generator function -> an HDF5 file
inspect:  an HDF5 file -> its keys, sizes and statistics, as a table or as JSON
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enqueuer.cli.arguments import (
    Commands,
    UnusableSource,
    add_backend,
    add_command,
    add_flag,
    add_names,
    add_number,
    add_seed,
    add_source,
    load_source,
)
from enqueuer.common.extras import install_command
from enqueuer.common.text import pluralize, printable, size, table
from enqueuer.monitoring.progress import bar
from enqueuer.workers.shards import Shard, fresh_seed

if TYPE_CHECKING:
    from enqueuer.datasets.hdf5 import Column, Description, Summary

# Most characters of an attribute.
_LONGEST_VALUE = 60
_HEAD = ("key", "shape", "dtype", "chunk", "compression", "stored", "min", "mean", "max")
# Options of `pack` that decide how rows are written, and the others.
_FORMAT = ("keys", "ragged", "chunk_rows", "compression", "checksum")
_RUN = ("workers", "backend", "shards", "merge")

_PACK_EXAMPLES = """\
  enqueuer pack mydata:batches train.h5 --workers 8 --seed 7
      run batches(shard) of mydata.py, which yields dicts of arrays, on 8 processes
  enqueuer pack mydata:batches train.h5 --dry-run
      only make the first batch, and show what would be written
  enqueuer pack mydata:samples train.h5 --samples --ragged tokens --compression gzip --merge
      one row at a time, of any length, compressed, into one self-contained file

After Ctrl-C, a crash or a power cut the same command resumes the run.
"""


_INSPECT_EXAMPLES = """\
  enqueuer inspect train.h5
      keys, shapes, dtypes, chunks, sizes; statistics of some of the rows
  enqueuer inspect train.h5 --full
      statistics of all rows; this reads the whole file and so finds any broken part
"""


def add_pack(commands: Commands) -> None:
    """Add `pack` and its options."""
    command = add_command(
        commands,
        "pack",
        help="run a generator function in parallel and write its batches to an HDF5 file",
        description=(
            "Run a generator function in parallel and write its batches to an HDF5 file, which "
            f"appears when it is complete. What it needs: {install_command('hdf5')}"
        ),
        examples=_PACK_EXAMPLES,
    )
    add_source(command, "a generator function of a shard, or any iterable")
    command.add_argument("path", metavar="OUT.h5", help="the file to write")
    add_number(command, "--workers", "number of workers, one shard at a time each (default: 1)", 1)
    add_backend(command, "process", "kind of the workers (default: process)")
    add_number(command, "--shards", "number of shards, on which the content depends (default: 32)")
    add_seed(command, "seed of everything random (default: drawn; a resumed run keeps it)")
    add_names(command, "--keys", "names of a tuple's members, or keys to take")
    add_names(command, "--ragged", "keys with rows of any length", ())
    add_number(command, "--chunk-rows", "number of rows in a chunk (default: 1 MiB, at most 1024)")
    command.add_argument(
        "--compression", choices=("gzip", "lzf"), help="compression of each chunk (default: none)"
    )
    add_flag(command, "--samples", "the source yields single rows, not batches")
    add_flag(command, "--checksum", "write checksums, which reveal flipped bits")
    add_flag(command, "--merge", "copy all parts into one self-contained file")
    add_flag(command, "--dry-run", "make the first batch only, and write nothing")
    add_flag(command, "--quiet", "show no progress bar (default: a bar, on a terminal)")
    command.set_defaults(run=_pack)


def _pack(options: argparse.Namespace) -> int:
    # h5py is an extra.
    from enqueuer.datasets.hdf5 import pack
    from enqueuer.datasets.hdf5.pack import is_refusal

    source = load_source(*options.source)
    format = {name: getattr(options, name) for name in _FORMAT} | {"batched": not options.samples}
    try:
        if options.dry_run:
            print("\n".join(map(printable, _dry_run(options, source, format))))
            return 0
        run = {name: getattr(options, name) for name in _RUN} | {"random_seed": options.seed}
        rows = pack(source, options.path, progress=not options.quiet, **run, **format)
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


def _dry_run(options: argparse.Namespace, source: Any, format: dict[str, Any]) -> Iterator[str]:
    """Pack the first batch alone, to a temporary folder, and yield a description of the file."""
    from enqueuer.datasets.hdf5 import describe, pack
    from enqueuer.datasets.hdf5.pack import as_shards
    from enqueuer.datasets.hdf5.resume import check_target

    target = Path(options.path)
    opens, shards = as_shards(source, options.shards)
    check_target(target, options.merge)
    seed = fresh_seed() if options.seed is None else options.seed
    items = opens.open(Shard(0, shards, 0, seed))
    first = next((item for item in items if item is not None), None)
    if first is None:
        yield f"{target}: the first of {shards} shards yields nothing"
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, target.name)
        rows = pack([first], path, merge=True, **format)
        found = describe(path)
    parts = target.with_name(target.name + ".parts")
    resumes = f"; resumes with {parts}" if parts.exists() else ""
    yield (
        f"{target}: would be written by {pluralize(options.workers, 'worker')}, "
        f"{pluralize(shards, 'shard')}{resumes}; the first item has {rows} rows"
    )
    yield from _table_of(found)


def add_inspect(commands: Commands) -> None:
    """Add `inspect` and its options."""
    command = add_command(
        commands,
        "inspect",
        help="show the content of an HDF5 file, and whether it is complete",
        description=(
            "Show the content of an HDF5 file: keys, shapes, dtypes, chunks, sizes, statistics. "
            f"What it needs: {install_command('hdf5')}"
        ),
        examples=_INSPECT_EXAMPLES,
    )
    command.add_argument("path", metavar="FILE.h5", help="the file to inspect")
    add_flag(command, "--refuse-outside", "fail if it shows data of files outside of its folder")
    add_flag(command, "--json", "print all of it as JSON")
    add_flag(command, "--full", "statistics of all rows (default: of 16 chunks, evenly spread)")
    add_flag(command, "--quiet", "show no progress bar (default: a bar, on a terminal)")
    command.set_defaults(run=_inspect)


def _inspect(options: argparse.Namespace) -> int:
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
    of_columns = found.column_attributes
    # The attributes of the file may be references, which `asdict` cannot copy.
    bare = dataclasses.replace(found, attributes={}, column_attributes={})
    plain = dataclasses.asdict(bare) | {"attributes": _plain(found.attributes)}
    del plain["column_attributes"]
    for column, summary in zip(plain["columns"], plain.pop("summaries"), strict=True):
        column["statistics"] = summary
        column["attributes"] = _plain(of_columns.get(column["name"], {}))
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
