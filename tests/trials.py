"""Interrupt runs, merge the states of their ranks, and go on with other numbers of ranks.

    python tests/trials.py 1000          so many random trials
    python tests/trials.py 1 17          the trial of seed 17, which has failed

Each trial draws a source, numbers of ranks, positions of each rank, and the workers. All ranks
together must get what one uninterrupted rank gets: in its order where that is promised, else each
item exactly once. So it is in the epoch of the interruptions, and in the next one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import logging
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from helpers import Elements, Resumable, kill_one

from enqueuer import (
    GeneratorEnqueuer,
    OrderedEnqueuer,
    Processes,
    StateMismatch,
    merge_states,
    mix,
)
from enqueuer.datasets.arrays import ArraySource

try:
    import h5py
except ImportError:
    h5py = None
else:
    from enqueuer.datasets.hdf5 import HDF5Source

SEED = 7
WORLDS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
# Processes are slow to start.
FEW = (1, 2, 3, 4)
BACKENDS = ("inline", "thread", "fork", "forkserver")
HANGS_S = 1200
ALL = 10**9


# --- sources ---


@dataclass(frozen=True)
class Lengths:
    """A generator function whose shards have these lengths, in turn, and another one each epoch."""

    lengths: tuple[int, ...]
    fails: bool = False

    def __call__(self, shard):
        for number in range(self.lengths[(shard.index + shard.epoch) % len(self.lengths)]):
            if self.fails and (shard.index * 5 + number) % 11 == 3:
                raise ValueError(shard.index, number)
            yield shard.epoch, shard.index, number, int(shard.rng.integers(1000))


def numbered(shard, first_item=0):
    """Yield items that need no earlier ones."""
    for number in range(first_item, 5):
        yield shard.epoch, shard.index, number


@dataclass(frozen=True)
class Gaps:
    """A generator function with items that are None, in each shard and epoch other ones."""

    lengths: tuple[int, ...]

    def __call__(self, shard):
        for item in Lengths(self.lengths)(shard):
            yield from [None] * ((shard.index * 5 + item[2] + shard.epoch) % 4)
            yield item


def stateful(shard):
    """Return an iterator with a state of its own."""
    return Resumable([(shard.epoch, shard.index, at) for at in range(2 + shard.index % 3)])


class Stream:
    """An iterable with a state of its own, which is that of its end until it begins again."""

    def __init__(self, count):
        self.count, self.begin, self.at = count, 0, 0

    def __iter__(self):
        begin, self.begin = self.begin, 0
        for element in range(begin, self.count):
            self.at = element + 1
            yield element

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begin = self.at = state["at"]


def drawn(element, task):
    return task.epoch, element, int(task.rng.integers(1000))


def nones(element, task):
    return None if element % 5 == 2 else drawn(element, task)


def broken(element, task):
    if element % 7 == 3:
        raise ValueError(element)
    return drawn(element, task)


def plain(batch):
    """Return a batch as something that can be compared and sorted."""
    if isinstance(batch, (dict, list)):
        return tuple(plain(part) for part in (batch.values() if isinstance(batch, dict) else batch))
    return tuple(batch.tolist()) if isinstance(batch, np.ndarray) else batch


@dataclass
class Kind:
    """What a trial reads, and what is promised of it.

    Attributes:
        make: Function that makes an enqueuer of `rank`, `world_size`, and options.
        worlds: Numbers of ranks that may have a part of it.
        is_sequence: Whether ranks at the same step have the sequence of one rank.
        shards: Number of shards, of which each rank has equally many in such a sequence.
        has_batches: Whether batches are lists of elements, which are composed anew.
        one_is_enough: Whether the state of any rank is that of all at the same step.
        loses: Function of the number of ranks: how many elements `drop_last` may leave out.
        needs_one_step: Whether the ranks must be at the same step, as the end is not known.
    """

    make: Callable[..., Any]
    worlds: tuple[int, ...] = WORLDS
    is_sequence: bool = True
    shards: int | None = None
    has_batches: bool = False
    one_is_enough: bool = False
    loses: Callable[[int], int] = lambda world_size: 0
    needs_one_step: bool = False

    def elements(self, batches):
        flat = itertools.chain.from_iterable(batches) if self.has_batches else batches
        return sorted(flat)


def of_shards(source, rng, is_equal, worlds=None, **options):
    shards = rng.choice([16, 24, 48] if worlds is None else [16, 19])
    if worlds is None:
        worlds = tuple(world for world in WORLDS if shards % world == 0)

    def make(**own):
        return GeneratorEnqueuer(source, shards=shards, random_seed=SEED, **options, **own)

    return Kind(make, worlds, is_equal, shards)


def equal_shards(rng):
    return of_shards(Lengths((rng.randint(0, 5),)), rng, True)


def numbered_shards(rng):
    return of_shards(numbered, rng, True)


def unequal_shards(rng):
    lengths = tuple(rng.randint(0, 6) for _ in range(rng.randint(2, 7)))
    return of_shards(Lengths(lengths), rng, False, WORLDS)


def unordered_shards(rng):
    return of_shards(Lengths((3, 1, 4)), rng, False, WORLDS, ordered=False)


def samples(rng):
    size, drop_last = rng.randint(1, 3), rng.random() < 0.5
    options = dict(batch_size=size, collate=list, drop_last=drop_last)
    if rng.random() < 0.5:
        options["shuffle_buffer"] = rng.randint(2, 9)
    is_even = rng.random() < 0.5
    lengths, worlds = ((7,), None) if is_even else ((7, 2, 0, 9), None if drop_last else WORLDS)
    return of_shards(Lengths(lengths), rng, is_even, worlds, **options)


def shards_with_gaps(rng):
    is_even = rng.random() < 0.6
    lengths, worlds = ((4,), None) if is_even else ((5, 1, 3), WORLDS)
    return of_shards(Gaps(lengths), rng, is_even, worlds)


def mixed(rng):
    source = mix({"a": Lengths((4,)), "b": Lengths((2, 5))}, [2, 1], at_end="continue")
    return of_shards(source, rng, False, WORLDS)


def skipped_shards(rng):
    return of_shards(Lengths((5, 9), fails=True), rng, False, WORLDS, on_error="skip")


def stateful_shards(rng):
    return of_shards(stateful, rng, False, WORLDS)


def rows(rng):
    array = np.arange(rng.randint(100, 200))
    source = ArraySource(
        {"x": array}, rng.randint(1, 3), shuffle=rng.random() < 0.7, drop_last=rng.random() < 0.5
    )
    return of_shards(source, rng, False, WORLDS)


def hdf5(rng):
    path = os.path.join(_folder().name, "rows.h5")
    if not os.path.exists(path):
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=np.arange(600), chunks=(5,))
    source = HDF5Source(
        path, "x", rng.randint(1, 4), shuffle=rng.random() < 0.7, window=20, rows=slice(20, 500)
    )
    return of_shards(source, rng, False, WORLDS)


_folders: list[Any] = []


def _folder():
    if not _folders:
        _folders.append(tempfile.TemporaryDirectory())
    return _folders[0]


def of_tasks(rng, function=drawn, make_elements=range, **options):
    count, shuffle = rng.randint(0, 200), make_elements is range and rng.random() < 0.5

    def make(**own):
        elements = make_elements(count)
        return OrderedEnqueuer(elements, function, shuffle, random_seed=SEED, **options, **own)

    is_certain = options.get("on_error", "raise") == "raise" and options.get("ordered", True)
    return Kind(make, one_is_enough=is_certain)


def tasks(rng):
    return of_tasks(rng)


def batches(rng):
    function = rng.choice([drawn, nones, broken])
    size = rng.randint(1, 4)
    options = dict(batch_size=size, collate=list)
    if function is broken:
        options["on_error"] = "skip"
    if rng.random() < 0.5:
        options["drop_last"] = True
    kind = of_tasks(rng, function, **options)
    kind.is_sequence, kind.has_batches = False, True
    if options.get("drop_last"):
        kind.loses = lambda world_size: world_size * size - 1
    return kind


def dropped_tasks(rng):
    kind = of_tasks(rng, drop_last=True)
    kind.loses = lambda world_size: world_size - 1
    return kind


def left_out(rng):
    function = rng.choice([nones, broken])
    kind = of_tasks(rng, function, on_error="skip" if function is broken else "raise")
    kind.is_sequence = False
    return kind


def unordered_tasks(rng):
    kind = of_tasks(rng, rng.choice([drawn, nones]), ordered=False)
    kind.is_sequence = False
    return kind


def iterables(rng):
    options = dict(batch_size=rng.randint(1, 3), collate=list) if rng.random() < 0.5 else {}
    has_state = rng.random() < 0.4
    kind = of_tasks(rng, make_elements=Stream if has_state else Elements, **options)
    kind.is_sequence, kind.has_batches = not options, bool(options)
    kind.needs_one_step = True
    return kind


KINDS = [
    *(
        equal_shards,
        numbered_shards,
        unequal_shards,
        unordered_shards,
        shards_with_gaps,
        samples,
        mixed,
        skipped_shards,
    ),
    *(stateful_shards, rows, tasks, batches, dropped_tasks, left_out, unordered_tasks),
    iterables,
    *([hdf5] if h5py else []),
]


# --- trials ---


def turns(batches_of_ranks):
    """Return the batches of all ranks, one of each rank in turn."""
    rows = itertools.zip_longest(*batches_of_ranks, fillvalue=turns)
    return [batch for row in rows for batch in row if batch is not turns]


class Refused(Exception):
    """States of an iterable that cannot be merged, as it says, since its end is not known."""


class Trial:
    """One trial: what all ranks have got in each epoch, and the state from which they go on."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.name = self.rng.choice(KINDS)
        self.kind = self.name(self.rng)
        self.backend = self.rng.choices(BACKENDS, [45, 35, 13, 7])[0]
        self.is_process = self.backend in ("fork", "forkserver")
        self.kills = self.is_process and self.rng.random() < 0.5
        self.changes = self.backend != "inline" and self.rng.random() < 0.2
        self.got: dict[int, list[Any]] = {0: [], 1: []}
        self.is_in_step = True
        # Number of elements that ranks may have left out at the end of each epoch.
        self.most_lost = [0, 0]
        self.state: Any = None
        self.history: list[str] = []

    def options(self):
        if self.backend == "inline":
            return {"workers": 0}
        if self.backend == "thread":
            return {"workers": self.rng.randint(1, 3)}
        method = Processes(start_method=self.backend)
        restarts = 100 if self.kills else 0
        return {"workers": self.rng.randint(1, 2), "backend": method, "max_restarts": restarts}

    def run(self):
        worlds = [world for world in self.kind.worlds if not self.is_process or world in FEW]
        if self.backend == "thread":
            worlds = [world for world in worlds if world <= 8 or self.rng.random() < 0.3]
        for _ in range(self.rng.randint(1, 2 if self.is_process else 3)):
            self.interrupt(self.rng.choice(worlds))
        self.finish(self.rng.choice(worlds))
        self.check()

    def counts(self, world_size):
        """Return how many batches each rank takes, and whether all are at the same step."""
        style = self.rng.choice(["same", "same", "begin", "different", "end", "one", "one ahead"])
        if style in ("different", "one", "one ahead") and self.kind.needs_one_step:
            style = "same"
        count = self.rng.randint(0, 9)
        if style == "different":
            return style, [self.rng.randint(0, 9) for _ in range(world_size)]
        if style == "one":
            return style, [count if rank == 0 else 0 for rank in range(world_size)]
        if style == "one ahead":
            return style, [ALL if rank == 0 else count for rank in range(world_size)]
        return style, [{"same": count, "begin": 0, "end": ALL}[style]] * world_size

    def interrupt(self, world_size):
        style, counts = self.counts(world_size)
        self.history.append(f"{world_size} ranks, {style}: {counts} of {self.state}")
        epoch = 0 if self.state is None else self.state["epoch"]
        # Two epochs are compared.
        if epoch == 2 or (epoch == 1 and style == "end"):
            return
        self.is_in_step &= len({*counts}) == 1 and self.is_even(world_size)
        got, states = [], []
        for rank in range(world_size):
            batches, state = self.read(rank, world_size, counts[rank])
            got.append(batches)
            # By way of JSON, as a checkpoint may be.
            states.append(json.loads(json.dumps(state)) if self.rng.random() < 0.8 else state)
        self.got[epoch] += turns(got)
        if any(len(batches) < count for batches, count in zip(got, counts, strict=True)):
            self.most_lost[epoch] += self.kind.loses(world_size)
        is_one = self.kind.one_is_enough and len({*counts}) == 1 and self.rng.random() < 0.4
        # Of these, other ranks know nothing. After the end of an epoch, the state has none of them.
        is_one &= self.kind.is_sequence or len({state["epoch"] for state in states}) == 1
        is_one &= not any(name in state for state in states for name in ("left_out", "done"))
        self.rng.shuffle(states)
        self.state = states[0] if is_one else self.merged(states)
        self.history.append(f"    {'one' if is_one else 'merged'} of {states}")

    def is_even(self, world_size):
        return self.kind.shards is None or self.kind.shards % world_size == 0

    def merged(self, states):
        try:
            return json.loads(json.dumps(merge_states(states)))
        except StateMismatch as error:
            # As many ranks that went on from one state do not know of it of an iterable either.
            whys = ("how many these were is not known", "they were resumed from different ones")
            if self.kind.needs_one_step and any(why in str(error) for why in whys):
                raise Refused from error
            raise

    def finish(self, world_size):
        epoch = 0 if self.state is None else self.state["epoch"]
        self.history.append(f"{world_size} ranks to the end of {self.state}")
        self.is_in_step &= self.is_even(world_size)
        both = {number: [] for number in range(epoch, 2)}
        for rank in range(world_size):
            with self.opened(rank, world_size) as enqueuer:
                for number in both:
                    both[number].append(self.taken(enqueuer, ALL))
        for number, batches in both.items():
            self.most_lost[number] += self.kind.loses(world_size)
            self.got[number] += turns(batches)

    @contextlib.contextmanager
    def opened(self, rank, world_size):
        enqueuer = self.kind.make(rank=rank, world_size=world_size, **self.options())
        if self.state is not None:
            enqueuer.load_state_dict(self.state)
        with enqueuer:
            yield enqueuer

    def read(self, rank, world_size, count):
        with self.opened(rank, world_size) as enqueuer:
            batches = self.taken(enqueuer, count)
            if self.rng.random() < 0.5:
                return batches, enqueuer.state_dict()
        return batches, enqueuer.state_dict()

    def taken(self, enqueuer, count):
        got = []
        for batch in itertools.islice(enqueuer, count):
            got.append(plain(batch))
            if self.kills and self.rng.random() < 0.1:
                kill_one(enqueuer, self.rng)
            if self.changes and self.rng.random() < 0.1:
                enqueuer.reconfigure(workers=self.rng.randint(1, 3))
        return got

    def check(self):
        kind = self.kind
        with kind.make(rank=0, world_size=1, workers=0) as enqueuer:
            wanted = [[plain(batch) for batch in enqueuer] for _ in range(2)]
        for epoch, whole in enumerate(wanted):
            got = self.got[epoch]
            most_lost = self.most_lost[epoch]
            if kind.is_sequence and self.is_in_step and most_lost == 0:
                assert got == whole, f"epoch {epoch}: {got} for {whole}"
            got, whole = kind.elements(got), kind.elements(whole)
            if most_lost:
                # What one rank leaves out is another part, so only numbers are compared.
                lost = Counter(whole) - Counter(got)
                assert len({*got}) == len(got), f"epoch {epoch}: twice in {got}"
                assert lost.total() <= most_lost, f"epoch {epoch}: lost {lost}"
            else:
                assert got == whole, (
                    f"epoch {epoch}: lost {Counter(whole) - Counter(got)}, "
                    f"too many {Counter(got) - Counter(whole)}"
                )


def run_trials(count, seed=0):
    """Run trials of consecutive seeds; return the counts of all and of the failures by kind."""
    counts, failures, refused = Counter(), Counter(), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for own in range(seed, seed + count):
            trial = Trial(own)
            name = trial.name.__name__
            counts[name] += 1
            try:
                trial.run()
            except Refused:
                refused += 1
            except Exception:
                failures[name] += 1
                print(f"seed {own} of {name} failed, {trial.backend}", *trial.history, sep="\n    ")
                traceback.print_exc(file=sys.stdout)
    while _folders:
        _folders.pop().cleanup()
    return counts, failures, refused


def main():
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    logging.disable(logging.CRITICAL)
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    begin = time.monotonic()
    counts, failures, refused = run_trials(count, seed)
    seconds = time.monotonic() - begin
    kinds = ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))
    print(f"{count} trials in {seconds:.0f} s, {failures.total()} failures: {dict(failures)}")
    print(f"{refused} refused, as an iterable's end is not known; kinds: {kinds}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
