"""Damaged states raised KeyError and others, or took all memory; the class was not named."""

import copy
import resource

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, StateMismatch, merge_states
from enqueuer.adapters.loading import Loader

# Bytes; a list of 100 million numbers takes more.
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
VALUES = ["<deleted>", None, "x", [], {}, -1, [[0, 3]], [1, [2]], 1e9, float("nan"), 10**8]


def ten(shard):
    yield from range(10)


def tasks(rank, world_size):
    return OrderedEnqueuer(range(100), abs, rank=rank, world_size=world_size, random_seed=1)


def shards(rank, world_size):
    return GeneratorEnqueuer(ten, rank=rank, world_size=world_size, shards=4, random_seed=1)


def steps(rank, world_size):
    return Loader(shards(rank, world_size), steps_per_epoch=5)


def state_of(make, rank, world_size):
    with make(rank, world_size) as enqueuer:
        batches = iter(enqueuer)
        for _ in range(3):
            next(batches)
        return enqueuer.state_dict()


found = []
for make in (tasks, shards, steps):
    states = [state_of(make, rank, 2) for rank in range(2)]
    for state in (states[0], merge_states(states)):
        for key in state:
            for value in VALUES:
                damaged = copy.deepcopy(state)
                damaged[key] = value
                if value == "<deleted>":
                    del damaged[key]
                for ranks in ((0, 2), (1, 2), (0, 3), (0, 1)):
                    try:
                        make(*ranks).load_state_dict(damaged)
                    except StateMismatch as error:
                        if len(str(error)) > 1100:
                            found.append(f"{make.__name__}, {key}: a message of {len(str(error))}")
                    except Exception as error:
                        found.append(f"{make.__name__}, {key}={value}: {error!r}")
try:
    tasks(1, 2).load_state_dict(state_of(shards, 0, 2))
except StateMismatch as error:
    if "that of GeneratorEnqueuer, and this is OrderedEnqueuer" not in str(error):
        found.append(str(error))
print("FAIL: " + "\n".join(found) if found else "ok")
