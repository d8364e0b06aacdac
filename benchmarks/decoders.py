"""Decoders of images and sound beside each other: one thread, files a second, CPU time of a file.

    python benchmarks/decoders.py                      # what is installed, about three minutes
    python benchmarks/decoders.py --only Pillow simplejpeg --seconds 1
    python benchmarks/decoders.py --quick              # only to see that it runs

The images are photographs that scikit-image brings, each fitted into 640 x 480 pixels and laid side
by side: 1, 2 x 2 and 4 x 4 of them, as JPEG (quality 90), PNG and WebP. A decoder reads the file,
decodes it, and resizes it to 224 x 224 pixels. The sound is half a second of a file of 30 s.

Each number is taken in a fresh process that has one thread, with the file in the system's cache.
It is the CPU time of a file, so that other programs on the machine disturb it little. The decoders
run in turn, `--repeats` times, and the fastest repeat counts. `files/s` is what one CPU can do. The
last column is the mean difference from the pixels of Pillow, of 255 levels.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import machine
import numpy as np

SIDE = 224
WIDTH, HEIGHT = 640, 480
# Photographs along each side of an image.
SIZES = {f"{WIDTH * n} x {HEIGHT * n}": n for n in (1, 2, 4)}
PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "retina.jpg")
RATE, SECONDS, CLIP = 44_100, 30, 22_050
ONE_THREAD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    **dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1"),
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
PACKAGES = [
    *("Pillow", "opencv-python-headless", "simplejpeg", "torchvision", "tensorflow-cpu"),
    "soundfile",
]

Decode = Callable[[Path], Any]
# {title of a table: {name of a decoder: (modules, function that returns the decoder)}}
DECODERS: dict[str, dict[str, tuple[tuple[str, ...], Callable[[], Decode]]]] = {}


def decoder(name: str, *modules: str, kinds: tuple[str, ...] = ("jpeg",)) -> Callable[[Any], Any]:
    """Add a function that imports what it needs and returns a decoder."""

    def add(make: Callable[[], Decode]) -> Callable[[], Decode]:
        for kind in kinds:
            DECODERS.setdefault(kind, {})[name] = (modules, make)
        return make

    return add


# --- images ------------------------------------------------------------------------------------


@decoder("Pillow", "PIL", kinds=("jpeg", "png", "webp"))
def _pillow() -> Decode:
    from PIL import Image

    def decode(path: Path) -> np.ndarray:
        with Image.open(path) as image:
            small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
            return np.asarray(small)

    return decode


@decoder("load_image (Pillow, reduced)", "PIL")
def _reduced_pillow() -> Decode:
    from enqueuer.datasets.files import load_image

    return lambda path: load_image(path, size=SIDE)


@decoder("OpenCV", "cv2", kinds=("jpeg", "png", "webp"))
def _opencv() -> Decode:
    import cv2

    cv2.setNumThreads(1)

    def decode(path: Path) -> np.ndarray:
        image = cv2.imread(str(path), cv2.IMREAD_COLOR_RGB)
        return cv2.resize(image, (SIDE, SIDE), interpolation=cv2.INTER_AREA)

    return decode


@decoder("OpenCV, reduced", "cv2", "PIL")
def _reduced_opencv() -> Decode:
    import cv2
    from PIL import Image

    cv2.setNumThreads(1)
    flags = {
        1: cv2.IMREAD_COLOR,
        2: cv2.IMREAD_REDUCED_COLOR_2,
        4: cv2.IMREAD_REDUCED_COLOR_4,
        8: cv2.IMREAD_REDUCED_COLOR_8,
    }

    def decode(path: Path) -> np.ndarray:
        with Image.open(path) as opened:
            scale = reduction(opened.size)
        image = cv2.imread(str(path), flags[scale])
        small = cv2.resize(image, (SIDE, SIDE), interpolation=cv2.INTER_AREA)
        return cv2.cvtColor(small, cv2.COLOR_BGR2RGB)

    return decode


@decoder("simplejpeg", "simplejpeg", "cv2")
def _whole_simplejpeg() -> Decode:
    return _simplejpeg()


@decoder("simplejpeg, reduced", "simplejpeg", "cv2")
def _reduced_simplejpeg() -> Decode:
    return _simplejpeg(min_height=SIDE, min_width=SIDE)


def _simplejpeg(**options: int) -> Decode:
    import cv2
    import simplejpeg

    cv2.setNumThreads(1)

    def decode(path: Path) -> np.ndarray:
        image = simplejpeg.decode_jpeg(path.read_bytes(), **options)
        return cv2.resize(image, (SIDE, SIDE), interpolation=cv2.INTER_AREA)

    return decode


@decoder("torchvision", "torchvision", kinds=("jpeg", "png", "webp"))
def _torchvision() -> Decode:
    import torch
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms.v2.functional import resize

    torch.set_num_threads(1)

    def decode(path: Path) -> Any:
        image = decode_image(str(path), ImageReadMode.RGB)
        return resize(image, [SIDE, SIDE], antialias=True).permute(1, 2, 0).numpy()

    return decode


@decoder("tf.io", "tensorflow", kinds=("jpeg", "png"))
def _whole_tensorflow() -> Decode:
    return _tensorflow(is_reduced=False)


@decoder("tf.io, reduced", "tensorflow", "PIL")
def _reduced_tensorflow() -> Decode:
    return _tensorflow(is_reduced=True)


def _tensorflow(is_reduced: bool) -> Decode:
    import tensorflow as tf
    from PIL import Image

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)

    def decode(path: Path) -> Any:
        data = tf.io.read_file(str(path))
        if is_reduced:
            with Image.open(path) as opened:
                image = tf.io.decode_jpeg(data, channels=3, ratio=reduction(opened.size))
        else:
            image = tf.io.decode_image(data, channels=3, expand_animations=False)
        # It returns floating point.
        small = tf.image.resize(image, (SIDE, SIDE), antialias=True)
        return tf.cast(tf.round(small), tf.uint8).numpy()

    return decode


def reduction(size: tuple[int, int]) -> int:
    """Return by how much a JPEG file can be reduced and still be large enough."""
    return max(scale for scale in (1, 2, 4, 8) if scale == 1 or min(size) >= scale * SIDE)


# --- sound -------------------------------------------------------------------------------------


@decoder("soundfile, whole file", "soundfile", kinds=("wav", "flac", "ogg"))
def _whole_soundfile() -> Decode:
    import soundfile

    def decode(path: Path) -> np.ndarray:
        samples, _ = soundfile.read(path, dtype="float32")
        return samples[RATE : RATE + CLIP]

    return decode


@decoder("load_audio (start, frames)", "soundfile", kinds=("wav", "flac", "ogg"))
def _part_by_load_audio() -> Decode:
    from enqueuer.datasets.files import load_audio

    return lambda path: load_audio(path, start=RATE, frames=CLIP)[0]


# --- files, measurements, tables ---------------------------------------------------------------


def make_files(folder: Path) -> Iterator[tuple[str, str, list[Path]]]:
    """Write the files; yield the kind, the words for a size, and the paths."""
    import skimage
    import soundfile
    from PIL import Image, ImageOps

    tiles = []
    for name in PHOTOS:
        with Image.open(Path(skimage.data_dir, name)) as photo:
            tiles.append(ImageOps.fit(photo.convert("RGB"), (WIDTH, HEIGHT)))
    for kind, options in {"jpeg": {"quality": 90}, "png": {}, "webp": {"quality": 90}}.items():
        for words, n in SIZES.items():
            # The two other formats need no more than one size.
            if kind != "jpeg" and n != 2:
                continue
            paths = [folder / f"{n}-{number}.{kind}" for number in range(len(tiles))]
            for number, path in enumerate(paths):
                whole = Image.new("RGB", (n * WIDTH, n * HEIGHT))
                for place in range(n * n):
                    corner = place % n * WIDTH, place // n * HEIGHT
                    whole.paste(tiles[(number + place) % len(tiles)], corner)
                whole.save(path, **options)
            yield kind, words, paths
    times = np.arange(SECONDS * RATE) / RATE
    noise = np.random.default_rng(7).normal(0, 0.02, len(times))
    for kind in ("wav", "flac", "ogg"):
        path = folder / f"sound.{kind}"
        soundfile.write(path, (0.3 * np.sin(2000 * times) + noise).astype(np.float32), RATE)
        yield kind, f"0.5 s of {SECONDS} s", [path]


def measure(name: str, kind: str, paths: list[Path], seconds: float) -> None:
    """Decode files for some seconds; print the numbers as JSON. Runs in a process of its own."""
    decode = DECODERS[kind][name][1]()
    pixels = np.stack([np.asarray(decode(path)) for path in paths]).astype(np.float32)
    np.save(paths[0].parent / "pixels.npy", pixels)
    count, began = 0, time.process_time()
    while count == 0 or time.process_time() - began < seconds:
        for path in paths:
            decode(path)
        count += len(paths)
    print(1000 * (time.process_time() - began) / count, flush=True)
    # TensorFlow takes seconds to end.
    os._exit(0)


def run_one(name: str, kind: str, paths: list[Path], seconds: float) -> float:
    """Return the milliseconds of CPU for a file, measured in a fresh process."""
    files = map(str, paths)
    done = subprocess.run(
        [sys.executable, __file__, "--seconds", str(seconds), "--one", name, kind, *files],
        env={**os.environ, **ONE_THREAD},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{name}, {kind}:\n{done.stderr}")
    return float(done.stdout.splitlines()[-1])


def run(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Measure everything that is installed; yield a row for each decoder and size."""
    for kind, words, paths in make_files(folder):
        rows: dict[str, dict[str, Any]] = {}
        expected = None
        for _ in range(options.repeats):
            for name, (modules, _) in DECODERS[kind].items():
                missing = [m for m in modules if importlib.util.find_spec(m) is None]
                if missing or (options.only and name not in options.only):
                    if missing:
                        rows[name] = {"missing": missing[0]}
                    continue
                cpu_ms = run_one(name, kind, paths, options.seconds)
                pixels = np.load(folder / "pixels.npy")
                expected = pixels if expected is None else expected
                row = rows.setdefault(name, {"cpu_ms": cpu_ms})
                row["cpu_ms"] = min(row["cpu_ms"], cpu_ms)
                row["difference"] = float(np.abs(pixels - expected).mean())
        for name, row in rows.items():
            yield {"kind": kind, "size": words, "name": name, **row}


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table of reStructuredText, the quickest first."""
    rule = f"{'=' * 30}  {'=' * 9}  {'=' * 8}  {'=' * 10}"
    yield from ("", f"{rows[0]['kind']}, {rows[0]['size']}", "", rule)
    yield f"{'decoder':30}  {'files/s':>9}  {'CPU ms':>8}  {'difference':>10}"
    yield rule
    for row in sorted(rows, key=lambda row: row.get("cpu_ms", float("inf"))):
        if "missing" in row:
            yield f"{row['name']:30}  needs {row['missing']}"
            continue
        figures = f"{1000 / row['cpu_ms']:9,.0f}  {row['cpu_ms']:8.2f}  {row['difference']:10.2f}"
        yield f"{row['name']:30}  {figures}"
    yield rule


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="decoders (default: all)")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="of CPU for a number (default: 0.5)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of each (default: 3)")
    parser.add_argument("--quick", action="store_true", help="one short repeat")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, kind, *paths = options.one
        measure(name, kind, [Path(path) for path in paths], options.seconds)
    if options.quick:
        options.seconds, options.repeats = 0.01, 1
    about = machine.describe(PACKAGES)
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    print(f"{datetime.date.today()}, {about['cpu']}, {about['cores']} cores, Python", end=" ")
    print(f"{about['python']}, load {about['load'][0]:.1f}\n{versions}", flush=True)
    tables: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for row in run(options, Path(folder)):
            tables.setdefault((row["kind"], row["size"]), []).append(row)
    for rows in tables.values():
        print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
