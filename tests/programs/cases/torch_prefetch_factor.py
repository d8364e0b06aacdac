"""A sampler is read as far ahead as by torch, at the start of an epoch and after each batch."""

# needs: torch

import warnings

from torch.utils import data

from enqueuer.adapters.torch import DataLoader


class Counting:
    def __init__(self):
        self.reads = 0

    def __len__(self):
        return 40

    def __iter__(self):
        for index in range(40):
            self.reads += 1
            yield [index]


def reads(kind, workers, factor, **options):
    sampler = Counting()
    loader = kind(
        range(40), batch_sampler=sampler, num_workers=workers, prefetch_factor=factor, **options
    )
    batches = iter(loader)
    found = [sampler.reads]
    for _ in range(8):
        next(batches)
        found.append(sampler.reads)
    return found


def main():
    warnings.simplefilter("ignore")
    for workers in (1, 2, 3):
        for factor in (1, 2):
            expected = reads(data.DataLoader, workers, factor)
            for options in ({}, {"round_robin": True}, {"backend": "thread"}):
                found = reads(DataLoader, workers, factor, **options)
                assert found == expected, (workers, factor, options, found, expected)
    print("ok")


if __name__ == "__main__":
    main()
