"""Going on with an interrupted run: whose the folder of the parts is, and what they are of.

    train.h5.parts/  pack.json      what the parts are of; locked by who packs
                     shard-*.h5     those that are finished, and whole
                     finished       the file that shows them was written

Parts of another source, seed or format are refused, and never mixed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from enqueuer.datasets.h5files import parts_of
from enqueuer.datasets.h5rows import sync
from enqueuer.errors import DataFileError, InvalidState, StateMismatch
from enqueuer.formats import an
from enqueuer.shards import fresh_seed

_MANIFEST, _FINISHED, _PART = "pack.json", "finished", "shard-*.h5"  # in the folder of the parts
_targets: set[Path] = set()  # that this process is packing to
_targets_lock = threading.Lock()


def identity(source: Any, version: str | int | None) -> dict[str, Any]:
    """Return what can be told of a source, so that another is not taken for it.

    Neither its code nor its pickle is compared: it may be mended after an error, and what
    cloudpickle makes of a function differs from run to run.

    Args:
        source: What is packed.
        version: Of what it yields; None: what it has bound is told instead.
    """
    if not (version is None or isinstance(version, (str, int))):
        raise TypeError(f"version must be a text, a number or None, got {version!r}")
    bound = _bound(source) if version is None and callable(source) else {}
    digests = {name: _digest(value) for name, value in bound.items()}
    return {
        "source": name_of(source),
        "version": version,
        "bound": {name: digest for name, digest in digests.items() if digest},
    }


def name_of(source: Any) -> str:
    """Return what a source is called."""
    while isinstance(source, functools.partial):
        source = source.func
    # a generator has a name, and no module
    is_named = callable(source) and hasattr(source, "__qualname__")
    named = source if is_named else type(source)
    return f"{named.__module__}.{named.__qualname__}"


def _bound(source: Any) -> dict[str, Any]:
    """Return what a partial, a closure, or the instance of a class has bound, by name."""
    if isinstance(source, functools.partial):
        own = {f"argument {at}": value for at, value in enumerate(source.args)}
        return {**_bound(source.func), **own, **source.keywords}
    if inspect.ismethod(source):
        return _bound(source.__self__)
    if inspect.isfunction(source):
        with contextlib.suppress(ValueError):  # a variable of it has no value now
            return dict(inspect.getclosurevars(source).nonlocals)
        return {}
    return dict(getattr(source, "__dict__", {}))


def _digest(value: Any) -> str | None:
    """Return the same text for the same value in every run; None if nobody can."""
    try:
        text = repr(_plain(value))
    except TypeError:
        return None
    # no more than that, as the folder may travel with the data, and values may be secret
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
    raise TypeError(f"no two runs need write {an(type(value).__name__)} alike")


@contextlib.contextmanager
def begun(target: Path, run: Mapping[str, Any], keep: bool) -> Iterator[tuple[Path, int]]:
    """Give the folder for the parts, which is this call's meanwhile, and the seed.

    Args:
        target: The file that is to be written.
        run: What the parts are of, with `random_seed`: None takes that of the run before.
        keep: Whether the parts are still needed afterwards.

    Raises:
        FileExistsError: The file is there already.
        StateMismatch: The parts that are there are of something else.
        InvalidState: Somebody else is packing to the same path.
        DataFileError: The folder cannot be written.
    """
    folder = parts_of(target)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_only_thread(target))
        try:
            folder.mkdir(exist_ok=True)
            file = stack.enter_context(open(folder / _MANIFEST, "a+b"))
        except OSError as error:
            raise DataFileError(f"{folder} cannot be written: {error}", str(folder)) from error
        _lock(file, target)
        must_be_new(target)  # another process may just have finished it
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
        elif told := "; ".join(_differences(before, now)):
            raise StateMismatch(
                f"{folder} was left by another run ({told}); give the same again to go on, or "
                "remove the folder to begin anew"
            )
        _remove(folder, "*.tmp")
        try:
            yield folder, now["random_seed"]
        except BaseException:
            if not any(folder.glob(_PART)):
                _remove(folder)
            raise
        if keep:
            _remove(folder, "*.tmp")  # of workers that were killed and replaced
            (folder / _FINISHED).touch()
        else:
            _remove(folder)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name, value in now.items():
        had = before.get(name)
        if name == "bound":
            had = had or {}
            others = [key for key in {**had, **value} if had.get(key) != value.get(key)]
            if others:
                yield f"the source has bound another {', '.join(others)}"
        elif value != had:
            yield f"{name} was {had!r}, is {value!r}"


def must_be_new(target: Path) -> None:
    """Raise FileExistsError if there is something at a path."""
    if os.path.lexists(target):
        raise FileExistsError(
            f"{target} is there already; remove it, and {parts_of(target).name} if it is there, "
            "or choose another name"
        )


def _remove(folder: Path, *patterns: str) -> None:
    """Remove files of those names, or else all that is ours, and the folder if it is empty."""
    for pattern in patterns or (_PART, "*.tmp", _MANIFEST, _FINISHED):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    if not patterns:
        with contextlib.suppress(OSError):  # there may be other things in it
            folder.rmdir()


@contextlib.contextmanager
def _only_thread(target: Path) -> Iterator[None]:
    """Keep other threads off, which the lock of a file does not."""
    with _targets_lock:
        if target in _targets:
            raise InvalidState(f"another thread is packing to {target}")
        _targets.add(target)
    try:
        yield
    finally:
        with _targets_lock:
            _targets.remove(target)


def _lock(file: Any, target: Path) -> None:
    """Keep other processes off; the lock goes with this process, and no fork inherits it."""
    try:
        import fcntl
    except ImportError:  # there is none on Windows
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise InvalidState(f"another process is packing to {target}") from None


def _loads(text: bytes, folder: Path) -> dict[str, Any]:
    """Read what the run wrote that left the shards."""
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
            f"{folder / _MANIFEST} does not say what the shards are of; remove the folder to "
            "begin anew"
        ) from None
