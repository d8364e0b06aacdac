"""States that an earlier version has saved are loaded, and the rest comes out as it did there.

`write()` made `stored_states.json`, with the version of its time. A state that a later version can
no longer load is named in the changelog, and stays in the file.
"""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, merge_states, mix
from enqueuer.datasets.arrays import ArraySource

STORED = Path(__file__).with_name("stored_states.json")


class Counter:
    """An iterator of a state of its own, which counts to 6."""

    def __init__(self, shard):
        self.at = 10 * shard

    def __iter__(self):
        return self

    def __next__(self):
        if self.at % 10 == 6:
            raise StopIteration
        self.at += 1
        return self.at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def counters(shard):
    return Counter(shard.index)


def numbers(shard):
    for number in range(3 + 2 * shard.index):
        drawn = int(shard.rng.integers(1000))
        yield None if number % 4 == 3 else [shard.index, shard.epoch, number, drawn]


def letters(shard):
    for letter in "abcdefgh":
        yield [shard.index, letter]


def doubled(number):
    if number % 7 == 5:
        raise ValueError(number)
    return None if number % 6 == 4 else 2 * number


def of_generator(source, **options):
    return functools.partial(GeneratorEnqueuer, source, random_seed=7, workers=0, **options)


def of_list(**options):
    return functools.partial(
        OrderedEnqueuer, range(23), doubled, random_seed=7, workers=0, on_error="skip", **options
    )


MIXED = mix({"a": counters, "b": ArraySource({"x": np.arange(24)}, batch_size=2)}, [0.7, 0.3])

# Makers, each with the number of batches that each rank has read before its state was saved.
KINDS = {
    "shards": (of_generator(numbers, shards=3), [7]),
    "shards in the next epoch": (of_generator(numbers, shards=3), [17]),
    "between epochs": (of_generator(numbers, shards=3), [12]),
    "shards of ranks": (of_generator(numbers, shards=4), [4, 5]),
    "samples": (of_generator(letters, shards=2, batch_size=3, shuffle_buffer=4), [2]),
    "iterators": (of_generator(counters, shards=3), [7]),
    "rows": (of_generator(ArraySource({"x": np.arange(24)}, batch_size=2), shards=3), [5]),
    "a mixture": (of_generator(mix({"a": numbers, "b": letters}, [0.3, 0.7]), shards=2), [6]),
    "a mixture of iterators": (of_generator(MIXED, shards=2), [7]),
    "tasks": (of_list(), [9]),
    "batches": (of_list(batch_size=2, collate=list, shuffle=True), [4]),
    "batches of ranks": (of_list(batch_size=2, collate=list, drop_last=True), [3, 3, 3]),
}


def plain(value):
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def rest_of(make, state):
    """Return the batches that follow on a state, up to the end of the epoch after it."""
    enqueuer = make()
    enqueuer.load_state_dict(state)
    with enqueuer:
        return [plain(list(enqueuer)) for _ in range(2)]


def states_of(make, counts):
    states = []
    for rank, count in enumerate(counts):
        with make(rank=rank, world_size=len(counts)) as enqueuer:
            batches = (batch for _ in range(2) for batch in enqueuer)
            for _ in range(count):
                next(batches)
            states.append(json.loads(json.dumps(enqueuer.state_dict())))
    return states


@pytest.mark.filterwarnings("ignore::enqueuer.EnqueuerWarning")
@pytest.mark.parametrize("name", KINDS)
def test_a_stored_state_goes_on_as_before(name):
    make, counts = KINDS[name]
    states, expected, merged = json.loads(STORED.read_text())[name]
    for rank, (state, rest) in enumerate(zip(states, expected, strict=True)):
        assert rest_of(functools.partial(make, rank=rank, world_size=len(counts)), state) == rest
    assert rest_of(make, merge_states(states)) == merged
    if name != "a mixture of iterators":  # whose turns had another form
        # So today's states can be read by that version, too.
        assert states_of(make, counts) == states


def write(path):
    stored = {}
    for name, (make, counts) in KINDS.items():
        states, ranks = states_of(make, counts), range(len(counts))
        rests = [
            rest_of(functools.partial(make, rank=rank, world_size=len(counts)), states[rank])
            for rank in ranks
        ]
        stored[name] = states, rests, rest_of(make, merge_states(states))
    lines = (f"{json.dumps(name)}: {json.dumps(all_of)}" for name, all_of in stored.items())
    Path(path).write_text("{" + ",\n".join(lines) + "}\n")
