"""Who is compared, and what each is asked for. One file each; here is the list.

Each file imports its package at the top and has `open(setup)`, a context manager that starts
everything, gives an iterator over what `setup.source` yields, and stops everything.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

METHODS = ("fork", "forkserver", "spawn")


@dataclass(frozen=True)
class Setup:
    """What a contestant is asked for.

    Attributes:
        source: A generator function; each worker calls it for itself.
        queue_size: How many finished items may wait, or the nearest that there is.
        workers: How many processes, or threads.
        start_method: How processes are started; None is the contestant's own choice.
        item_bytes: The size of an item, for those that must be told.
        call: The same work as a function of an index, for those that map and do not iterate.
    """

    source: Callable[[], Iterator[Any]]
    queue_size: int
    workers: int = 1
    start_method: str | None = None
    item_bytes: int = 1024
    call: Callable[[int], Any] | None = None


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
        methods: The start methods that it can be told to use.
        threads: Whether it has `open_threads(setup)`, for work that waits.
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


_BYTES = frozenset({"large", "larger", "memory", "consumer-cpu"})

_LIST = [
    Contestant(
        "enqueuer-process", "enqueuer process", "enqueuer_process", "enqueuer", methods=METHODS
    ),
    Contestant(
        "enqueuer-thread",
        "enqueuer thread",
        "enqueuer_thread",
        "enqueuer",
        kind="thread",
        threads=True,
    ),
    Contestant("multiprocessing.Queue", "multi- process. Queue", "mp_queue", None, methods=METHODS),
    Contestant("torch", "torch Data- Loader", "torch_loader", "torch", methods=METHODS),
    Contestant(  # what it does to tiny arrays, one file descriptor each, nobody would want
        "torch-numpy",
        "torch, numpy",
        "torch_numpy",
        "torch",
        only=frozenset({"large", "larger", "tiny"}),
    ),
    Contestant("faster-fifo", "faster- fifo", "faster_fifo_", "faster_fifo"),
    Contestant(  # takes dicts of arrays only
        "pescador", "pescador", "pescador_", "pescador", never=frozenset({"ints"})
    ),
    Contestant("tensorpack", "tensor- pack", "tensorpack_", "tensorpack", threads=True),
    Contestant("grain", "Grain", "grain_", "grain", threads=True),
    Contestant("spdl", "SPDL", "spdl_", "spdl", methods=METHODS, threads=True),
    Contestant("spdl-arena", "SPDL arena", "spdl_arena", "spdl", only=_BYTES),
    Contestant("batchgenerators", "batch- genera- tors", "batchgenerators_", "batchgenerators"),
    Contestant(  # has no end: its thread stays as long as the process
        "prefetch_generator",
        "prefetch_ generator",
        "prefetch_generator_",
        "prefetch_generator",
        kind="thread",
        many=False,
        never=frozenset({"stop"}),
    ),
    Contestant("plain-loop", "plain loop", "plain_loop", None, kind="loop", many=False),
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
