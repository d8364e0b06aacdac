"""A `worker_init_fn` seeds random, numpy and torch: from torch's number, or by hand.

From torch's number, as Lightning's `seed_everything(workers=True)`: the epochs differ. By hand: the
numbers are the same in each run, and the epochs are the same where they are with torch.
"""

# needs: torch

import random

import numpy as np
import torch
from torch.utils import data

from enqueuer.adapters.torch import DataLoader


class Augmented(data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        u = torch.distributions.Uniform(0.0, 1.0).sample().item()
        return u, float(np.random.rand()), random.random()


def from_torch(index):
    base = torch.initial_seed() - index
    a, b, c = np.random.SeedSequence([base % 2**32, index]).spawn(3)
    np.random.seed(a.generate_state(4))
    torch.manual_seed(int(b.generate_state(1, np.uint64)[0]))
    random.seed(int(c.generate_state(1, np.uint64)[0]))


def by_hand(index):
    np.random.seed(7 + index), random.seed(7 + index), torch.manual_seed(7 + index)


def epochs(kind, init, persistent):
    options = {"worker_init_fn": init, "persistent_workers": persistent}
    loader = kind(Augmented(), batch_size=2, num_workers=2, **options)
    found = [[[column.tolist() for column in batch] for batch in loader] for _ in range(2)]
    # By generator.
    return [[[x for batch in epoch for x in batch[k]] for epoch in found] for k in range(3)]


def main():
    for persistent in (False, True):
        torch.manual_seed(3)
        found = epochs(DataLoader, from_torch, persistent)
        for first, second in found:
            assert first != second, "both epochs have the same numbers"
            assert len({*first}) == len(first), "several batches have the same numbers"
        torch.manual_seed(3)
        assert epochs(DataLoader, from_torch, persistent) == found

        torch.seed()
        found = epochs(DataLoader, by_hand, persistent)
        of_torch = epochs(data.DataLoader, by_hand, persistent)
        for (first, second), (one, other) in zip(found, of_torch, strict=True):
            assert (first == second) == (one == other)
        assert epochs(DataLoader, by_hand, persistent) == found
    print("ok")


if __name__ == "__main__":
    main()
