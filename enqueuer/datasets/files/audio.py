"""load_audio: a file -> samples, for `FileBatches` or for `map` of an enqueuer."""

from __future__ import annotations

import os
import wave
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from enqueuer.common import checks
from enqueuer.common.extras import framework
from enqueuer.datasets.files.lists import Path


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
        A second from a random place, for `FileBatches` or `OrderedEnqueuer`::

            def load(path, task):
                start = lambda frames: task.rng.integers(max(1, frames - 16000))
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
