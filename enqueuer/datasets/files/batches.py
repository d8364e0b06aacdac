"""Lists of files -> batches: found or read, shuffled, divided over shards, loaded, stacked.

    find_files, read_list --> FileBatches --(a shard)--> load each file --> stack --> a batch

An epoch is one permutation of all files, cut into batches. The shards get the batches in turn, so
the batches do not depend on the number of shards. Lists are read by the process that makes them,
files by the workers.
"""

from __future__ import annotations

import contextlib
import glob
import inspect
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, cast, overload

import numpy as np

from enqueuer.common import checks
from enqueuer.common.packed_list import packed
from enqueuer.common.text import an
from enqueuer.datasets.epochs import Batch, EpochBatches, fingerprint_of_epochs
from enqueuer.enqueuers import options
from enqueuer.enqueuers.options import Unpack
from enqueuer.errors import FrameworkUnavailable
from enqueuer.monitoring.duplicates import SampleWatch
from enqueuer.workers.collate import stack
from enqueuer.workers.logs import warn_of_reuse
from enqueuer.workers.plan import OnError, may_skip
from enqueuer.workers.shards import Shard, Task
from enqueuer.workers.sources import fingerprint_of, name_of, takes_two

T = TypeVar("T")

Path = str | os.PathLike[str]
Array = np.ndarray[Any, Any]
Files = Iterable[Path | tuple[Path, Any]]
_LoadWithTask = Callable[[Any, Any, Task], T | None]
Load = Callable[[Any], T | None] | Callable[[Any, Any], T | None] | _LoadWithTask[T]
"""A function that loads a file; None leaves it out."""


class FileEntry(NamedTuple):
    """A file and its label; any pair can replace it."""

    path: Path
    label: Any = None


def find_files(*patterns: Path, root: Path | None = None) -> list[str]:
    """Return the files that match any of some patterns, sorted, each once.

    They are sorted by the code points of their paths, so the order is the same on every machine,
    for any language and file system.

    Args:
        patterns: As for `glob.glob`: `*`, `?` and `[...]` within a name, `**` for any number of
            folders. Names that begin with a dot are matched only by patterns that do, too.
            `**` follows links to folders, unless they lead back to a folder above: in a loop,
            each file is found once.
        root: The folder of the patterns; by default the working directory. Each path that is
            returned begins with it.

    Raises:
        FileNotFoundError: A pattern matches no file.

    Example:
        >>> import os, pathlib, tempfile
        >>> from enqueuer.datasets.files import find_files
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("b.png", "a.png", "a.txt"):
        ...         pathlib.Path(folder, name).touch()
        ...     [os.path.basename(path) for path in find_files("**/*.png", root=folder)]
        ['a.png', 'b.png']
    """
    if not patterns:
        raise TypeError("find_files needs a pattern, such as 'images/**/*.png'")
    found: set[str] = set()
    for pattern in patterns:
        names = _matches(os.fspath(root or ""), os.fspath(pattern))
        paths = [os.path.join(root or "", _tidied(name)) for name in names]
        files = [path for path in paths if os.path.isfile(path)]
        if not files:
            where = os.getcwd() if root is None else os.fspath(root)
            raise FileNotFoundError(f"no file matches {os.fspath(pattern)!r} in {where!r}")
        found.update(files)
    return sorted(found)


def _matches(root: str, pattern: str) -> Iterator[str]:
    """Yield matching paths like `glob.iglob`, but follow no link in a circle."""
    parts = pattern.replace("/", os.sep).split(os.sep)
    if "**" not in parts:
        yield from glob.iglob(pattern, root_dir=root or None)
        return
    at = parts.index("**")
    rest = os.sep.join(parts[at + 1 :]) or "*"
    before = os.sep.join([*parts[:at], ""])
    for top in glob.iglob(before, root_dir=root or None) if at else [""]:
        for folder in _folders(root, top, frozenset()):
            for name in _matches(os.path.join(root, folder), rest):
                yield os.path.join(folder, name)


def _folders(root: str, folder: str, above: frozenset[str]) -> Iterator[str]:
    """Yield a folder and all folders in it, at any depth, without circles."""
    here = os.path.join(root, folder)
    real = os.path.realpath(here)
    if real in above:
        return
    yield folder
    for name in glob.iglob(os.path.join("*", ""), root_dir=here or None):
        yield from _folders(root, os.path.join(folder, name), above | {real})


def _tidied(name: str) -> str:
    """Return a path without needless parts, so that two patterns give a file one name."""
    # Behind a link to a folder, `..` is not needless.
    if os.pardir in name.split(os.sep):
        return name
    return os.path.normpath(name)


def read_list(path: Path, label: Callable[[str], Any] | None = None) -> list[FileEntry]:
    r"""Read a text list with a path, or a path and a label, on each line.

    Fields are separated by blanks or tabs. A field that contains some, or begins with `#` or a
    quote, needs single or double quotes; within double quotes, `\"` and `\\` stand for a quote
    and a backslash. A `#` at the beginning of a field begins a comment. Empty lines are left out,
    and repeated lines are kept.

    Args:
        path: Path of the list, in UTF-8. The paths in it are relative to its folder.
        label: Function that makes a label of its text. By default labels are ints if all in the
            list are written as ints, otherwise strings.

    Returns:
        The files in the order of the list; the label of a line without one is None.

    Raises:
        ValueError: A line is malformed; the message has the list, the line and the reason.

    Example:
        >>> import os, pathlib, tempfile
        >>> from enqueuer.datasets.files import read_list
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     train = pathlib.Path(folder, "train.txt")
        ...     _ = train.write_text('a.png 3\n# spoilt: b.png 1\n"c d.png" 0\n')
        ...     [(os.path.basename(path), label) for path, label in read_list(train)]
        [('a.png', 3), ('c d.png', 0)]
    """
    folder = os.path.dirname(os.fspath(path))
    # Path, label, and place in the list.
    rows: list[tuple[str, str | None, str]] = []
    # File names need not be UTF-8: Python decodes those of the system in the same way.
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            where = f"{os.fspath(path)}, line {number}"
            fields = _fields(line.rstrip("\n"), where)
            if len(fields) > 2:
                raise ValueError(
                    f"{where}: {len(fields)} fields, but a line is a path and a label; "
                    f"quote a field that contains blanks: {line.rstrip()!r}"
                )
            if fields:
                own = fields[1] if len(fields) == 2 else None
                rows.append((os.path.join(folder, fields[0]), own, where))
    if label is None:
        are_ints = all(_INT.fullmatch(own) for _, own, _ in rows if own is not None)
        label = int if are_ints else str
    return [FileEntry(name, _label(label, own, where)) for name, own, where in rows]


# 007 is a string: as an int it would be the same as 7.
_INT = re.compile("-?[1-9][0-9]*|0")
# A field in double quotes, in single quotes, or as it is.
_FIELD = re.compile(r"""(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([^ \t"'][^ \t]*))(?=[ \t]|$)""")


def _fields(line: str, where: str) -> list[str]:
    fields = []
    rest = line.strip(" \t")
    while rest and not rest.startswith("#"):
        match = _FIELD.match(rest)
        if match is None:
            raise ValueError(f"{where}: a quote is not closed, or more follows at once: {rest!r}")
        double, single, plain = match.groups()
        escaped = None if double is None else re.sub(r'\\(["\\])', r"\1", double)
        fields.append(next(text for text in (escaped, single, plain) if text is not None))
        rest = rest[match.end() :].lstrip(" \t")
    if fields and not fields[0]:
        raise ValueError(f"{where}: the path is empty: {line!r}")
    return fields


def _label(make: Callable[[str], Any], text: str | None, where: str) -> Any:
    if text is None:
        return None
    try:
        return make(text)
    except ValueError as error:
        raise ValueError(f"{where}: the label {text!r} is wrong: {error}") from error


class FileOptions(TypedDict, total=False):
    """Types of the options of `FileBatches` that do not change the type of a batch."""

    shuffle: bool
    drop_last: bool
    on_error: OnError


@checks.tells_options
class FileBatches(EpochBatches[Batch]):
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
        super().__init__("files", len(paths), batch_size, shuffle, drop_last)
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
        self._watch = SampleWatch()
        # An interrupted `pack` of this source is resumed only if all plain attributes are the same.
        self._drop_last = bool(drop_last)
        self._with_names = bool(with_names)
        self._collate = collate
        self._on_error = options.on_error("on_error", on_error)

    def _batch(self, indices: range | np.ndarray, shard: Shard) -> Any:
        """Load a batch; return None if no file can be loaded."""
        kept: list[int] = []
        samples: list[Any] = []
        seen = None
        for index in map(int, indices):
            sample = self._sample(index, shard)
            if sample is not None:
                seen = seen if samples else self._watch.look(sample)
                kept.append(index)
                samples.append(sample)
        if not samples:
            return None
        if self._watch.has_changed(seen, samples[0]):
            warn_of_reuse("a result of load")
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
    return fingerprint_of_epochs(source, names=source._names_hash)


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
