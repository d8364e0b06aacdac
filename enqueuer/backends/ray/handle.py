"""One actor as the process of the loop sees it: its state, its node, its death.

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
from enqueuer.backends.ray.session import is_of_its_node
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
        handle: Ray's handle of the actor.
        grant: Method `grant` of the actor, with its options. It is called more often than others.
        send: Function that sends the actor epochs.
        ask_to_end: Function that asks the actor to end its loop.
        inbox: Messages that have arrived and were not taken.
        where: Process and node of the actor, for its name; empty until they are known.
        why: Cause of its death, in Ray's words.
        never_ran: Whether its node died before the actor sent anything. Ray may not have known
            that when it chose the node.
        began: Time of its start.
        thread: Thread that receives the packets of the actor.
        last_stats: The last statistics that the actor sent.
    """

    index: int
    shards: tuple[int, ...]
    handle: Any
    grant: Any
    send: Callable[[Actor, list[Epoch]], None]
    ask_to_end: Callable[[Actor], None]
    inbox: RayInbox
    state: WorkerState = WorkerState.STARTING
    is_leaving: bool = False
    where: str = ""
    why: str = ""
    never_ran: bool = False
    began: int = field(default_factory=clock)
    thread: threading.Thread | None = None
    last_stats: WorkerStats | None = None

    @property
    def is_receiving(self) -> bool:
        """Whether the thread that receives from it runs; False in that thread itself."""
        thread = self.thread
        return thread is not None and thread is not threading.current_thread() and thread.is_alive()

    def begin(self, epoch: Epoch) -> None:
        """Send the actor an epoch of its shards."""
        self.send(self, [epoch])

    def ask_to_exit(self) -> None:
        """Ask the actor to exit; another one does the rest of its work."""
        self.is_leaving = True
        self.ask_to_end(self)

    def death(self) -> Death:
        """Return the cause of its death, with advice."""
        if not self.where:
            message = (
                f"{self} could not be started. {self.why} Check actor_options, and that "
                "enqueuer and all modules of the generator are installed on its node."
            )
        else:
            message = (
                f"{self} died; the items that it had sent were delivered. {self.why} Unless you "
                "killed it, likely causes are a lack of memory on its node, os._exit, or a crash "
                "in a library that the generator uses."
            )
        return Death(f"died ({self.why.rstrip('.')})", message, counts=not self.never_ran)

    def lose(self, error: BaseException, why: str) -> None:
        """Note the death of the actor.

        Args:
            error: Exception that Ray raised.
            why: Cause of the death, in Ray's words.
        """
        self.why = why
        self.never_ran = self.state is WorkerState.STARTING and is_of_its_node(error)
        self.move(WorkerState.DEAD)

    def move(self, new: WorkerState) -> None:
        """Change state; the only method that assigns `state` after the start."""
        assert new in _NEXT_STATE[self.state], f"{self.state} -> {new}"
        self.state = new

    def measure(self) -> WorkerStats:
        """Return the last known statistics of the actor."""
        now = self.last_stats
        if now is None:
            so_far = (clock() - self.began) / 1e9
            now = WorkerStats(
                *(self.index, "", self.shards, 0, 0, 0),
                *(so_far, 0.0, 0.0, 0.0, 0.0),
            )
        return dataclasses.replace(now, name=str(self), started=self.began)

    def keep_stats(self, stats: WorkerStats) -> None:
        """Keep statistics that the actor has sent, with the time of its start as seen from here."""
        all_s = (clock() - self.began) / 1e9
        at_work_s = stats.making_s + stats.sending_s + stats.waiting_s + stats.idle_s
        self.last_stats = dataclasses.replace(stats, starting_s=max(0.0, all_s - at_work_s))

    def __str__(self) -> str:
        return f"worker {self.index} (Ray actor{self.where})"
