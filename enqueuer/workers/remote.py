"""The loop of a worker in another process: a worker process, or a Ray actor.

There a function can be called when a module has been imported. A setting of a library can be
changed only once the library is imported, and the user's code may import it at any time, also in
the middle of an item. So a finder in front of all others has the loader of the module call the
function when it has run the module, before the import statement ends.

The finder does not inherit from a class of `importlib.abc`, whose import takes longer than to fork
a worker. The import system calls its method and does not check its class.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

from enqueuer.errors import StartError
from enqueuer.monitoring.trace import TraceTarget
from enqueuer.workers import logs
from enqueuer.workers.plan import OnError, Plan, Watch, serve_failure
from enqueuer.workers.shards import FRAMEWORKS, GlobalStreams, TaskSeeds
from enqueuer.workers.sources import Source
from enqueuer.workers.tasks import TaskSource
from enqueuer.workers.worker_trace import run_worker


def after_import(names: Collection[str], act: Callable[[str], object]) -> None:
    """Call `act` with the name of each of these modules that this process imports from now on."""
    for name in names:
        _finder.acts.setdefault(name, []).append(act)
    # A second finder for the same module would ask the first one, and that one the second.
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def on_import(name: str, act: Callable[[str], object]) -> None:
    """Call `act` with the name of a module that is imported already, else after its import."""
    if name in sys.modules:
        act(name)
    else:
        after_import([name], act)


# Whether this process is a worker, or forks some; and whether it is a fork of the program.
_is_worker = _is_fork = False


def be_worker(*, is_fork: bool = False) -> None:
    """Note that this process is no program of the user's.

    Args:
        is_fork: Whether it was forked by the program, and so has all that the program has.
    """
    global _is_worker, _is_fork
    _is_worker, _is_fork = True, is_fork


def is_fork_of_program() -> bool:
    """Return whether this process is a worker that the program has forked."""
    return _is_fork


def check_not_importing() -> None:
    """Raise StartError if this thread of a worker is importing a module, which starts workers.

    They would import that module as well, and each would start others.
    """
    frame = sys._getframe() if _is_worker else None
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if frame.f_code.co_name == "<module>" and module != "__main__":
            raise StartError(
                f"the module {module} starts worker processes while it is imported. Workers "
                "import it, too, and would start workers of their own without end; move this into "
                "a function, which the program calls"
            )
        frame = frame.f_back


class _Finder:
    def __init__(self) -> None:
        self.acts: dict[str, list[Callable[[str], object]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.acts:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._wrap(spec.loader, fullname)
        return spec

    def _wrap(self, loader: Any, name: str) -> None:
        """Have a loader act, once, when it has run the module of that name."""

        def run(module: ModuleType) -> None:
            # The loader is as it was: other code may keep it, or ask it for the source.
            del loader.exec_module
            loader.exec_module(module)
            # A spec that is never loaded leaves this to another module of the same loader.
            if module.__name__ == name:
                for act in self.acts[name]:
                    act(name)

        loader.exec_module = run


_finder = _Finder()


class WorkerConfig(NamedTuple):
    """Configuration of all workers of an enqueuer that run in other processes; not the source.

    Attributes:
        shard_count: Number of shards, over all ranks.
        random_seed: Seed of the enqueuer.
        levels: Levels of the loggers whose records are wanted; None if none are.
        trace: File in which workers record what they do; None if they record nothing.
    """

    shard_count: int
    random_seed: int
    levels: logs.Levels | None
    trace: TraceTarget | None

    def serve(
        self,
        index: int,
        shards: tuple[int, ...],
        source: Source | TaskSource,
        on_error: OnError,
        channel: Any,
        watch: Watch | None = None,
    ) -> None:
        """Run the loop of a worker until there are no more orders.

        Args:
            index: Index of the worker.
            shards: Indices of its shards; empty for tasks.
            source: Source that it runs.
            on_error: Handling of an exception of the source.
            channel: Channel of the worker.
            watch: See `Plan`.
        """
        plan = Plan(source, shards, self.shard_count, self.random_seed, on_error, watch)
        seeds = TaskSeeds() if isinstance(source, TaskSource) else GlobalStreams()
        after_import(FRAMEWORKS, seeds.seed_imported)
        enter: Callable[[Any], None] = seeds.enter
        if isinstance(source, TaskSource) and source.begin_worker is not None:
            try:
                enter = source.begin_worker(index) or enter
            except BaseException as error:
                serve_failure(error, shards, channel)
                return
        run_worker(plan, channel, index, self.trace, enter)
