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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Generic, Literal, TypeVar, overload

import numpy as np

from enqueuer.common import checks
from enqueuer.common.packed_list import packed
from enqueuer.common.text import an
from enqueuer.common.trees import members_of
from enqueuer.datasets.files.lists import FileEntry, Path
from enqueuer.enqueuers import options
from enqueuer.enqueuers.task_order import permutation, steps_in
from enqueuer.errors import FrameworkUnavailable, StateMismatch
from enqueuer.workers.collate import stack
from enqueuer.workers.plan import OnError
from enqueuer.workers.shards import Shard, Task
from enqueuer.workers.sources import name_of
from enqueuer.workers.tasks import takes_two

Batch = TypeVar("Batch")
T = TypeVar("T")

Array = np.ndarray[Any, Any]
_LoadWithTask = Callable[[Any, Any, Task], T | None]
Load = Callable[[Any], T | None] | Callable[[Any, Any], T | None] | _LoadWithTask[T]
"""A function that loads a file; None leaves it out."""


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
        files: Iterable[Path | tuple[Path, Any]],
        load: Load[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        with_labels: Literal[False] = False,
        with_names: Literal[False] = False,
        collate: Callable[[list[Any]], Batch],
        on_error: OnError = "raise",
    ) -> None: ...
    @overload
    def __init__(
        self: FileBatches[Array],
        files: Iterable[Path | tuple[Path, Any]],
        load: Load[Array],
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        with_labels: Literal[False] = False,
        with_names: Literal[False] = False,
        collate: None = None,
        on_error: OnError = "raise",
    ) -> None: ...
    @overload
    def __init__(
        self: FileBatches[tuple[Array, Any]],
        files: Iterable[Path | tuple[Path, Any]],
        load: Load[Array],
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        with_labels: Literal[True],
        with_names: Literal[False] = False,
        collate: None = None,
        on_error: OnError = "raise",
    ) -> None: ...
    @overload
    def __init__(
        self: FileBatches[Any],
        files: Iterable[Path | tuple[Path, Any]],
        load: Load[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        with_labels: bool = False,
        with_names: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        on_error: OnError = "raise",
    ) -> None: ...
    def __init__(
        self,
        files: Iterable[Path | tuple[Path, Any]],
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
        entries = _entries(files)
        # Packed, so that worker processes share the memory of a long list.
        self._paths = packed([entry.path for entry in entries])
        if not callable(load):
            raise TypeError(f"load must be a function of a path, got {load!r}")
        self._takes_label, self._takes_task = _label_and_task(load)
        self._with_labels = bool(with_labels)
        needs_labels = self._with_labels or self._takes_label
        self._labels = packed([entry.label for entry in entries]) if needs_labels else []
        bare = next((entry.path for entry in entries if entry.label is None), None)
        if needs_labels and bare is not None:
            reason = "with_labels is True" if with_labels else "load takes a label"
            raise ValueError(f"{reason}, but {os.fspath(bare)!r} has no label")
        if collate is not None and not callable(collate):
            raise TypeError(f"collate must be a function of a list or None, got {collate!r}")
        self._load: Callable[..., Any] = load
        self._batch_size = checks.positive("batch_size", batch_size)
        self._shuffle = bool(shuffle)
        self._drop_last = bool(drop_last)
        self._with_names = bool(with_names)
        self._collate = collate
        self._on_error = options.on_error("on_error", on_error)
        self._order: tuple[tuple[int, int], np.ndarray] | None = None
        if drop_last and len(entries) < self._batch_size:
            raise ValueError(
                f"{len(entries)} files do not fill a batch of {batch_size}, and drop_last is True"
            )

    def __call__(self, shard: Shard) -> Iterator[Batch]:
        """Return an iterator over the batches of a shard; it has a `state_dict`."""
        return _Share(self, shard)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": None}

    def __repr__(self) -> str:
        return f"<FileBatches of {len(self._paths)} files, {self._batch_size} a batch>"

    def _steps(self, shard: Shard) -> range:
        """Return the numbers of a shard's batches in the epoch."""
        steps = steps_in(len(self._paths), self._batch_size, self._drop_last)
        if self._drop_last:
            if steps < shard.count:
                raise ValueError(
                    f"{steps} batches cannot be divided evenly over {shard.count} shards, and "
                    "drop_last is True; give fewer shards, or a smaller batch_size"
                )
            steps -= steps % shard.count
        return range(shard.index, steps, shard.count)

    def _batch(self, step: int, shard: Shard) -> Any:
        """Load batch number `step` of the epoch; return None if no file can be loaded."""
        size = self._batch_size
        kept, samples = [], []
        for index in map(int, self._order_of(shard)[step * size : (step + 1) * size]):
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

    def _order_of(self, shard: Shard) -> Sequence[int] | np.ndarray:
        count = len(self._paths)
        if not self._shuffle:
            return range(count)
        epoch = shard.random_seed, shard.epoch
        # The shards of a worker share the order of an epoch.
        kept = self._order
        if kept is None or kept[0] != epoch:
            kept = self._order = epoch, permutation(count, *epoch)
        return kept[1]

    def _sample(self, index: int, shard: Shard) -> Any:
        path = self._paths[index]
        try:
            if not self._takes_task and not self._takes_label:
                return self._load(path)
            task = Task(index, shard.epoch, shard.random_seed)
            if not self._takes_label:
                return self._load(path, task)
            given = {"task": task} if self._takes_task else {}
            return self._load(path, label=self._labels[index], **given)
        # No file could be loaded without the framework.
        except FrameworkUnavailable:
            raise
        except Exception as error:
            _note(error, f"while loading {os.fspath(path)!r}")
            if self._on_error == "raise":
                raise
            sample = self._on_error(error) if callable(self._on_error) else None
            shard.report(error, log=self._on_error == "skip")
            return sample

    def _collated(self, samples: list[Any], indices: list[int]) -> Any:
        try:
            return stack(samples) if self._collate is None else self._collate(samples)
        except Exception as error:
            names = [os.fspath(self._paths[index]) for index in indices]
            builds = [_build_of(sample) for sample in samples]
            odd = next((i for i, build in enumerate(builds) if build != builds[0]), None)
            if self._collate is None and odd is not None:
                raise ValueError(
                    f"{names[0]!r} and {names[odd]!r} cannot be in one batch, with shapes "
                    f"{builds[0]} and {builds[odd]}; let load give all samples one shape, or give "
                    "collate= a function that can join them"
                ) from error
            _note(error, f"while joining {names[0]!r} to {names[-1]!r}, {len(names)} files")
            raise


class _Share:
    """The batches of one shard in one epoch."""

    def __init__(self, files: FileBatches[Any], shard: Shard) -> None:
        self._files = files
        self._shard = shard
        self._steps = files._steps(shard)
        self._next = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._next >= len(self._steps):
            raise StopIteration
        step = self._steps[self._next]
        self._next += 1
        try:
            return self._files._batch(step, self._shard)
        except StopIteration as error:
            # Unchanged, it would be taken for the end of the batches.
            raise RuntimeError("load, collate or on_error raised StopIteration") from error

    def state_dict(self) -> dict[str, int]:
        return {"batch": self._next, **self._identity()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        for key, own in self._identity().items():
            if state.get(key) != own:
                raise StateMismatch(f"the state is of {key}={state.get(key)}, but here it is {own}")
        self._next = state["batch"]

    def _identity(self) -> dict[str, int]:
        files = self._files
        own = {"files": len(files._paths), "batch_size": files._batch_size}
        return {**own, "shuffle": files._shuffle}


def _label_and_task(load: Callable[..., Any]) -> tuple[bool, bool]:
    """Return whether `load` takes the label of a file, and its `Task`.

    Raises:
        TypeError: It takes other arguments.
    """
    try:
        parameters = list(inspect.signature(load).parameters.values())[1:]
    except ValueError:
        # Some built-in functions have no signature.
        return False, False
    # A label with a default is bound by the user.
    if not any(p.name == "label" and p.default is p.empty for p in parameters):
        return False, takes_two(load, "load", "path")
    names = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    required = {p.name for p in parameters if p.name in names and p.default is p.empty}
    if required - {"label", "task"}:
        raise TypeError(
            "load must take the path, and if it needs them the label and the task, but "
            f"{name_of(load)} takes {inspect.signature(load)}; bind the others with "
            "functools.partial"
        )
    return True, "task" in names


def _entries(files: Iterable[Path | tuple[Path, Any]]) -> list[FileEntry]:
    if isinstance(files, (str, os.PathLike)):
        raise TypeError(f"files must be a list of paths, got {files!r}; see find_files, read_list")
    if isinstance(files, (Set, Mapping)):
        raise TypeError(f"files must have an order, got {an(type(files).__name__)}; sort them")
    entries = [_entry(file) for file in files]
    if not entries:
        raise ValueError("there are no files")
    return entries


def _entry(file: Any) -> FileEntry:
    if isinstance(file, (str, os.PathLike)):
        return FileEntry(file)
    if isinstance(file, (tuple, list)) and len(file) == 2:
        path, label = file
        if isinstance(path, (str, os.PathLike)):
            return FileEntry(path, label)
    raise TypeError(f"a file must be a path, or a path and its label, got {file!r}")


def _note(error: Exception, text: str) -> None:
    # A class may forbid attributes. Python 3.10 has no add_note().
    with contextlib.suppress(Exception):
        error.__notes__ = [*getattr(error, "__notes__", ()), text]


def _build_of(sample: Any) -> Any:
    """Return a sample with each array replaced by its shape, to compare and show it."""
    members = members_of(sample)
    if members is None:
        shape = getattr(sample, "shape", None)
        return () if shape is None else tuple(shape)
    builds = {key: _build_of(value) for key, value in members.items()}
    return list(builds.values()) if isinstance(sample, (tuple, list)) else builds
