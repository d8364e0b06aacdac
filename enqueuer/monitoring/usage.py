"""Reading CPU time, memory, the number of CPUs and the GIL, for threads and processes."""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

N = TypeVar("N", int, float)
T = TypeVar("T")

# Share of the available memory; the rest is for batches, and for workers that grow.
_OF_MEMORY = 0.8
# Files with the limit and the usage of memory, and names in `memory.stat` of files in the cache, by
# the version of control groups.
_MEMORY_FILES = {
    2: ("memory.max", "memory.current", "inactive_file", "active_file"),
    1: (
        *("memory.limit_in_bytes", "memory.usage_in_bytes"),
        *("total_inactive_file", "total_active_file"),
    ),
}


class Usage(NamedTuple):
    """The usage of a thread or a process so far; None where the system does not report it.

    Attributes:
        cpu_s: Seconds of CPU time.
        cpu_wait_s: Seconds in which it could have run, but had no CPU.
        rss_bytes: Memory that it has now, with what it shares with others; of processes only.
        switches: Number of times that it gave up its CPU to wait for something; of threads only.
    """

    cpu_s: float | None = None
    cpu_wait_s: float | None = None
    rss_bytes: int | None = None
    switches: int | None = None

    def since(self, earlier: Usage) -> Usage:
        """Return what was used since an earlier time; the memory is that of now."""
        used: Any = map(_difference, self, earlier)
        return Usage(*used)._replace(rss_bytes=self.rss_bytes)


def of_process(pid: int, has_threads: bool = False) -> Usage:
    """Return the usage of a process with all its threads; all None after its end.

    Args:
        pid: Number of the process.
        has_threads: Whether all its threads run code of the user, and not only its first one. The
            waits of a native library's own threads are those of the first one, too.
    """
    folder = f"/proc/{pid}"
    return Usage(
        _or_none(_cpu_s, ~pid << 3 | 2),
        _or_none(_cpu_waits_s if has_threads else _cpu_wait_s, folder),
        _or_none(_rss_bytes, pid),
    )


def of_thread(thread: threading.Thread) -> Usage:
    """Return the usage of a thread of this process; all None after its end."""
    return Usage() if thread.native_id is None else of_native_thread(thread.native_id)


def of_native_thread(number: int) -> Usage:
    """Return the usage of a thread of this process, by its number of `threading.get_native_id`."""
    task = f"/proc/self/task/{number}"
    return Usage(
        _or_none(_cpu_s, ~number << 3 | 6),
        _or_none(_cpu_wait_s, task),
        switches=_or_none(_number, f"{task}/status", "\nvoluntary_ctxt_switches:"),
    )


def of_threads(threads: Sequence[threading.Thread]) -> Usage:
    """Return the usage of some threads of this process together."""
    return Usage(*map(_sum, zip(*map(of_thread, threads), strict=True)))


def cpus(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> float:
    """Return the number of CPUs that this process may use, as by the limit of its container."""
    allowed = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0)
    quotas = (_or_none(_quota, *group) for group in _groups("cpu", proc, cgroups))
    return min(allowed or os.cpu_count() or 1, *(quota or math.inf for quota in quotas), math.inf)


def has_gil() -> bool:
    """Return whether one thread of this process runs Python code at a time."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def unshared_bytes(pid: int) -> int | None:
    """Return the memory of a process, with its part of what it shares; None if not known."""
    found = _or_none(_number, f"/proc/{pid}/smaps_rollup", "\nPss:")
    return _or_none(_rss_bytes, pid) if found is None else 1024 * found


def available_bytes(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int | None:
    """Return the bytes that this process and its children may still allocate without swapping.

    These are the free memory of the machine, or the rest of the limit of a container or of any
    other control group, if that is less. Files in the cache count as free. None if not known.
    """
    facts = _or_none(_numbers, f"{proc}/meminfo")
    if facts is None:
        return None
    free = 1024 * facts["MemAvailable:"] if "MemAvailable:" in facts else None
    for folder, version in _groups("memory", proc, cgroups):
        limit, used, *cached = _MEMORY_FILES[version]
        most, now = (_or_none(_number, f"{folder}/{name}") for name in (limit, used))
        stat = _or_none(_numbers, f"{folder}/memory.stat")
        # There is no such group, or its limit is "max".
        if most is None or now is None or stat is None:
            continue
        available = max(0, most - now + sum(stat.get(name, 0) for name in cached))
        free = available if free is None else min(free, available)
    return free


def room_for(free_bytes: int, each_bytes: int) -> int:
    """Return the number of further workers for which there is memory.

    Example:
        >>> room_for(10_000, 1000), room_for(1000, 1000)
        (8, 0)
    """
    return int(_OF_MEMORY * free_bytes / max(1, each_bytes))


@functools.cache
def _groups(controller: str, proc: str, root: str) -> list[tuple[str, int]]:
    """Return the folders of the control groups of this process and around it, and their versions.

    A process hardly ever changes its groups.
    """
    found = []
    for line in (_or_none(_text, f"{proc}/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        base, version = (root, 2) if number == "0" else (f"{root}/{controller}", 1)
        parts = [part for part in path.split("/") if part]
        found += [("/".join([base, *parts[:end]]), version) for end in range(len(parts), -1, -1)]
    return found


def _sum(values: Sequence[N | None]) -> N | None:
    """Return the sum of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known else None


def _difference(now: N | None, before: N | None) -> N | None:
    return None if now is None or before is None else max(now - before, now - now)


def _or_none(read: Callable[..., T], *args: Any) -> T | None:
    """Return what a function reads; None where the system does not tell it."""
    try:
        return read(*args)
    except (OSError, AttributeError, OverflowError, IndexError, ValueError):
        return None


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()


def _number(path: str, name: str = "") -> int:
    """Return the first number of a file, or the one behind a name."""
    text = _text(path)
    return int((text.partition(name)[2] if name else text).split(maxsplit=1)[0])


def _numbers(path: str) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _cpu_s(clock_id: int) -> float:
    # Linux computes the number of a process's CPU clock from its pid, see clock_getcpuclockid(3)
    # and MAKE_PROCESS_CPUCLOCK in the kernel's posix-timers.h; the C library only adds checks.
    return time.clock_gettime(clock_id)


def _cpu_wait_s(folder: str) -> float:
    return int(_text(f"{folder}/schedstat").split()[1]) / 1e9


def _cpu_waits_s(folder: str) -> float:
    """Return the sum over the threads of a process; some may end meanwhile."""
    folder += "/task"
    tasks = [_or_none(_cpu_wait_s, f"{folder}/{task}") for task in os.listdir(folder)]
    return sum(seconds for seconds in tasks if seconds is not None)


def _rss_bytes(pid: int) -> int:
    return int(_text(f"/proc/{pid}/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _quota(folder: str, version: int) -> float | None:
    """Return the number of CPUs that a control group may use; None if there is no limit."""
    names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    # ValueError if it is "max"; of version 1, it is -1.
    quota, period = map(int, " ".join(_text(f"{folder}/{name}") for name in names).split())
    return quota / period if quota > 0 else None
