"""Trainings with endless samplers that are never drained: their workers end with the loaders.

The loaders are in circles of references, and others are closed.
"""

# needs: torch

import gc
import multiprocessing
import os
import time

from enqueuer.adapters.torch import DataLoader

LIMIT_S = 60.0


class Endless:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class InfiniteLoader(DataLoader):
    """The pattern of several detection libraries."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Endless(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


def children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return len(file.read().split())


def training():
    loader = InfiniteLoader(range(24), batch_size=4, shuffle=True, num_workers=2)
    for _ in range(3):
        assert sorted(x for batch in loader for x in batch.tolist()) == list(range(24))
    assert children() >= 2
    return loader


def wait_for_none():
    end = time.monotonic() + LIMIT_S
    while children():
        assert time.monotonic() < end, f"{children()} processes are left"
        time.sleep(0.05)


def main():
    for _ in range(3):
        holder = [training()]
        holder.append(holder)
        del holder
    gc.collect()
    wait_for_none()
    loader = training()
    loader.close()
    wait_for_none()
    with DataLoader(range(8), num_workers=2, persistent_workers=True) as loader:
        next(iter(loader))
    wait_for_none()
    print("ok")


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    main()
