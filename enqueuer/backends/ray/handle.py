"""One actor as the process of the loop sees it: its state, its place, its end.

STARTING --Ready--> RUNNING --its stream breaks--> DEAD
    \\__________________\\__was asked to stop, or discarded__\\--> ENDED
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from enqueuer.backends.pool import Death, WorkerState
from enqueuer.backends.ray.inbox import RayInbox
from enqueuer.monitoring.meters import clock
from enqueuer.monitoring.worker_stats import WorkerStats
from enqueuer.workers.messages import Epoch

_NEXT_STATE = {
    WorkerState.STARTING: {WorkerState.RUNNING, WorkerState.DEAD, WorkerState.ENDED},
    WorkerState.RUNNING: {WorkerState.DEAD, WorkerState.ENDED},
    WorkerState.DEAD: {WorkerState.ENDED},
    WorkerState.ENDED: set(),
}


@dataclass(eq=False)
class Actor:
    """One actor; see `enqueuer.backends.pool.Worker`.

    Attributes:
        handle: Ray's handle of it.
        allow: Method of the actor that takes its credit, which is called the most.
        send: Function that sends it an epoch.
        hang_up: Function that asks it to end its loop.
        inbox: What has come and was not taken.
        where: Process and node, once they are known, for its name.
        why: How it died, in Ray's words.
        never_ran: Whether its node died before the actor said anything; Ray may not have known
            that when it chose the node.
        began: When it was started.
        thread: Thread that receives what it sends.
        last: What it said last that it has done.
    """

    index: int
    shards: tuple[int, ...]
    handle: Any
    allow: Any
    send: Callable[[Actor, list[Epoch]], None]
    hang_up: Callable[[Actor], None]
    inbox: RayInbox
    state: WorkerState = WorkerState.STARTING
    is_leaving: bool = False
    where: str = ""
    why: str = ""
    never_ran: bool = False
    began: int = field(default_factory=clock)
    thread: threading.Thread | None = None
    last: WorkerStats | None = None

    @property
    def is_receiving(self) -> bool:
        """Whether its thread runs, and is not this one."""
        thread = self.thread
        return thread is not None and thread is not threading.current_thread() and thread.is_alive()

    def begin(self, epoch: Epoch) -> None:
        """Have it run its shards for an epoch."""
        self.send(self, [epoch])

    def ask_to_exit(self) -> None:
        """Have it exit; what it cannot finish, another one does."""
        self.is_leaving = True
        self.hang_up(self)

    def death(self) -> Death:
        """Return how it died, and what to do."""
        if not self.where:
            message = (
                f"{self} could not be started. {self.why} Look at actor_options, and whether "
                "enqueuer, and what the generator imports, is on its node."
            )
        else:
            message = (
                f"{self} died; what it had sent was delivered. {self.why} Unless you killed it, "
                "look for a lack of memory on its node, os._exit, or a crash in the libraries that "
                "the generator uses."
            )
        return Death(f"died ({self.why.rstrip('.')})", message, counts=not self.never_ran)

    def move(self, new: WorkerState) -> None:
        """Change state; the only method that assigns `state` after the start."""
        assert new in _NEXT_STATE[self.state], f"{self.state} -> {new}"
        self.state = new

    def measure(self) -> WorkerStats:
        """Return what it was last known to have done."""
        now = self.last
        if now is None:
            so_far = (clock() - self.began) / 1e9
            now = WorkerStats(
                *(self.index, "", self.shards, 0, 0, 0),
                *(so_far, 0.0, 0.0, 0.0, 0.0),
            )
        return dataclasses.replace(now, name=str(self), started=self.began)

    def note(self, told: WorkerStats) -> None:
        """Remember what it says that it has done."""
        all_s = (clock() - self.began) / 1e9
        at_work_s = told.making_s + told.sending_s + told.waiting_s + told.idle_s
        self.last = dataclasses.replace(told, starting_s=max(0.0, all_s - at_work_s))

    def __str__(self) -> str:
        return f"worker {self.index} (Ray actor{self.where})"
