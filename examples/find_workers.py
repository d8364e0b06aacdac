"""Let the enqueuer find the number of workers: a batch takes 40 ms to make, and 12 ms to use."""

import logging
import sys
import time

from enqueuer import GeneratorEnqueuer


def batches(shard):
    for number in shard.split(range(400)):
        time.sleep(0.040)
        yield number


# The enqueuer logs each change of the number of workers.
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)

with GeneratorEnqueuer(batches, workers="auto", random_seed=7) as enqueuer:
    for number in enqueuer:
        time.sleep(0.012)
        if number == 200:
            earlier = enqueuer.stats()
    print(enqueuer.stats().since(earlier))  # without the search
