"""Fill shared memory directly, so that a large batch is not copied.

The same function runs in threads and in a plain loop, where `empty` is `numpy.empty`.
"""

import time

import numpy as np

from enqueuer import GeneratorEnqueuer, empty

SHAPE = (64, 224, 224, 3)


def batches(shard):
    for number in shard.split(range(40)):
        # Make a new array for each batch; the memory is reused.
        images = empty(SHAPE, "uint8")
        for index in range(len(images)):
            # A real program loads an image here.
            images[index] = number + index
        yield {"images": images, "number": number}


def run(backend):
    start = time.perf_counter()
    with GeneratorEnqueuer(batches, workers=2, backend=backend, max_queue_size=4) as enqueuer:
        sums = [(batch["number"], int(batch["images"][:, 0, 0, 0].sum())) for batch in enqueuer]
    gigabytes = len(sums) * np.prod(SHAPE) / 1e9
    print(f"{backend}: {gigabytes / (time.perf_counter() - start):.1f} GB/s, all included")
    return sums


assert run("process") == run("thread") == [(n, sum(range(n, n + 64))) for n in range(40)]
