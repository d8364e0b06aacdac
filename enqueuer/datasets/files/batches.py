"""Lists of files -> batches: found or read, shuffled, divided over shards, loaded, stacked.

    find_files, read_list --> FileBatches --(a shard)--> load each file --> stack --> a batch

An epoch is one permutation of all files, cut into batches. The shards get the batches in turn, so
the batches do not depend on the number of shards. Lists are read by the process that makes them,
files by the workers.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, Generic, Literal, TypedDict, TypeVar, cast, overload

import numpy as np

from enqueuer.common import checks
from enqueuer.common.packed_list import packed
from enqueuer.common.text import an
from enqueuer.datasets.epochs import EpochOrder
from enqueuer.datasets.files.lists import FileEntry, Path
from enqueuer.enqueuers import options
from enqueuer.enqueuers.options import Unpack
from enqueuer.errors import FrameworkUnavailable
from enqueuer.workers.collate import stack
from enqueuer.workers.plan import OnError, may_skip
from enqueuer.workers.shards import Shard, Task
from enqueuer.workers.sources import fingerprint_of, name_of, takes_two

Batch = TypeVar("Batch")
T = TypeVar("T")

Array = np.ndarray[Any, Any]
Files = Iterable[Path | tuple[Path, Any]]
_LoadWithTask = Callable[[Any, Any, Task], T | None]
Load = Callable[[Any], T | None] | Callable[[Any, Any], T | None] | _LoadWithTask[T]
"""A function that loads a file; None leaves it out."""


class FileOptions(TypedDict, total=False):
    """Types of the options of `FileBatches` that do not change the type of a batch."""

    shuffle: bool
    drop_last: bool
    on_error: OnError


class FileBatches(Generic[Batch]):
    """Load files in batches: a source for `GeneratorEnqueuer`, and for any number of workers.

    Each epoch has each file exactly once, in an order of its own that is drawn from the
    enqueuer's seed. The same files, seed and `batch_size` give the same batches in the same
    order, for any number of shards and workers and any backend. A saved position is resumed at
    once, without loading earlier files again.

    A file that cannot be loaded makes its batch smaller. No other file replaces it, so all others
    keep their batches. A batch without any file is None, which enqueuers skip.

    A call with a shard returns an iterator over that shard's batches.

    Args:
        files: Paths, or pairs of a path and a label, as from `find_files` and `read_list`.
        load: A function of the path; or of the path and its `Task`, whose `rng` belongs to the
            file and the epoch, for augmentation. A parameter with the name `label` gets the label
            of the file: `load(path, label)` or `load(path, label, task)`. It returns a sample: an
            array, a number, or a dict, tuple or list of them. None leaves the file out.
        batch_size: Number of files in a batch.
        shuffle: Whether each epoch has an order of its own; True by default.
        drop_last: Whether to leave out an incomplete last batch, and batches that would give
            some shards more than others; False by default.
        with_labels: Whether to yield `(batch, labels)`; labels that are numbers are one array,
            others a list. False by default.
        with_names: Whether to yield `(batch, names)`, or `(batch, labels, names)`, with the list
            of the paths. False by default.
        collate: Function that makes one batch of a list of samples. By default arrays and
            numbers are stacked along a new first axis, also inside of dicts, tuples and lists.
            The arrays are made by `enqueuer.empty`, so processes send them without a copy.
        on_error: Reaction to a file that cannot be loaded. `"raise"`, the default: raise the
            error, with a note of the path. `"skip"`: report the error to the enqueuer and leave
            the file out. The error is counted (`error_count`, `max_errors`), and logged once
            with path and traceback, though it occurs again in each epoch. A callable: the same
            without the log line; the worker calls it with the error, and its result, if it is
            not None, is the sample.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There are no files, or too few for a batch; a label is missing.

    Example:
        >>> from enqueuer import GeneratorEnqueuer
        >>> from enqueuer.datasets.files import FileBatches
        >>> files = [("a.txt", 0), ("bb.txt", 1), ("ccc.txt", 0)]
        >>> batches = FileBatches(files, len, 2, shuffle=False, with_labels=True)
        >>> with GeneratorEnqueuer(batches, workers=2) as enqueuer:
        ...     for lengths, labels in enqueuer:
        ...         print(lengths, labels)
        [5 6] [0 1]
        [7] [0]
    """

    @overload
    def __init__(
        self,
        files: Files,
        load: Load[Any],
        batch_size: int,
        *,
        collate: Callable[[list[Any]], Batch],
        **options: Unpack[FileOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: FileBatches[Array],
        files: Files,
        load: Load[Array],
        batch_size: int,
        **options: Unpack[FileOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: FileBatches[tuple[Array, Any]],
        files: Files,
        load: Load[Array],
        batch_size: int,
        *,
        with_labels: Literal[True],
        **options: Unpack[FileOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: FileBatches[Any],
        files: Files,
        load: Load[Any],
        batch_size: int,
        *,
        with_labels: bool = False,
        with_names: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        **options: Unpack[FileOptions],
    ) -> None: ...
    def __init__(
        self,
        files: Files,
        load: Load[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        with_labels: bool = False,
        with_names: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        on_error: OnError = "raise",
    ) -> None:
        paths, labels = _columns(files)
        # Packed, so that worker processes share the memory of a long list.
        self._paths = packed(paths)
        # Here, as to unpack a million of them takes longer.
        self._names_hash = _hash_of(paths)
        if not callable(load):
            raise TypeError(f"load must be a function of a path, got {load!r}")
        self._wanted = _wanted_by(load)
        self._with_labels = bool(with_labels)
        needs_labels = self._with_labels or "label" in self._wanted
        self._labels = packed(labels) if needs_labels else []
        bare = next(
            (path for path, label in zip(paths, labels, strict=True) if label is None), None
        )
        if needs_labels and bare is not None:
            reason = "with_labels is True" if with_labels else "load takes a label"
            raise ValueError(f"{reason}, but {os.fspath(bare)!r} has no label")
        checks.function("collate", collate, "of a list")
        self._load: Callable[..., Any] = load
        self._epochs = EpochOrder("files", len(paths), batch_size, shuffle, drop_last)
        self._identity = self._epochs.identity
        # An interrupted `pack` of this source is resumed only if all plain attributes are the same.
        self._drop_last = bool(drop_last)
        self._with_names = bool(with_names)
        self._collate = collate
        self._on_error = options.on_error("on_error", on_error)

    def __call__(self, shard: Shard, first_item: int = 0) -> Iterator[Batch]:
        """Return an iterator over the batches of a shard from one on; it has a `state_dict`.

        Raises:
            ValueError: There are fewer batches than shards, and `drop_last` is True.
        """
        return self._epochs.batches(shard, self._batch, self._identity, first_item)

    def __repr__(self) -> str:
        return f"<FileBatches of {len(self._paths)} files, {self._identity['batch_size']} a batch>"

    def _batch(self, indices: range | np.ndarray, shard: Shard) -> Any:
        """Load a batch; return None if no file can be loaded."""
        kept, samples = [], []
        for index in map(int, indices):
            sample = self._sample(index, shard)
            if sample is not None:
                kept.append(index)
                samples.append(sample)
        if not samples:
            return None
        batch: tuple[Any, ...] = (self._collated(samples, kept),)
        if self._with_labels:
            batch += (stack([self._labels[index] for index in kept]),)
        if self._with_names:
            batch += ([os.fspath(self._paths[index]) for index in kept],)
        return batch if len(batch) > 1 else batch[0]

    def _sample(self, index: int, shard: Shard) -> Any:
        path = self._paths[index]
        try:
            if not self._wanted:
                return self._load(path)
            task = Task(index, shard.epoch, shard.random_seed)
            if "label" not in self._wanted:
                return self._load(path, task)
            given = {"label": self._labels[index], "task": task}
            return self._load(path, **{name: given[name] for name in self._wanted})
        except Exception as error:
            _note(error, f"while loading {os.fspath(path)!r}")
            # No file could be loaded without the framework.
            if isinstance(error, FrameworkUnavailable) or not may_skip(error, self._on_error):
                raise
            sample = self._on_error(error) if callable(self._on_error) else None
            shard.report(error, log=self._on_error == "skip")
            return sample

    def _collated(self, samples: list[Any], indices: list[int]) -> Any:
        try:
            return stack(samples) if self._collate is None else self._collate(samples)
        except Exception as error:
            names = [os.fspath(self._paths[index]) for index in indices]
            odd = None if self._collate is not None else _odd_one(samples)
            if odd is not None:
                pair = f"{names[0]!r} and {names[odd]!r} cannot be in one batch"
                raise ValueError(f"{pair}: {error}") from error
            _note(error, f"while joining {names[0]!r} to {names[-1]!r}, {len(names)} files")
            raise


@fingerprint_of.register(FileBatches)
def _fingerprint_of(source: FileBatches[Any]) -> dict[str, Any]:
    return {"name": type(source).__qualname__, **source._identity, "names": source._names_hash}


def _hash_of(paths: list[Path]) -> int:
    """Return a hash of the names of files, below the folder of all, which may move."""
    # All in a few calls, as there may be a million.
    names = list(map(os.fspath, paths))  # type: ignore[arg-type]  # it is overloaded
    if {*map(type, names)} != {str}:
        names = list(map(os.fsdecode, names))
    # It is cut at a separator.
    prefix = os.path.commonprefix((min(names), max(names)))  # noqa: RUF071
    folder = prefix[: prefix.rfind(os.sep) + 1]
    text = "\0" + "\0".join(names)
    below = text.replace("\0" + folder, "\0").replace(os.sep, "/")
    return zlib.crc32(below.encode("utf-8", "surrogatepass"))


def _wanted_by(load: Callable[..., Any]) -> set[str]:
    """Return what `load` takes beside the path: the label of a file, its `Task`, or both.

    Raises:
        TypeError: It takes other arguments.
    """
    try:
        parameters = list(inspect.signature(load).parameters.values())[1:]
    except ValueError:
        # Some built-in functions have no signature.
        return set()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = {p.name for p in named if p.default is p.empty}
    # A label with a default is bound by the user.
    if "label" not in required:
        return {"task"} if takes_two(load, "load", "path") else set()
    if required - {"label", "task"}:
        raise TypeError(
            "load must take the path, and if it needs them the label and the task, but "
            f"{name_of(load)} takes {inspect.signature(load)}; bind the others with "
            "functools.partial"
        )
    return {"label", "task"} & {p.name for p in named}


def _columns(files: Files) -> tuple[list[Path], list[Any]]:
    """Return the paths and the labels of files, None where there is no label."""
    if isinstance(files, (str, os.PathLike)):
        raise TypeError(f"files must be a list of paths, got {files!r}; see find_files, read_list")
    if isinstance(files, (Set, Mapping)):
        raise TypeError(f"files must have an order, got {an(type(files).__name__)}; sort them")
    files = list(files)
    if not files:
        raise ValueError("there are no files")
    if {*map(type, files)} == {str}:
        return cast(list[Path], files), [None] * len(files)
    entries = [_entry(file) for file in files]
    return [entry.path for entry in entries], [entry.label for entry in entries]


def _entry(file: Any) -> FileEntry:
    is_pair = isinstance(file, (tuple, list)) and len(file) == 2
    entry = FileEntry(*file) if is_pair else FileEntry(file)
    if not isinstance(entry.path, (str, os.PathLike)):
        raise TypeError(f"a file must be a path, or a path and its label, got {file!r}")
    return entry


def _note(error: Exception, text: str) -> None:
    # A class may forbid attributes. Python 3.10 has no add_note().
    with contextlib.suppress(Exception):
        error.__notes__ = [*getattr(error, "__notes__", ()), text]


def _odd_one(samples: list[Any]) -> int | None:
    """Return the index of the first sample that cannot be joined to the first one."""
    for index in range(1, len(samples)):
        try:
            stack([samples[0], samples[index]])
        except Exception:
            return index
    return None
