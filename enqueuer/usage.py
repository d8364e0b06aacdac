"""What the system says of threads and processes: CPU time, memory, and how many CPUs there are."""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """What a thread or a process has used so far; None where the system does not tell.

    Attributes:
        cpu_s: Seconds of CPU time.
        starved_s: Seconds in which it could have run, but had no CPU.
        rss_bytes: Memory that it has now, with what it shares with others; of processes only.
    """

    cpu_s: float | None = None
    starved_s: float | None = None
    rss_bytes: int | None = None


def of_process(pid: int) -> Usage:
    """Return what a process has used, of all its threads; nothing of one that has ended."""
    return Usage(
        _cpu_s(~pid << 3 | 2),
        # of its first thread, in which the generator runs
        _starved_s(f"/proc/{pid}/schedstat"),
        _rss_bytes(pid),
    )


def of_thread(thread: threading.Thread) -> Usage:
    """Return what a thread of this process has used; nothing of one that has ended."""
    if thread.native_id is None:
        return Usage()
    return Usage(
        _cpu_s(~thread.native_id << 3 | 6),
        _starved_s(f"/proc/self/task/{thread.native_id}/schedstat"),
    )


def cpus() -> float:
    """Return how many CPUs this process may use: those it may run on, or its container's share."""
    allowed = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0)
    return min(allowed or os.cpu_count() or 1, _quota())


def _cpu_s(clock_id: int) -> float | None:
    # Linux makes the number of a process's CPU clock of its pid, see clock_getcpuclockid(3) and
    # MAKE_PROCESS_CPUCLOCK in the kernel's posix-timers.h; the C library only adds checks
    try:
        return time.clock_gettime(clock_id)
    except (OSError, AttributeError, OverflowError):
        return None


def _starved_s(path: str) -> float | None:
    try:
        with open(path, "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


def _rss_bytes(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None


def _quota() -> float:
    try:
        with open("/sys/fs/cgroup/cpu.max", "rb") as file:
            quota, period = map(int, file.read().split())
    except (OSError, ValueError):  # no such file, or "max"
        return math.inf
    return quota / period
