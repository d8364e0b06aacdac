"""The DataLoader beside torch's, in random configurations.

`ENQUEUER_ROUNDS=20` compares 500 of them.
"""

import itertools
import os
import random

import pytest
from helpers import needs

torch = needs("torch")
torch.set_num_threads(1)  # its thread pool does not survive a fork

from enqueuer.adapters.torch import DataLoader  # noqa: E402  (torch may be missing)

data = torch.utils.data
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
GROUPS, OF_A_GROUP = 5 * int(os.environ.get("ENQUEUER_ROUNDS", "1")), 5


class Rows(data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index


def generator_of(chance):
    """Return a generator for torch, or none; and the same one when it is called again."""
    seed = chance.randrange(100)
    return chance.choice([lambda: None, lambda: torch.Generator().manual_seed(seed)])


def sampler_of(chance, rows):
    """Return a function that makes a sampler."""
    count, draws, generator = len(rows), chance.randint(1, 80), generator_of(chance)
    ranks, flags = chance.randint(1, 4), (chance.random() < 0.5, chance.random() < 0.5)
    rank, some = chance.randrange(ranks), chance.sample(range(count), chance.randint(1, count))
    return chance.choice(
        [
            lambda: data.SequentialSampler(rows),
            lambda: data.RandomSampler(rows, True, draws, generator()),
            lambda: data.RandomSampler(rows, False, generator=generator()),
            lambda: data.SubsetRandomSampler(some, generator()),
            lambda: data.WeightedRandomSampler(range(1, count + 1), draws, True, generator()),
            lambda: data.DistributedSampler(rows, ranks, rank, *flags[:1], drop_last=flags[1]),
            lambda: some,
        ]
    )


def configuration(chance):
    """Return a function that makes the arguments of a loader."""
    rows = Rows(chance.randint(1, 40))
    workers = chance.randint(0, 3)
    how = {"num_workers": workers}
    if workers:
        how["persistent_workers"] = chance.random() < 0.5
        how["prefetch_factor"] = chance.randint(1, 4)
    size, drop_last = chance.choice([1, 2, 3, 7, 50]), chance.random() < 0.3
    sampler, generator = sampler_of(chance, rows), generator_of(chance)
    shuffle = chance.random() < 0.5
    kinds = [
        lambda: {"batch_size": size, "drop_last": drop_last, "shuffle": shuffle},
        lambda: {"batch_size": size, "drop_last": drop_last, "sampler": sampler()},
        lambda: {"batch_size": None, "sampler": sampler()},
        lambda: {"batch_sampler": data.BatchSampler(sampler(), size, drop_last)},
    ]
    kind = chance.choice(kinds)
    return lambda: {"dataset": rows, "generator": generator(), **how, **kind()}


@pytest.mark.parametrize("group", range(GROUPS))
def test_the_order_of_a_random_configuration_is_torchs(group):
    for number in range(group * OF_A_GROUP, (group + 1) * OF_A_GROUP):
        chance = random.Random(number)
        arguments = configuration(chance)
        epochs = [chance.choice([None, None, 0, 1, 3]) for _ in range(chance.randint(1, 3))]
        seen = []
        for kind in (data.DataLoader, DataLoader):
            torch.manual_seed(number)
            loader, batches = kind(**arguments()), []
            for epoch, stop in enumerate(epochs):
                if hasattr(getattr(loader, "sampler", None), "set_epoch"):
                    loader.sampler.set_epoch(epoch)
                some = itertools.islice(loader, stop)
                batches.append([torch.as_tensor(batch).tolist() for batch in some])
            seen.append((batches, torch.rand(3).tolist()))
        assert seen[0] == seen[1], f"configuration {number}"
