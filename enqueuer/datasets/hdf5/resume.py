"""Resuming an interrupted run: the folder of the parts, and whether they are of the same run.

    train.h5.parts/  pack.json      description of the run; locked by the process that packs
                     shard-*.h5     finished parts
                     finished       exists once the file that shows the parts was written

Parts of another source, seed or format are refused, and never mixed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from enqueuer.common.text import an
from enqueuer.datasets.hdf5.files import parts_folder, sync
from enqueuer.errors import DataFileError, InvalidState, StateMismatch
from enqueuer.workers.shards import fresh_seed

_MANIFEST, _FINISHED, _PART = "pack.json", "finished", "shard-*.h5"
# Files that this process is packing to, and what stands for the call.
_running: dict[Path, object] = {}


def identity(source: Any, version: str | int | None) -> dict[str, Any]:
    """Return a description of a source, by which two sources are distinguished.

    Neither its code nor its pickle is compared: code may be corrected after an error, and the
    pickle of a function differs from run to run.

    Args:
        source: The source.
        version: Version of its rows. None: the values that it has bound are described.
    """
    if not (version is None or isinstance(version, (str, int))):
        raise TypeError(f"version must be a text, a number or None, got {version!r}")
    bound = _bound(source) if version is None and callable(source) else {}
    digests = {name: digest for name, value in bound.items() if (digest := _digest(value))}
    return {"source": source_name(source), "version": version, "bound": digests}


def source_name(source: Any) -> str:
    """Return the name of a source."""
    while isinstance(source, functools.partial):
        source = source.func
    # A generator has a name, but no module.
    is_named = callable(source) and hasattr(source, "__qualname__")
    named = source if is_named else type(source)
    return f"{named.__module__}.{named.__qualname__}"


def _bound(source: Any) -> dict[str, Any]:
    """Return the values that a partial, a closure or an instance has bound, by name."""
    if isinstance(source, functools.partial):
        own = {f"argument {at}": value for at, value in enumerate(source.args)}
        return {**_bound(source.func), **own, **source.keywords}
    if inspect.ismethod(source):
        return _bound(source.__self__)
    if inspect.isfunction(source):
        # A variable of the closure may have no value now.
        with contextlib.suppress(ValueError):
            return dict(inspect.getclosurevars(source).nonlocals)
        return {}
    return dict(getattr(source, "__dict__", {}))


def _digest(value: Any) -> str | None:
    """Return the same text for the same value in every run; None if that is not possible."""
    try:
        text = repr(_plain(value))
    except TypeError:
        return None
    # Only a hash is kept, as values may be secret, and the folder may be copied with the data.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _plain(value: Any) -> Any:
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
    raise TypeError(f"{an(type(value).__name__)} may differ from run to run")


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
    folder, owner = parts_folder(target), object()
    # The lock of a file does not exclude other threads. This is one step of a dict.
    if _running.setdefault(target, owner) is not owner:
        raise InvalidState(f"another thread is packing to {target}")
    with contextlib.ExitStack() as stack:
        stack.callback(_running.pop, target)
        try:
            folder.mkdir(exist_ok=True)
            file = stack.enter_context(open(folder / _MANIFEST, "a+b"))
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
        (folder / _FINISHED).touch()


def _resumed_seed(folder: Path, file: IO[bytes], run: Mapping[str, Any]) -> int:
    """Compare a run with the one that left the parts, or begin one; return its seed.

    Raises:
        StateMismatch: Existing parts are of another run.
    """
    file.seek(0)
    before = _loads(file.read(), folder) if any(folder.glob(_PART)) else None
    now = {"manifest": 1, **json.loads(json.dumps(run))}
    if now["random_seed"] is None:
        now["random_seed"] = fresh_seed() if before is None else before["random_seed"]
    if before is None:
        file.truncate(0)
        file.write(json.dumps(now, indent=1).encode())
        file.flush()
        os.fsync(file.fileno())
        sync(folder)
    elif differences := "; ".join(_differences(before, now)):
        raise StateMismatch(
            f"{folder} was left by another run ({differences}); give the same arguments to "
            "resume it, or remove the folder to begin anew"
        )
    seed: int = now["random_seed"]
    return seed


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name, value in now.items():
        old = before.get(name)
        if name == "bound":
            old = old or {}
            others = [key for key in {**old, **value} if old.get(key) != value.get(key)]
            if others:
                yield f"the source has bound another {', '.join(others)}"
        elif value != old:
            yield f"{name} was {old!r}, is {value!r}"


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
    for pattern in patterns or (_PART, "*.tmp", _MANIFEST, _FINISHED):
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


def _loads(text: bytes, folder: Path) -> dict[str, Any]:
    """Read the description of the run that left the parts."""
    if (folder / _FINISHED).exists():
        raise StateMismatch(
            f"{folder} is of a run that was finished, and its file is gone; put that back, or "
            "remove the folder to begin anew"
        )
    try:
        found: dict[str, Any] = json.loads(text)
        return {"random_seed": found["random_seed"], **found}
    except (ValueError, KeyError, TypeError):
        raise StateMismatch(
            f"{folder / _MANIFEST} does not describe the run that left the shards; remove the "
            "folder to begin anew"
        ) from None
