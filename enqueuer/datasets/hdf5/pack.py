"""Packing: a source, run in parallel, becomes one HDF5 file; an interrupted run is resumed.

    source of a shard ==> a worker writes shard-00003.h5 ==> one file that shows all of them

    train.h5.parts/  pack.json      description of the run, empty once the file of all is there;
                                    locked by the process that packs
                     shard-*.h5     finished parts

The unit is the shard: its rows depend on the source, the seed and its number, and not on the worker
that writes it. The part of a shard appears when it is whole, so an interrupted run can be resumed.
Parts of another source, seed or format are refused, and never mixed.

A worker writes one shard after the other (by an OrderedEnqueuer): with several at once it would
have finished none when it is killed. At the end, one file shows the parts, or has a copy of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import inspect
import json
import os
import stat
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from enqueuer.common import checks
from enqueuer.common.descriptors import open_no_link
from enqueuer.datasets.hdf5.files import guarded, h5py, key_names, parts_folder
from enqueuer.datasets.hdf5.rows import PACKED, Layout, RowReader, escaped, joined
from enqueuer.datasets.hdf5.writer import Format, Writer
from enqueuer.enqueuers.options import Backends
from enqueuer.enqueuers.ordered import OrderedEnqueuer
from enqueuer.errors import Closed, DataFileError, InvalidState, StateMismatch
from enqueuer.monitoring.progress import Progress, bar
from enqueuer.order.position import fingerprint_of
from enqueuer.workers import sources
from enqueuer.workers.shards import Shard, fresh_seed
from enqueuer.workers.sources import FunctionSource, LiveSource, Source, as_source, close

# The default: two or more for each worker of most machines, so that none idles for long.
_SHARDS = 32
_MANIFEST, _PART = "pack.json", "shard-*.h5"
# Files that this process is packing to, and what stands for the call.
_running: set[Path] = set()
_running_lock = threading.Lock()


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
        compression: Compression as in h5py: None, the default; `"gzip"` (or 0 to 9, its level), or
            `"lzf"`, which is faster and for h5py only.
        checksum: Whether chunks of numbers have checksums, so that a flipped bit is an error;
            False by default. Like compression, it has no effect on strings and ragged rows,
            which HDF5 stores apart.
        merge: Whether to copy all parts into one self-contained file and to remove them. False,
            the default, makes virtual datasets, in no time; file and folder belong together.
        progress: Whether to show a bar. True shows it if standard error is a terminal, and needs
            tqdm; a class, such as `tqdm.notebook.tqdm`, is used as it is. False by default.
        max_restarts: Number of dead workers that are replaced; a new one starts the shard again.
        version: Version of the rows of the source. Change it when they change: an interrupted run
            is resumed only with the same version. None, the default, compares the values that
            the source has bound: numbers, texts, paths, arrays, and lists and dicts of them; of
            others, the name of the function or class.

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
    keys = checks.optional(key_names)("keys", keys)
    ragged = key_names("ragged", ragged) if ragged else ()
    rows = checks.optional(checks.positive)("chunk_rows", chunk_rows)
    format = Format(keys, bool(batched), ragged, rows, compression, bool(checksum))
    opens, count = as_shards(source, shards)
    seed = None if random_seed is None else checks.seed(random_seed)
    workers = min(checks.positive("workers", workers), count)
    run = {"random_seed": seed, "shards": count, **dataclasses.asdict(format)}
    with begun(target, {**identity(source, version), **run}, merge) as (folder, drawn):
        job = PackingJob(opens, str(folder), count, drawn, format)
        if isinstance(opens, LiveSource) and version is None:
            # The part may be of another list, which is known only when this one has been read.
            job.part(0).unlink(missing_ok=True)
        write_parts(job, progress, workers=workers, backend=backend, max_restarts=max_restarts)
        return assemble(target, job, merge)


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
    raised_in = Path(frames[-1].filename) if frames else Path()
    return raised_in.parent == Path(__file__).parent or raised_in == Path(sources.__file__)


# --- the parts, and the file of all ---


@dataclass(frozen=True)
class PackingJob:
    """The work of packing; a worker can write any shard of it.

    Attributes:
        source: The source.
        folder: Folder of the parts.
        shards: Number of shards.
        random_seed: Seed of the shards.
        format: Format of the rows.
        ended: Not empty once workers should end; threads share it.
    """

    source: Source
    folder: str
    shards: int
    random_seed: int
    format: Format
    ended: list[bool] = field(default_factory=list)

    def part(self, index: int) -> Path:
        """Return the path of a shard's part."""
        return Path(self.folder, f"shard-{index:05}.h5")

    def __call__(self, index: int, advance: Callable[[int], object] = lambda rows: None) -> int:
        """Write a shard, unless its part exists; return its number of rows.

        Args:
            index: Index of the shard.
            advance: Function that is called with the number of rows whenever some were written.
        """
        path = self.part(index)
        if path.exists():
            rows = _layout_of(path).rows
            advance(rows)
            return rows
        # The task has the same index, and so the same seeds: global generators fit as well.
        shard = Shard(index, self.shards, 0, self.random_seed)
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(whole(path, Path(self.folder)))
            items: Any = iter(self.source.open(shard))
            stack.callback(close, items)
            writer = Writer(file, self.format, str(path))
            for rows in writer.write(item for item in items if item is not None):
                advance(rows)
                if self.ended:
                    raise Closed("packing was ended")
        return writer.rows


def _layout_of(part: Path) -> Layout:
    """Return the layout of a part; the error of a broken one says to remove it."""
    try:
        found = Layout(str(part))
        found.check_readable()
    except DataFileError as error:
        raise DataFileError(f"{error}; remove this part and pack again", str(part)) from error
    return found


def write_parts(job: PackingJob, progress: Progress, **options: Any) -> None:
    """Write all parts that do not exist, by the workers of an enqueuer with these options."""
    # A running iterator can be read in this process only.
    if isinstance(job.source, LiveSource):
        with bar("packing", None, "row", progress) as advance:
            job(0, advance)
        return
    total = 0
    with (
        bar("packing", job.shards, "shard", progress) as advance,
        OrderedEnqueuer(
            range(job.shards), job, ordered=False, random_seed=job.random_seed, **options
        ) as enqueuer,
    ):
        try:
            for rows in enqueuer:
                total += rows
                advance(1, f"{total:,} rows")
        finally:
            # Threads cannot be killed, but end when they see this.
            job.ended.append(True)


def assemble(target: Path, job: PackingJob, merge: bool) -> int:
    """Make one file of all parts; return its number of rows.

    Args:
        target: Path of the file.
        job: The work; all of its parts exist.
        merge: Whether the file has a copy of the parts, rather than showing them.

    Raises:
        ValueError: The parts are not alike, or have no rows.
    """
    layouts = [_layout_of(job.part(index)) for index in range(job.shards)]
    if not any(layout.columns for layout in layouts):
        # Otherwise the same call would not run a source that was fixed since.
        _remove(Path(job.folder), _PART)
        raise ValueError("the source yielded no rows, so there is nothing to pack")
    try:
        shown = joined([layout for layout in layouts if layout.columns])
    except DataFileError as error:
        raise ValueError(
            f"the shards are not alike: {error}; fix the source, and remove {job.folder}"
        ) from error
    with whole(target, Path(job.folder)) as file:
        if merge:
            kinds = {key: column.kind.name for key, column in shown.columns.items()}
            ragged = tuple(key for key, name in kinds.items() if name.startswith("ragged"))
            format = dataclasses.replace(job.format, keys=None, batched=True, ragged=ragged)
            for _ in Writer(file, format, str(target)).write(_batches_of(shown)):
                pass
        else:
            _show(file, shown, target)
        # The seed may have more bits than HDF5's numbers.
        file.attrs.update({PACKED: job.shards, "enqueuer.random_seed": str(job.random_seed)})
        must_be_new(target)
    return shown.rows


def _batches_of(shown: Layout) -> Iterator[dict[str, Any]]:
    """Yield the rows of all parts, as many at a time as a chunk has."""
    step = next(iter(shown.columns.values())).stretches[0].chunk
    with contextlib.closing(RowReader(shown)) as reader:
        for start in range(0, shown.rows, step):
            yield reader.read([(start, min(start + step, shown.rows))])


def _show(file: Any, shown: Layout, target: Path) -> None:
    """Make virtual datasets of the rows of all parts."""
    for key, (shape, kind, stretches) in shown.columns.items():
        layout = h5py.VirtualLayout(shape, kind.dtype)
        for at in stretches:
            # The path is relative, so that file and parts can be moved together.
            name = escaped(Path(at.path).relative_to(target.parent).as_posix())
            there = (at.stop - at.start, *kind.shape)
            layout[at.start : at.stop] = h5py.VirtualSource(name, escaped(key), there, kind.dtype)
        file.create_virtual_dataset(key, layout)


# --- an interrupted run ---


def identity(source: Any, version: str | int | None) -> dict[str, Any]:
    """Return a description of a source, by which two sources are distinguished.

    Neither its code nor its pickle is compared: code may be corrected after an error, and the
    pickle of a function differs from run to run.

    Args:
        source: The source.
        version: Version of its rows. None: the values that it has bound are described.
    """
    found = {"source": fingerprint_of(source), "version": version}
    bound = _bound(source) if version is None and callable(source) else {}
    for name, value in bound.items():
        # Only a hash is kept, as values may be secret, and the folder may be copied with the data.
        text = repr(_plain(value)).encode("utf-8", "surrogatepass")
        found[f"bound {name}"] = hashlib.sha256(text).hexdigest()[:16]
    return found


def _bound(source: Any) -> dict[str, Any]:
    """Return the values that a partial, a closure or an instance has bound, by name."""
    if isinstance(source, functools.partial):
        own = {f"argument {at}": value for at, value in enumerate(source.args)}
        return {**_bound(source.func), **own, **source.keywords}
    # What a method or an object has bound is what the object has.
    source = getattr(source, "__self__", source)
    if not inspect.isfunction(source):
        return dict(getattr(source, "__dict__", {}))
    # A variable of the closure may have no value now.
    with contextlib.suppress(ValueError):
        return dict(inspect.getclosurevars(source).nonlocals)
    return {}


def _plain(value: Any) -> Any:
    """Return a value whose `repr` is the same in every run: the name of what has no such value."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, range, slice)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return [(_plain(key), _plain(item)) for key, item in value.items()]
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return value.dtype.str, value.shape, hashlib.sha256(value.tobytes()).hexdigest()
    return getattr(value, "__qualname__", type(value).__qualname__)


@contextlib.contextmanager
def begun(target: Path, run: Mapping[str, Any], merge: bool) -> Iterator[tuple[Path, int]]:
    """Give the folder for the parts, locked for this call, and the seed.

    Args:
        target: Path of the file.
        run: Description of the run. With None as `random_seed`, that of the run before is used.
        merge: Whether the parts are not needed afterwards.

    Raises:
        FileExistsError: The file exists already.
        StateMismatch: Existing parts are of another run.
        InvalidState: Another process or thread is packing to the same path.
        DataFileError: The folder cannot be written.
        ValueError: The name of the file cannot be written.
    """
    check_target(target, merge)
    folder = parts_folder(target)
    # The lock of a file does not exclude other threads.
    with _running_lock:
        if target in _running:
            raise InvalidState(f"another thread is packing to {target}")
        _running.add(target)
    with contextlib.ExitStack() as stack:
        stack.callback(_running.discard, target)
        try:
            _make_folder(folder)
            file = stack.enter_context(open(folder / _MANIFEST, "a+b", opener=open_no_link))
        except OSError as error:
            raise DataFileError(f"{folder} cannot be written: {error}", str(folder)) from error
        _lock(file, target)
        # Another process may just have finished it.
        must_be_new(target)
        seed = _resumed_seed(folder, file, run)
        _remove(folder, "*.tmp")
        try:
            yield folder, seed
        except BaseException:
            if not any(folder.glob(_PART)):
                _remove(folder)
            raise
        if merge:
            _remove(folder)
            return
        # Workers that were killed and replaced may have left files.
        _remove(folder, "*.tmp")
        file.truncate(0)


def _make_folder(folder: Path) -> None:
    """Make the folder of the parts, unless there is one into which no other user puts files."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        return
    found = folder.lstat()
    # The owner of the folder around it can exchange all in it anyway. On Windows, all have 0.
    owners = {folder.parent.stat().st_uid, getattr(os, "geteuid", int)()}
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners:
        raise OSError(
            errno.EEXIST,
            "it is no folder of yours, but a link, a file or the folder of another user, who "
            "could exchange its files; remove it, or choose another name",
        )


def _resumed_seed(folder: Path, file: IO[bytes], run: Mapping[str, Any]) -> int:
    """Compare a run with the one that left the parts, or begin one; return its seed.

    Raises:
        StateMismatch: Existing parts are of another run.
    """
    now = json.loads(json.dumps(run))
    file.seek(0)
    before: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        before = json.loads(file.read())
    has_parts = any(folder.glob(_PART))
    if now["random_seed"] is None:
        now["random_seed"] = before.get("random_seed") if has_parts else fresh_seed()
    if not has_parts:
        file.truncate(0)
        file.write(json.dumps(now, indent=1).encode())
        file.flush()
        os.fsync(file.fileno())
        sync(folder)
    elif not before:
        raise StateMismatch(
            f"{folder} is of a run that was finished, and its file is gone; put that back, or "
            "remove the folder to begin anew"
        )
    elif before != now:
        others = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        raise StateMismatch(
            f"{folder} was left by a run with another {', '.join(others)}; give the same arguments "
            "to resume it, or remove the folder to begin anew"
        )
    seed: int = now["random_seed"]
    return seed


def check_target(target: Path, merge: bool) -> None:
    """Raise FileExistsError, DataFileError or ValueError if a file cannot be made there."""
    if not target.parent.is_dir():
        raise DataFileError(f"{target}: there is no folder {target.parent}", str(target))
    must_be_new(target)
    if not merge and target.name != target.name.encode(errors="ignore").decode():
        raise ValueError(
            f"{target} refers to its parts by its name, which must be UTF-8, got {target.name!r}; "
            "choose another, or give merge=True"
        )


def must_be_new(target: Path) -> None:
    """Raise FileExistsError if a path exists."""
    if os.path.lexists(target):
        raise FileExistsError(
            f"{target} is there already; remove it, and {parts_folder(target).name} if it is "
            "there, or choose another name"
        )


def _remove(folder: Path, *patterns: str) -> None:
    """Remove files of these names; without names, all files of packing and the empty folder."""
    for pattern in patterns or (_PART, "*.tmp", _MANIFEST):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    if not patterns:
        # The folder may have other files.
        with contextlib.suppress(OSError):
            folder.rmdir()


def _lock(file: Any, target: Path) -> None:
    """Exclude other processes; the lock ends with this process, and no fork inherits it."""
    # Windows has no fcntl.
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise InvalidState(f"another process is packing to {target}") from None


# --- writing a file ---


@contextlib.contextmanager
def whole(path: Path, folder: Path) -> Iterator[Any]:
    """Give an `h5py.File` that appears under its name only when all is in it and on the disk.

    Args:
        path: Path of the file.
        folder: Folder for the file while it is written; on the same file system.
    """
    temporary = folder / f"{path.name}.{os.getpid()}.tmp"
    try:
        with guarded(temporary):
            # A name that is there may be a link of another user: "x" does not follow it.
            temporary.unlink(missing_ok=True)
            file = h5py.File(temporary, "x")
        try:
            yield file
        except BaseException:
            # The first error is the one to report.
            with contextlib.suppress(Exception):
                _discard(file)
            raise
        with guarded(temporary):
            file.close()
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _discard(file: Any) -> None:
    """Close a file whose content is not needed."""
    # HDF5 writes pending data when it closes a file. If it cannot, as the disk is full, it crashes
    # when the file's memory is freed. So the data are written to /dev/null.
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, file.id.get_vfd_handle(), inheritable=False)
    os.close(nowhere)
    file.close()


def sync(path: Path) -> None:
    """Write the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
