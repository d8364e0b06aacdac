"""The source that the workers run: six items, one of which fails.

An item takes a moment to make. So a loader that sends from a thread has sent earlier items when
the fault strikes, and no loader loses an item by chance.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from faults import COUNT, STRIKES_AT

_EACH_S = 0.05  # to make an item
_MESSAGE = "broken"


class TwoArguments(Exception):
    """Pickle stores it and cannot rebuild it: its class wants more than its `args` hold."""

    def __init__(self, a: str, b: str) -> None:
        super().__init__(f"{a} and {b}")
        self.a = a
        self.b = b


class HoldsLock(Exception):
    """Pickle cannot even store it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


def items(fault: str) -> Iterator[dict[str, Any]]:
    """Yield the items, for those that take a generator function."""
    for index in range(COUNT):
        yield item(index, fault)


def item(index: int, fault: str) -> dict[str, Any]:
    """Return an item, for those that take a function of an index."""
    time.sleep(_EACH_S)
    made: dict[str, Any] = {"x": np.full(8, index)}
    if index == STRIKES_AT:
        if fault == "unpicklable":
            made["lock"] = threading.Lock()
        else:
            strike(fault)
    return made


def strike(fault: str) -> None:
    """Cause the fault. The traceback must show this frame."""
    match fault:
        case "ValueError":
            raise ValueError(_MESSAGE, STRIKES_AT)
        case "KeyError":
            raise KeyError(_MESSAGE)
        case "two-arguments":
            raise TwoArguments("left", "right")
        case "holds-lock":
            raise HoldsLock(_MESSAGE)
        case "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        case "os._exit":
            os._exit(0)
        case "sys.exit":
            sys.exit(3)


def is_original(error: BaseException, fault: str) -> bool:
    """Return whether an error has the very class of what was raised."""
    classes = {
        "ValueError": ValueError,
        "KeyError": KeyError,
        "two-arguments": TwoArguments,
        "holds-lock": HoldsLock,
        "sys.exit": SystemExit,
    }
    return type(error) is classes.get(fault)


def has_attributes(error: BaseException, fault: str) -> bool:
    """Return whether an error has the arguments and attributes of what was raised."""
    match fault:
        case "ValueError":
            return error.args == (_MESSAGE, STRIKES_AT)
        case "two-arguments":
            attributes = [getattr(error, name, None) for name in ("a", "b")]
            return error.args == ("left and right",) and attributes == ["left", "right"]
        case "sys.exit":
            return error.args == (3,)
        case _:
            return error.args == (_MESSAGE,)
