"""Lists of files: found by patterns, or read from a text file, with labels."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

Path = str | os.PathLike[str]


def find_files(*patterns: Path, root: Path | None = None) -> list[str]:
    """Return the files that match any of some patterns, sorted, each once.

    They are sorted by the code points of their paths, so the order is the same on every machine,
    for any language and file system.

    Args:
        patterns: As for `glob.glob`: `*`, `?` and `[...]` within a name, `**` for any number of
            folders. Names that begin with a dot are matched only by patterns that do, too.
            `**` follows links to folders, unless they lead back to a folder above: in a loop,
            each file is found once.
        root: The folder of the patterns; by default the working directory. Each path that is
            returned begins with it.

    Raises:
        FileNotFoundError: A pattern matches no file.

    Example:
        >>> import os, pathlib, tempfile
        >>> from enqueuer.datasets.files import find_files
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("b.png", "a.png", "a.txt"):
        ...         pathlib.Path(folder, name).touch()
        ...     [os.path.basename(path) for path in find_files("**/*.png", root=folder)]
        ['a.png', 'b.png']
    """
    if not patterns:
        raise TypeError("find_files needs a pattern, such as 'images/**/*.png'")
    found: set[str] = set()
    for pattern in patterns:
        names = _matches(os.fspath(root or ""), os.fspath(pattern))
        paths = [os.path.join(root or "", _tidied(name)) for name in names]
        files = [path for path in paths if os.path.isfile(path)]
        if not files:
            where = os.getcwd() if root is None else os.fspath(root)
            raise FileNotFoundError(f"no file matches {os.fspath(pattern)!r} in {where!r}")
        found.update(files)
    return sorted(found)


def _matches(root: str, pattern: str) -> Iterator[str]:
    """Yield matching paths like `glob.iglob`, but follow no link in a circle."""
    parts = pattern.replace("/", os.sep).split(os.sep)
    if "**" not in parts:
        yield from glob.iglob(pattern, root_dir=root or None)
        return
    at = parts.index("**")
    rest = os.sep.join(parts[at + 1 :]) or "*"
    before = os.sep.join([*parts[:at], ""])
    for top in glob.iglob(before, root_dir=root or None) if at else [""]:
        for folder in _folders(root, top, frozenset()):
            for name in _matches(os.path.join(root, folder), rest):
                yield os.path.join(folder, name)


def _folders(root: str, folder: str, above: frozenset[str]) -> Iterator[str]:
    """Yield a folder and all folders in it, at any depth, without circles."""
    here = os.path.join(root, folder)
    real = os.path.realpath(here)
    if real in above:
        return
    yield folder
    for name in glob.iglob(os.path.join("*", ""), root_dir=here or None):
        yield from _folders(root, os.path.join(folder, name), above | {real})


def _tidied(name: str) -> str:
    """Return a path without needless parts, so that two patterns give a file one name."""
    # Behind a link to a folder, `..` is not needless.
    if os.pardir in name.split(os.sep):
        return name
    return os.path.normpath(name)


def read_list(path: Path, label: Callable[[str], Any] | None = None) -> list[tuple[str, Any]]:
    r"""Read a text list with a path, or a path and a label, on each line.

    Fields are separated by blanks or tabs. A field that contains some, or begins with `#` or a
    quote, needs single or double quotes; within double quotes, `\"` and `\\` stand for a quote
    and a backslash. A `#` at the beginning of a field begins a comment. Empty lines are left out,
    and repeated lines are kept.

    Args:
        path: Path of the list, in UTF-8. The paths in it are relative to its folder.
        label: Function that makes a label of its text. By default labels are ints if all in the
            list are written as ints, otherwise strings.

    Returns:
        Paths and labels in the order of the list; the label of a line without one is None.

    Raises:
        ValueError: A line is malformed; the message has the list, the line and the reason.

    Example:
        >>> import os, pathlib, tempfile
        >>> from enqueuer.datasets.files import read_list
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     train = pathlib.Path(folder, "train.txt")
        ...     _ = train.write_text('a.png 3\n# spoilt: b.png 1\n"c d.png" 0\n')
        ...     [(os.path.basename(path), label) for path, label in read_list(train)]
        [('a.png', 3), ('c d.png', 0)]
    """
    folder = os.path.dirname(os.fspath(path))
    # Path, label, and place in the list.
    rows: list[tuple[str, str | None, str]] = []
    # File names need not be UTF-8: Python decodes those of the system in the same way.
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            where = f"{os.fspath(path)}, line {number}"
            fields = _fields(line.rstrip("\n"), where)
            if len(fields) > 2:
                raise ValueError(
                    f"{where}: {len(fields)} fields, but a line is a path and a label; "
                    f"quote a field that contains blanks: {line.rstrip()!r}"
                )
            if fields:
                own = fields[1] if len(fields) == 2 else None
                rows.append((os.path.join(folder, fields[0]), own, where))
    if label is None:
        are_ints = all(_INT.fullmatch(own) for _, own, _ in rows if own is not None)
        label = int if are_ints else str
    return [(name, _label(label, own, where)) for name, own, where in rows]


# 007 is a string: as an int it would be the same as 7.
_INT = re.compile("-?[1-9][0-9]*|0")
# A field in double quotes, in single quotes, or as it is.
_FIELD = re.compile(r"""(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([^ \t"'][^ \t]*))(?=[ \t]|$)""")


def _fields(line: str, where: str) -> list[str]:
    fields = []
    rest = line.strip(" \t")
    while rest and not rest.startswith("#"):
        match = _FIELD.match(rest)
        if match is None:
            raise ValueError(f"{where}: a quote is not closed, or more follows at once: {rest!r}")
        double, single, plain = match.groups()
        escaped = None if double is None else re.sub(r'\\(["\\])', r"\1", double)
        fields.append(next(text for text in (escaped, single, plain) if text is not None))
        rest = rest[match.end() :].lstrip(" \t")
    if fields and not fields[0]:
        raise ValueError(f"{where}: the path is empty: {line!r}")
    return fields


def _label(make: Callable[[str], Any], text: str | None, where: str) -> Any:
    if text is None:
        return None
    try:
        return make(text)
    except ValueError as error:
        raise ValueError(f"{where}: the label {text!r} is wrong: {error}") from error
