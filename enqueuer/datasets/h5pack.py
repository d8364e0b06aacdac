"""Packing: a source, run in parallel, becomes one HDF5 file.

    source of a shard ==> a worker writes shard-00003.h5 ==> one file that shows all of them

The unit is the shard: its rows depend on the source, the seed and its number, never on who
writes it, and the file of a shard that is there is whole. So an interrupted run goes on. A worker
is given one shard after the other (by an OrderedEnqueuer), as one that writes several at once
would have finished none when it is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from enqueuer import arguments
from enqueuer.backends import BackendName
from enqueuer.datasets.h5files import guarded, h5py, kind_of, opened, readable
from enqueuer.datasets.h5layout import escaped
from enqueuer.datasets.h5resume import begun, identity, must_be_new, name_of
from enqueuer.datasets.h5rows import Format, Kind, Writer, whole
from enqueuer.enqueuers import OrderedEnqueuer
from enqueuer.errors import Closed, DataFileError
from enqueuer.progress import Progress, bar
from enqueuer.shards import Shard
from enqueuer.sources import FunctionSource, LiveSource, Source, as_source

_SHARDS = 32  # by default: two or more for each worker of most machines, so that none idles long


def pack(
    source: Callable[[Shard], Iterable[Any]] | Callable[[], Iterable[Any]] | Iterable[Any],
    path: str | os.PathLike[str],
    *,
    workers: int = 1,
    backend: BackendName = "process",
    shards: int | None = None,
    random_seed: int | None = None,
    keys: Sequence[str] | None = None,
    batched: bool = True,
    ragged: Sequence[str] = (),
    chunk_rows: int | None = None,
    compression: str | int | None = None,
    checksum: bool = False,
    attributes: Mapping[str, Any] | None = None,
    merge: bool = False,
    progress: Progress = False,
    mp_context: str | BaseContext | None = None,
    max_restarts: int = 0,
    version: str | int | None = None,
) -> int:
    """Write all that a source yields in one epoch to an HDF5 file, and return how many rows.

    Each shard is written to a file of its own by whichever worker is free, in the folder
    `<path>.parts`; then one file shows them as a whole. It appears under its name only when it
    is whole and on the disk. If a run was interrupted, however hard, the same call goes on with
    the shards that were not finished. The content depends on the source, `random_seed` and
    `shards`, and not on workers. The rows are in the order of the shards: all of the first, then
    all of the second.

    Args:
        source: A generator function of a `Shard` (or of nothing, then with `shards=1`), which
            workers run; or any iterable, also an enqueuer, which is read here, by one, and anew
            after an interruption.
            An item is a batch: an array, or a flat dict or tuple of arrays and lists with
            equally many rows. None is left out.
        path: Of the file. It must not be there yet.
        workers: How many processes (or threads) write; 1 by default.
        backend: `"process"`, the default, or `"thread"`, for a source that mostly waits: HDF5
            itself works for one thread at a time.
        shards: Into how many parts the work is split; 32 by default. Part of the content.
        random_seed: As for `GeneratorEnqueuer`. None, the default, draws one; a run that goes
            on takes that of the run before.
        keys: Names for the members of a tuple (by default those of a named tuple, or `"0"`,
            `"1"` ...) or for a single array (`"data"`); of a dict, those to be taken.
        batched: Whether an item is a batch of rows, as by default, or one row.
        ragged: Keys whose rows are 1-D arrays of any length.
        chunk_rows: How many rows a chunk has: what is read from the disk, and compressed, as
            one. By default as many as make 1 MiB of the largest key, and at most 1024.
        compression: None, the default; `"gzip"` (or 0 to 9, its level), or `"lzf"`, which is
            faster and for h5py only.
        checksum: Whether chunks of numbers have checksums, so that a flipped bit is an error;
            False by default. Like compression, it does not reach strings and ragged rows, which
            HDF5 keeps elsewhere.
        attributes: Of the file; what has a dict for its value is a key, and these are its own.
        merge: Whether to copy all into one self-contained file and to remove the parts. False,
            the default, makes virtual datasets, in no time; file and folder belong together.
        progress: Whether to show a bar. True shows it if standard error is a terminal, and needs
            tqdm; a class, such as `tqdm.notebook.tqdm`, is used as it is. False by default.
        mp_context: As for `GeneratorEnqueuer`.
        max_restarts: How many workers that died are replaced; each writes its shard anew.
        version: Of what the source yields; an interrupted run goes on only with the same. Change
            it when that changes. None, the default, compares instead what the source has bound,
            as far as that can be told: numbers, texts, paths, arrays, and lists and dicts of them.

    Raises:
        FileExistsError: The file is there already.
        StateMismatch: What an interrupted run left was of another source, seed or format.
        InvalidState: Another process or thread is packing to the same path.
        DataFileError: A file cannot be written or read.
        TypeError: What the source yields has no type in HDF5; the message says what to do.
        ValueError: Rows of a key are not alike, or the source yielded none.

    Example:
        >>> import os, tempfile
        >>> import numpy as np
        >>> from enqueuer.datasets.hdf5 import HDF5Source
        >>> def batches(shard):
        ...     for number in shard.split(range(10)):
        ...         yield {"x": np.full((2, 3), number), "name": [f"{number}a", f"{number}b"]}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "numbers.h5")
        ...     pack(batches, path, shards=4, backend="thread")
        ...     HDF5Source(path)[5:7]["name"].tolist()
        20
        ['8b', '1a']
    """
    target = Path(os.path.abspath(path))
    format = Format(
        None if keys is None else _names("keys", keys),
        bool(batched),
        _names("ragged", ragged),
        None if chunk_rows is None else arguments.positive("chunk_rows", chunk_rows),
        _compression(compression),
        bool(checksum),
    )
    opens, count = as_shards(source, shards)
    check_target(target)
    if not merge and not _is_utf8(target.name):
        raise ValueError(
            f"{target} refers to its parts by its name, which must be UTF-8, got {target.name!r}; "
            "choose another, or give merge=True"
        )
    attributes = dict(attributes or {})
    of_keys = {name for name, value in attributes.items() if isinstance(value, Mapping)}
    _try_out(attributes)
    run = {
        **identity(source, version),
        "random_seed": None if random_seed is None else arguments.seed(random_seed),
        "shards": count,
        **dataclasses.asdict(format),
    }
    with begun(target, run, keep=not merge) as (folder, drawn):
        job = _Job(opens, str(folder), count, drawn, format, frozenset(of_keys))
        if isinstance(opens, LiveSource) and version is None:
            # what is there may be of another list: nobody can tell before this one was read
            job.part(0).unlink(missing_ok=True)
        options: dict[str, Any] = dict(
            random_seed=drawn,
            workers=min(arguments.positive("workers", workers), count),
            backend=backend,
            mp_context=mp_context,
            max_restarts=max_restarts,
        )
        _write_parts(job, options, progress)
        provenance = {
            "enqueuer.source": name_of(source),
            "enqueuer.random_seed": str(drawn),  # it may have more bits than HDF5's numbers
            "enqueuer.shards": count,
        }
        return _assemble(target, job, {**provenance, **attributes}, merge)


def check_target(target: Path) -> None:
    """Raise FileExistsError or DataFileError if a file cannot be made there."""
    if not target.parent.is_dir():
        raise DataFileError(f"{target}: there is no folder {target.parent}", str(target))
    must_be_new(target)


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _try_out(attributes: Mapping[str, Any]) -> None:
    """Raise ValueError if some cannot be stored: now, and not when all else has been done."""
    with h5py.File("attributes", "w", driver="core", backing_store=False) as file:
        for name, value in attributes.items():
            try:
                if isinstance(value, Mapping):
                    file.create_group(name).attrs.update(value)
                else:
                    file.attrs[name] = value
            except (TypeError, ValueError, OSError, RuntimeError) as error:
                raise ValueError(
                    f"the attribute {name!r} cannot be stored in HDF5: {error}"
                ) from error


def _names(argument: str, names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"{argument} must be names in a list or tuple, got {names!r}")
    return tuple(names)


def _compression(value: str | int | None) -> str | int | None:
    is_level = isinstance(value, int) and not isinstance(value, bool) and value in range(10)
    if value is None or is_level or value in ("gzip", "lzf"):
        return value
    raise ValueError(f"compression must be None, 'gzip', 'lzf' or 0 to 9, got {value!r}")


def as_shards(source: Any, shards: int | None) -> tuple[Source, int]:
    """Return what can be run of what was handed over, and how many shards it has."""
    if callable(source):
        runs = as_source(source)
        if isinstance(runs, FunctionSource) and runs.takes_shard:
            return runs, _SHARDS if shards is None else arguments.positive("shards", shards)
    elif isinstance(source, Mapping) or not isinstance(source, Iterable):
        raise TypeError(
            "pack needs a generator function or an iterable of batches, got a "
            f"{type(source).__name__}; [batch] is a source of one batch"
        )
    else:
        runs = LiveSource(source)
    if shards not in (None, 1):
        raise ValueError(
            f"only a generator function of a shard can be split into shards={shards}; "
            "write `def batches(shard): ...`, with shard.split for its share of the work"
        )
    return runs, 1


# --- the parts ---


@dataclass(frozen=True)
class _Job:
    """What a worker must know in order to write any shard."""

    source: Source
    folder: str
    shards: int
    random_seed: int
    format: Format
    keys: frozenset[str]  #: that there must be
    ended: list[bool] = field(default_factory=list)  #: shared by threads; set when they should end

    def part(self, index: int) -> Path:
        return Path(self.folder, f"shard-{index:05}.h5")

    def __call__(self, index: int) -> int:
        """Write a shard, unless it is there; return how many rows it has."""
        had = 0
        for rows in self.write(index):
            had = rows
            if self.ended:
                raise Closed("packing was ended")
        return had

    def write(self, index: int) -> Iterator[int]:
        """Write a shard, unless it is there; yield how many rows it has so far."""
        path = self.part(index)
        if path.exists():
            with _part(path) as file:
                rows = int(file.attrs["rows"])
                if rows:
                    self._check(_kinds_of(file))
                yield rows
            return
        # the task has the same index, and so the same seeds: also the global generators' fit
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
def _part(path: Path) -> Iterator[Any]:
    try:
        with opened(path) as file, guarded(path):
            yield file
    except DataFileError as error:
        raise DataFileError(f"{error}; remove this part and pack again", str(path)) from error


def _write_parts(job: _Job, options: dict[str, Any], progress: Progress) -> None:
    if isinstance(job.source, LiveSource):  # nobody else can read it
        had = 0
        with bar("packing", None, "row", progress) as tell:
            for rows in job.write(0):
                tell(rows - had)
                had = rows
        return
    total = 0
    with (
        bar("packing", job.shards, "shard", progress) as tell,
        OrderedEnqueuer(range(job.shards), job, ordered=False, **options) as enqueuer,
    ):
        try:
            for rows in enqueuer:
                total += rows
                tell(1, f"{total:,} rows")
        finally:
            job.ended.append(True)  # threads cannot be killed, but look at it


# --- the whole ----------------------------------------------------------------------------------


def _assemble(target: Path, job: _Job, attributes: Mapping[str, Any], merge: bool) -> int:
    parts = [job.part(index) for index in range(job.shards)]
    kinds, rows = _alike(parts)
    total = sum(rows.values())
    with whole(target, Path(job.folder)) as file:
        if merge:
            format = dataclasses.replace(
                job.format, keys=None, batched=True, ragged=_ragged_of(kinds)
            )
            for _ in Writer(file, format, str(target)).write(_batches_of(parts, kinds)):
                pass
        else:
            for key, kind in kinds.items():
                layout = h5py.VirtualLayout((total, *kind.shape), kind.dtype)
                start = 0
                for part, count in rows.items():
                    # relative, so that both can be moved together
                    name = f"{part.parent.name}/{part.name}"
                    source = h5py.VirtualSource(
                        escaped(name), escaped(key), (count, *kind.shape), kind.dtype
                    )
                    layout[start : start + count] = source
                    start += count
                file.create_virtual_dataset(key, layout)
        for name, value in attributes.items():
            if isinstance(value, Mapping):
                file[name].attrs.update(value)
            else:
                file.attrs[name] = value
        must_be_new(target)
    return total


def _alike(parts: Sequence[Path]) -> tuple[dict[str, Kind], dict[Path, int]]:
    """Return what kind the keys are in all parts, and the rows of the parts that have some."""
    kinds: dict[str, Kind] = {}
    rows = {}
    first = None
    for path in parts:
        with _part(path) as file:
            count = int(file.attrs["rows"])
            found = _kinds_of(file)
        if not count:
            continue
        if first is None:
            first, kinds = path, found
        if found != kinds:
            raise ValueError(
                f"the shards are not alike: {first} has {_told(kinds)}, and {path} has "
                f"{_told(found)}; mend the source, and remove {path.parent}"
            )
        rows[path] = count
    if not rows:
        for path in parts:
            path.unlink()  # or a source that was mended would not be asked again
        raise ValueError("the source yielded no rows, so there is nothing to pack")
    return kinds, rows


def _kinds_of(file: Any) -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}

    def note(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            kinds[name] = Kind(kind_of(item.dtype), item.dtype, tuple(item.shape[1:]))

    file.visititems(note)
    return kinds


def _told(kinds: Mapping[str, Kind]) -> str:
    return ", ".join(f"{key!r}: {kind}" for key, kind in kinds.items())


def _ragged_of(kinds: Mapping[str, Kind]) -> tuple[str, ...]:
    return tuple(key for key, kind in kinds.items() if kind.name.startswith("ragged"))


def _batches_of(parts: Sequence[Path], kinds: Mapping[str, Kind]) -> Iterator[dict[str, Any]]:
    for path in parts:
        with _part(path) as file:
            rows = int(file.attrs["rows"])
            if not rows:
                continue
            columns = {key: readable(file[key]) for key in kinds}
            step = file[next(iter(kinds))].chunks[0]
            for start in range(0, rows, step):
                yield {key: column[start : start + step] for key, column in columns.items()}
