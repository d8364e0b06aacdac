"""A source with all that may make it hard to run again, and the plain loop that is its model."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import signal
import threading
import zlib
from collections import deque

import numpy as np

from enqueuer.workers.shards import Shard, borrowed_globals

SEED = 7


class Broken(Exception):
    """What a source raises, with its place."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A generator function; workers can import it.

    Attributes:
        lengths: How many items each shard has, the Nones among them included.
        gaps: The (shard, number) of items that are None.
        fails: The (shard, number) at which it raises.
        unsendable: The (shard, number) of items that cannot be sent between processes.
        size: Of the array in each item, in bytes.
        draws_globals: Whether to draw from the global random generators, too.
        knows: Whether the iterators have a state of their own.
        deaths: How many workers die at a place: (shard, epoch, number) or ("load",).
        folder: Where those are noted.
    """

    lengths: tuple[int, ...]
    gaps: frozenset[tuple[int, int]] = frozenset()
    fails: frozenset[tuple[int, int]] = frozenset()
    unsendable: frozenset[tuple[int, int]] = frozenset()
    size: int = 0
    draws_globals: bool = False
    knows: bool = False
    deaths: tuple[tuple[tuple, int], ...] = ()
    folder: str = ""

    def __call__(self, shard):
        return Knowing(self, shard) if self.knows else self.items(shard)

    def items(self, shard):
        for number in range(self.lengths[shard.index]):
            yield self.item(shard, number, shard.rng)

    def item(self, shard, number, rng):
        place = shard.index, number
        drawn = int(rng.integers(2**60))
        if self.draws_globals:
            drawn = drawn, random.random(), float(np.random.rand())
        self.die_at(shard.index, shard.epoch, number)
        if place in self.fails:
            raise Broken(place)
        if place in self.gaps:
            return None
        if place in self.unsendable:
            return shard.index, shard.epoch, number, drawn, threading.Lock()
        array = np.frombuffer(rng.bytes(self.size), np.uint8)
        return shard.index, shard.epoch, number, drawn, array

    def die_at(self, *place):
        for time in range(dict(self.deaths).get(place, 0)):
            with contextlib.suppress(FileExistsError):
                name = "-".join(map(str, (*place, time)))
                os.close(os.open(f"{self.folder}/{name}", os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.die_at("load")

    def error_count(self):
        """Return how many errors there are in an epoch."""
        count = 0
        for index, length in enumerate(self.lengths):
            for number in range(length):
                place = (index, number)
                if place in self.fails:
                    count += 1
                    # A generator has ended by it.
                    if not self.knows:
                        break
                else:
                    count += place in self.unsendable and place not in self.gaps
        return count


class Knowing:
    """The same items out of an iterator that knows where it is."""

    def __init__(self, source, shard):
        self.source, self.shard, self.rng, self.at = source, shard, shard.rng, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.source.lengths[self.shard.index]:
            raise StopIteration
        self.at += 1
        return self.source.item(self.shard, self.at - 1, self.rng)

    def state_dict(self):
        return {"at": self.at, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state):
        self.at, self.rng.bit_generator.state = state["at"], state["rng"]


UNSENDABLE = (-1, "unsendable")


def instead(error):
    """Return what is to stand for an item that failed."""
    return (*error.args[0], "instead") if isinstance(error, Broken) else UNSENDABLE


def plain(item):
    """Return an item as something that can be compared."""
    if len(item) < 5:  # it stands for one
        return item
    *where, array = item
    return *where, zlib.crc32(array)


def serial(source, epoch=0, on_error="skip"):
    """Return what a plain loop gives: one item of each shard in turn."""
    source = dataclasses.replace(source, deaths=())
    count = len(source.lengths)
    lines = deque()
    for index in range(count):
        shard = Shard(index, count, epoch, SEED)
        with borrowed_globals(shard):
            lines.append(deque(_one_shard(source, shard, callable(on_error))))
    whole = []
    while lines:
        if lines[0]:
            whole.append(lines[0].popleft())
            lines.rotate(-1)
        else:
            lines.popleft()
    return whole


def _one_shard(source, shard, replaces):
    items = iter(source(shard))
    for number in itertools.count():
        try:
            item = next(items)
        except StopIteration:
            return
        except Broken as error:
            if replaces:
                yield instead(error)
            # A generator has ended by it; another iterator goes on.
            continue
        if item is not None and (shard.index, number) in source.unsendable:
            if replaces:
                yield UNSENDABLE
        elif item is not None:
            yield plain(item)
