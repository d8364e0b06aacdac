"""The parts of a packed file: each shard is written to a file of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from enqueuer.datasets.hdf5.files import guarded, h5py, kind_of, opened
from enqueuer.datasets.hdf5.whole import whole
from enqueuer.datasets.hdf5.writer import Format, Kind, Writer
from enqueuer.enqueuers.ordered import OrderedEnqueuer
from enqueuer.errors import Closed, DataFileError
from enqueuer.monitoring.progress import Progress, bar
from enqueuer.workers.shards import Shard
from enqueuer.workers.sources import LiveSource, Source


@dataclass(frozen=True)
class PackingJob:
    """The work of packing; a worker can write any shard of it.

    Attributes:
        source: The source.
        folder: Folder of the parts.
        shards: Number of shards.
        random_seed: Seed of the shards.
        format: Format of the rows.
        keys: Keys that the rows must have.
        ended: Not empty once workers should end; threads share it.
    """

    source: Source
    folder: str
    shards: int
    random_seed: int
    format: Format
    keys: frozenset[str]
    ended: list[bool] = field(default_factory=list)

    def part(self, index: int) -> Path:
        """Return the path of a shard's part."""
        return Path(self.folder, f"shard-{index:05}.h5")

    def __call__(self, index: int) -> int:
        """Write a shard, unless its part exists; return its number of rows."""
        written = 0
        for rows in self.write(index):
            written = rows
            if self.ended:
                raise Closed("packing was ended")
        return written

    def write(self, index: int) -> Iterator[int]:
        """Write a shard, unless its part exists; yield its number of rows so far."""
        path = self.part(index)
        if path.exists():
            with opened_part(path) as file:
                rows = int(file.attrs["rows"])
                if rows:
                    self._check(kinds_of(file))
                yield rows
            return
        # The task has the same index, and so the same seeds: global generators fit as well.
        shard = Shard(index, self.shards, 0, self.random_seed)
        with whole(path, Path(self.folder)) as file, _closing(self.source.open(shard)) as items:
            writer = Writer(file, self.format, str(path))
            for rows in writer.write(item for item in items if item is not None):
                self._check(writer.kinds)
                yield rows
            file.attrs["rows"] = writer.rows
        yield writer.rows

    def _check(self, kinds: Mapping[str, Kind]) -> None:
        if kinds and (unknown := sorted(self.keys - kinds.keys())):
            raise ValueError(f"attributes are for {unknown}, but the keys are {sorted(kinds)}")


@contextlib.contextmanager
def _closing(items: Iterable[Any]) -> Iterator[Iterator[Any]]:
    iterator = iter(items)
    try:
        yield iterator
    finally:
        if hasattr(iterator, "close"):
            iterator.close()


@contextlib.contextmanager
def opened_part(path: Path) -> Iterator[Any]:
    """Open a part; the error of a broken one says to remove it."""
    try:
        with opened(path) as file, guarded(path):
            yield file
    except DataFileError as error:
        raise DataFileError(f"{error}; remove this part and pack again", str(path)) from error


def write_parts(job: PackingJob, options: dict[str, Any], progress: Progress) -> None:
    """Write all parts that do not exist, by the workers of an enqueuer with these options."""
    # A running iterator can be read in this process only.
    if isinstance(job.source, LiveSource):
        _write_here(job, progress)
        return
    total = 0
    with (
        bar("packing", job.shards, "shard", progress) as advance,
        OrderedEnqueuer(range(job.shards), job, ordered=False, **options) as enqueuer,
    ):
        try:
            for rows in enqueuer:
                total += rows
                advance(1, f"{total:,} rows")
        finally:
            # Threads cannot be killed, but end when they see this.
            job.ended.append(True)


def _write_here(job: PackingJob, progress: Progress) -> None:
    written = 0
    with bar("packing", None, "row", progress) as advance:
        for rows in job.write(0):
            advance(rows - written)
            written = rows


def kinds_of(file: Any) -> dict[str, Kind]:
    """Return the types of the keys of a part."""
    kinds: dict[str, Kind] = {}

    def note(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            kinds[name] = Kind(kind_of(item.dtype), item.dtype, tuple(item.shape[1:]))

    file.visititems(note)
    return kinds
