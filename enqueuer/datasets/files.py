"""Files as elements: lists of them, and functions that load one, for `map`.

    find_files:    paths that match patterns
    image_folder:  pairs of a path and a class, of folders
    read_list:     pairs of a path and a label, of a CSV or text file
    split:         pairs -> those for training, those for validation

The functions that load a file are those of `loaders`.
"""

from __future__ import annotations

import csv
import glob
import os
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TextIO, TypeVar

from enqueuer.common import checks
from enqueuer.datasets.loaders import Path, load_array, load_audio, load_image, random_crop
from enqueuer.workers.tasks import permutation

__all__ = [
    "find_files",
    "image_folder",
    "load_array",
    "load_audio",
    "load_image",
    "random_crop",
    "read_list",
    "split",
]


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
        FileNotFoundError: No pattern matches a file.

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
    found = _found(patterns, root)
    if not found:
        where = os.getcwd() if root is None else os.fspath(root)
        wanted = " or ".join(repr(os.fspath(pattern)) for pattern in patterns)
        raise FileNotFoundError(f"no file matches {wanted} in {where!r}")
    return sorted(found)


def _found(patterns: Sequence[Path], root: Path | None) -> set[str]:
    """Return the files that match any of some patterns."""
    found: set[str] = set()
    for pattern in patterns:
        names = _matches(os.fspath(root or ""), os.fspath(pattern))
        paths = [os.path.join(root or "", _tidied(name)) for name in names]
        found.update(path for path in paths if os.path.isfile(path))
    return found


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


_IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


def image_folder(root: Path, *endings: str) -> tuple[list[tuple[str, int]], list[str]]:
    """Return the images in a folder that has a folder for each class, and the names of classes.

    As `ImageFolder` of torchvision does it: the classes are sorted and numbered from 0, and the
    images of a class may lie in folders of their own. What begins with a dot is left out.

    Args:
        root: Path of the folder.
        endings: Endings of the files, in any case; by default those of torchvision.

    Returns:
        Pairs of a path and the number of its class, sorted; and the names of the classes.

    Raises:
        FileNotFoundError: There is no class, or one without an image.

    Example:
        >>> import os, pathlib, tempfile
        >>> from enqueuer.datasets.files import image_folder
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("dog/b.JPG", "cat/c.png", "cat/a.jpg", "cat/notes.txt"):
        ...         path = pathlib.Path(folder, name)
        ...         path.parent.mkdir(exist_ok=True); path.touch()
        ...     files, classes = image_folder(folder)
        ...     classes, [(os.path.basename(path), label) for path, label in files]
        (['cat', 'dog'], [('a.jpg', 0), ('c.png', 0), ('b.JPG', 1)])
    """
    with os.scandir(root) as entries:
        classes = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    if not classes:
        raise FileNotFoundError(f"{os.fspath(root)!r} has no folders, and each class is one")
    ends, found = tuple(ending.lower() for ending in endings or _IMAGES), []
    for number, name in enumerate(classes):
        files = _found([os.path.join(glob.escape(name), "**")], root)
        images = [(path, number) for path in sorted(files) if path.lower().endswith(ends)]
        if not images:
            raise FileNotFoundError(
                f"class {name!r} in {os.fspath(root)!r} has no file with one of {ends}"
            )
        found += images
    return found, classes


T = TypeVar("T")


def split(
    pairs: Sequence[T],
    *,
    validation: float = 0.1,
    random_seed: int = 0,
    balanced: bool = True,
) -> tuple[list[T], list[T]]:
    """Divide a list at random into two, for training and for validation.

    Both keep the order of the list. The same list and seed give the same parts on every machine.

    Args:
        pairs: What is divided, such as pairs of a path and a label.
        validation: Share of the second part; 0.1 by default.
        random_seed: Seed of the choice; 0 by default.
        balanced: Whether each label has this share, up to one pair; the seed chooses the labels
            that have one more. The label of a pair is its last element.

    Raises:
        TypeError: `balanced` is True, and there are no pairs, or labels that cannot be compared.
        ValueError: `validation` is not between 0 and 1, or a part would have nothing.

    Example:
        >>> from enqueuer.datasets.files import split
        >>> pairs = [(f"{number}.png", "odd" if number % 2 else "even") for number in range(8)]
        >>> train, check = split(pairs, validation=0.25)
        >>> len(train), sorted(label for _, label in check)
        (6, ['even', 'odd'])
    """
    checks.integer("random_seed", random_seed, least=0)
    if not (isinstance(validation, (int, float)) and 0 < validation < 1):
        raise ValueError(f"validation must be a number between 0 and 1, got {validation!r}")
    groups: dict[Any, list[int]] = {}
    pair: Any
    for index, pair in enumerate(pairs):
        if balanced and not (isinstance(pair, (tuple, list)) and pair):
            raise TypeError(f"balanced=True needs pairs with a label, got {pair!r}")
        if balanced and not isinstance(pair[-1], Hashable):
            raise TypeError(f"balanced=True needs labels such as ints and texts, got {pair[-1]!r}")
        groups.setdefault(pair[-1] if balanced else None, []).append(index)
    chosen: set[int] = set()
    seen = 0
    by_label = [*groups.values()]
    for number in permutation(len(by_label), random_seed, len(pairs)):
        group = by_label[number]
        # The rounding of one label is made good by the next one.
        seen += len(group)
        count = min(len(group), max(0, round(validation * seen) - len(chosen)))
        chosen.update(group[at] for at in permutation(len(group), random_seed, number)[:count])
    if not 0 < len(chosen) < len(pairs):
        raise ValueError(
            f"validation={validation} of {len(pairs)} pairs are {len(chosen)}, and each part "
            "must have one at least"
        )
    parts: tuple[list[T], list[T]] = [], []
    for index, pair in enumerate(pairs):
        parts[index in chosen].append(pair)
    return parts


def read_list(
    path: Path,
    label: Callable[[str], Any] | None = None,
    *,
    columns: tuple[str, str] | None = None,
) -> list[tuple[str, Any]]:
    r"""Read a list of paths and labels: a CSV or TSV file with a header, or a text file.

    A list that ends with `.csv` or `.tsv` is read by the csv module; commas, semicolons or tabs
    separate its columns. Other lists have a path, or a path and a label, on each line.

    Fields of a text file are separated by blanks or tabs. A field that contains some, or begins
    with `#` or a quote, needs single or double quotes; within double quotes, `\"` and `\\` stand
    for a quote and a backslash. A `#` at the beginning of a field begins a comment. Empty lines
    are left out, and repeated lines are kept.

    Args:
        path: Path of the list, in UTF-8. The paths in it are relative to its folder, and URLs
            stay as they are.
        label: Function that makes a label of its text. By default labels are ints if all in the
            list are written as ints, otherwise strings.
        columns: Names of the columns with paths and labels in a CSV or TSV file; by default it
            has these two alone, or one with paths.

    Returns:
        Paths and labels in the order of the list; the label of a line without one is None.

    Raises:
        ValueError: There are no paths, a line is malformed or not UTF-8, or the columns are not
            clear; the message has the list, the line and the reason.

    Example:
        >>> import os, pathlib, tempfile
        >>> from enqueuer.datasets.files import read_list
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     train = pathlib.Path(folder, "train.txt")
        ...     _ = train.write_text('a.png 3\n# spoilt: b.png 1\n"c d.png" 0\n')
        ...     [(os.path.basename(path), label) for path, label in read_list(train)]
        [('a.png', 3), ('c d.png', 0)]
    """
    name = os.fspath(path)
    # File names need not be UTF-8: Python decodes those of the system in the same way.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        if name.lower().endswith((".csv", ".tsv")):
            rows = list(_table(file, name, columns))
        elif columns is not None:
            raise ValueError(f"{name}: columns are those of a .csv or .tsv file")
        else:
            rows = list(_lines(file, name))
    if not rows:
        raise ValueError(f"{name}: there are no paths in this list")
    for place, own, where in rows:
        # Names of files need not be UTF-8.
        if _OTHER.search(own or "") or (_OTHER.search(place) and not _exists(name, place)):
            raise ValueError(f"{where}: {_not_utf8(place + (own or ''))}")
    if label is None:
        are_ints = all(_INT.fullmatch(own) for _, own, _ in rows if own is not None)
        label = int if are_ints else str
    folder = os.path.dirname(name)
    return [
        (place if _URL.match(place) else os.path.join(folder, place), _label(label, own, where))
        for place, own, where in rows
    ]


# A path, the text of its label, and the place in the list.
_Row = tuple[str, str | None, str]


def _table(file: TextIO, name: str, columns: tuple[str, str] | None) -> Iterator[_Row]:
    """Yield the rows of a CSV or TSV file."""
    first, begin = "", 0
    while not first.strip() and (line := file.readline()):
        first, begin = line, begin + 1
    if _OTHER.search(first):
        raise ValueError(f"{name}, line {begin}: {_not_utf8(first)}")
    file.seek(0)
    is_tsv = name.lower().endswith(".tsv")
    # Spreadsheets write the separator into a line of its own.
    known = re.fullmatch('"?sep=(.)"?', first.strip("\r\n"))
    delimiter = known[1] if known else "\t" if is_tsv else max(",;\t", key=first.count)
    table = csv.reader(file, delimiter=delimiter, strict=True)
    rows: Iterator[list[str]] = (row for row in table if any(field.strip() for field in row))
    try:
        if known:
            next(rows)
        header = [field.strip() for field in next(rows, [])]
        places = _places(header, columns, f"{name}, line {begin}")
        if columns is None:
            rows = _below(rows, header, _exists(name, header[0]), f"{name}, line {begin}")
        for row in rows:
            where = f"{name}, line {table.line_num}"
            if len(row) != len(header):
                raise ValueError(f"{where}: {len(row)} fields, and {len(header)} in the header")
            if is_tsv and any("\n" in field for field in row):
                raise ValueError(f"{where}: a field has several lines; is a quote not closed?")
            path, *label = (row[place].strip() for place in places)
            if not path:
                raise ValueError(f"{where}: the path is empty")
            yield path, (label[0] or None) if label else None, where
    except csv.Error as error:
        raise ValueError(f"{name}, line {table.line_num}: {error}") from error


def _places(header: list[str], columns: tuple[str, str] | None, where: str) -> list[int]:
    """Return the places of the columns with paths and labels."""
    wanted = header if columns is None else list(columns)
    if len(header) == 1 and re.search("[,;|\t]", header[0]):
        raise ValueError(
            f"{where}: {header[0]!r} is one column; commas, semicolons or tabs separate those of a "
            ".csv file, and tabs those of a .tsv file"
        )
    # The paths come first.
    is_turned = columns is None and [_is_of_paths(name) for name in header] == [False, True]
    is_known = 0 < len({*wanted}) == len(wanted) <= 2 and {*wanted} <= {*header}
    if is_turned or not is_known:
        raise ValueError(f"{where}: give columns=(of paths, of labels); the header has {header}")
    return [*range(len(header))] if columns is None else [*map(header.index, wanted)]


def _below(
    rows: Iterator[list[str]], header: list[str], is_file: bool, where: str
) -> Iterator[list[str]]:
    """Return the rows below a header; raise ValueError if that looks like one of them."""
    if is_file or any(_INT.fullmatch(name) or _PATH.search(name) for name in header):
        raise ValueError(
            f"{where}: it must be a header, and {header} looks like a row; write a line such as "
            "`path,label` before it, or give columns=(of paths, of labels) if it is one"
        )
    return rows


def _is_of_paths(name: str) -> bool:
    """Return whether a column has the name of one of paths."""
    return bool({"path", "file", "filename", "image"} & set(re.split("[^a-z]+", name.lower())))


def _not_utf8(text: str) -> str:
    encoding = "UTF-16" if "\0" in text else "WINDOWS-1252"
    return f"it is not UTF-8: save the list so, or use `iconv -f {encoding} -t UTF-8 LIST`"


def _lines(file: TextIO, name: str) -> Iterator[_Row]:
    """Yield the rows of a text file."""
    for number, line in enumerate(file, 1):
        where = f"{name}, line {number}"
        fields = _fields(line.rstrip("\r\n"), where)
        if len(fields) > 2:
            raise ValueError(
                f"{where}: {len(fields)} fields, but a line is a path and a label; "
                f"quote a field that contains blanks: {line.rstrip()!r}"
            )
        is_alone = len(fields) == 1
        is_quoted = '"' in line or "'" in line
        is_table = fields and re.search("[,;]" if is_alone else "[,;]$", fields[0])
        if is_table and not is_quoted and not _exists(name, fields[0]):
            raise ValueError(
                f"{where}: there is no file {fields[0]!r}; a list with commas has a header, and "
                "a name that ends with .csv"
            )
        if fields:
            yield fields[0], None if is_alone else fields[1], where


def _exists(name: str, path: str) -> bool:
    """Return whether a path of a list is a file."""
    return os.path.isfile(os.path.join(os.path.dirname(name), path))


# 007 is a string: as an int it would be the same as 7.
_INT = re.compile("-?[1-9][0-9]*|0")
# What no text has that was written in UTF-8.
_OTHER = re.compile("[\0\udc80-\udcff]")
# A folder before a name, or an ending of a file.
_PATH = re.compile(r"[/\\]|\.[A-Za-z0-9]{2,4}$")
_URL = re.compile("[a-z][a-z0-9+.-]*://", re.IGNORECASE)
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
    except (ValueError, LookupError) as error:
        raise ValueError(f"{where}: the label {text!r} is wrong: {error}") from error
