"""Functions that load a file, for `FileBatches` or for `map` of an enqueuer."""

from __future__ import annotations

import os
import wave
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from enqueuer.common.extras import framework
from enqueuer.datasets.files.lists import Path


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


def load_image(
    path: Path,
    *,
    mode: Literal["RGB", "BGR", "L"] = "RGB",
    size: int | tuple[int, int] | None = None,
) -> np.ndarray:
    """Load an image with Pillow, rotated by its EXIF data.

    Set options by `functools.partial`: `partial(load_image, size=224)`. Transparency is dropped,
    16-bit grey is scaled to 8 bits, and only the first image of a file is loaded.

    Args:
        path: Path of a file in any format that Pillow reads.
        mode: `"RGB"`, the default; `"BGR"`, the order of OpenCV; or `"L"`, grey.
        size: New size: `(height, width)` in pixels, as in the array's shape, or one number for
            both. The aspect ratio is not kept. None, the default, keeps the size.

    Returns:
        A uint8 array of shape `(height, width, 3)`, or `(height, width)` for `"L"`.

    Raises:
        OSError: The file is missing, truncated or no image.
        ValueError: `mode` or `size` is wrong, or the image has 32-bit pixels.
        FrameworkUnavailable: Pillow is not installed.
    """
    if mode not in ("RGB", "BGR", "L"):
        raise ValueError(f"mode must be 'RGB', 'BGR' or 'L', got {mode!r}")
    framework("Pillow", "images", "9.2", module="PIL", user="load_image")
    from PIL import Image, ImageOps

    with Image.open(path) as opened:
        image = ImageOps.exif_transpose(opened)
        if image.mode.startswith("I;16") or (image.mode == "I" and opened.format == "PNG"):
            # Pillow would make 255 of all larger values.
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.mode in ("I", "F"):
            raise ValueError(
                f"{os.fspath(path)!r} has 32-bit pixels, whose range is unknown; "
                "give a load function of your own"
            )
        # A conversion to RGB in one step would warn.
        if image.mode == "P" and "transparency" in image.info:
            image = image.convert("RGBA")
        image = image.convert("L" if mode == "L" else "RGB")
    if size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return np.array(pixels[..., ::-1] if mode == "BGR" else pixels)


def load_audio(path: Path) -> tuple[np.ndarray, int]:
    """Load an audio file: a WAV file of integers by the standard library, others by soundfile.

    Returns:
        The samples, float32 from -1 to 1, of shape `(frames,)` if there is one channel and
        `(frames, channels)` if there are more; and the frames per second.

    Raises:
        OSError: The file is missing.
        EOFError: The file is truncated.
        wave.Error: The file is a broken WAV file.
        RuntimeError: soundfile cannot read the file.
        FrameworkUnavailable: The file needs soundfile, which is not installed.
    """
    with open(path, "rb") as file:
        head = file.read(12)
        if head[:4] == b"RIFF" and head[8:] == b"WAVE":
            file.seek(0)
            try:
                with wave.open(file) as sound:
                    return _samples(sound), sound.getframerate()
            except wave.Error as error:
                # soundfile reads formats and extended formats that are unknown here.
                if not str(error).startswith("unknown"):
                    raise
    soundfile = framework("soundfile", "audio", "0.12", user=f"load_audio({os.fspath(path)!r})")
    samples, rate = soundfile.read(path, dtype="float32")
    return samples, int(rate)


def _samples(sound: wave.Wave_read) -> npt.NDArray[np.float32]:
    width, channels, frames = sound.getsampwidth(), sound.getnchannels(), sound.getnframes()
    data = sound.readframes(frames)
    if len(data) < frames * width * channels:
        raise EOFError(f"it has {len(data)} bytes of sound, but says {frames * width * channels}")
    raw = np.frombuffer(data, np.uint8)
    # Samples of 8 bits have no sign.
    if width == 1:
        samples = (raw.astype(np.float32) - np.float32(128)) / np.float32(128)
    elif width in (2, 4):
        samples = raw.view(f"<i{width}").astype(np.float32) / np.float32(2 ** (8 * width - 1))
    elif width == 3:
        # The three bytes are the upper ones of 32 bits.
        whole = np.zeros((len(raw) // 3, 4), np.uint8)
        whole[:, 1:] = raw.reshape(-1, 3)
        samples = whole.reshape(-1).view("<i4").astype(np.float32) / np.float32(2**31)
    else:
        raise wave.Error(f"{8 * width} bits a sample")
    return samples if channels == 1 else samples.reshape(-1, channels)
