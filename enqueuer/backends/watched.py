"""One worker process as the consumer's process sees it: its state, its place, its end.

STARTING --READY--> RUNNING --its process ends--> DRAINING --all read--> DEAD
    \\__________________\\_____________ was asked to stop _______________\\--> ENDED
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from dataclasses import dataclass, field

from enqueuer import usage
from enqueuer.backends import WorkerState
from enqueuer.backends.launching import Launched
from enqueuer.backends.stacks import Stacks
from enqueuer.meters import clock
from enqueuer.stats import WorkerStats, worker_stats
from enqueuer.transport import is_portable
from enqueuer.transport.item_receiver import ItemReceiver
from enqueuer.transport.packets import Descriptor, close_in_children

_NEXT_STATE = {
    WorkerState.STARTING: {WorkerState.RUNNING, WorkerState.DRAINING, WorkerState.ENDED},
    WorkerState.RUNNING: {WorkerState.DRAINING, WorkerState.ENDED},
    WorkerState.DRAINING: {WorkerState.DEAD, WorkerState.ENDED},
    WorkerState.ENDED: set(),
    WorkerState.DEAD: {WorkerState.ENDED},
}


@dataclass(eq=False)
class Watched:
    """A worker process as this process sees it."""

    index: int
    method: str
    process: Launched
    channel: ItemReceiver
    lifeline: Descriptor
    pidfd: Descriptor | None
    shards: tuple[int, ...]
    stacks: Stacks | None = None  # None: nobody will ask
    state: WorkerState = WorkerState.STARTING
    exitcode: int | None = None
    gone: bool = False  # whether the process has ended
    began: int = field(default_factory=clock)
    before: WorkerStats | None = None  # of those that it has replaced

    def move(self, new: WorkerState) -> None:
        """Change state; the only method that assigns `state` after the start."""
        assert new in _NEXT_STATE[self.state], f"{self.state} -> {new}"
        self.state = new

    def measure(self) -> WorkerStats:
        """Return what it has done so far, and those whose place it has taken."""
        channel, pid = self.channel, self.process.pid
        now = worker_stats(
            self.index,
            str(self),
            self.shards,
            channel.meter,
            channel.sent,
            usage.of_process(pid),
            self.began,
            channel.memory,
        )
        return now if self.before is None else now.after(self.before)

    def send_signal(self, number: int) -> None:
        """Signal the process, and never another one that has got its pid."""
        with contextlib.suppress(ProcessLookupError):
            if self.pidfd is None or not _signalled(self.pidfd, number):
                os.kill(self.process.pid, number)

    def handles(self, number: int) -> bool:
        """Return whether the process has a handler for a signal; True if nobody can tell."""
        try:
            with open(f"/proc/{self.process.pid}/status") as file:
                caught = next(line for line in file if line.startswith("SigCgt:"))
        except (OSError, StopIteration):
            return True
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)

    def close(self) -> None:
        """Close all that this process has of it."""
        self.channel.close()
        for one in (self.lifeline, self.stacks, self.pidfd):
            if one is not None:
                one.close()

    def __str__(self) -> str:
        return f"worker {self.index} (process {self.process.pid}, {self.method})"


def _signalled(pidfd: Descriptor, number: int) -> bool:
    """Signal a process; return False where a sandbox forbids that for a pidfd."""
    try:
        signal.pidfd_send_signal(pidfd.fileno(), number)
    except ProcessLookupError:
        raise
    except OSError:
        return False
    return True


def open_pidfd(pid: int) -> Descriptor | None:
    """Return a descriptor that tells of a process's end; None where there are none."""
    if is_portable() or not hasattr(os, "pidfd_open"):
        return None
    try:
        pidfd = Descriptor(os.pidfd_open(pid))
    except OSError:
        # The process was reaped already, the kernel is older than 5.3, or a sandbox forbids it.
        return None
    close_in_children(pidfd)
    return pidfd


def has_ended(worker: Watched, timeout: float = 0) -> bool:
    """Tell whether the process is gone, or goes within `timeout` seconds."""
    if worker.pidfd is None:
        return worker.channel.ended
    poller = select.poll()
    poller.register(worker.pidfd.fileno(), select.POLLIN)
    return bool(poller.poll(timeout * 1000))


def wait_for_exitcode(worker: Watched, timeout: float) -> int | None:
    """Wait for the process to end; return its exit code, None if nobody knows it."""
    if worker.pidfd is not None and not has_ended(worker, timeout):
        return None
    return worker.process.exitcode(timeout)


def how_it_ended(worker: Watched) -> str:
    """Say how a worker that was not asked to ended: "was killed by SIGKILL"."""
    code = worker.exitcode
    if code is None:
        return "ended, nobody knows how (its exit code was taken by somebody else)"
    if code < 0:
        return f"was killed by {_signal_name(-code)}"
    return f"ended with exit code {code} and said nothing"


def death_message(worker: Watched) -> str:
    """Say who died, how, and what to do about it."""
    advice = {
        -signal.SIGKILL: "If nobody killed it, the system was out of memory: try fewer workers, "
        "smaller batches or a smaller max_queue_size.",
        -signal.SIGSEGV: "A crash in C code; its Python stack was written to stderr.",
    }.get(
        worker.exitcode or 0,
        "Look for os._exit or a crash in the libraries that the generator uses.",
    )
    return f"{worker} {how_it_ended(worker)}; what it had sent was delivered. {advice}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
