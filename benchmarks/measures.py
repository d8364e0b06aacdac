"""How each case is measured.

Each function here runs in a fresh process, which is the consumer, and measures one row.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import machine
import sources
from contestants import Contestant, Setup, Tasks

MB = 1_000_000

WAIT_S = 0.020  # of latency-bound work, for each item
STEPS = 50_000  # of CPU-bound work: about 3 ms
WORKERS = 4  # that start and stop
PATH_WORKERS = 32  # workers that share a long list
FILES_OF_BATCH = 64
ITEM_S = 0.001  # of an item that is made again
_PATH_COUNT = 1_200_000
# The loop whose memory is measured takes half as long as a training step.
_STEP_S, _STEP_COUNT = 0.020, 50
_SOME = 50  # items between two readings of the clock
_CLOCK_S = 0.001  # between two readings of the clock
_SAMPLE_S = 0.02  # between two readings of the memory

_AHEAD = 4  # batches of images or spectrograms that may wait
FILLED = 1_250_000  # numbers in an array that a task makes: 5 MB
# One task of so many is slow.
EVERY, TASK_S, SLOW_S = 20, 0.003, 0.060


class Missing(Exception):
    """A contestant, or a package, that a row needs is missing."""


def rate(items: Iterator[Any], warm_up: int, seconds: float) -> float:
    """Return items a second, once `warm_up` items have come."""
    for _ in range(warm_up):
        next(items)
    # The clock is read about every millisecond; with each item it would add to the time.
    count, some = 0, 1
    start = now = time.perf_counter()
    while True:
        before = now
        deque(itertools.islice(items, some), maxlen=0)
        count += some
        now = time.perf_counter()
        if now - start >= seconds:
            break
        if now - before < _CLOCK_S:
            some *= 2
    return count / (now - start)


def throughput(contestant: Contestant, setup: Setup, seconds: float) -> float:
    """Return items a second."""
    with contestant.load()(setup) as items:
        return rate(items, 2 * setup.queue_size + 2, seconds)


def bandwidth(contestant: Contestant, setup: Setup, seconds: float) -> float:
    """Return GB a second."""
    return throughput(contestant, setup, seconds) * setup.item_bytes / 1e9


def in_place(contestant: Contestant, size: int, seconds: float) -> float:
    """Return GB a second of arrays that are made in shared memory."""
    if contestant.needs == "enqueuer":
        import enqueuer

        if not hasattr(enqueuer, "empty"):
            raise Missing("this version has no enqueuer.empty")
        setup = Setup(functools.partial(sources.in_place, size), 4, 1, None, size)
        with contestant.load()(setup) as items:
            # After this all blocks exist. The system clears new ones.
            rate(items, 0, seconds)
            return rate(items, 0, seconds) * size / 1e9
    return bandwidth(contestant, _ring_of(size), seconds)


def many_arrays(contestant: Contestant, work_s: float, seconds: float) -> float:
    """Return the rate of batches of many small arrays, in percent of that of one large array."""
    many, one = (
        throughput(
            contestant, Setup(functools.partial(sources.many, count, work_s), 8), seconds / 2
        )
        for count in (sources.MANY, 1)
    )
    return 100 * many / one


def short_queue(contestant: Contestant, queue_size: int, seconds: float) -> float:
    """Return tiny items a second."""
    return throughput(contestant, Setup(sources.tiny, queue_size), seconds)


def short_queue_cpu(contestant: Contestant, queue_size: int, seconds: float) -> float:
    """Return the microseconds of CPU that a tiny item costs all processes together."""
    with contestant.load()(Setup(sources.tiny, queue_size)) as items:
        rate(items, 2 * queue_size + 2, 0.1)
        start, count = machine.cpu_of_session(), 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            deque(itertools.islice(items, _SOME), maxlen=0)
            count += _SOME
        return (machine.cpu_of_session() - start) / count * 1e6


def arrival(contestant: Contestant, row: tuple[int, float], seconds: float) -> float:
    """Return the microseconds from `yield` to `next` of a loop that waits, at a quantile."""
    queue_size, quantile = row
    with contestant.load()(Setup(sources.stamped, queue_size)) as items:
        rate(items, 100, 0.0)
        took = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            took.append(-next(items) + time.perf_counter_ns())
    return sorted(took)[int(quantile * len(took))] / 1e3


def python_work(contestant: Contestant, workers: int, seconds: float) -> float | None:
    """Return items a second of work in Python; None if the contestant has one worker only."""
    if workers > 1 and not contestant.many:
        return None
    setup = Setup(functools.partial(sources.python_work, STEPS), 8, workers)
    with contestant.load()(setup) as items:
        return rate(items, 4 * workers, seconds)


def latency(contestant: Contestant, workers: int, seconds: float) -> float | None:
    """Return items a second of work that waits; None if the contestant has one worker only."""
    if workers > 1 and not contestant.many:
        return None
    setup = Setup(
        functools.partial(sources.sleeping, WAIT_S),
        queue_size=workers + 8,
        workers=workers,
        call=functools.partial(sources.wait, WAIT_S),
    )
    load = contestant.load_threads if contestant.threads else contestant.load
    with load()(setup) as items:
        return rate(items, 2 * workers + 4, seconds)


def overlap(contestant: Contestant, row: tuple[str, float, float], seconds: float) -> float:
    """Return the ms that a batch takes beyond the slower of the two sides."""
    how, make_s, use_s = row
    source, use = {
        "sleep": (sources.sleeping, time.sleep),
        "busy": (sources.spinning, sources.spin),
    }[how]
    with contestant.load()(Setup(functools.partial(source, make_s), 4)) as items:
        took = 1 / rate(_used(items, use, use_s), 10, seconds)
    return (took - max(make_s, use_s)) * 1e3


def _used(items: Iterator[Any], use: Callable[[float], None], seconds: float) -> Iterator[Any]:
    for item in items:
        use(seconds)
        yield item


def first(contestant: Contestant, row: tuple[str | None, bool], seconds: float) -> float:
    """Return the ms from the start to the first batch; imports of this process count only once."""
    method, is_again = row
    open_, setup = contestant.load(), _small(contestant, method)
    for _ in range(1 + is_again):
        start = time.perf_counter()
        with open_(setup) as items:
            next(items)
            took = time.perf_counter() - start
            # torch fails if it ends while a worker still starts.
            for _ in range(2 * WORKERS):
                next(items)
    return took * 1e3


def stop(contestant: Contestant, row: None, seconds: float) -> float:
    """Return the ms that workers with full queues take to end."""
    with contestant.load()(_small(contestant, None)) as items:
        for _ in range(20):
            next(items)
        time.sleep(0.3)
        start = time.perf_counter()
    return (time.perf_counter() - start) * 1e3


def first_of_paths(contestant: Contestant, workers: int, seconds: float) -> float:
    """Return the ms from the start of that many workers to the first item of a long list."""
    contestant.load()
    paths = _paths()
    start = time.perf_counter()
    with _reading(contestant, paths, workers) as items:
        next(items)
        return (time.perf_counter() - start) * 1e3


def memory_of_paths(contestant: Contestant, workers: int, seconds: float) -> float:
    """Return the MB that each of that many workers has, of a long list and of its own."""
    contestant.load()
    paths = _paths()
    before = machine.memory_of_session()
    with _reading(contestant, paths, workers) as items:
        for _ in range(4 * workers):
            next(items)
        return (machine.memory_of_session() - before) / workers / MB


def resumed_files(contestant: Contestant, share: float, seconds: float) -> float:
    """Return the ms from a list of many paths to the first batch behind a share of the epoch."""
    contestant.load()
    paths, state = _paths(), None
    if share:
        with _batches_of_files(contestant, paths, None) as (batches, save):
            deque(itertools.islice(batches, int(share * len(paths)) // FILES_OF_BATCH), maxlen=0)
            state = save()
    start = time.perf_counter()
    with _batches_of_files(contestant, paths, state) as (batches, _):
        next(batches)
        return (time.perf_counter() - start) * 1e3


@contextmanager
def _batches_of_files(
    contestant: Contestant, paths: list[str], state: Any
) -> Iterator[tuple[Iterator[Any], Callable[[], Any]]]:
    """Open shuffled batches of the names of files at a state, and give a function that saves it."""
    if contestant.needs == "enqueuer":
        from enqueuer import OrderedEnqueuer

        own: Any = dict(shuffle=True, workers=WORKERS, backend=contestant.kind, random_seed=7)
        enqueuer = OrderedEnqueuer(paths, sources.name, batch_size=FILES_OF_BATCH, **own)
        if state is not None:
            enqueuer.load_state_dict(state)
        with enqueuer:
            yield iter(enqueuer), enqueuer.state_dict
    else:
        import torch
        from contestants.torch_loader import Indexed
        from torchdata.stateful_dataloader import StatefulDataLoader

        torch.manual_seed(7)
        files = Indexed(functools.partial(_name_at, paths), len(paths))
        own = dict(batch_size=FILES_OF_BATCH, shuffle=True, num_workers=WORKERS)
        loader = StatefulDataLoader(files, **own)
        if state is not None:
            loader.load_state_dict(state)
        yield iter(loader), loader.state_dict


def _name_at(paths: list[str], index: int) -> int:
    return sources.name(paths[index])


def resumed_items(contestant: Contestant, name: str, seconds: float) -> float:
    """Return the ms from a state at 90 % of an epoch until each shard has given an item."""
    from enqueuer import GeneratorEnqueuer

    make, shards = getattr(sources, name), 8
    own: Any = dict(shards=shards, workers=2, backend=contestant.kind, random_seed=7)
    # The same items without their work.
    with GeneratorEnqueuer(functools.partial(make, 0.0), **own) as enqueuer:
        deque(itertools.islice(enqueuer, sources.RESUMED_COUNT * 9 // 10), maxlen=0)
        state = enqueuer.state_dict()
    later = GeneratorEnqueuer(functools.partial(make, ITEM_S), **own)
    start = time.perf_counter()
    later.load_state_dict(state)
    with later:
        deque(itertools.islice(later, shards), maxlen=0)
        return (time.perf_counter() - start) * 1e3


def _paths() -> list[str]:
    return [f"/data/train/{number % 1000:04}/{number:07}.jpg" for number in range(_PATH_COUNT)]


@contextmanager
def _reading(contestant: Contestant, paths: list[str], workers: int) -> Iterator[Iterator[str]]:
    """Open workers that send the paths themselves, as each contestant takes a sequence."""
    if contestant.needs == "enqueuer":
        from enqueuer import OrderedEnqueuer

        options: Any = dict(workers=workers, max_queue_size=2 * workers, backend="process")
        with OrderedEnqueuer(paths, **options) as enqueuer:
            yield iter(enqueuer)
    else:
        from torch.utils.data import DataLoader

        yield iter(DataLoader(paths, batch_size=None, num_workers=workers))  # type: ignore[arg-type]


def _small(contestant: Contestant, method: str | None) -> Setup:
    workers = WORKERS if contestant.many else 1
    return Setup(functools.partial(sources.sleeping, 0.0), 2 * WORKERS, workers, method)


def memory(contestant: Contestant, setup: Setup, seconds: float) -> float:
    """Return the largest memory of this process and its children, in MB, beyond that at first."""
    open_ = contestant.load()
    before = machine.memory_of_session()
    peak, done = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(_SAMPLE_S):
            peak = max(peak, machine.memory_of_session())

    watcher = threading.Thread(target=watch)
    with open_(setup) as items:
        watcher.start()
        for _ in range(_STEP_COUNT):
            next(items)
            time.sleep(_STEP_S)
        done.set()
        watcher.join()
    return (peak - before) / MB


def consumer_cpu(contestant: Contestant, size: int, seconds: float) -> float:
    """Return the ms of CPU that a batch costs the process that reads it."""
    # With threads the clock of the process would count the workers as well.
    clock = time.process_time if contestant.kind == "process" else time.thread_time
    setup = _ring_of(size)
    with contestant.load()(setup) as items:
        rate(items, 2 * setup.queue_size + 2, 0.0)
        start, count = clock(), 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            next(items)
            count += 1
        return (clock() - start) / count * 1e3


def transformed(contestant: Contestant, row: tuple[str, str, int], seconds: float) -> float:
    """Return items a second."""
    with _transforming(contestant, row) as items:
        return rate(items, 2 * _AHEAD + 2, seconds)


def transform_cpu(contestant: Contestant, row: tuple[str, str, int], seconds: float) -> float:
    """Return the ms of CPU that an item costs all processes together."""
    with _transforming(contestant, row) as items:
        rate(items, 2 * _AHEAD + 2, 0.0)
        start, count = machine.cpu_of_session(), 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            next(items)
            count += 1
        return (machine.cpu_of_session() - start) / count * 1e3


def _transforming(
    contestant: Contestant, row: tuple[str, str, int]
) -> AbstractContextManager[Iterator[Any]]:
    source, package, workers = row
    if importlib.util.find_spec(package) is None:
        raise Missing(f"{package} is not installed")
    return contestant.load()(Setup(getattr(sources, source), _AHEAD, workers))


def task_rate(contestant: Contestant, tasks: Tasks, seconds: float) -> float:
    """Return results a second, over whole epochs; the first one is not counted."""
    with contestant.load_tasks()(tasks) as epoch:
        came = sum(1 for _ in epoch())
        if came != tasks.steps:
            raise RuntimeError(f"{came} results arrived, not {tasks.steps}")
        count, start = 0, time.perf_counter()
        while True:
            deque(epoch(), maxlen=0)
            count += tasks.steps
            took = time.perf_counter() - start
            if took >= seconds:
                return count / took


def trained_rate(contestant: Contestant, tasks: Tasks, seconds: float) -> float:
    """Return steps a second of a small model that this process trains with the batches."""
    import training  # imports torch, which other cases do not need

    step = training.step()
    with contestant.load_tasks()(tasks) as epoch:
        for batch in epoch():
            step(batch)
        count, start = 0, time.perf_counter()
        while True:
            for batch in epoch():
                step(batch)
            count += tasks.steps
            took = time.perf_counter() - start
            if took >= seconds:
                return count / took


def task_bandwidth(contestant: Contestant, tasks: Tasks, seconds: float) -> float:
    """Return GB a second of the results of tasks."""
    return task_rate(contestant, tasks, seconds) * FILLED * 4 / 1e9


def share_of_ideal(contestant: Contestant, tasks: Tasks, seconds: float) -> float:
    """Return the rate in percent of the rate of workers that never wait."""
    mean = ((EVERY - 1) * TASK_S + SLOW_S) / EVERY
    return task_rate(contestant, tasks, seconds) / (tasks.workers / mean) * 100


def _ring_of(size: int) -> Setup:
    # More batches would take too much memory.
    count = max(2, min(8, 128 * MB // size))
    return Setup(functools.partial(sources.ring, (size,), "uint8", count), 4, item_bytes=size)
