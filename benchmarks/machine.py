"""The machine: what it is, what processes have, and ending them. Linux only."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROUNDS = 500_000  # about 50 ms of CPU time
_ASK_S = 2.0  # from SIGTERM to SIGKILL: enough to remove shared memory that has a name


def describe(packages: list[str]) -> dict[str, Any]:
    """Return what the numbers depend on."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg(),
        "versions": {name: _version(name) for name in packages},
    }


def memory_of_session() -> int:
    """Return the bytes that all processes of this session have, and the machine's shared memory.

    Shared memory counts once. A block on its way may be mapped by no process, so it can only be
    counted for the machine as a whole; only the growth of the sum matters.
    """
    own = sum(_own_memory(pid) for pid in session(os.getsid(0)))
    return 1024 * (own + _number("/proc/meminfo", "Shmem"))


def cpu_of_session() -> float:
    """Return the seconds of CPU that the processes of this session have used, of all threads.

    Children that have ended count with the process that waited for them.
    """
    used = 0.0
    for pid in session(os.getsid(0)):
        with contextlib.suppress(OSError):  # it is gone
            used += time.clock_gettime(~pid << 3 | 2)  # see clock_getcpuclockid(3)
            used += _cpu_of_ended_children(pid)
    return used


def speed() -> float:
    """Return the millions of rounds of a loop in Python for a second of CPU time, now.

    On a machine that others share it changes within seconds, and with it all CPU times.
    """
    state, began = 1, time.thread_time()
    for _ in range(_ROUNDS):
        state = (state * 31 + 7) & 0xFFFFFFFF
    return _ROUNDS / (time.thread_time() - began) / 1e6


def memory_is_short() -> bool:
    """Return whether the machine has less than a tenth of its memory left."""
    return 10 * _number("/proc/meminfo", "MemAvailable") < _number("/proc/meminfo", "MemTotal")


def session(leader: int) -> Iterator[int]:
    """Yield the processes of a session: all that its leader started, and what those did."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it is gone
                if os.getsid(int(entry)) == leader:
                    yield int(entry)


def end(leader: int) -> None:
    """End all processes of a session: ask first, so that what has a name is removed."""
    for signal_ in (signal.SIGTERM, signal.SIGKILL):
        for pid in session(leader):
            with contextlib.suppress(OSError):
                os.kill(pid, signal_)
        deadline = time.monotonic() + _ASK_S
        while any(session(leader)) and time.monotonic() < deadline:
            time.sleep(0.02)


def _cpu_of_ended_children(pid: int) -> float:
    """Return what RUSAGE_CHILDREN is to that process: seconds, also of their own children."""
    # The name of the program, in brackets, may contain anything.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    # cutime and cstime, fields 16 and 17 of proc(5), of which the third is the first here.
    return sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")


def _own_memory(pid: int) -> int:
    path = f"/proc/{pid}/smaps_rollup"
    try:
        return _number(path, "Pss_Anon") + _number(path, "Pss_File")
    except (OSError, LookupError):  # it is gone
        return 0


def _number(path: str, name: str) -> int:
    return int(_field(path, name).split()[0])


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    raise LookupError(f"{path} has no {name}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
