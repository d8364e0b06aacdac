"""Lists of files -> batches: found or read, shuffled, dealt out, loaded, stacked.

    find_files, read_list --> FileBatches --(a shard)--> load each file --> stack --> a batch

An epoch is one permutation of all files, cut into batches; the batches are dealt out to the
shards in turn, so that they do not depend on how many there are. The lists are read where they
are made; the files, in the workers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from enqueuer import arguments
from enqueuer.arrays import empty
from enqueuer.datasets.lists import FileEntry, Path, find_files, read_list
from enqueuer.datasets.loaders import load_array, load_audio, load_image
from enqueuer.errors import FrameworkUnavailable, StateMismatch
from enqueuer.formats import an
from enqueuer.shards import Shard, Task
from enqueuer.tasks import permutation, stack, steps_in, takes_two
from enqueuer.worker import OnError

__all__ = [
    "FileBatches",
    "FileEntry",
    "find_files",
    "load_array",
    "load_audio",
    "load_image",
    "read_list",
]


class FileBatches:
    """Load files in batches: a source for `GeneratorEnqueuer`, and for any number of workers.

    Each epoch has each file exactly once, in an order of its own, which is drawn from the
    enqueuer's seed. The same files, seed and `batch_size` give the same batches in the same
    order, for any number of shards and workers and any backend. It is resumed at once, without
    loading again what came before.

    A file that cannot be loaded makes its batch smaller, and is not replaced by another, so that
    all others stay where they are. A batch that is left without any file is None, which
    enqueuers leave out.

    Called with a shard, it returns an iterator over that shard's batches.

    Args:
        files: Paths, or pairs of a path and a label: what `find_files` and `read_list` return.
        load: A function of the path; or of the path and its `Task`, whose `rng` is the file's
            own, a new one in each epoch, for augmentation. What it returns is a sample: an
            array, a number, or a dict, tuple or list of them. None leaves the file out.
        batch_size: How many files a batch has.
        shuffle: Whether each epoch has an order of its own; True by default.
        drop_last: Whether to leave out an incomplete last batch, and the batches that cannot be
            dealt out evenly over the shards, so that each has equally many; False by default.
        with_labels: Whether to yield `(batch, labels)`; labels that are numbers are one array,
            others a list. False by default.
        with_names: Whether to yield `(batch, names)`, or `(batch, labels, names)`, with the list
            of the paths. False by default.
        collate: Makes one batch of a list of samples. By default arrays and numbers are stacked
            along a new first axis, inside of dicts, tuples and lists, too; the arrays are made
            by `enqueuer.empty`, so that processes send them without a copy.
        on_error: What to do about a file that cannot be loaded. `"raise"`, the default: raise
            the error, with a note of the path. `"skip"`: report it to the enqueuer and leave the
            file out. So it is counted (`error_count`, `max_errors`), and logged once with path
            and traceback, though it fails again in each epoch. A callable: the same, without
            the log line, but it is called with the error, in the worker, and what it returns is
            the sample, if it is not None.

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

    def __init__(
        self,
        files: Iterable[Path | tuple[Path, Any]],
        load: Callable[[Any], Any] | Callable[[Any, Task], Any],
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
        self._paths = [entry.path for entry in entries]
        self._labels = [entry.label for entry in entries] if with_labels else None
        bare = next((entry.path for entry in entries if entry.label is None), None)
        if with_labels and bare is not None:
            raise ValueError(f"with_labels is True, but {os.fspath(bare)!r} has no label")
        if not callable(load):
            raise TypeError(f"load must be a function of a path, got {load!r}")
        if collate is not None and not callable(collate):
            raise TypeError(f"collate must be a function of a list or None, got {collate!r}")
        self._load: Callable[..., Any] = load
        self._takes_task = takes_two(load, "load", "path")
        self._batch_size = arguments.positive("batch_size", batch_size)
        self._shuffle = bool(shuffle)
        self._drop_last = bool(drop_last)
        self._with_names = bool(with_names)
        self._collate = collate
        self._on_error = arguments.on_error(on_error)
        self._order: tuple[tuple[int, int], np.ndarray] | None = None
        if drop_last and len(entries) < self._batch_size:
            raise ValueError(
                f"{len(entries)} files do not fill a batch of {batch_size}, and drop_last is True"
            )

    def __call__(self, shard: Shard) -> Iterator[Any]:
        """Return an iterator over the batches of a shard; it has a `state_dict`."""
        return _Share(self, shard)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": None}

    def __repr__(self) -> str:
        return f"<FileBatches of {len(self._paths)} files, {self._batch_size} a batch>"

    # --- inside, for _Share ---

    def _steps(self, shard: Shard) -> range:
        """Return which batches of the epoch are a shard's."""
        steps = steps_in(len(self._paths), self._batch_size, self._drop_last)
        if self._drop_last:
            if steps < shard.count:
                raise ValueError(
                    f"{steps} batches cannot be dealt out evenly over {shard.count} shards, and "
                    "drop_last is True; give fewer shards, or a smaller batch_size"
                )
            steps -= steps % shard.count
        return range(shard.index, steps, shard.count)

    def _batch(self, step: int, shard: Shard) -> Any:
        """Load batch number `step` of the epoch; None if nothing can be loaded of it."""
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
        if self._labels is not None:
            batch += (stack([self._labels[index] for index in kept]),)
        if self._with_names:
            batch += ([os.fspath(self._paths[index]) for index in kept],)
        return batch if len(batch) > 1 else batch[0]

    def _order_of(self, shard: Shard) -> Sequence[int] | np.ndarray:
        count = len(self._paths)
        if not self._shuffle:
            return range(count)
        epoch = shard.random_seed, shard.epoch
        kept = self._order
        if kept is None or kept[0] != epoch:  # the shards of a worker share it
            kept = self._order = epoch, permutation(count, *epoch)
        return kept[1]

    def _sample(self, index: int, shard: Shard) -> Any:
        path = self._paths[index]
        try:
            if self._takes_task:
                return self._load(path, Task(index, shard.epoch, shard.random_seed))
            return self._load(path)
        except FrameworkUnavailable:
            raise  # no fault of the file's: none could be loaded
        except Exception as error:
            _note(error, f"while loading {os.fspath(path)!r}")
            if self._on_error == "raise":
                raise
            sample = self._on_error(error) if callable(self._on_error) else None
            shard.report(error, log=self._on_error == "skip")
            return sample

    def _collated(self, samples: list[Any], indices: list[int]) -> Any:
        try:
            return stack(samples, _joined) if self._collate is None else self._collate(samples)
        except Exception as error:
            names = [os.fspath(self._paths[index]) for index in indices]
            builds = [_build_of(sample) for sample in samples]
            odd = next((at for at, build in enumerate(builds) if build != builds[0]), None)
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

    def __init__(self, files: FileBatches, shard: Shard) -> None:
        self._files = files
        self._shard = shard
        self._steps = files._steps(shard)
        self._at = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._at >= len(self._steps):
            raise StopIteration
        step = self._steps[self._at]
        self._at += 1
        try:
            return self._files._batch(step, self._shard)
        except StopIteration as error:
            # left as it is it would look like an end
            raise RuntimeError("load, collate or on_error raised StopIteration") from error

    def state_dict(self) -> dict[str, int]:
        return {"batch": self._at, **self._identity()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        for key, own in self._identity().items():
            if state.get(key) != own:
                raise StateMismatch(f"the state is of {key}={state.get(key)}, but here it is {own}")
        self._at = state["batch"]

    def _identity(self) -> dict[str, int]:
        files = self._files
        own = {"files": len(files._paths), "batch_size": files._batch_size}
        return {**own, "shuffle": files._shuffle}


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
    with contextlib.suppress(Exception):  # a class may forbid it
        # add_note() is of Python 3.11
        error.__notes__ = [*getattr(error, "__notes__", ()), text]


def _joined(arrays: list[Any]) -> np.ndarray:
    """Stack arrays into memory that processes share."""
    arrays = [np.asarray(array) for array in arrays]
    dtype = np.result_type(*{array.dtype for array in arrays})
    out = empty((len(arrays), *arrays[0].shape), dtype)
    return np.stack(arrays, out=out)


def _build_of(sample: Any) -> Any:
    """Return a sample with shapes in the place of arrays, to be compared and shown."""
    if isinstance(sample, Mapping):
        return {key: _build_of(value) for key, value in sample.items()}
    if isinstance(sample, (tuple, list)):
        return [_build_of(value) for value in sample]
    shape = getattr(sample, "shape", None)
    return () if shape is None else tuple(shape)
