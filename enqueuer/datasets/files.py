"""Files as elements: lists of them, and functions that load one, for `map`.

    find_files:  paths that match patterns
    image_folder, read_list: pairs of a path and a label, of folders, of a CSV or text file
    split:       pairs -> those for training, those for validation
    load_image:  header -> the box to load -> decoded at a reduced scale -> resized -> turned
    load_audio:  the wanted frames of a WAV file; others by soundfile; at another rate by soxr
    load_array:  the files of numpy

Only Pillow decodes images, so that the pixels do not depend on other packages that are installed.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import io
import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, Literal, TextIO, TypeVar

import numpy as np
import numpy.typing as npt

from enqueuer.common import checks
from enqueuer.common.extras import framework
from enqueuer.errors import DataFileError, FrameworkUnavailable
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


# --- lists ----------------------------------------------------------------------------------------

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
    found: set[str] = set()
    for pattern in patterns:
        names = _matches(os.fspath(root or ""), os.fspath(pattern))
        paths = [os.path.join(root or "", _tidied(name)) for name in names]
        found.update(path for path in paths if os.path.isfile(path))
    if not found:
        where = os.getcwd() if root is None else os.fspath(root)
        wanted = " or ".join(repr(os.fspath(pattern)) for pattern in patterns)
        raise FileNotFoundError(f"no file matches {wanted} in {where!r}")
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
        files = find_files(os.path.join(glob.escape(name), "**"), root=root)
        images = [(path, number) for path in files if path.lower().endswith(ends)]
        if not images:
            raise FileNotFoundError(
                f"class {name!r} in {os.fspath(root)!r} has no file with one of {ends}"
            )
        found += images
    return found, classes


Pair = TypeVar("Pair")


def split(
    pairs: Sequence[Pair],
    *,
    validation: float = 0.1,
    random_seed: int = 0,
    balanced: bool = True,
) -> tuple[list[Pair], list[Pair]]:
    """Divide a list at random into two, for training and for validation.

    Both keep the order of the list. The same list and seed give the same parts on every machine.

    Args:
        pairs: What is divided, such as pairs of a path and a label.
        validation: Share of the second part; 0.1 by default.
        random_seed: Seed of the choice; 0 by default.
        balanced: Whether each label has this share, up to one pair. The label of a pair is its
            last element.

    Raises:
        TypeError: `balanced` is True, and there are no pairs, or labels that cannot be compared.
        ValueError: A part would have nothing.

    Example:
        >>> from enqueuer.datasets.files import split
        >>> pairs = [(f"{number}.png", "odd" if number % 2 else "even") for number in range(8)]
        >>> train, check = split(pairs, validation=0.25)
        >>> len(train), sorted(label for _, label in check)
        (6, ['even', 'odd'])
    """
    groups: dict[Any, list[int]] = {}
    for index, pair in enumerate(pairs):
        if balanced and not (isinstance(pair, (tuple, list)) and pair):
            raise TypeError(f"balanced=True needs pairs with a label, got {pair!r}")
        groups.setdefault(pair[-1] if balanced else None, []).append(index)  # type: ignore[index]
    chosen: set[int] = set()
    seen = 0
    for number, group in enumerate(groups.values()):
        # The rounding of one label is made good by the next one.
        seen += len(group)
        count = min(len(group), max(0, round(validation * seen) - len(chosen)))
        chosen.update(group[at] for at in permutation(len(group), random_seed, number)[:count])
    if not 0 < len(chosen) < len(pairs):
        raise ValueError(
            f"validation={validation} of {len(pairs)} pairs are {len(chosen)}, and each part "
            "must have one at least"
        )
    parts: tuple[list[Pair], list[Pair]] = [], []
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
        path: Path of the list, in UTF-8. The paths in it are relative to its folder.
        label: Function that makes a label of its text. By default labels are ints if all in the
            list are written as ints, otherwise strings.
        columns: Names of the columns with paths and labels in a CSV or TSV file; by default it
            has these two alone, or one with paths.

    Returns:
        Paths and labels in the order of the list; the label of a line without one is None.

    Raises:
        ValueError: A line is malformed, or the columns are not clear; the message has the list,
            the line and the reason.

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
    if label is None:
        are_ints = all(_INT.fullmatch(own) for _, own, _ in rows if own is not None)
        label = int if are_ints else str
    folder = os.path.dirname(name)
    return [(os.path.join(folder, file), _label(label, own, where)) for file, own, where in rows]


# A path, the text of its label, and the place in the list.
_Row = tuple[str, str | None, str]


def _table(file: TextIO, name: str, columns: tuple[str, str] | None) -> Iterator[_Row]:
    """Yield the rows of a CSV or TSV file."""
    first = file.readline()
    file.seek(0)
    rows = csv.reader(file, delimiter=max(",;\t", key=first.count), strict=True)
    try:
        header = [field.strip() for field in next(rows, [])]
        wanted = header if columns is None else list(columns)
        if not 0 < len(wanted) <= 2 or not set(wanted) <= set(header):
            raise ValueError(
                f"{name}, line 1: give columns=(of paths, of labels); the header has {header}"
            )
        if _exists(name, header[0]):
            raise ValueError(f"{name}, line 1: it must be a header, and {header[0]!r} is a file")
        places = [header.index(column) for column in wanted]
        for row in rows:
            where = f"{name}, line {rows.line_num}"
            if row and len(row) != len(header):
                raise ValueError(f"{where}: {len(row)} fields, and {len(header)} in the header")
            fields = [row[place] for place in places] if row else []
            if fields and not fields[0]:
                raise ValueError(f"{where}: the path is empty")
            if fields:
                yield fields[0], fields[1] if len(fields) == 2 else None, where
    except csv.Error as error:
        raise ValueError(f"{name}, line {rows.line_num}: {error}") from error


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
        if is_alone and "," in fields[0] and not _exists(name, fields[0]):
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


# --- loaders --------------------------------------------------------------------------------------

File = Path | BinaryIO | npt.ArrayLike | bytes | bytearray | memoryview
"""A path, the bytes of a file (also as an array), or a file object, which is read from its place
on."""


class _Input(contextlib.AbstractContextManager[Any]):
    """A file for a decoder; what is raised within names it.

    Attributes:
        name: Its path, or what else tells it from others.
        is_path: Whether it is a file on disk.
    """

    def __init__(self, file: File) -> None:
        self._file = file
        self.is_path = isinstance(file, (str, os.PathLike))
        if self.is_path:
            self.name = os.fsdecode(file)  # type: ignore[arg-type]
        elif hasattr(file, "read"):
            self.name = str(getattr(file, "name", None) or file)
        else:
            self.name = f"<{memoryview(file).nbytes} bytes>"  # type: ignore[arg-type]

    def opened(self) -> BinaryIO:
        """Return a file object that can seek. Called within the `with`."""
        if self.is_path:
            return open(self.name, "rb")
        read = getattr(self._file, "read", None)
        # What a tar file, a zip file or an object store opens need not be able to seek.
        return io.BytesIO(self._file if read is None else read())  # type: ignore[arg-type]

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if isinstance(error, MemoryError):
            raise MemoryError(f"{self.name}: {error}") from error
        if not isinstance(error, Exception) or isinstance(error, FrameworkUnavailable):
            return
        text = str(error).strip() or type(error).__name__
        if isinstance(error, OSError) and error.filename and self.name in text:
            return
        text = text if self.name in text else f"{self.name}: {text}"
        raise DataFileError(text, self.name if self.is_path else "") from error


Box = tuple[int, int, int, int]
"""A part of an image: top, left, height and width in pixels."""

_ORIENTATION = 0x0112
# What Pillow has to do with the pixels of a file, by the orientation in its EXIF data.
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
# Orientations that exchange rows and columns, and those whose columns or rows begin at the end.
_EXCHANGED = (5, 6, 7, 8)
_FROM_RIGHT = (2, 3, 7, 8)
_FROM_BOTTOM = (3, 4, 6, 7)
# Attempts to find a random box that fits into the image.
_ATTEMPTS = 10
# What Pillow calls the modes, each with the type of its pixels.
_MODES = {"RGB": "u1", "BGR": "u1", "L": "u1", "I;16": "u2", "F": "f4"}
# Tags of TIFF: bits of a sample, and 0 if the least value is white.
_BITS, _WHITE_IS = 258, 262


def load_image(
    file: File,
    *,
    mode: Literal["RGB", "BGR", "L", "I;16", "F"] = "RGB",
    size: int | tuple[int, int] | None = None,
    crop: Box | Callable[[int, int], Box] | None = None,
) -> npt.NDArray[Any]:
    """Load an image with Pillow, turned as its EXIF data say.

    With `size`, a JPEG file is decoded at a half, a quarter or an eighth of its size if that is
    still large enough, which takes much less time. Set options by `functools.partial`:
    `partial(load_image, size=224)`. Transparency is dropped, and only the first image of a file
    is loaded. Grey of more than 8 bits is scaled to 8 by the bits that the file declares, so it
    is dark if the values use fewer of them.

    Args:
        file: Path of a file in any format that Pillow reads, its bytes, or a file object.
        mode: `"RGB"`, the default; `"BGR"`, the order of OpenCV; `"L"`, grey; or for grey images
            the values in the file, `"I;16"` as uint16 and `"F"` as float32.
        size: New size: `(height, width)` in pixels, as in the array's shape, or one number for
            both. The aspect ratio is not kept. None, the default, keeps the size.
        crop: Part of the image that is returned, in its original pixels: `(top, left, height,
            width)`; or a function that is called with the height and the width of the image and
            returns that, such as `random_crop(task.rng)`. None, the default: all of it. If it
            is resized, the pixels at its border are mixed with those around it.

    Returns:
        An array of shape `(height, width, 3)`, or `(height, width)` for grey; uint8, if `mode`
        does not say otherwise.

    Raises:
        OSError: The file is missing; or it is truncated, no image, or has no pixels of this mode,
            a `DataFileError` that names it.
        ValueError: `mode` or `size` is wrong, or `crop` is not within the image.
        FrameworkUnavailable: Pillow is not installed.

    Example:
        >>> import io
        >>> from enqueuer.datasets.files import load_image
        >>> load_image(b"P5 2 1 255 Az", mode="L")
        array([[ 65, 122]], dtype=uint8)
    """
    if mode not in _MODES:
        *names, last = map(repr, _MODES)
        raise ValueError(f"mode must be {', '.join(names)} or {last}, got {mode!r}")
    framework("Pillow", "images", "9.2", module="PIL", user="load_image")
    from PIL import Image

    source = _Input(file)
    with contextlib.ExitStack() as stack:
        with source:
            image: Any = stack.enter_context(Image.open(stack.enter_context(source.opened())))
            scale = _scale_of(image)
            if image.format not in ("JPEG", "MPO"):
                # Some formats have their size and orientation only then, or turn the pixels.
                image.load()
            turn = image.getexif().get(_ORIENTATION, 1)
        width, height = image.size[::-1] if turn in _EXCHANGED else image.size
        top, left, high, wide = _box(crop, height, width, source.name)
        target = _target(size, (high, wide))
        columns, rows = (left, left + wide), (top, top + high)
        if turn in _EXCHANGED:
            columns, rows = rows, columns
        if turn in _FROM_RIGHT:
            columns = image.width - columns[1], image.width - columns[0]
        if turn in _FROM_BOTTOM:
            rows = image.height - rows[1], image.height - rows[0]
        with source:
            reduced = _reduce(image, min(high / target[0], wide / target[1]))
            box = [place / reduced for place in (columns[0], rows[0], columns[1], rows[1])]
            image = _converted(image, mode, *scale)
            if crop is not None or target != (high, wide):
                # Before it is turned: the rest of an odd size is at the end of the file's rows.
                shape = target if turn in _EXCHANGED else target[::-1]
                image = image.resize(shape, Image.Resampling.BILINEAR, box=box)
            if turn in _TURNS:
                image = image.transpose(Image.Transpose[_TURNS[turn]])
            pixels = np.asarray(image)
    if mode == "I;16":
        pixels = np.rint(pixels)
    return np.array(pixels[..., ::-1] if mode == "BGR" else pixels, _MODES[mode])


def _scale_of(image: Any) -> tuple[int, int, bool]:
    """Return the white of a file, that of Pillow's pixels, and whether 0 is white, of 16 bits.

    Args:
        image: Image of which only the header was read.
    """
    if image.format == "TIFF":
        white = 2 ** image.tag_v2.get(_BITS, (16,))[0] - 1
        return white, white, image.tag_v2.get(_WHITE_IS) == 0
    white = 2**16 - 1
    if image.format == "PPM" and image.tile and image.tile[0][0] != "raw":
        white = image.tile[0][3][1]
    if image.format == "JPEG2000":
        at = image.fp.tell()
        image.fp.seek(0)
        data = image.fp.read()
        image.fp.seek(at)
        # The markers of the codestream and of its sizes, 38 bytes, and the bits of a sample.
        bits = 1 + (data[data.index(b"\xff\x4f\xff\x51") + 42] & 127)
        white = 2**bits - 1
        return white, white << max(0, 16 - bits), False
    return white, 2**16 - 1, False


def _converted(image: Any, mode: str, white: int, scaled: int, is_negative: bool) -> Any:
    """Return an image of another mode, "F" for 16 bits.

    Args:
        image: The image.
        mode: Mode for the caller.
        white: White in the file, if it has 16 bits.
        scaled: White in the image.
        is_negative: Whether it has black for white.

    Raises:
        ValueError: It has colours, or other values than this mode can have.
    """
    from PIL import Image

    is_16 = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    if mode in ("I;16", "F"):
        if not (is_16 or image.mode in ("L", "I", "F")):
            raise ValueError(
                f"mode {mode!r} gives the values of grey images, and this one is {image.mode!r}"
            )
        values = np.asarray(image)
        if is_16 and white != scaled:
            values = np.rint(values * (white / scaled))
        if (
            mode == "I;16"
            and image.mode in ("I", "F")
            and not np.array_equal(values, np.rint(values).clip(0, 2**16 - 1))
        ):
            raise ValueError("it has values that uint16 has not; mode='F' gives them")
        return Image.fromarray(values.astype(np.float32))
    # Pillow would make 255 of all larger values.
    if is_16:
        values = np.asarray(image).astype(np.int64) * 256 // (scaled + 1)
        image = Image.fromarray((255 - values if is_negative else values).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(
            "it has pixels of 32 bits or with a sign, whose range is unknown; mode='F' gives "
            "their values"
        )
    # A direct conversion to RGB would warn.
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    mode = "L" if mode == "L" else "RGB"
    return image if image.mode == mode else image.convert(mode)


def _target(size: int | tuple[int, int] | None, extent: tuple[int, int]) -> tuple[int, int]:
    """Return height and width of the result."""
    if size is None:
        return extent
    height, width = (size, size) if isinstance(size, int) else size
    return checks.positive("size", height), checks.positive("size", width)


def _box(
    crop: Box | Callable[[int, int], Box] | None, height: int, width: int, name: str
) -> list[int]:
    """Return top, left, height and width; raise ValueError if they are not within the image."""
    if crop is None:
        return [0, 0, height, width]
    given = crop(height, width) if callable(crop) else crop
    top, left, high, wide = (checks.count("crop", place) for place in given)
    if not (0 < high <= height - top and 0 < wide <= width - left):
        raise ValueError(
            f"{name}: crop must be (top, left, height, width) within the image of {height} x "
            f"{width} pixels, got {tuple(given)}"
        )
    return [top, left, high, wide]


def _reduce(image: Any, ratio: float) -> int:
    """Have a JPEG file decoded at a smaller scale; return by how much it is reduced.

    Args:
        image: Image of which only the header was read.
        ratio: How much larger than the result the image is.
    """
    whole = image.size
    scale = max((scale for scale in (1, 2, 4, 8) if scale <= ratio), default=1)
    if scale > 1:
        image.draft(None, (whole[0] // scale, whole[1] // scale))
    # Other formats ignore that.
    return scale if image.size != whole else 1


def random_crop(
    rng: np.random.Generator,
    area: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Callable[[int, int], Box]:
    """Return a function for `crop` of `load_image`, which draws a part of the image.

    The parts are those of `RandomResizedCrop` of torchvision. If no part fits, the largest one in
    the middle is taken.

    Args:
        rng: Random generator, such as `task.rng`.
        area: Least and greatest share of the image's area.
        ratio: Least and greatest ratio of width to height.

    Example:
        >>> import numpy as np
        >>> from enqueuer.datasets.files import random_crop
        >>> top, left, height, width = random_crop(np.random.default_rng(7))(300, 400)
        >>> 0 <= top <= 300 - height and 0 <= left <= 400 - width
        True
    """

    def draw(height: int, width: int) -> Box:
        for _ in range(_ATTEMPTS):
            pixels = height * width * rng.uniform(*area)
            shape = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
            wide, high = round(math.sqrt(pixels * shape)), round(math.sqrt(pixels / shape))
            if 0 < wide <= width and 0 < high <= height:
                top, left = rng.integers(height - high + 1), rng.integers(width - wide + 1)
                return int(top), int(left), high, wide
        wide = min(width, max(1, round(height * ratio[1])))
        high = min(height, max(1, round(width / ratio[0])))
        return (height - high) // 2, (width - wide) // 2, high, wide

    return draw


def load_audio(
    file: File,
    *,
    start: int | np.random.Generator | Callable[[int], int] = 0,
    frames: int | None = None,
    pad: bool = False,
    sample_rate: int | None = None,
    mono: bool = False,
) -> tuple[npt.NDArray[np.float32], int]:
    """Load an audio file: a WAV file of integers by itself, others by soundfile.

    Only the frames that are wanted are read. `start` and `frames` count frames of the sound that
    is returned, so with another rate those of that rate.

    Args:
        file: Path of the file, its bytes, or a file object.
        start: First frame, 0 by default. A random generator, such as `task.rng`, draws a section
            of `frames`, or begins with the first frame if there are not more. A function is
            called with the number of frames in the file, and returns the first one.
        frames: Number of frames; fewer are returned at the end of the file. None, the default:
            all that follow.
        pad: Whether zeros follow where there are fewer than `frames`; False by default.
        sample_rate: Frames per second to which soxr resamples other files; None, the default:
            as in the file.
        mono: Whether to return the mean of all channels; False by default.

    Returns:
        The samples, float32 from -1 to 1, of shape `(frames,)` if there is one channel and
        `(frames, channels)` if there are more; and the frames per second. The header of a stream
        may not know its length; then it goes to the end of the file.

    Raises:
        OSError: The file is missing; or it is truncated or broken, a `DataFileError` that names
            it.
        ValueError: `start` is negative, or is after the end of the file.
        FrameworkUnavailable: soundfile or soxr is needed, and not installed.

    Example:
        A second of 16 kHz from a random place, for `OrderedEnqueuer`::

            def load(path, task):
                options = dict(sample_rate=16000, mono=True, pad=True)
                samples, rate = load_audio(path, start=task.rng, frames=16000, **options)
                return samples
    """
    if frames is not None:
        checks.positive("frames", frames)
    elif pad or isinstance(start, np.random.Generator):
        raise ValueError("pad and a random start need frames, the length of the section")
    if sample_rate is not None:
        checks.positive("sample_rate", sample_rate)
    source = _Input(file)
    with contextlib.ExitStack() as stack:
        with source:
            opened = stack.enter_context(source.opened())
            sound = _Wave.of(opened) or _decoder(opened, source.name, stack)
            rate, channels = int(sound.samplerate), int(sound.channels)
        wanted = sample_rate or rate
        count = round(sound.frames * wanted / rate)
        first = _first(start, frames, count, source.name)
        end = count if frames is None else min(first + frames, count)
        # A section begins and ends where frames of both rates coincide.
        step = rate // math.gcd(rate, wanted)
        begin = first * rate // wanted // step * step
        with source:
            samples = sound.section(begin, -(-end * rate // wanted // step) * step - begin)
    if mono and channels > 1:
        samples = samples.mean(axis=1, dtype=np.float32)
    if wanted != rate:
        soxr = framework("soxr", "audio", "0.3", user=f"load_audio({source.name!r})")
        samples = soxr.resample(samples, rate, wanted)
        samples = samples[first - begin * wanted // rate :][: end - first]
    missing = frames - len(samples) if pad and frames is not None else 0
    if missing:
        samples = np.pad(samples, [(0, missing)] + [(0, 0)] * (samples.ndim - 1))
    return samples, wanted


def _first(
    start: int | np.random.Generator | Callable[[int], int],
    frames: int | None,
    count: int,
    name: str,
) -> int:
    """Return the first frame to be read; raise ValueError if the file does not have it."""
    if isinstance(start, np.random.Generator):
        return int(start.integers(max(0, count - (frames or 0)) + 1))
    first = checks.count("start", start(count) if callable(start) else start)
    if first > count:
        raise ValueError(f"{name}: start must be <= {count}, the number of frames, got {first}")
    return first


# Lengths in headers that were written before the sound: from here on, whatever the program.
_UNKNOWN = 2**31 - 2**16
# Formats of WAV files that are read here, and what extended ones have behind two bytes of theirs.
_PCM, _EXTENDED = 1, 0xFFFE
_GUID = bytes.fromhex("000000001000800000aa00389b71")


class _Wave:
    """The sound of a WAV file of integers, with the names that soundfile has."""

    def __init__(self, file: BinaryIO, form: bytes, size: int) -> None:
        _, self.channels, self.samplerate, _, _, bits = struct.unpack_from("<HHIIHH", form)
        self._width, self._file, self._begin = (bits + 7) // 8, file, file.tell()
        there = file.seek(0, os.SEEK_END) - self._begin
        if size > there and size < _UNKNOWN:
            raise EOFError(
                f"the file is truncated: {there} bytes of sound follow, and its header announces "
                f"{size}"
            )
        if not (0 < self._width <= 4 and self.channels and self.samplerate):
            raise ValueError(
                f"no sound has {bits} bits a sample, {self.channels} channels and "
                f"{self.samplerate} frames a second"
            )
        self.frames = min(size, there) // (self._width * self.channels)

    @classmethod
    def of(cls, file: BinaryIO) -> _Wave | None:
        """Return the sound of a file; None if it is another one."""
        head, form = file.read(12), b""
        if head[:4] == b"RIFF" and head[8:] == b"WAVE":
            while len(head := file.read(8)) == 8:
                kind, size = struct.unpack("<4sI", head)
                if kind == b"data" and form:
                    return cls(file, form, size)
                begin = file.tell()
                if kind == b"fmt ":
                    form = file.read(min(size, 40))
                    code = int.from_bytes(form[:2], "little")
                    if code == _EXTENDED and form[26:] == _GUID:
                        code = int.from_bytes(form[24:26], "little")
                    if len(form) >= 16 and code != _PCM:
                        break
                # Chunks have even lengths.
                file.seek(begin + size + size % 2)
            else:
                raise EOFError("the header of the file is broken: it has no format and sound")
        file.seek(0)
        return None

    def section(self, first: int, count: int) -> npt.NDArray[np.float32]:
        """Return so many frames from one on."""
        width, channels = self._width, self.channels
        self._file.seek(self._begin + first * width * channels)
        data = self._file.read(count * width * channels)
        # Samples become the upper bytes of 32 bits.
        whole = np.zeros((len(data) // width, 4), np.uint8)
        whole[:, 4 - width :] = np.frombuffer(data, np.uint8).reshape(-1, width)
        # Samples of 8 bits have no sign.
        whole[:, 3] ^= 128 if width == 1 else 0
        samples = whole.view("<i4").reshape(-1).astype(np.float32) / np.float32(2**31)
        return samples if channels == 1 else samples.reshape(-1, channels)


def _decoder(file: BinaryIO, name: str, stack: contextlib.ExitStack) -> Any:
    """Return a file of soundfile that has `section`."""
    soundfile = framework("soundfile", "audio", "0.12", user=f"load_audio({name!r})")
    sound = stack.enter_context(soundfile.SoundFile(file))

    def section(first: int, count: int) -> np.ndarray:
        if sound.seekable():
            sound.seek(first)
            first = 0
        # Formats such as GSM can only be read from the beginning.
        samples: np.ndarray = sound.read(first + count, dtype="float32")[first:]
        return samples

    sound.section = section
    return sound


def load_array(file: File) -> Any:
    """Return the array of an `.npy` file, or a dict of the arrays of an `.npz` file.

    Args:
        file: Path of the file, its bytes, or a file object.

    Raises:
        OSError: The file is missing; or it is broken, of another kind, or has pickled objects,
            which are never loaded: a `DataFileError` that names it.

    Example:
        >>> import io
        >>> import numpy as np
        >>> from enqueuer.datasets.files import load_array
        >>> file = io.BytesIO()
        >>> np.savez(file, x=np.arange(3)); load_array(file.getvalue())
        {'x': array([0, 1, 2])}
    """
    # numpy would leave a broken file open.
    with (source := _Input(file)), source.opened() as opened:
        if opened.read(4) not in (b"\x93NUM", b"PK\3\4", b"PK\5\6"):
            raise ValueError("it is no .npy or .npz file, or it is empty")
        opened.seek(0)
        loaded = np.load(opened, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            return {name: loaded[name] for name in loaded.files}
