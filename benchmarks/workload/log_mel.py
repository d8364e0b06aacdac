"""WAV files -> log-mel spectrograms, in numpy: windows, a Fourier transform, a matrix product."""

from __future__ import annotations

import functools
import wave
from pathlib import Path
from typing import Any

import numpy as np

from workload import Epochs, Workload, mapped
from workload.mapped import Mapped, Samples

_RATE, _SECONDS, _FILES = 16_000, 2, 128
_WINDOW, _HOP, _FFT, _BANDS = 400, 160, 512, 80


def _prepare(folder: Path, items: int) -> Mapped:
    paths = [folder / f"{n}.wav" for n in range(_FILES)]
    if not paths[-1].exists():
        rng = np.random.default_rng(7)
        for path in paths:
            with wave.open(str(path), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(_RATE)
                clip = rng.normal(0, 3000, _RATE * _SECONDS).astype("<i2")
                file.writeframes(clip.tobytes())
    return Mapped([str(paths[n % _FILES]) for n in range(items)], load, 32)


WORKLOAD = Workload(
    "log-mel",
    f"WAV clips of {_SECONDS} s -> {_BANDS} log-mel bands by numpy; batches of 32; 2 workers",
    unit="clips",
    items=1600,
    batch_size=32,
    prepare=_prepare,
    size_of=len,
    why="Arithmetic of numpy. enqueuer limits the BLAS threads of a worker; one row does "
    "that for torch.",
)


def load(path: str) -> Any:
    """Return the spectrogram of a clip."""
    with wave.open(path) as file:
        clip = np.frombuffer(file.readframes(file.getnframes()), "<i2") / np.float32(32768)
    frames = np.lib.stride_tricks.sliding_window_view(clip, _WINDOW)[::_HOP] * _window()
    power = np.abs(np.fft.rfft(frames, _FFT)).astype(np.float32) ** 2
    return np.log(power @ _bands() + 1e-6)


@functools.cache
def _window() -> Any:
    return np.hanning(_WINDOW).astype(np.float32)


@functools.cache
def _bands() -> Any:
    """Return triangles over the frequencies, whose tops have equal distances in mel."""
    most = 2595 * np.log10(1 + _RATE / 2 / 700)
    tops = 700 * (10 ** (np.linspace(0, most, _BANDS + 2) / 2595) - 1)
    low, middle, high = tops[:-2], tops[1:-1], tops[2:]
    hertz = np.linspace(0, _RATE / 2, _FFT // 2 + 1)[:, None]
    rising, falling = (hertz - low) / (middle - low), (high - hertz) / (high - middle)
    return np.maximum(0, np.minimum(rising, falling)).astype(np.float32)


mapped.add(WORKLOAD)


def _one_thread(worker: int) -> None:
    from threadpoolctl import threadpool_limits

    threadpool_limits(1)


@WORKLOAD.contestant("torch, one BLAS thread", "torch", (Samples, _one_thread))
def _torch(data: Mapped, items: int) -> Epochs:
    from torch.utils.data import DataLoader

    options = dict(num_workers=2, persistent_workers=True, worker_init_fn=_one_thread)
    batches = DataLoader(Samples(data), batch_size=data.batch_size, **options)
    while True:
        yield batches
