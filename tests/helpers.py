"""Sources and bad objects that worker processes can import, and small tools for tests."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np

LIMIT = 30.0  # seconds; generous: only a hang reaches it


def counting(shard):
    """Yield (shard, number) for ever."""
    number = 0
    while True:
        yield shard.index, number
        number += 1


def twelve(shard):
    """Yield this shard's share of 0..11."""
    yield from shard.split(range(12))


def uneven(shard):
    """Yield (shard, number): 0, 3, 6 ... items of shard 0, 1, 2 ..."""
    for number in range(3 * shard.index):
        yield shard.index, number


def random_batches(shard):
    """Yield batches of this shard's random numbers: small and large arrays, nested."""
    for number in range(4 + shard.index):
        yield {
            "where": (shard.index, shard.epoch, number),
            "small": shard.rng.random(3),
            "large": [shard.rng.integers(0, 255, (40, 1000), np.uint8)],
        }


def bytes_of(batch):
    """Return a batch as plain data that can be compared."""
    return batch["where"], batch["small"].tobytes(), batch["large"][0].tobytes()


class Failing:
    """A generator function that yields `count` items in each shard, then calls `act`."""

    def __init__(self, count, act, shard=0):
        self.count = count
        self.act = act
        self.shard = shard

    def __call__(self, shard):
        for number in range(self.count):
            yield shard.index, number
        if shard.index == self.shard:
            self.act()
        yield shard.index, self.count


class TwoArguments(Exception):
    """An exception that plain pickle cannot rebuild."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")
        self.a = a
        self.b = b


class HoldsLock(Exception):
    """An exception that nothing can pickle."""

    def __init__(self):
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def raise_value_error():
    raise ValueError("bad value", 7)


def raise_two_arguments():
    raise TwoArguments(1, "two")


def raise_holds_lock():
    raise HoldsLock


def raise_key_error():
    raise KeyError("missing")


def raise_unicode_error():
    b"\xff".decode()


def raise_stop_iteration():
    raise StopIteration(5)


def raise_chained():
    try:
        raise KeyError("cause")
    except KeyError as error:
        raise RuntimeError("effect") from error


def recurse():
    recurse()


def exit_zero():
    raise SystemExit(0)


def interrupt():
    raise KeyboardInterrupt


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def exit_hard():
    os._exit(0)


def exit_hard_three():
    os._exit(3)


def abort():
    os.abort()


def hang():
    time.sleep(1000)


def alive(pid):
    """Tell whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition, limit=LIMIT):
    """Wait for another process's doing, of which nothing tells; fail at `limit`."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)
