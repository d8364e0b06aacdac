"""Loaders of a file, for `map`: of an image, a sound, an array. `files` has their public names.

    load_image:  header -> the box to load -> decoded at a reduced scale -> resized -> turned
    load_audio:  the wanted frames of a WAV file; others by soundfile; at another rate by soxr
    load_array:  the files of numpy

Only Pillow decodes images, so that the pixels do not depend on other packages that are installed.
A file is a path, bytes or a file object; what a decoder raises becomes an error that names it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from enqueuer.common import checks
from enqueuer.common.extras import framework
from enqueuer.common.text import an
from enqueuer.errors import DataFileError, FrameworkUnavailable

Path = str | os.PathLike[str]
# A path, the bytes of a file, or a file object, which is read from its place on.
File = Path | BinaryIO | Sequence[int] | npt.NDArray[Any]


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
            try:
                self.name = f"<{memoryview(file).nbytes} bytes>"  # type: ignore[arg-type]
            except TypeError:
                raise TypeError(
                    f"a file is a path, bytes or a file object, got {an(type(file).__name__)}; "
                    "where elements have more than a file, `map` is a function that loads theirs"
                ) from None

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
        if isinstance(error, OSError) and error.filename == self.name:
            return
        text = str(error).strip() or type(error).__name__
        # In quotes, as a short name may be a part of any word.
        text = text if repr(self.name) in text else f"{self.name}: {text}"
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
# Tags of TIFF: bits of a sample, 0 if the least value is white, and 2 if samples have a sign.
_BITS, _WHITE_IS, _KIND = 258, 262, 339


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
            scale = _Scale.of(image)
            if image.format not in ("JPEG", "MPO"):
                # Some formats have their size and orientation only then, or turn the pixels.
                image.load()
            turn = image.getexif().get(_ORIENTATION, 1)
        width, height = image.size[::-1] if turn in _EXCHANGED else image.size
        part = _box(crop, height, width, source.name)
        target = _target(size, part[2:])
        box = _in_file(part, turn, *image.size)
        with source:
            reduced = _reduce(image, min(part[2] / target[0], part[3] / target[1]))
            image = _converted(image, mode, scale)
            if crop is not None or target != part[2:]:
                # Before it is turned: the rest of an odd size is at the end of the file's rows.
                shape = target if turn in _EXCHANGED else target[::-1]
                box = [place / reduced for place in box]
                image = image.resize(shape, Image.Resampling.BILINEAR, box=box)
            if turn in _TURNS:
                image = image.transpose(Image.Transpose[_TURNS[turn]])
            pixels = np.asarray(image)
    if mode == "I;16":
        pixels = np.rint(pixels)
    return np.array(pixels[..., ::-1] if mode == "BGR" else pixels, _MODES[mode])


def _in_file(part: Box, turn: int, width: int, height: int) -> list[float]:
    """Return the first and the last column and row, in the file, of a part of its turned image."""
    top, left, high, wide = part
    columns, rows = (left, left + wide), (top, top + high)
    if turn in _EXCHANGED:
        columns, rows = rows, columns
    if turn in _FROM_RIGHT:
        columns = width - columns[1], width - columns[0]
    if turn in _FROM_BOTTOM:
        rows = height - rows[1], height - rows[0]
    return [columns[0], rows[0], columns[1], rows[1]]


class _Scale(NamedTuple):
    """How the values of a grey file became the pixels of Pillow.

    Attributes:
        white: The greatest value in the file.
        scaled: What Pillow makes of it.
        is_negative: Whether 0 is white in the file.
        kind: What the pixels of Pillow are to be taken for, if not for what they are.
    """

    white: int
    scaled: int
    is_negative: bool = False
    kind: str = ""

    @classmethod
    def of(cls, image: Any) -> _Scale:
        """Return that of an image of which only the header was read."""
        scaled = 2**8 - 1 if image.mode in ("1", "L") else 2**16 - 1
        white = 1 if image.mode == "1" else scaled
        how: Any = image.tile[0][3] if image.tile else ""
        if image.format == "TIFF":
            tags = image.tag_v2
            white = 2 ** tags.get(_BITS, (1,))[0] - 1
            kind = {("I", 1): "u4", ("L", 2): "i1"}.get((image.mode, tags.get(_KIND, (1,))[0]), "")
            return cls(white, max(white, 2**8 - 1), tags.get(_WHITE_IS) == 0, kind)
        if image.format == "PNG":
            white = {"L;2": 3, "L;4": 15}.get(how, white)
        elif image.format == "PPM" and image.mode != "1" and image.tile[0][0] != "raw":
            white = how[1]
        elif image.format == "JPEG2000":
            at = image.fp.tell()
            image.fp.seek(0)
            data = image.fp.read()
            image.fp.seek(at)
            # The markers of the codestream and of its sizes, 38 bytes, and the bits of a sample.
            bits = 1 + (data[data.index(b"\xff\x4f\xff\x51") + 42] & 127)
            white = 2**bits - 1
            scaled = white << max(0, (8 if image.mode == "L" else 16) - bits)
        return cls(white, scaled, image.format == "PPM" and image.mode == "1")


def _converted(image: Any, mode: str, scale: _Scale) -> Any:
    """Return an image of another mode, "F" for 16 bits.

    Raises:
        ValueError: It has colours, or other values than this mode can have.
    """
    from PIL import Image

    is_16 = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    if mode in ("I;16", "F"):
        if not (is_16 or image.mode in ("1", "L", "I", "F")):
            raise ValueError(
                f"mode {mode!r} gives the values of grey images, and this one is {image.mode!r}"
            )
        values = np.asarray(image.convert("L") if image.mode == "1" else image)
        values = values.view(scale.kind or values.dtype)
        if scale.white != scale.scaled:
            values = np.rint(values * (scale.white / scale.scaled))
        # Pillow turns those of 8 bits at most.
        if scale.is_negative and image.mode in ("1", "L"):
            values = scale.white - values
        if mode == "I;16" and not (
            is_16 or np.array_equal(values, np.rint(values, dtype=np.float64).clip(0, 2**16 - 1))
        ):
            raise ValueError("it has values that uint16 has not; mode='F' gives them")
        return Image.fromarray(values.astype(np.float32))
    # Pillow would make 255 of all larger values.
    if is_16:
        values = np.asarray(image).astype(np.int64) * 256 // (scale.scaled + 1)
        values = 255 - values if scale.is_negative else values
        image = Image.fromarray(values.astype(np.uint8))
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


def _box(crop: Box | Callable[[int, int], Box] | None, height: int, width: int, name: str) -> Box:
    """Return top, left, height and width; raise ValueError if they are not within the image."""
    if crop is None:
        return 0, 0, height, width
    given = crop(height, width) if callable(crop) else crop
    top, left, high, wide = (checks.count("crop", place) for place in given)
    if not (0 < high <= height - top and 0 < wide <= width - left):
        raise ValueError(
            f"{name}: crop must be (top, left, height, width) within the image of {height} x "
            f"{width} pixels, got {tuple(given)}"
        )
    return top, left, high, wide


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
            sound = _Wave.of(opened) or _Decoded(opened, source.name, stack)
            rate, channels = sound.samplerate, sound.channels
        wanted = sample_rate or rate
        count = round(sound.frames * wanted / rate)
        first = _first(start, frames, count, source.name)
        end = count if frames is None else min(first + frames, count)
        begin, stop = _needed(first, end, rate, wanted)
        stop = min(stop, sound.frames)
        with source:
            samples = sound.section(begin, stop - begin)
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


def _needed(first: int, end: int, rate: int, wanted: int) -> tuple[int, int]:
    """Return the frames of a file that a section of another rate needs.

    They begin where frames of both rates coincide, and are more than the filter needs.
    """
    step = rate // math.gcd(rate, wanted)
    margin = 0 if wanted == rate else _FILTER_FRAMES * max(1, rate // wanted)
    begin = max(0, first * rate // wanted - margin) // step * step
    return begin, -(-end * rate // wanted) + margin


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


# Of the lower rate: soxr's filter is shorter on each side.
_FILTER_FRAMES = 256
# Lengths in headers that were written before the sound: from here on, whatever the program.
_UNKNOWN = 2**31 - 2**16
# Formats of WAV files that are read here, and what extended ones have behind two bytes of theirs.
_PCM, _EXTENDED = 1, 0xFFFE
_GUID = bytes.fromhex("000000001000800000aa00389b71")


def _check_length(there: int, announced: int) -> None:
    """Raise EOFError if there are fewer bytes of sound than a header announces."""
    if there < announced < _UNKNOWN:
        raise EOFError(
            f"the file is truncated: {there} bytes of sound follow, and its header announces "
            f"{announced}"
        )


def _code_of(form: bytes) -> int:
    code = int.from_bytes(form[:2], "little")
    return (
        int.from_bytes(form[24:26], "little") if code == _EXTENDED and form[26:] == _GUID else code
    )


class _Wave:
    """The sound of a WAV file of integers."""

    def __init__(self, file: BinaryIO, begin: int, form: bytes, size: int) -> None:
        _, self.channels, self.samplerate, _, _, bits = struct.unpack_from("<HHIIHH", form)
        self._width, self._file, self._begin = (bits + 7) // 8, file, begin
        if not (0 < self._width <= 4 and self.channels and self.samplerate):
            raise ValueError(
                f"sound of {bits} bits a sample, {self.channels} channels and {self.samplerate} "
                "frames a second is not read"
            )
        self.frames = size // (self._width * self.channels)

    @classmethod
    def of(cls, file: BinaryIO) -> _Wave | None:
        """Return the sound of a file; None if it is another one.

        Raises:
            EOFError: It is a WAV file of any format, and is truncated.
        """
        head, form = file.read(12), b""
        if head[:4] == b"RIFF" and head[8:] == b"WAVE":
            head_size = int.from_bytes(head[4:8], "little")
            while len(head := file.read(8)) == 8:
                kind, size = struct.unpack("<4sI", head)
                begin = file.tell()
                if kind == b"data" and len(form) >= 16:
                    there = file.seek(0, os.SEEK_END) - begin
                    _check_length(there, size)
                    if _code_of(form) == _PCM:
                        # A recorder that was not closed announces a header without sound.
                        is_open = head_size == 8 and not size
                        return cls(file, begin, form, there if is_open else min(size, there))
                    break
                if kind == b"fmt ":
                    form = file.read(min(size, 40))
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


# What libsndfile logs of a file whose sound is shorter than its header says.
_SHORTER = re.compile(
    r"^ *(?:SSND|BODY|data|Data Size|riff|Riff size) *: (\d+) \(should be (\d+)\)", re.MULTILINE
)


class _Decoded:
    """The sound of any other file, by soundfile."""

    def __init__(self, file: BinaryIO, name: str, stack: contextlib.ExitStack) -> None:
        soundfile = framework("soundfile", "audio", "0.12", user=f"load_audio({name!r})")
        is_guessed, announced = _is_guessed(file), _nist_frames(file)
        sound = self._sound = stack.enter_context(soundfile.SoundFile(file))
        for length, there in _SHORTER.findall(sound.extra_info):
            _check_length(int(there), int(length))
        if "Seems to be a truncated file" in sound.extra_info or sound.frames < announced:
            raise EOFError("the file is truncated: its header announces more sound")
        self.samplerate, self.channels, self.frames = sound.samplerate, sound.channels, sound.frames
        if not self.frames and sound.format in ("OGG", "RF64"):
            raise EOFError("it has no sound: the file is truncated, or its stream was not ended")
        if self.frames > 2**62:
            raise ValueError(
                "its header has no length, as it was written as a stream, and soundfile needs it: "
                "`ffmpeg -i FILE NEW` writes it"
            )
        self._whole: np.ndarray | None = sound.read(dtype="float32") if is_guessed else None
        if self._whole is not None:
            self.frames = len(self._whole)

    def section(self, first: int, count: int) -> np.ndarray:
        """Return so many frames from one on."""
        if self._whole is not None:
            return self._whole[first : first + count]
        before = first
        if self._sound.seekable():
            self._sound.seek(first)
            before = 0
        # Formats such as GSM can only be read from the beginning.
        samples: np.ndarray = self._sound.read(before + count, dtype="float32")[before:]
        if len(samples) < min(count, self.frames - first):
            raise EOFError(
                f"the file is truncated: it ends at frame {first + len(samples)}, and its header "
                f"announces {self.frames}"
            )
        return samples


def _nist_frames(file: BinaryIO) -> int:
    """Return how many frames the header of a NIST SPHERE file announces; 0 for any other file."""
    head = file.read(1024)
    file.seek(0)
    found = re.search(rb"^sample_count -i (\d+)", head, re.MULTILINE)
    return int(found[1]) if found and head.startswith(b"NIST_1A") else 0


def _is_guessed(file: BinaryIO) -> bool:
    """Return whether a file is MP3 whose first frame is not a header with the number of frames."""
    start = file.read(10)
    is_tagged = start[:3] == b"ID3"
    # The length of a tag has 7 bits in each byte.
    length = functools.reduce(lambda length, byte: length << 7 | byte, start[6:10], 0)
    file.seek(10 + length if is_tagged else 0)
    frame = file.read(64)
    file.seek(0)
    is_mp3 = is_tagged or (frame[:1] == b"\xff" and frame[1:2] >= b"\xe0")
    return is_mp3 and not re.search(b"(?:Xing|Info)...[\1\3\5\7\x09\x0b\x0d\x0f]", frame, re.DOTALL)


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
