"""The command `enqueuer pack`: a generator function -> an HDF5 file."""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

from enqueuer.cli.arguments import (
    Commands,
    add_backend,
    add_command,
    add_number,
    add_progress,
    add_seed,
    add_source,
    names,
)
from enqueuer.cli.description import table_of
from enqueuer.cli.sources import load_source
from enqueuer.cli.user_errors import UnusableSource, in_one_line
from enqueuer.common.text import pluralize, printable
from enqueuer.workers.shards import Shard, fresh_seed

_EXAMPLES = """\
examples:
  enqueuer pack mydata:batches train.h5 --workers 8 --seed 7
      run batches(shard) of mydata.py, which yields dicts of arrays, on 8 processes
  enqueuer pack mydata:batches train.h5 --dry-run
      only make the first batch, and show what would be written
  enqueuer pack mydata:samples train.h5 --samples --ragged tokens --compression gzip --merge
      one row at a time, of any length, compressed, into one self-contained file

After Ctrl-C, a crash or a power cut the same command resumes the run.
exit codes: 0 written, 1 failed, 2 wrong arguments, 130 after Ctrl-C, 143 after SIGTERM
"""


def add_pack(commands: Commands) -> None:
    """Add `pack` and its options."""
    command = add_command(
        commands,
        "pack",
        help="run a generator function in parallel and write its batches to an HDF5 file",
        description=(
            "Run a generator function in parallel and write its batches to an HDF5 file, which "
            "appears when it is complete. Needs, in the clone: pip install '.[hdf5]'"
        ),
        examples=_EXAMPLES,
    )
    add_source(command, "a generator function of a shard, or any iterable")
    command.add_argument("path", metavar="OUT.h5", help="the file to write")
    _add_run(command)
    _add_format(command)
    command.add_argument(
        "--dry-run", action="store_true", help="make the first batch only, and write nothing"
    )
    add_progress(command)
    command.set_defaults(run=in_one_line(_pack))


def _add_run(command: argparse.ArgumentParser) -> None:
    add_number(
        command,
        "--workers",
        help="number of workers; each writes one shard at a time (default: 1)",
        default=1,
    )
    add_backend(command, default="process", help="kind of the workers (default: process)")
    add_number(
        command,
        "--shards",
        help="number of shards, on which the content depends (default: 32)",
    )
    add_seed(command, help="seed of everything random (default: drawn; a resumed run keeps it)")


def _add_format(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--keys", type=names, metavar="A,B", help="names of a tuple's members, or keys to take"
    )
    command.add_argument(
        "--samples", action="store_true", help="the source yields single rows, not batches"
    )
    command.add_argument(
        "--ragged", type=names, default=(), metavar="A,B", help="keys with rows of any length"
    )
    add_number(
        command,
        "--chunk-rows",
        help="number of rows in a chunk (default: 1 MiB of rows, at most 1024)",
    )
    command.add_argument(
        "--compression", choices=("gzip", "lzf"), help="compression of each chunk (default: none)"
    )
    command.add_argument(
        "--checksum", action="store_true", help="write checksums, which reveal flipped bits"
    )
    command.add_argument(
        "--merge", action="store_true", help="copy all parts into one self-contained file"
    )


def _pack(options: argparse.Namespace) -> int:
    # h5py is an extra.
    from enqueuer.datasets.hdf5 import pack
    from enqueuer.datasets.hdf5.pack import as_shards, is_refusal

    source = load_source(*options.source)
    try:
        as_shards(source, options.shards)
    except (TypeError, ValueError) as error:
        raise UnusableSource(f"{':'.join(options.source)}: {error}") from error
    if options.dry_run:
        return _dry_run(options, source)
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
            **_format(options),
        )
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


def _format(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "keys": options.keys,
        "batched": not options.samples,
        "ragged": options.ragged,
        "chunk_rows": options.chunk_rows,
        "compression": options.compression,
        "checksum": options.checksum,
    }


def _dry_run(options: argparse.Namespace, source: Any) -> int:
    """Pack the first batch alone, to a temporary folder, and describe the file."""
    from enqueuer.datasets.hdf5 import describe, pack
    from enqueuer.datasets.hdf5.pack import as_shards, check_target

    target = Path(options.path)
    opens, shards = as_shards(source, options.shards)
    check_target(target)
    seed = fresh_seed() if options.seed is None else options.seed
    items = opens.open(Shard(0, shards, 0, seed))
    first = list(itertools.islice((item for item in items if item is not None), 1))
    if not first:
        print(f"{target}: the first of {shards} shards yields nothing")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, target.name)
        rows = pack(first, path, merge=True, **_format(options))
        found = describe(path)
    parts = target.with_name(target.name + ".parts")
    resumes = f"; resumes with {parts}" if parts.exists() else ""
    print(
        f"{target}: would be written by {pluralize(options.workers, 'worker')}, "
        f"{pluralize(shards, 'shard')}{resumes}; the first item has {rows} rows"
    )
    print("\n".join(map(printable, table_of(found))))
    return 0
