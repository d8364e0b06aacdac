"""Run a program as run.py does, and write down its losses, its steps and its waiting.

    meter.py REPORT NAME VERSION STEPS KILL_AT RESTARTS PROGRAM [ARGUMENTS]

`measure.py` starts it. VERSION is "before" or "after". A step is one call of `backward()`;
the program ends after STEPS of them. After step KILL_AT one of its worker processes gets SIGKILL,
while it makes a sample for a DataLoader, or where it is.
RESTARTS is the `max_restarts` of each DataLoader of enqueuer.
"""

import contextlib
import functools
import importlib
import inspect
import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import torch
from run import begin, change

from enqueuer.adapters.torch import DataLoader


class Meter:
    """What one run gave.

    Args:
        report: Path of its report.
        steps: Steps after which the program ends.
        kill_at: Step after which a worker is killed; 0: none is.
    """

    def __init__(self, report, steps, kill_at):
        self.path, self.steps, self.kill_at = Path(report), steps, kill_at
        self.losses, self.times, self.waits = [], [], [0.0]
        # Set for the worker that makes the next sample of a DataLoader.
        self.is_struck = multiprocessing.Value("i", 0)
        self.has_loader = False

    def step(self, loss):
        """Count a step; its loss is written to the last bit."""
        self.losses.append(loss.item().hex())
        self.times.append(time.perf_counter())
        self.waits.append(0.0)
        if len(self.losses) == self.steps:
            raise SystemExit
        if self.kill_at:
            # It may never come to the end.
            self.write()
        if len(self.losses) == self.kill_at:
            self.kill()

    def kill(self):
        """Kill a worker, if there is one."""
        if self.has_loader:
            self.is_struck.value = 1
        elif found := workers():
            os.kill(found[0], signal.SIGKILL)

    def strike(self, dataset):
        """Let the worker that gets a sample of the dataset after `kill()` be killed."""
        while hasattr(dataset, "dataset"):
            dataset = dataset.dataset
        get = type(dataset).__getitem__

        def get_or_die(dataset, index):
            with self.is_struck.get_lock():
                is_struck, self.is_struck.value = self.is_struck.value, 0
            if is_struck:
                os.kill(os.getpid(), signal.SIGKILL)
            return get(dataset, index)

        if not self.has_loader:
            type(dataset).__getitem__ = get_or_die
        self.has_loader = True

    @contextlib.contextmanager
    def waiting(self):
        """Add the time of the block to the waiting of this step."""
        start = time.perf_counter()
        yield
        self.waits[-1] += time.perf_counter() - start

    def write(self):
        """Write the report: the losses, and the seconds of a step after the first."""
        report = {"losses": self.losses}
        between = len(self.times) - 1
        if between > 0:
            report["step"] = (self.times[-1] - self.times[0]) / between
            report["waiting"] = sum(self.waits[1 : between + 1]) / between
        self.path.write_text(json.dumps(report))


def workers():
    """Return the processes below this one that have none below them, the oldest first."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    below, found = {os.getpid()}, set()
    while below:
        below = {pid for pid, parent in parents.items() if parent in below}
        found |= below
    helpers = ("resource_tracker", "forkserver")
    return sorted(
        pid
        for pid in found - {parents[pid] for pid in found}
        if not any(name in Path(f"/proc/{pid}/cmdline").read_text() for name in helpers)
    )


def timed(meter, function):
    """Return the function, with its time counted as waiting."""

    @functools.wraps(function)
    def call(*arguments, **options):
        with meter.waiting():
            return function(*arguments, **options)

    return call


def watch(meter):
    """Count the steps, and the waiting for any DataLoader; that of enqueuer has the same base."""
    backward = torch.Tensor.backward
    loader, iterator = torch.utils.data.DataLoader, torch.utils.data.dataloader._BaseDataLoaderIter
    begin = timed(meter, loader.__iter__)

    def counted(loss, *arguments, **options):
        meter.step(loss)
        return backward(loss, *arguments, **options)

    def watched(loader):
        if meter.kill_at:
            meter.strike(loader.dataset)
        return begin(loader)

    torch.Tensor.backward, loader.__iter__ = counted, watched
    iterator.__next__ = timed(meter, iterator.__next__)


def watch_generator(meter, module, name):
    """Count the waiting for the generators that a function returns."""
    module = importlib.import_module(module)
    function = getattr(module, name)

    def watched(*arguments, **options):
        generator = function(*arguments, **options)
        following = timed(meter, generator.__next__)
        with contextlib.suppress(StopIteration):
            while True:
                yield following()

    setattr(module, name, watched)


def watch_iterator(meter, module, name):
    """Count the waiting for the iterators of a class."""
    kind = getattr(importlib.import_module(module), name)
    kind.__next__ = timed(meter, kind.__next__)


# What the programs read that have no DataLoader.
ITERATORS = {
    "nnunet": (
        "nnunetv2.training.nnUNetTrainer.nnUNetTrainer",
        "NonDetMultiThreadedAugmenter",
    ),
}
GENERATORS = {
    "ctpn": ("utils.dataset.data_provider", "get_batch"),
    "east": ("icdar", "get_batch"),
    "nanochat": (
        "nanochat.dataloader",
        "tokenizing_distributed_data_loader_with_state_bos_bestfit",
    ),
}

if __name__ == "__main__":
    _, report, name, version, steps, kill_at, restarts, program, *arguments = sys.argv
    meter = Meter(report, int(steps), int(kill_at))
    torch.manual_seed(7)
    watch(meter)
    begin(program, arguments)
    if int(restarts):
        # It is wrapped, to check its arguments.
        defaults = inspect.unwrap(DataLoader.__init__).__kwdefaults__
        defaults["max_restarts"] = int(restarts)
    if version == "after":
        change(name)
    if name in GENERATORS:
        watch_generator(meter, *GENERATORS[name])
    if name in ITERATORS:
        watch_iterator(meter, *ITERATORS[name])
    try:
        runpy.run_path(program, run_name="__main__")
    finally:
        meter.write()
