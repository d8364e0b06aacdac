"""From worker processes to a GPU: bandwidth beside a bare copy, and overlap with work there.

    python benchmarks/to_gpu.py                    # on a machine with a GPU
    python benchmarks/to_gpu.py --device cpu --quick    # only to see that it runs

Each batch is one float32 array. In turn, `--repeats` times:

- bare: one pinned tensor, copied to the GPU again and again, without any loader;
- CudaDataLoader: an enqueuer with `--workers` processes, arrays of `enqueuer.empty` of which the
  workers write a few bytes, so that the loader is measured and not the memory of the CPUs;
- filled: the same, and the workers write every byte, which they can do more slowly than a GPU
  copies, unless there are many of them;
- threads: ordinary arrays that threads fill: they go through pinned buffers;
- DataLoader: torch's, with as many workers and `pin_memory=True`, and `.to(non_blocking=True)`;

first as fast as it goes, then with a matrix product for each batch that takes about as long as
the copy. The clock starts when no new block of shared memory has been registered for a while.
Medians are printed, as shares of the bare copy too, and as JSON with `--json`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

import enqueuer
from enqueuer import GeneratorEnqueuer
from enqueuer.adapters.cuda import CudaDataLoader
from enqueuer.adapters.pinning import PINS

WARM = 8  # batches before the clock starts, at least
QUIET = 24  # batches without a new registered block, after which the clock starts
MOST_WARM = 300  # batches after which it starts anyway


def light(shard: Any, shape: tuple[int, ...] = ()) -> Iterator[np.ndarray]:
    """Yield arrays that lie in shared memory, and of which only a few bytes are new."""
    for number in itertools.count(shard.index, shard.count):
        batch = enqueuer.empty(shape, np.float32)
        batch[0, :16] = number
        yield batch


def filled(shard: Any, shape: tuple[int, ...] = ()) -> Iterator[np.ndarray]:
    """Yield arrays that lie in shared memory, and of which every byte is new."""
    for number in itertools.count(shard.index, shard.count):
        batch = enqueuer.empty(shape, np.float32)
        batch.fill(number)
        yield batch


def ordinary(shard: Any, shape: tuple[int, ...] = ()) -> Iterator[np.ndarray]:
    """Yield ordinary arrays."""
    for number in itertools.count(shard.index, shard.count):
        yield np.full(shape, number, np.float32)


class Ones(torch.utils.data.IterableDataset):
    """The same for torch's DataLoader, as tensors."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(self.shape)


def main() -> None:
    """Measure, and print."""
    options = arguments()
    device = torch.device(options.device)
    shape = (options.megabytes * 250, 1000)
    contestants: dict[str, Callable[[], Iterable[torch.Tensor]]] = {
        "bare": lambda: bare(shape, device),
        "CudaDataLoader": lambda: ours(light, shape, device, options.workers, "process"),
        "CudaDataLoader, filled": lambda: ours(filled, shape, device, options.workers, "process"),
        "CudaDataLoader, threads": lambda: ours(ordinary, shape, device, options.workers, "thread"),
        "DataLoader": lambda: torchs(shape, device, options.workers),
    }
    work = work_of(shape, device) if device.type == "cuda" else None
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    busy: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(options.repeats):
        for name, make in contestants.items():
            rates[name].append(seconds_a_batch(make(), options.batches, device))
            if work is not None:
                busy[name].append(seconds_a_batch(make(), options.batches, device, work))
    gigabytes = 4 * shape[0] * shape[1] / 1e9
    alone = seconds_a_batch(same(shape, device), options.batches, device, work) if work else 0.0
    print(machine(device), f"\n{gigabytes * 1000:.0f} MB a batch, {options.workers} workers")
    results = {}
    of_bare = statistics.median(rates["bare"])
    for name in contestants:
        seconds = statistics.median(rates[name])
        results[name] = {"GB/s": gigabytes / seconds, "percent of bare": 100 * of_bare / seconds}
        line = f"{name:26} {gigabytes / seconds:7.1f} GB/s {100 * of_bare / seconds:5.0f} %"
        if busy[name]:
            turn = statistics.median(busy[name])
            results[name] |= {"ms with work": turn * 1e3, "ms of work alone": alone * 1e3}
            line += f"   with work {turn * 1e3:7.2f} ms a batch (work alone {alone * 1e3:.2f})"
        print(line)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine(device), "results": results}, file, indent=2)


def bare(shape: tuple[int, ...], device: torch.device) -> Iterator[torch.Tensor]:
    """Yield copies of one pinned tensor."""
    source = torch.ones(shape, pin_memory=device.type == "cuda")
    while True:
        yield source.to(device, non_blocking=True, copy=True)


def same(shape: tuple[int, ...], device: torch.device) -> Iterator[torch.Tensor]:
    """Yield a tensor that is there already."""
    batch = torch.ones(shape, device=device)
    while True:
        yield batch


def ours(
    source: Callable[..., Iterator[np.ndarray]],
    shape: tuple[int, ...],
    device: torch.device,
    workers: int,
    backend: Any,
) -> Iterator[torch.Tensor]:
    """Yield batches by way of CudaDataLoader."""

    def batches(shard: Any) -> Iterator[np.ndarray]:
        return source(shard, shape)

    with CudaDataLoader(GeneratorEnqueuer(batches, workers=workers, backend=backend), device) as it:
        yield from it


def torchs(shape: tuple[int, ...], device: torch.device, workers: int) -> Iterator[torch.Tensor]:
    """Yield batches by way of torch's DataLoader."""
    on_gpu = device.type == "cuda"
    loader = torch.utils.data.DataLoader(
        Ones(shape), batch_size=None, num_workers=workers, pin_memory=on_gpu
    )
    for batch in loader:
        yield batch.to(device, non_blocking=True, copy=True)


def work_of(shape: tuple[int, ...], device: torch.device) -> Callable[[torch.Tensor], Any]:
    """Return a function of a batch that takes the GPU about as long as copying one does."""
    copying = seconds_a_batch(bare(shape, device), 30, device)
    matrix = torch.rand(4096, 4096, device=device)

    def work(batch: torch.Tensor, times: int = 1) -> torch.Tensor:
        for _ in range(times):
            torch.mm(matrix, matrix)
        return batch.sum()  # it is used

    once = seconds_a_batch(same(shape, device), 30, device, work)
    times = max(1, round(copying / once))
    return lambda batch: work(batch, times)


def seconds_a_batch(
    batches: Iterable[torch.Tensor],
    count: int,
    device: torch.device,
    work: Callable[[torch.Tensor], Any] | None = None,
) -> float:
    """Return how long a batch takes, after the first ones."""
    iterator = iter(batches)
    warm_up(iterator)
    finish(device)
    begin = time.perf_counter()
    for _ in range(count):
        batch = next(iterator)
        if work is not None:
            work(batch)
        del batch
    finish(device)
    seconds = (time.perf_counter() - begin) / count
    if hasattr(iterator, "close"):
        iterator.close()
    return seconds


def warm_up(iterator: Iterator[torch.Tensor]) -> None:
    """Take batches until no new block of shared memory is registered any more.

    Registering one takes as long as copying it, and ends when all blocks have been used.
    """
    registered, since = 0, 0
    for number in range(1, MOST_WARM + 1):
        next(iterator)
        before, registered = registered, PINS.count
        since = since + 1 if registered == before else 0
        if number >= WARM and (registered == 0 or since >= QUIET):
            return


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine(device: torch.device) -> str:
    """Return what this was measured on."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    return f"{gpu}, torch {torch.__version__}, Python {platform.python_version()}"


def arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=64, help="of a batch")
    parser.add_argument("--batches", type=int, default=200, help="to measure, after some others")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one short repeat")
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args()
    if options.quick:
        options.batches, options.repeats, options.megabytes, options.workers = 20, 1, 8, 2
    return options


if __name__ == "__main__":
    main()
