"""The `get_batch` of EAST, and of the many repositories that copied it; only its import changed.

One thing is better changed as well, and is here: the enqueuer gets a function, not a generator
that is already running. Then each process draws its own random numbers, and nothing comes twice.
"""

import functools
import time

import numpy as np

# It was: from data_util import GeneratorEnqueuer
from enqueuer import GeneratorEnqueuer


def generator(input_size=32, batch_size=4):
    index = np.arange(100)
    while True:
        np.random.shuffle(index)
        for start in range(0, len(index), batch_size):
            chosen = index[start : start + batch_size]
            images = np.random.random((batch_size, input_size, input_size, 3)).astype("float32")
            yield images, chosen.copy()


def get_batch(num_workers, **kwargs):
    try:
        enqueuer = GeneratorEnqueuer(
            functools.partial(generator, **kwargs), use_multiprocessing=True
        )
        enqueuer.start(max_queue_size=24, workers=num_workers)
        generator_output = None
        while True:
            while enqueuer.is_running():
                if not enqueuer.queue.empty():
                    generator_output = enqueuer.queue.get()
                    break
                else:
                    time.sleep(0.01)
            yield generator_output
            generator_output = None
    finally:
        if enqueuer is not None:
            enqueuer.stop()


data_generator = get_batch(num_workers=4, input_size=64)
seen = set()
for _step in range(40):
    images, chosen = next(data_generator)
    assert images.shape == (4, 64, 64, 3)
    seen.add(images.tobytes())
data_generator.close()
print(f"{len(seen)} batches, no two alike")
assert len(seen) == 40
