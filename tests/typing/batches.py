"""Never run: the types of batches that mypy and pyright must infer in users' programs."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from typing_extensions import assert_type

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Shard, Task, imap, prefetch
from enqueuer.adapters.torch import TorchLoader
from enqueuer.datasets.hdf5 import HDF5Source

Array = np.ndarray[Any, Any]


class Pairs:
    """A map-style dataset."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[int, str]:
        return index, str(index)


def batches(shard: Shard) -> Iterator[dict[str, Array]]:
    yield {"x": np.zeros(3)}


def pairs() -> Iterator[tuple[Array, Array]]:
    yield np.zeros(3), np.zeros(3)


def length(word: str) -> int:
    return len(word)


def noisy(number: int, task: Task) -> float:
    return number + task.rng.random()


def maybe(number: int) -> str | None:
    return str(number) if number else None


async def fetched(url: str) -> bytes | None:
    return url.encode() or None


def total(numbers: list[int]) -> bytes:
    return bytes(numbers)


def seeded(numbers: list[int], tasks: list[Task]) -> complex:
    return complex(sum(numbers), tasks[0].rng.random())


# Generators.
assert_type(GeneratorEnqueuer(batches), GeneratorEnqueuer[dict[str, Array]])
assert_type(GeneratorEnqueuer(iter("ab"), workers=2), GeneratorEnqueuer[str])
assert_type(GeneratorEnqueuer([1, 2].__iter__, batch_size=2, collate=total).queue.get(), bytes)
assert_type(GeneratorEnqueuer(batches, batch_size=2), GeneratorEnqueuer[Any])
assert_type(GeneratorEnqueuer([1, 2].__iter__, batch_size=None, collate=None).get(), Iterator[int])
assert_type(GeneratorEnqueuer([1, 2].__iter__, collate=None).get(), Iterator[int])
assert_type(next(prefetch(pairs, workers=0)), tuple[Array, Array])
assert_type(next(prefetch(pairs, batch_size=None)), tuple[Array, Array])
assert_type(next(prefetch(pairs, batch_size=3)), Any)
assert_type(next(prefetch([1, 2].__iter__, batch_size=2, collate=total)), bytes)
for batch in GeneratorEnqueuer(batches):
    assert_type(batch["x"], Array)

# Elements, with and without a map.
assert_type(OrderedEnqueuer(["a"]), OrderedEnqueuer[str])
assert_type(OrderedEnqueuer(["a"], True), OrderedEnqueuer[str])
assert_type(OrderedEnqueuer(Pairs(), shuffle=True), OrderedEnqueuer[tuple[int, str]])
assert_type(OrderedEnqueuer(np.zeros(3)), OrderedEnqueuer[Any])
assert_type(OrderedEnqueuer(["a"], length), OrderedEnqueuer[int])
assert_type(OrderedEnqueuer(range(5), noisy, workers=2), OrderedEnqueuer[float])
assert_type(OrderedEnqueuer(range(5), maybe), OrderedEnqueuer[str])
assert_type(OrderedEnqueuer(["a"], fetched), OrderedEnqueuer[bytes])
assert_type(OrderedEnqueuer(iter(["a"]), str.upper).get(), Iterator[str])
assert_type(OrderedEnqueuer(["a"], length, batch_size=None), OrderedEnqueuer[int])
assert_type(OrderedEnqueuer(["a"], length, collate=None), OrderedEnqueuer[int])
assert_type(OrderedEnqueuer(range(5), batch_size=2, collate=total), OrderedEnqueuer[bytes])
assert_type(OrderedEnqueuer(range(5), batch_size=2, collate=seeded), OrderedEnqueuer[complex])
assert_type(OrderedEnqueuer(range(5), batch_size=2), OrderedEnqueuer[Any])
assert_type(imap(length, ["a"], workers=2), Iterator[int])
assert_type(imap(length, ["a"], batch_size=None), Iterator[int])
assert_type(imap(noisy, range(5)), Iterator[float])
assert_type(imap(fetched, ["a"], shuffle=True), Iterator[bytes])
assert_type(imap(maybe, range(5), backend="process"), Iterator[str])
assert_type(imap(length, ["a"], batch_size=2, collate=total), Iterator[bytes])
assert_type(imap(length, ["a"], batch_size=2), Iterator[Any])

# Tensors.
assert_type(TorchLoader(GeneratorEnqueuer(pairs)), TorchLoader[tuple[Tensor, Tensor]])
assert_type(next(iter(TorchLoader(GeneratorEnqueuer(batches)))), dict[str, Tensor])
assert_type(TorchLoader(OrderedEnqueuer(Pairs())), TorchLoader[Any])
loader: TorchLoader[tuple[int, str]] = TorchLoader(OrderedEnqueuer(Pairs()))
assert_type(next(iter(loader)), tuple[int, str])

# Datasets.
assert_type(GeneratorEnqueuer(HDF5Source("a.h5", "x", shuffle=True)), GeneratorEnqueuer[Any])
