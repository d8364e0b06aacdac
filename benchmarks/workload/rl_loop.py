"""Reinforcement learning: rollouts of 64 steps through a queue of 1, and their age in the loop.

A learner wants rollouts of a policy that is as new as possible, so the queue is as short as
possible, and a rollout is measured from its end to the loop.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from workload import Epochs, Workload

_STEPS = 64


def _prepare(folder: Path, items: int) -> None:
    """There are no data."""


def _learn(rollout: Any) -> None:
    """Fit a policy to a rollout, about as long as a rollout takes."""
    states = np.asarray(rollout["states"])
    for _ in range(8):
        np.linalg.lstsq(states, np.asarray(rollout["rewards"]), rcond=None)


WORKLOAD = Workload(
    "rl-loop",
    f"rollouts of {_STEPS} steps of a pole on a cart, by Python, through a queue of 1; 1 worker",
    unit="rollouts",
    items=2000,
    batch_size=1,
    prepare=_prepare,
    size_of=lambda rollout: 1,
    why="The worker and the loop wait for each other at each rollout, as the queue holds one.",
    use=_learn,
)


def rollouts(items: int) -> Iterator[Any]:
    """Yield dicts of small arrays, and when each was ready."""
    rng = np.random.default_rng(7)
    weights = rng.normal(size=4).tolist()
    for _ in range(items):
        state = rng.normal(0, 0.05, 4).tolist()
        states, actions = [], []
        for _ in range(_STEPS):
            action = sum(map(float.__mul__, state, weights)) > 0
            states.append(state)
            actions.append(action)
            state = _next(state, 10.0 if action else -10.0)
        rollout = {"states": np.array(states, np.float32), "actions": np.array(actions)}
        rollout["rewards"] = np.arange(_STEPS, 0, -1, dtype=np.float32)
        yield rollout | {"made_at": time.perf_counter()}


def _next(state: list[float], force: float) -> list[float]:
    """Return the state after 20 ms."""
    x, speed, angle, turn = state
    push = force / 1.1 + 0.045 * turn * turn * angle
    twist = (9.8 * angle - push) / 0.63
    return [x + 0.02 * speed, speed + 0.02 * push, angle + 0.02 * turn, turn + 0.02 * twist]


@WORKLOAD.contestant("plain loop")
def _plain(data: None, items: int) -> Epochs:
    while True:
        yield rollouts(items)


@WORKLOAD.contestant("enqueuer")
def _enqueuer(data: None, items: int) -> Epochs:
    from enqueuer import GeneratorEnqueuer

    source = functools.partial(rollouts, items)
    with GeneratorEnqueuer(source, backend="process", max_queue_size=1) as batches:
        while True:
            yield batches


@WORKLOAD.contestant("enqueuer, thread")
def _thread(data: None, items: int) -> Epochs:
    from enqueuer import GeneratorEnqueuer

    with GeneratorEnqueuer(functools.partial(rollouts, items), max_queue_size=1) as batches:
        while True:
            yield batches


def _fill(queue: Any, items: int) -> None:
    while True:
        for rollout in rollouts(items):
            queue.put(rollout)


@WORKLOAD.contestant("multiprocessing.Queue", uses=(_fill,))
def _queue(data: None, items: int) -> Epochs:
    import multiprocessing

    queue: Any = multiprocessing.Queue(1)
    multiprocessing.Process(target=_fill, args=(queue, items), daemon=True).start()
    while True:
        yield (queue.get() for _ in range(items))


@WORKLOAD.contestant("torch", "torch")
def _torch(data: None, items: int) -> Epochs:
    from torch.utils.data import DataLoader, IterableDataset

    class Rollouts(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return rollouts(items)

    options: Any = dict(num_workers=1, prefetch_factor=1, persistent_workers=True)
    batches = DataLoader(Rollouts(), batch_size=None, **options)
    while True:
        yield batches


class Source:
    """The rollouts as an iterable."""

    def __init__(self, items: int) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return rollouts(self.items)


@WORKLOAD.contestant("SPDL, process", "spdl", (Source,))
def _spdl(data: None, items: int) -> Epochs:
    from spdl.pipeline import iterate_in_subprocess

    batches = iterate_in_subprocess(functools.partial(Source, items), buffer_size=1)
    while True:
        yield batches


@WORKLOAD.contestant("tf.data", "tensorflow")
def _tensorflow(data: None, items: int) -> Epochs:
    import tensorflow as tf

    first = next(rollouts(1))
    signature = {
        name: tf.TensorSpec(np.shape(value), np.asarray(value).dtype)
        for name, value in first.items()
    }
    dataset = tf.data.Dataset.from_generator(
        functools.partial(rollouts, items), output_signature=signature
    )
    while True:
        yield itertools.islice(dataset.prefetch(1).as_numpy_iterator(), items)
