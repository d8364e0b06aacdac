"""The parts of all shards -> one file that shows them, or has a copy of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from enqueuer.datasets.hdf5.files import h5py, readable
from enqueuer.datasets.hdf5.layout import escaped
from enqueuer.datasets.hdf5.parts import PackingJob, kinds_of, opened_part
from enqueuer.datasets.hdf5.resume import must_be_new
from enqueuer.datasets.hdf5.whole import whole
from enqueuer.datasets.hdf5.writer import Kind, Writer


def assemble(target: Path, job: PackingJob, attributes: Mapping[str, Any], merge: bool) -> int:
    """Make one file of all parts; return its number of rows.

    Args:
        target: Path of the file.
        job: The work; all of its parts exist.
        attributes: Attributes of the file; a mapping has those of a key.
        merge: Whether the file has a copy of the parts, rather than showing them.

    Raises:
        ValueError: The parts are not alike, or have no rows.
    """
    parts = [job.part(index) for index in range(job.shards)]
    kinds, rows = _alike(parts)
    with whole(target, Path(job.folder)) as file:
        if merge:
            _copy(file, target, job, parts, kinds)
        else:
            _show(file, rows, kinds)
        for name, value in attributes.items():
            if isinstance(value, Mapping):
                file[name].attrs.update(value)
            else:
                file.attrs[name] = value
        must_be_new(target)
    return sum(rows.values())


def _copy(
    file: Any, target: Path, job: PackingJob, parts: Sequence[Path], kinds: Mapping[str, Kind]
) -> None:
    """Copy the rows of all parts."""
    ragged = tuple(key for key, kind in kinds.items() if kind.name.startswith("ragged"))
    format = dataclasses.replace(job.format, keys=None, batched=True, ragged=ragged)
    for _ in Writer(file, format, str(target)).write(_batches_of(parts, kinds)):
        pass


def _show(file: Any, rows: Mapping[Path, int], kinds: Mapping[str, Kind]) -> None:
    """Make virtual datasets of the rows of all parts."""
    total = sum(rows.values())
    for key, kind in kinds.items():
        layout = h5py.VirtualLayout((total, *kind.shape), kind.dtype)
        start = 0
        for part, count in rows.items():
            # The path is relative, so that file and parts can be moved together.
            name = f"{part.parent.name}/{part.name}"
            source = h5py.VirtualSource(
                escaped(name), escaped(key), (count, *kind.shape), kind.dtype
            )
            layout[start : start + count] = source
            start += count
        file.create_virtual_dataset(key, layout)


def _alike(parts: Sequence[Path]) -> tuple[dict[str, Kind], dict[Path, int]]:
    """Return the types of the keys in all parts, and the number of rows of the parts with rows."""
    kinds: dict[str, Kind] = {}
    rows = {}
    first = None
    for path in parts:
        with opened_part(path) as file:
            count = int(file.attrs["rows"])
            found = kinds_of(file)
        if not count:
            continue
        if first is None:
            first, kinds = path, found
        if found != kinds:
            raise ValueError(
                f"the shards are not alike: {first} has {_shown(kinds)}, and {path} has "
                f"{_shown(found)}; fix the source, and remove {path.parent}"
            )
        rows[path] = count
    if not rows:
        # Otherwise the same call would not run a source that was fixed since.
        for path in parts:
            path.unlink()
        raise ValueError("the source yielded no rows, so there is nothing to pack")
    return kinds, rows


def _shown(kinds: Mapping[str, Kind]) -> str:
    return ", ".join(f"{key!r}: {kind}" for key, kind in kinds.items())


def _batches_of(parts: Sequence[Path], kinds: Mapping[str, Kind]) -> Iterator[dict[str, Any]]:
    for path in parts:
        with opened_part(path) as file:
            rows = int(file.attrs["rows"])
            if not rows:
                continue
            columns = {key: readable(file[key]) for key in kinds}
            step = file[next(iter(kinds))].chunks[0]
            for start in range(0, rows, step):
                yield {key: column[start : start + step] for key, column in columns.items()}
