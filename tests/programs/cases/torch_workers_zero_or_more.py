"""The random numbers of 1 and 2 workers are the same, and those of no worker are torch's."""

# needs: torch

import random

import numpy as np
import torch
from torch.utils import data

from enqueuer.adapters.torch import DataLoader


class Augmented(data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return i, torch.rand(1).item(), float(np.random.rand()), random.random()


def numbers(workers, seed=1, method=None, kind=DataLoader):
    torch.manual_seed(99), np.random.seed(99), random.seed(99)
    generator = torch.Generator().manual_seed(seed)
    options = {"shuffle": True, "generator": generator, "multiprocessing_context": method}
    loader = kind(Augmented(), batch_size=3, num_workers=workers, **options)
    return [[column.tolist() for column in batch] for _ in range(2) for batch in loader]


def main():
    one = numbers(1)
    assert one != numbers(1, seed=2)
    assert one[:4] != one[4:], "both epochs are the same"
    assert numbers(1) == numbers(2) == numbers(2, method="spawn") == one
    zero = numbers(0)
    assert zero == numbers(0, kind=data.DataLoader)
    assert [batch[0] for batch in zero] == [batch[0] for batch in one]
    print("ok")


if __name__ == "__main__":
    main()
