"""Packing: a source, run in parallel, becomes one HDF5 file.

    source of a shard ==> a worker writes shard-00003.h5 ==> one file that shows all of them

The unit is the shard: its rows depend on the source, the seed and its number, and not on the worker
that writes it. The part of a shard appears when it is whole, so an interrupted run can be resumed.
A worker writes one shard after the other (by an OrderedEnqueuer): with several at once it would
have finished none when it is killed.
"""

from __future__ import annotations

import dataclasses
import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from enqueuer.common import checks
from enqueuer.datasets.hdf5 import assembly, columns, parts, writer
from enqueuer.datasets.hdf5.files import h5py
from enqueuer.datasets.hdf5.resume import begun, identity, must_be_new, source_name
from enqueuer.enqueuers.options import Backends
from enqueuer.errors import DataFileError
from enqueuer.monitoring.progress import Progress
from enqueuer.workers.shards import Shard
from enqueuer.workers.sources import FunctionSource, LiveSource, Source, as_source

# The default: two or more for each worker of most machines, so that none idles for long.
_SHARDS = 32


def pack(
    source: Callable[[Shard], Iterable[Any]] | Callable[[], Iterable[Any]] | Iterable[Any],
    path: str | os.PathLike[str],
    *,
    workers: int = 1,
    backend: Backends = "process",
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
    max_restarts: int = 0,
    version: str | int | None = None,
) -> int:
    """Write all batches of one epoch of a source to an HDF5 file; return the number of rows.

    A free worker writes each shard to a file of its own, in the folder `<path>.parts`. Then one
    file shows them as a whole. It appears under its name only when it is whole and on the disk.
    If a run was interrupted, even by SIGKILL, the same call resumes it with the shards that were
    not finished. The content depends on the source, `random_seed` and
    `shards`, and not on workers. The rows are in the order of the shards: all of the first, then
    all of the second.

    Args:
        source: A generator function of a `Shard` (or of no argument, with `shards=1`), which
            workers run. Or any iterable, also an enqueuer; this process reads it, after an
            interruption again from the start.
            An item is a batch: an array, or a flat dict or tuple of arrays and lists with
            equally many rows. None is skipped.
        path: Path of the file, which must not exist yet.
        workers: Number of processes (or threads) that write; 1 by default.
        backend: `"process"`, the default, or `Processes(...)`; or `"thread"`, for a source that
            mostly waits: HDF5 itself works for one thread at a time.
        shards: Number of parts of the work; 32 by default. The content depends on it.
        random_seed: As for `GeneratorEnqueuer`. None, the default, draws one; a resumed
            run keeps its seed.
        keys: Names for the members of a tuple, by default those of a named tuple, or `"0"`, `"1"`
            and so on. Or the name of a single array, by default `"data"`, or the keys to take
            from a dict.
        batched: Whether an item is a batch of rows, as by default, or one row.
        ragged: Keys whose rows are 1-D arrays of any length.
        chunk_rows: Number of rows in a chunk, which is read from the disk, and compressed, as a
            whole. By default as many as make 1 MiB of the largest key, and at most 1024.
        compression: None, the default; `"gzip"` (or 0 to 9, its level), or `"lzf"`, which is
            faster and for h5py only.
        checksum: Whether chunks of numbers have checksums, so that a flipped bit is an error;
            False by default. Like compression, it has no effect on strings and ragged rows,
            which HDF5 stores apart.
        attributes: Attributes of the file. A dict has the attributes of the key of that name.
        merge: Whether to copy all parts into one self-contained file and to remove them. False,
            the default, makes virtual datasets, in no time; file and folder belong together.
        progress: Whether to show a bar. True shows it if standard error is a terminal, and needs
            tqdm; a class, such as `tqdm.notebook.tqdm`, is used as it is. False by default.
        max_restarts: Number of dead workers that are replaced; a new one starts the shard again.
        version: Version of the rows of the source. Change it when they change: an interrupted run
            is resumed only with the same version. None, the default, compares the values that
            the source has bound, as far as they can be compared: numbers, texts, paths, arrays,
            and lists and dicts of them.

    Raises:
        FileExistsError: The file exists already.
        StateMismatch: An interrupted run had another source, seed or format.
        InvalidState: Another process or thread is packing to the same path.
        DataFileError: A file cannot be written or read.
        TypeError: A batch has no type in HDF5; the message proposes a remedy.
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
    format = writer.Format(
        None if keys is None else _names("keys", keys),
        bool(batched),
        _names("ragged", ragged),
        None if chunk_rows is None else checks.positive("chunk_rows", chunk_rows),
        _compression(compression),
        bool(checksum),
    )
    opens, count = as_shards(source, shards)
    check_target(target)
    _check_name(target, merge)
    attributes = dict(attributes or {})
    of_keys = {name for name, value in attributes.items() if isinstance(value, Mapping)}
    _try_out(attributes)
    run = {
        **identity(source, version),
        "random_seed": None if random_seed is None else checks.seed(random_seed),
        "shards": count,
        **dataclasses.asdict(format),
    }
    with begun(target, run, keep=not merge) as (folder, drawn):
        job = parts.PackingJob(opens, str(folder), count, drawn, format, frozenset(of_keys))
        if isinstance(opens, LiveSource) and version is None:
            # The part may be of another list, which is known only when this one has been read.
            job.part(0).unlink(missing_ok=True)
        options: dict[str, Any] = dict(
            random_seed=drawn,
            workers=min(checks.positive("workers", workers), count),
            backend=backend,
            max_restarts=max_restarts,
        )
        parts.write_parts(job, options, progress)
        provenance = {
            "enqueuer.source": source_name(source),
            # The seed may have more bits than HDF5's numbers.
            "enqueuer.random_seed": str(drawn),
            "enqueuer.shards": count,
        }
        return assembly.assemble(target, job, {**provenance, **attributes}, merge)


def _check_name(target: Path, merge: bool) -> None:
    if not merge and not _is_utf8(target.name):
        raise ValueError(
            f"{target} refers to its parts by its name, which must be UTF-8, got {target.name!r}; "
            "choose another, or give merge=True"
        )


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
    """Raise ValueError if some cannot be stored: now, and not after all rows were written."""
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
    """Return a source for the argument of `pack`, and its number of shards."""
    if callable(source):
        runs = as_source(source)
        if isinstance(runs, FunctionSource) and runs.takes_shard:
            return runs, _SHARDS if shards is None else checks.positive("shards", shards)
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


def is_refusal(error: BaseException) -> bool:
    """Return whether packing itself refused a batch, and not the source's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = {__file__, *(module.__file__ for module in (assembly, columns, parts, writer))}
    return bool(frames) and frames[-1].filename in own
