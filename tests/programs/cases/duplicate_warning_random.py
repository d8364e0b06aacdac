"""A shuffling generator in two processes was said to give every batch twice, which it did not."""

import warnings

import numpy as np

from enqueuer import GeneratorEnqueuer


def generator():
    index = np.arange(10_000)
    while True:
        np.random.shuffle(index)
        for start in range(0, 10_000, 100):
            yield index[start : start + 100].copy()


with warnings.catch_warnings(record=True) as got:
    warnings.simplefilter("always")
    enqueuer = GeneratorEnqueuer(generator(), use_multiprocessing=True)
    enqueuer.start(workers=2, max_queue_size=24)
    output = enqueuer.get()
    batches = [next(output).tobytes() for _ in range(40)]
    enqueuer.stop()
twice = len(batches) - len(set(batches))
said = str(got[0].message)
is_true = "unless it draws from `random` or `numpy.random`" in said if twice == 0 else True
print("ok" if is_true else f"FAIL: {twice} of 40 came twice, and was told: {said}")
