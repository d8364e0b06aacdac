"""Which tests run: the quick suite by default, all of it or the rest by `ENQUEUER_TESTS`.

The quick suite holds most promises once on threads, processes and Ray, and those about starts and
ends by each start method. It leaves out what is marked `thorough`, as it takes more than a second;
if the mark says "processes", the first parameters without them run. It leaves out repetitions, too:
further parameters of tests with processes, fork and spawn beyond starts and ends, and the portable
path beyond what the transport itself promises.

`ENQUEUER_TESTS=all` runs everything, and so do `ENQUEUER_INTERRUPTS` and `ENQUEUER_POSITIONS`;
`ENQUEUER_TESTS=rest` runs what the quick suite left out, but not what repeats itself by spawn,
where workers start slowly.

`ENQUEUER_PART=2/3` runs the second third of that, chosen by the names of the tests.
"""

from __future__ import annotations

import os
import zlib

import pytest

_CHOICE = os.environ.get(
    "ENQUEUER_TESTS",
    "all" if {"ENQUEUER_INTERRUPTS", "ENQUEUER_POSITIONS"} & set(os.environ) else "quick",
)
if _CHOICE not in ("quick", "rest", "all"):
    raise pytest.UsageError(f"ENQUEUER_TESTS must be 'quick', 'rest' or 'all', got {_CHOICE!r}")
# Which part, from 1, of how many.
_PART, _PARTS = map(int, os.environ.get("ENQUEUER_PART", "1/1").split("/"))
IS_PART = _PARTS > 1
if not 1 <= _PART <= _PARTS:
    raise pytest.UsageError(f"ENQUEUER_PART must be '1/3', say, got {_PART}/{_PARTS}")
_IS_RAY = bool(os.environ.get("ENQUEUER_RAY"))
_IS_LONG_RUN = bool({"ENQUEUER_ROUNDS", "ENQUEUER_KILLS"} & set(os.environ))

# The portable path replaces only the transport, and how the death of a worker is seen. In the
# quick suite it runs the tests of these; the rest is the same code as on Linux.
_PORTABLE_QUICK = {
    "test_bound.py",
    "test_death.py",
    "test_failure.py",
    "test_in_place.py",
    "test_items.py",
    "test_killed_worker.py",
    "test_order.py",
    "test_stop.py",
}
# The portable path runs the whole contract in the end; of the faults, which take longer, these.
_PORTABLE_FAULTS = {
    "test_killed_worker.py",
    "test_killed_tasks.py",
    "test_crash_matrix.py",
    "test_resume_and_restart.py",
}


# With `workers=0` nothing is made ahead, and so nothing of this happens.
_AHEAD = {"test_auto.py", "test_bound.py", "test_stalls.py"}

# Of the contract, the start method may make a difference to these.
_ABOUT_STARTS = {
    "test_native_threads.py",
    "test_source.py",
    "test_stop.py",
}
# Elsewhere it may make one to all but these.
_ABOUT_OTHER_THINGS = {
    "test_lists.py",
    "test_garbage.py",
    "test_killed_tasks.py",
    # It starts workers again and again.
    "test_resume_and_restart.py",
}

# As the parameters of tests name them, the longer names first.
_BACKENDS = ("process-fork-portable", "forkserver", "spawn", "fork", "thread", "ray")


def chosen(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that are to run, in their order."""
    items = [item for item in items if not _is_never_run(item)]
    if _CHOICE != "all":
        left_out = _further_parameters(items)
        items = [item for item in items if item not in left_out]
        quick = set(_quick(items))
        items = [item for item in items if (item in quick) == (_CHOICE == "quick")]
    return [item for item in items if zlib.crc32(item.nodeid.encode()) % _PARTS == _PART - 1]


def _is_never_run(item: pytest.Item) -> bool:
    if _IS_RAY and not _is_about_ray(item):
        return True
    if "[inline" in item.name or "-inline" in item.name:
        is_ahead = item.get_closest_marker("ahead") is not None
        return is_ahead or item.path.name in _AHEAD or item.path.parent.name == "faults"
    if _is_portable(item) and item.path.parent.name == "faults":
        return item.path.name not in _PORTABLE_FAULTS
    # A spawned worker takes twelve times as long to start as one of the fork server, an actor
    # longer still; what they repeat would prove nothing new.
    if _is_spawn(item) or _IS_RAY:
        return item.get_closest_marker("repeats") is not None and not _IS_LONG_RUN
    return False


def _further_parameters(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return what of a test is left out by spawn, where its start is not the point.

    That is all but the first parameters: the fork server runs them all, and it pickles and imports
    the same.
    """
    alike: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        is_there = item.path.parent.name in ("contract", "datasets")
        if is_there and item.path.name not in _ABOUT_STARTS and _is_spawn(item):
            alike.setdefault(_function_and_backend(item), []).append(item)
    return {item for same in alike.values() for item in same[1:]}


def _is_about_ray(item: pytest.Item) -> bool:
    is_local = item.get_closest_marker("local") is not None
    return not is_local and ("[ray" in item.name or "-ray" in item.name or "ray" in item.path.stem)


def _quick(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the quick suite."""
    seen: set[tuple[str, str]] = set()
    quick = []
    for item in items:
        thorough = item.get_closest_marker("thorough")
        if thorough is not None and (not thorough.args or _is_of_processes(item)):
            continue
        is_once = thorough is not None or item.get_closest_marker("repeats") is not None
        if _is_portable(item) and item.path.name not in _PORTABLE_QUICK:
            continue
        if (_is_spawn(item) or _is_fork(item)) and not _is_about_starts(item):
            continue
        if is_once or _is_of_processes(item):
            once = _function_and_backend(item)
        else:
            once = (item.nodeid, "")
        if once in seen:
            continue
        seen.add(once)
        quick.append(item)
    return quick


def _is_of_processes(item: pytest.Item) -> bool:
    """Return whether its workers are processes or actors; threads run all parameters."""
    if _IS_RAY:
        return item.path.parent.name == "contract"
    return any(name in _function_and_backend(item)[1] for name in ("fork", "forkserver", "spawn"))


def _is_about_starts(item: pytest.Item) -> bool:
    """Return whether the start method of a test may make a difference to it.

    Once started, a worker runs what one of the fork server runs, which runs everything. And to
    start fresh interpreters takes long.
    """
    if item.path.parent.name == "contract":
        return item.path.name in _ABOUT_STARTS
    return _is_fork(item) and item.path.name not in _ABOUT_OTHER_THINGS


def _function_and_backend(item: pytest.Item) -> tuple[str, str]:
    function, _, parameters = item.nodeid.partition("[")
    return function, next((name for name in _BACKENDS if name in parameters), "")


def _is_portable(item: pytest.Item) -> bool:
    return "process-fork-portable" in item.name


def _is_fork(item: pytest.Item) -> bool:
    is_plain = not _is_portable(item) and "forkserver" not in item.name
    return is_plain and ("process-fork" in item.name or "[fork" in item.name)


def _is_spawn(item: pytest.Item) -> bool:
    return "process-spawn" in item.name or "[spawn" in item.name
