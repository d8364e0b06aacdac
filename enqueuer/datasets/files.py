"""Files as elements: lists of them, and functions that load one, for `map`.

    find_files:  paths that match patterns
    read_list:   paths and labels of a text file
    load_image:  header -> the box to load -> decoded at a reduced scale -> resized -> turned
    load_audio:  the wanted frames of a WAV file, by the standard library; others by soundfile
    load_array:  the files of numpy

Only Pillow decodes images, so that the pixels do not depend on other packages that are installed.
"""

from __future__ import annotations

import glob
import math
import os
import re
import wave
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from enqueuer.common import checks
from enqueuer.common.extras import framework

__all__ = [
    "find_files",
    "load_array",
    "load_audio",
    "load_image",
    "random_crop",
    "read_list",
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


# --- loaders --------------------------------------------------------------------------------------

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


def load_image(
    path: Path,
    *,
    mode: Literal["RGB", "BGR", "L"] = "RGB",
    size: int | tuple[int, int] | None = None,
    crop: Box | Callable[[int, int], Box] | None = None,
) -> npt.NDArray[np.uint8]:
    """Load an image with Pillow, rotated by its EXIF data.

    With `size`, a JPEG file is decoded at a half, a quarter or an eighth of its size if that is
    still large enough, which takes much less time. Set options by `functools.partial`:
    `partial(load_image, size=224)`. Transparency is dropped, 16-bit grey is scaled to 8 bits, and
    only the first image of a file is loaded.

    Args:
        path: Path of a file in any format that Pillow reads.
        mode: `"RGB"`, the default; `"BGR"`, the order of OpenCV; or `"L"`, grey.
        size: New size: `(height, width)` in pixels, as in the array's shape, or one number for
            both. The aspect ratio is not kept. None, the default, keeps the size.
        crop: Part of the image that is returned, in its original pixels: `(top, left, height,
            width)`; or a function that is called with the height and the width of the image and
            returns that, such as `random_crop(task.rng)`. None, the default: all of it. If it
            is resized, the pixels at its border are mixed with those around it.

    Returns:
        A uint8 array of shape `(height, width, 3)`, or `(height, width)` for `"L"`.

    Raises:
        OSError: The file is missing, truncated or no image.
        ValueError: `mode` or `size` is wrong, `crop` is not within the image, or the image has
            32-bit pixels.
        FrameworkUnavailable: Pillow is not installed.
    """
    if mode not in ("RGB", "BGR", "L"):
        raise ValueError(f"mode must be 'RGB', 'BGR' or 'L', got {mode!r}")
    framework("Pillow", "images", "9.2", module="PIL", user="load_image")
    from PIL import Image

    with Image.open(path) as opened:
        image: Any = opened
        turn = image.getexif().get(_ORIENTATION, 1)
        width, height = image.size[::-1] if turn in _EXCHANGED else image.size
        top, left, high, wide = _box(crop, height, width)
        target = _target(size, (high, wide))
        columns, rows = (left, left + wide), (top, top + high)
        if turn in _EXCHANGED:
            columns, rows = rows, columns
        if turn in _FROM_RIGHT:
            columns = image.width - columns[1], image.width - columns[0]
        if turn in _FROM_BOTTOM:
            rows = image.height - rows[1], image.height - rows[0]
        reduced = _reduce(image, min(high / target[0], wide / target[1]))
        box = [place / reduced for place in (columns[0], rows[0], columns[1], rows[1])]
        image = _converted(image, opened.format, "L" if mode == "L" else "RGB")
        if crop is not None or target != (high, wide):
            # Before the image is turned: the rest of an odd size is at the end of the file's rows.
            shape = target if turn in _EXCHANGED else target[::-1]
            image = image.resize(shape, Image.Resampling.BILINEAR, box=box)
        if turn in _TURNS:
            image = image.transpose(Image.Transpose[_TURNS[turn]])
        pixels = np.asarray(image)
    return np.array(pixels[..., ::-1] if mode == "BGR" else pixels)


def _converted(image: Any, format: str | None, mode: str) -> Any:
    """Return an image of another mode; raise ValueError for one with 32-bit pixels."""
    # Pillow would make 255 of all larger values.
    if image.mode.startswith("I;16") or (image.mode == "I" and format == "PNG"):
        from PIL import Image

        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(
            f"{image.filename!r} has 32-bit pixels, whose range is unknown; "
            "give a load function of your own"
        )
    # A direct conversion to RGB would warn.
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


def _target(size: int | tuple[int, int] | None, extent: tuple[int, int]) -> tuple[int, int]:
    """Return height and width of the result."""
    if size is None:
        return extent
    height, width = (size, size) if isinstance(size, int) else size
    return checks.positive("size", height), checks.positive("size", width)


def _box(crop: Box | Callable[[int, int], Box] | None, height: int, width: int) -> list[int]:
    """Return top, left, height and width; raise ValueError if they are not within the image."""
    if crop is None:
        return [0, 0, height, width]
    given = crop(height, width) if callable(crop) else crop
    top, left, high, wide = (checks.count("crop", place) for place in given)
    if not (0 < high <= height - top and 0 < wide <= width - left):
        raise ValueError(
            f"crop must be (top, left, height, width) within the image of {height} x {width} "
            f"pixels, got {tuple(given)}"
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
    path: Path, *, start: int | Callable[[int], int] = 0, frames: int | None = None
) -> tuple[np.ndarray, int]:
    """Load an audio file: a WAV file of integers by the standard library, others by soundfile.

    Only the frames that are wanted are read.

    Args:
        path: Path of the file.
        start: First frame, 0 by default; or a function that is called with the number of frames
            in the file and returns it, for a random section.
        frames: Number of frames; fewer are returned at the end of the file. None, the default:
            all that follow.

    Returns:
        The samples, float32 from -1 to 1, of shape `(frames,)` if there is one channel and
        `(frames, channels)` if there are more; and the frames per second.

    Raises:
        OSError: The file is missing.
        EOFError: The file is truncated.
        wave.Error: The file is a broken WAV file.
        RuntimeError: soundfile cannot read the file.
        ValueError: `start` is negative, or is after the end of the file.
        FrameworkUnavailable: The file needs soundfile, which is not installed.

    Example:
        A second from a random place, for `OrderedEnqueuer`::

            def load(path, task):
                start = lambda frames: task.rng.integers(max(1, frames - 16000 + 1))
                samples, rate = load_audio(path, start=start, frames=16000)
                return samples
    """
    if frames is not None:
        checks.positive("frames", frames)
    with open(path, "rb") as file:
        head = file.read(12)
        if head[:4] == b"RIFF" and head[8:] == b"WAVE":
            file.seek(0)
            try:
                with wave.open(file) as sound:
                    sound.setpos(_first(start, sound.getnframes()))
                    return _samples(sound, frames), sound.getframerate()
            except wave.Error as error:
                # soundfile reads formats and extended formats that are unknown here.
                if not str(error).startswith("unknown"):
                    raise
    soundfile = framework("soundfile", "audio", "0.12", user=f"load_audio({os.fspath(path)!r})")
    with soundfile.SoundFile(path) as sound:
        sound.seek(_first(start, sound.frames))
        return sound.read(-1 if frames is None else frames, dtype="float32"), int(sound.samplerate)


def _first(start: int | Callable[[int], int], count: int) -> int:
    """Return the first frame to be read; raise ValueError if the file does not have it."""
    first = checks.count("start", start(count) if callable(start) else start)
    if first > count:
        raise ValueError(f"start must be <= {count}, the number of frames, got {first}")
    return first


def _samples(sound: wave.Wave_read, most: int | None) -> npt.NDArray[np.float32]:
    width, channels = sound.getsampwidth(), sound.getnchannels()
    frames = sound.getnframes() - sound.tell()
    frames = frames if most is None else min(frames, most)
    data = sound.readframes(frames)
    if len(data) < frames * width * channels:
        raise EOFError(
            f"the file is truncated: {len(data)} bytes of sound were read, and its header "
            f"announces {frames * width * channels}"
        )
    if width > 4:
        raise wave.Error(f"{8 * width} bits a sample")
    # Samples become the upper bytes of 32 bits.
    whole = np.zeros((len(data) // width, 4), np.uint8)
    whole[:, 4 - width :] = np.frombuffer(data, np.uint8).reshape(-1, width)
    # Samples of 8 bits have no sign.
    whole[:, 3] ^= 128 if width == 1 else 0
    samples = whole.view("<i4").reshape(-1).astype(np.float32) / np.float32(2**31)
    return samples if channels == 1 else samples.reshape(-1, channels)


def load_array(path: Path) -> Any:
    """Return the array of an `.npy` file, or a dict of the arrays of an `.npz` file.

    Raises:
        ValueError: The file is of another kind, or has pickled objects, which are never loaded.
    """
    # numpy would leave a broken file open.
    with open(path, "rb") as file:
        loaded = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            return {name: loaded[name] for name in loaded.files}
