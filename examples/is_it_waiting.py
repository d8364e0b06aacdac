"""Find the bottleneck of a training loop and its remedy: statistics, advice, a timeline.

A batch takes 20 ms to get, as from a slow disk, and 5 ms to train on. The loop runs with one
worker, then with as many as the statistics ask for.
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from enqueuer import GeneratorEnqueuer, Stats


def batches(shard):
    for _ in shard.split(range(120)):
        time.sleep(0.020)
        yield shard.rng.random((64, 100))


def train(batch):
    time.sleep(0.005)
    return float(np.mean(batch))


def run(workers, trace=None) -> Stats:
    """Train for an epoch, and return the statistics."""
    # shards of their own: the data stay the same, however many workers there are
    with GeneratorEnqueuer(
        batches, workers=workers, shards=8, random_seed=7, trace=trace
    ) as enqueuer:
        for batch in enqueuer:
            train(batch)
        return enqueuer.stats()


def main(folder, counts=(1, 4)):
    for workers in counts:
        stats = run(workers, trace=Path(folder, f"{workers}_workers.json"))
        if len(counts) > 1:
            print(f"--- workers={workers}")
        print(stats)


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].isdigit():
        # The traces stay there, for Perfetto.
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder, [int(count) for count in sys.argv[1:]] or (1, 4))
