"""Batches of the contents of 64 JPEG files, as `bytes` objects."""

from __future__ import annotations

import io
import operator
import tarfile
from pathlib import Path
from typing import Any

from workload import Epochs, Workload, mapped, photos
from workload.mapped import Mapped

_TARS = 4


def _prepare(folder: Path, items: int) -> Mapped:
    paths = photos.save(folder)
    elements = [paths[n % len(paths)] for n in range(items)]
    share = -(-items // _TARS)
    for number, path in enumerate(_tars(elements)):
        if not path.exists():
            _write_tar(path, elements[number * share : (number + 1) * share])
    return Mapped(elements, read, 64, together)


WORKLOAD = Workload(
    "jpeg-bytes",
    "the bytes of JPEG files, 64 objects a batch; 2 workers",
    unit="files",
    items=6400,
    batch_size=64,
    prepare=_prepare,
    size_of=len,
    why="Files are only read, so that the transport of large `bytes` matters.",
    needs="skimage",
)


def read(path: str) -> bytes:
    """Return the content of a file."""
    with open(path, "rb") as file:
        return file.read()


def _tars(elements: Any) -> list[Path]:
    return [Path(elements[0]).parent / f"{number}.tar" for number in range(_TARS)]


def _write_tar(path: Path, files: Any) -> None:
    with tarfile.open(path, "w") as tar:
        for number, file in enumerate(files):
            content = read(file)
            entry = tarfile.TarInfo(f"{number:06}.jpg")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def together(contents: list[bytes]) -> list[bytes]:
    """Return a batch as it is."""
    return contents


mapped.add(WORKLOAD, leave_out=["tf.data, numpy_function", "WebDataset"])


@WORKLOAD.contestant("WebDataset", "webdataset", compare=False)
def _webdataset(data: Mapped, items: int) -> Epochs:
    import webdataset

    urls = [str(path) for path in _tars(data.elements)]
    dataset = webdataset.WebDataset(urls, shardshuffle=False).map(operator.itemgetter("jpg"))
    dataset = dataset.batched(64, collation_fn=together)
    batches = webdataset.WebLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    while True:
        yield batches


@WORKLOAD.contestant("tf.data", "tensorflow")
def _tensorflow(data: Mapped, items: int) -> Epochs:
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(list(data.elements))
    dataset = dataset.map(tf.io.read_file, num_parallel_calls=2).batch(64).prefetch(4)
    while True:
        yield (batch.tolist() for batch in dataset.as_numpy_iterator())
