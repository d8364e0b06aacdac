"""inference-perf#509, tensorpack#1099: an augmenter that holds its own numpy Generator.

Each worker process draws the same numbers, although the global seeds differ. Every row must have
other noise, or a word must be said.
"""

import warnings

import numpy as np

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer


class Augment:
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self, x):
        return x, float(self.rng.random())


augment = Augment()
RNG = np.random.default_rng(1)


def rows(shard):
    for i in shard.split(range(40)):
        yield augment(i)


def rows_of_module(shard):
    for i in shard.split(range(40)):
        yield i, float(RNG.random())


RUNS = {
    "shards": lambda **options: GeneratorEnqueuer(rows, workers=2, **options),
    "module": lambda **options: GeneratorEnqueuer(rows_of_module, workers=2, **options),
    "tasks": lambda **options: OrderedEnqueuer(range(40), augment, workers=2, **options),
}

problems = []
for name, make in RUNS.items():
    for options in ({}, {"backend": "process"}):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with make(**options) as enqueuer:
                noise = [number for _, number in enqueuer]
        if len(set(noise)) < 40 and not any("shard.rng" in str(w.message) for w in seen):
            if not any("task.rng" in str(w.message) for w in seen):
                problems.append(f"{name} {options}: {len(set(noise))} numbers, and no warning")
print("FAIL: " + "; ".join(problems) if problems else "ok")
