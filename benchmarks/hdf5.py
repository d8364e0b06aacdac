"""HDF5: packing with one and two workers, and an epoch of random batches read in several ways.

    python benchmarks/hdf5.py             # a few minutes, 0.5 GB in a temporary directory
    python benchmarks/hdf5.py --quick     # only to see that it runs

Rows are images, 64 x 64 x 3 `uint8`, that compress to about half, and a label. In turn,
`--repeats` times; medians are printed, and as JSON with `--json`:

- pack: a source that takes about 2 ms of CPU for each row, with 1 and 2 processes;
- an epoch of batches of 64, plain and with gzip, in this process without any workers:
  `chunks` is HDF5Source(shuffle=True), `rows` reads each row of a batch by itself, `sorted`
  gives h5py the sorted numbers of a batch at once; `parts` is a file that was not merged;
- the same of loose .npy files, one for each row, by OrderedEnqueuer;
- `chunks` and the loose files again, in one and two worker processes.

`--cold` has the system forget the files before each epoch, as far as it does that.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Shard
from enqueuer.datasets.files import find_files, load_array
from enqueuer.datasets.hdf5 import HDF5Source, pack

BATCH = 64
SHAPE = (64, 64, 3)
WORK_S = 0.002  # CPU time for each row of the source that is packed in parallel


def images(shard: Any, rows: int = 0, work_s: float = 0.0) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches of images, after some work for each."""
    for start in shard.split(range(0, rows, BATCH)):
        count = min(BATCH, rows - start)
        end = time.process_time() + work_s * count
        while time.process_time() < end:
            sum(range(500))
        image = shard.rng.integers(0, 16, (count, *SHAPE), np.uint8)
        yield {"image": image, "label": np.arange(start, start + count)}


class Images:
    """The same with its numbers bound, for processes."""

    def __init__(self, rows: int, work_s: float) -> None:
        self.rows, self.work_s = rows, work_s

    def __call__(self, shard: Any) -> Iterator[dict[str, np.ndarray]]:
        return images(shard, self.rows, self.work_s)


# --- ways to read an epoch of random batches ----------------------------------------------------


def chunks(path: Path) -> Any:
    """Read whole chunks in random order, and shuffle within a window of them."""
    return HDF5Source(path, ("image", "label"), BATCH, shuffle=True)


def single_rows(path: Path) -> Iterator[Any]:
    """Read each row of a batch by itself."""
    with h5py.File(path) as file:
        image, label = file["image"], file["label"]
        for at in _random(len(label)):
            yield np.stack([image[i] for i in at]), np.stack([label[i] for i in at])


def sorted_rows(path: Path) -> Iterator[Any]:
    """Read the rows of a batch by one call, which wants them sorted."""
    with h5py.File(path) as file:
        image, label = file["image"], file["label"]
        for at in _random(len(label)):
            at = np.sort(at)
            yield image[at], label[at]


def loose_files(folder: Path, workers: int) -> Iterator[Any]:
    """Read a file for each image."""
    paths = find_files("*.npy", root=folder)
    options: Any = dict(shuffle=True, batch_size=BATCH, workers=workers, backend="process")
    return iter(OrderedEnqueuer(paths, _loaded, **options))


def _loaded(path: str) -> tuple[Any, int]:
    return load_array(path), int(Path(path).stem)


def _random(rows: int) -> list[np.ndarray]:
    order = np.random.default_rng(7).permutation(rows)
    return [order[start : start + BATCH] for start in range(0, rows, BATCH)]


def here(source: Any) -> Iterator[Any]:
    """Read in this process, without any worker."""
    return iter(source(Shard(0, 1, 0, 7)))


def in_workers(source: Any, workers: int) -> Iterator[Any]:
    """Read in worker processes."""
    return iter(GeneratorEnqueuer(source, workers=workers, backend="process", shards=4))


# --- measuring ----------------------------------------------------------------------------------


def rows_per_second(read: Callable[[], Iterator[Any]], at_most_s: float) -> float:
    """Read an epoch, or as much as can be read in some time."""
    rows, started = 0, time.perf_counter()
    for batch in read():
        rows += len(batch[0])
        if time.perf_counter() - started > at_most_s:
            break
    return rows / (time.perf_counter() - started)


def forget(folder: Path) -> None:
    """Have the system forget what it keeps of the files in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--packed-rows", type=int, default=4_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="the most for one epoch")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.rows, options.packed_rows, options.repeats, options.seconds = 512, 128, 1, 1.0
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, load "
        f"{os.getloadavg()[0]:.1f}; h5py {h5py.__version__}, HDF5 {h5py.version.hdf5_version}"
    )
    with tempfile.TemporaryDirectory() as name:
        found = run(Path(name), options)
    for title, values in found.items():
        spread = f"{min(values):,.0f} to {max(values):,.0f}"
        print(f"{title:<32} {statistics.median(values):>12,.0f} rows/s   ({spread})")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def run(folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return rows a second of each case, of all repeats."""
    found: dict[str, list[float]] = {}
    for repeat in range(options.repeats):
        for workers in (1, 2):
            source = Images(options.packed_rows, WORK_S)
            started = time.perf_counter()
            pack(source, folder / f"{workers}.{repeat}.h5", workers=workers, random_seed=7)
            rate = options.packed_rows / (time.perf_counter() - started)
            found.setdefault(f"pack, {workers} worker(s)", []).append(rate)
    source = Images(options.rows, 0)
    paths = {name: folder / f"{name}.h5" for name in ("plain", "gzip", "parts")}
    for name, path in paths.items():
        # merged, as h5py alone would have a cache of its own for each part
        compression, merge = "gzip" if name == "gzip" else None, name != "parts"
        pack(source, path, workers=2, random_seed=7, compression=compression, merge=merge)
    loose = folder / "loose"
    loose.mkdir()
    for batch in source(Shard(0, 1, 0, 7)):
        for image, label in zip(batch["image"], batch["label"], strict=True):
            np.save(loose / f"{label:07}.npy", image)
    cases: dict[str, Callable[[], Iterator[Any]]] = {}
    for name in ("plain", "gzip"):
        cases[f"{name}, sorted"] = lambda path=paths[name]: sorted_rows(path)
        cases[f"{name}, rows"] = lambda path=paths[name]: single_rows(path)
    for name, path in paths.items():
        cases[f"{name}, chunks"] = lambda path=path: here(chunks(path))
    cases["npy files"] = lambda: loose_files(loose, 0)
    for workers in (1, 2):
        for name, path in paths.items():
            cases[f"{name}, chunks, {workers} process(es)"] = lambda path=path, workers=workers: (
                in_workers(chunks(path), workers)
            )
        cases[f"npy files, {workers} process(es)"] = lambda workers=workers: loose_files(
            loose, workers
        )
    for _ in range(options.repeats):
        for title, read in cases.items():
            if options.cold:
                forget(folder)
            found.setdefault(title, []).append(rows_per_second(read, options.seconds))
    return found


if __name__ == "__main__":
    main()
