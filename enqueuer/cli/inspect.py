"""The command `enqueuer inspect`: an HDF5 file -> its keys, sizes and statistics."""

from __future__ import annotations

import argparse
import json

from enqueuer.cli.arguments import Commands, add_command, add_progress
from enqueuer.cli.description import as_dict, attribute_lines, table_of
from enqueuer.cli.user_errors import in_one_line
from enqueuer.common.text import pluralize, printable, size
from enqueuer.monitoring.progress import bar

_EXAMPLES = """\
examples:
  enqueuer inspect train.h5
      keys, shapes, dtypes, chunks, sizes; statistics of some of the rows
  enqueuer inspect train.h5 --full
      statistics of all rows; this reads the whole file and so finds any broken part

exit codes: 0 the file is whole as far as it was read, 1 it is not, 2 wrong arguments
"""


def add_inspect(commands: Commands) -> None:
    """Add `inspect` and its options."""
    command = add_command(
        commands,
        "inspect",
        help="show the content of an HDF5 file, and whether it is complete",
        description=(
            "Show the content of an HDF5 file: keys, shapes, dtypes, chunks, sizes, statistics. "
            "Needs, in the clone: pip install '.[hdf5]'"
        ),
        examples=_EXAMPLES,
    )
    command.add_argument("path", metavar="FILE.h5", help="the file to inspect")
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
    add_progress(command)
    command.set_defaults(run=in_one_line(_inspect))


def _inspect(options: argparse.Namespace) -> int:
    # h5py is an extra.
    from enqueuer.datasets.hdf5 import describe

    with bar("reading", None, "row", options.progress if options.full else False) as advance:
        found = describe(options.path, options.full, advance, not options.refuse_outside)
    if options.json:
        print(json.dumps(as_dict(found), indent=2))
        return 0
    lines = [
        f"{found.path}: {size(found.bytes)} in {pluralize(found.files, 'file')}",
        *table_of(found),
        *(f"reads a file outside of its folder: {path}" for path in found.outside),
        *attribute_lines(found),
    ]
    # Names and attributes come from the file, which may contain control characters.
    print("\n".join(map(printable, lines)))
    return 0
