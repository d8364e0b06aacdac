"""Be the consumer of one loader that meets one fault, in this process; write what it saw.

Called by failures.py: observe.py LOADER FAULT
A line of JSON on the standard output for each item as it arrives, and one for the end.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

from faults import LOADERS, sources


def main(loader_name: str, fault: str) -> None:
    """Read all that comes, and write it down at once: what comes next may be a hang."""
    loader = LOADERS[loader_name]
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1) as report:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what others print is no report
        items = loader.load()
        last = time.monotonic()
        try:
            for item in items(fault, **loader.options):
                last = time.monotonic()
                report.write(json.dumps({"item": int(item["x"][0])}) + "\n")
            end: dict[str, Any] = {"end": "end"}
        except BaseException as error:  # whatever it is, the loop sees it
            end = {"end": "error", **_about(error, fault)}
        end["seconds"] = round(time.monotonic() - last, 3)
        report.write(json.dumps(end) + "\n")


def _about(error: BaseException, fault: str) -> dict[str, Any]:
    original = sources.is_original(error, fault)
    return {
        "type": f"{type(error).__module__}.{type(error).__qualname__}",
        "original": original,
        "attributes": original and sources.has_attributes(error, fault),
        "frames": _frames(error),
        "text": "\n".join(_texts(error)),
    }


def _frames(error: BaseException) -> str:
    name = sources.strike.__name__
    functions = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if name in functions:
        return "real"
    return "text" if any(f"in {name}" in text for text in _texts(error)) else "none"


def _texts(error: BaseException) -> Iterator[str]:
    """Yield what an error, and each that a traceback would print with it, says of itself."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield f"{type(one).__name__}: {one}"
        yield from getattr(one, "__notes__", [])
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


if __name__ == "__main__":  # started processes import this file
    main(*sys.argv[1:])
