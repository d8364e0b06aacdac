"""Checks of single arguments: each error names the argument, the rule and the value."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def positive(name: str, value: object) -> int:
    """Return a count; raise TypeError or ValueError unless it is an int >= 1."""
    return integer(name, value, least=1)


def count(name: str, value: object) -> int:
    """Return a number; raise TypeError or ValueError unless it is an int >= 0."""
    return integer(name, value, least=0)


def integer(name: str, value: object, least: int, kind: str = "an int") -> int:
    """Return an int; raise TypeError or ValueError unless it is one >= `least`."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be {kind}, got {value!r}")
    number = int(value.__index__())
    if number < least:
        raise ValueError(f"{name} must be >= {least}, got {number}")
    return number


def seconds(name: str, value: float) -> float:
    """Return a time; raise TypeError or ValueError unless it is a number >= 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be seconds or None, got {value!r}")
    if math.isnan(value) or value < 0:
        raise ValueError(f"{name} must be >= 0 seconds, got {value!r}")
    return min(float(value), threading.TIMEOUT_MAX / 2)


def wait_limit(name: str, value: float | None) -> float | None:
    """Return the limit of a wait; raise TypeError or ValueError unless None or a time > 0."""
    if value is None:
        return None
    limit = seconds(name, value)
    if limit == 0:
        raise ValueError(f"{name} must be > 0 seconds or None, got {value!r}")
    return limit


def path(name: str, value: object) -> str | None:
    """Return the path of a file as a string; raise TypeError unless it is a path or None."""
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise TypeError(f"{name} must be the path of a file or None, got {value!r}")
    return str(os.fspath(value))


def function(name: str, value: object, of: str) -> None:
    """Raise TypeError unless a value is None or can be called."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a function {of} or None, got {value!r}")


def either(name: str, value: T | None, old_name: str, old: T | None) -> T | None:
    """Return an argument that was given by its name or its old name; raise TypeError if by both."""
    if old is None:
        return value
    if value is not None:
        raise TypeError(f"{old_name} is the old name of {name}; give one of them")
    return old


def optional(check: Callable[[str, object], T]) -> Callable[[str, object], T | None]:
    """Return a check that also takes None."""

    def checked(name: str, value: object) -> T | None:
        return None if value is None else check(name, value)

    return checked


def rank(rank: object, world_size: object) -> tuple[int, int]:
    """Return rank and world size; raise TypeError or ValueError unless they fit."""
    size, number = positive("world_size", world_size), count("rank", rank)
    if number >= size:
        raise ValueError(f"rank must be < world_size, got rank={number} with world_size={size}")
    return number, size


def seed(value: object) -> int:
    """Return a random seed; raise TypeError or ValueError unless it is an int >= 0."""
    return integer("random_seed", value, least=0, kind="an int or None")
