"""The loaders that are compared, and the work that each gets. Each has a file; here is the list.

Each file imports its package at the top and has `open(setup)`, a context manager that starts
everything, gives an iterator over what `setup.source` yields, and stops everything. Or it has
`open_tasks(tasks)`, which gives a function; each call of it returns an iterator over one epoch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

METHODS = ("fork", "forkserver", "spawn")


@dataclass(frozen=True)
class Setup:
    """The work of a contestant.

    Attributes:
        source: A generator function; each worker calls it for itself.
        queue_size: How many finished items may wait, or the nearest that there is.
        workers: How many processes, or threads.
        start_method: How processes are started; None is the contestant's own choice.
        item_bytes: The size of an item, for contestants that need it.
        call: The same work as a function of an index, for those that map and do not iterate.
    """

    source: Callable[[], Iterator[Any]]
    queue_size: int
    workers: int = 1
    start_method: str | None = None
    item_bytes: int = 1024
    call: Callable[[int], Any] | None = None


@dataclass(frozen=True)
class Tasks:
    """The work of a contestant that maps: a result for each index, in their order.

    Attributes:
        call: The work, as a function of an index.
        count: How many indices an epoch has.
        queue_size: How many finished results may wait, or the nearest that there is.
        workers: How many processes, or threads.
        batch_size: How many results are stacked into one; None: each comes alone.
    """

    call: Callable[[int], Any]
    count: int
    queue_size: int
    workers: int
    batch_size: int | None = None

    @property
    def steps(self) -> int:
        """How many results, or batches of them, an epoch has."""
        return self.count // (self.batch_size or 1)

    def work(self) -> tuple[Callable[[Any], Any], Sequence[Any]]:
        """Return a function and its arguments, for those that do not make batches themselves."""
        if self.batch_size is None:
            return self.call, range(self.count)
        every = range(self.count)
        parts = [every[at : at + self.batch_size] for at in every[:: self.batch_size]]
        return functools.partial(_batch, self.call), parts


def _batch(call: Callable[[int], Any], indices: Sequence[int]) -> Any:
    return np.stack([call(index) for index in indices])


Epochs = AbstractContextManager[Callable[[], Iterator[Any]]]


@dataclass(frozen=True)
class Contestant:
    """A row of the list.

    Attributes:
        name: As it is called on the command line.
        heading: The same for the head of the table: a line for each word.
        module: The file here.
        needs: The package that must be installed; None if there is none.
        kind: Whether its workers are processes or threads; a loop has none.
        many: Whether it can have several workers.
        methods: The start methods that it can be set to use.
        threads: Whether it has `open_threads(setup)`, for work that waits.
        tasks: Whether it has `open_tasks(tasks)`, for functions of an index.
        only: The cases that it takes part in; None means all that it can do.
        never: Those that it cannot do.
    """

    name: str
    heading: str
    module: str
    needs: str | None
    kind: str = "process"
    many: bool = True
    methods: tuple[str, ...] = ()
    threads: bool = False
    tasks: bool = False
    only: frozenset[str] | None = None
    never: frozenset[str] = frozenset()

    @property
    def installed(self) -> bool:
        """Whether its package can be found."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    def load(self) -> Callable[[Setup], AbstractContextManager[Iterator[Any]]]:
        """Import it and return what opens it."""
        return importlib.import_module(f"contestants.{self.module}").open

    def load_threads(self) -> Callable[[Setup], AbstractContextManager[Iterator[Any]]]:
        """Import it and return what opens it with threads."""
        return importlib.import_module(f"contestants.{self.module}").open_threads

    def load_tasks(self) -> Callable[[Tasks], Epochs]:
        """Import it and return what opens it for tasks."""
        return importlib.import_module(f"contestants.{self.module}").open_tasks


_TASKS = frozenset({"tasks-tiny", "tasks-batch", "tasks-cpu", "tasks-large", "tasks-straggler"})
_BYTES = frozenset({"large", "larger", "memory", "consumer-cpu"})

_LIST = [
    Contestant(
        "enqueuer-process",
        "enqueuer process",
        "enqueuer_process",
        "enqueuer",
        methods=METHODS,
        tasks=True,
    ),
    Contestant(
        "enqueuer-thread",
        "enqueuer thread",
        "enqueuer_thread",
        "enqueuer",
        kind="thread",
        threads=True,
        tasks=True,
    ),
    Contestant("multiprocessing.Queue", "multi- process. Queue", "mp_queue", None, methods=METHODS),
    Contestant("torch", "torch Data- Loader", "torch_loader", "torch", methods=METHODS, tasks=True),
    Contestant(
        "enqueuer-loader",
        "enqueuer Data- Loader",
        "enqueuer_loader",
        "torch",
        tasks=True,
        only=frozenset({"loader", "loader-training"}),
    ),
    Contestant(
        "torchdata",
        "torchdata Stateful- Data- Loader",
        "torch_loader",
        "torchdata",
        only=frozenset({"resume-files"}),
    ),
    # Tiny arrays are left out: it needs a file descriptor for each.
    Contestant(
        "torch-numpy",
        "torch, numpy",
        "torch_numpy",
        "torch",
        tasks=True,
        only=frozenset({"large", "larger", "tiny", "tasks-batch", "tasks-large"}),
    ),
    Contestant("faster-fifo", "faster- fifo", "faster_fifo_", "faster_fifo"),
    # It takes only dicts of arrays.
    Contestant(
        "pescador", "pescador", "pescador_", "pescador", never=frozenset({"ints", "arrival"})
    ),
    Contestant("tensorpack", "tensor- pack", "tensorpack_", "tensorpack", threads=True),
    Contestant("grain", "Grain", "grain_", "grain", threads=True, tasks=True),
    Contestant("spdl", "SPDL", "spdl_", "spdl", methods=METHODS, threads=True),
    Contestant("spdl-arena", "SPDL arena", "spdl_arena", "spdl", only=_BYTES),
    Contestant("batchgenerators", "batch- genera- tors", "batchgenerators_", "batchgenerators"),
    # It cannot be stopped: its thread stays as long as the process.
    Contestant(
        "prefetch_generator",
        "prefetch_ generator",
        "prefetch_generator_",
        "prefetch_generator",
        kind="thread",
        many=False,
        never=frozenset({"stop"}),
    ),
    # Its thread stays as long as the process, too.
    Contestant(
        "queue.Queue",
        "queue. Queue",
        "thread_queue",
        None,
        kind="thread",
        many=False,
        never=frozenset({"stop"}),
    ),
    Contestant(
        "bare-deque",
        "bare deque",
        "bare_deque",
        None,
        kind="thread",
        many=False,
        only=frozenset({"ints", "tiny", "queue"}),
    ),
    Contestant("multiprocessing.Pool", "Pool. imap", "mp_pool", None, tasks=True, only=_TASKS),
    Contestant(
        "ThreadPoolExecutor",
        "Thread- Pool- Executor",
        "thread_pool",
        None,
        kind="thread",
        tasks=True,
        only=_TASKS,
    ),
    Contestant("plain-loop", "plain loop", "plain_loop", None, kind="loop", many=False, tasks=True),
    Contestant(
        "memcpy",
        "memcpy",
        "memcpy",
        None,
        kind="loop",
        many=False,
        only=frozenset({"large", "larger", "in-place"}),
    ),
]

CONTESTANTS = {contestant.name: contestant for contestant in _LIST}
