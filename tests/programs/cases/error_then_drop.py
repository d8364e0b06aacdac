"""An error comes out of next(), is caught, and the enqueuer is dropped without stop()."""

import gc
import os
import resource
import threading
import time
from pathlib import Path

import numpy as np

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Processes


def arrays(shard):
    for i in shard.split(range(60)):
        yield np.full(3000, i)


def array(i):
    return np.full(3000, i)


class BadElement:
    def __iter__(self):
        return iter([1, threading.Lock()])


def children():
    tasks = Path("/proc/self/task").glob("*/children")
    return sum(len(task.read_text().split()) for task in tasks)


def run(make, takes_descriptors):
    enqueuer = make()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        enqueuer.start()
        if takes_descriptors:
            count = len(os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (count, limits[1]))
        for _ in enqueuer:
            pass
    except Exception as error:
        return type(error).__name__
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def check(name, make, takes_descriptors, expected):
    before = children(), len(os.listdir("/proc/self/fd"))
    error = run(make, takes_descriptors)
    end = time.monotonic() + 20
    while True:
        gc.collect()
        after = children(), len(os.listdir("/proc/self/fd"))
        if error == expected and after[0] <= before[0] and after[1] <= before[1] + 1:
            return []
        if time.monotonic() > end:
            return [f"{name}: {error}, children and descriptors {before} -> {after}"]
        time.sleep(0.05)


def main(method):
    given = dict(workers=2, backend=Processes(start_method=method), stall_timeout=None)
    # The fork server stays.
    with GeneratorEnqueuer(arrays, **given):
        pass
    kinds = [
        ("shards", lambda: GeneratorEnqueuer(arrays, **given), True, "BlockMemoryError"),
        ("tasks", lambda: OrderedEnqueuer(range(60), array, **given), True, "BlockMemoryError"),
        (
            "element",
            lambda: OrderedEnqueuer(BadElement(), array, **given),
            False,
            "ItemNotPicklable",
        ),
    ]
    return [f"{method}, {text}" for kind in kinds for text in check(*kind)]


if __name__ == "__main__":
    wrong = [text for method in ("fork", "forkserver") for text in main(method)]
    print(f"FAIL: {'; '.join(wrong)}" if wrong else "ok")
