"""One worker process as the consumer's process sees it: its state, its place, its end.

STARTING --READY--> RUNNING --its process ends--> DRAINING --all read--> DEAD
    \\__________________\\_____________ was asked to stop _______________\\--> ENDED
"""

from __future__ import annotations

import contextlib
import os
import select
import signal

from enqueuer.backends.pool import Death, WorkerState
from enqueuer.backends.process.inbox import ProcessInbox
from enqueuer.backends.process.launching import Launched
from enqueuer.backends.process.stack_dump import Stacks
from enqueuer.common.descriptors import Descriptor, close_in_children, is_portable
from enqueuer.monitoring import usage
from enqueuer.monitoring.meters import clock
from enqueuer.monitoring.worker_stats import WorkerStats, worker_stats
from enqueuer.transport.item_receiver import ItemReceiver
from enqueuer.workers.messages import Epoch

_NEXT_STATE = {
    WorkerState.STARTING: {WorkerState.RUNNING, WorkerState.DRAINING, WorkerState.ENDED},
    WorkerState.RUNNING: {WorkerState.DRAINING, WorkerState.ENDED},
    WorkerState.DRAINING: {WorkerState.DEAD, WorkerState.ENDED},
    WorkerState.ENDED: set(),
    WorkerState.DEAD: {WorkerState.ENDED},
}


class ProcessWorker:
    """A worker process as this process sees it; see `enqueuer.backends.pool.Worker`.

    Attributes:
        method: How it was started: "fork", "forkserver" or "spawn".
        process: The process.
        channel: This process's end of its channel.
        inbox: The messages of the channel.
        lifeline: Pipe whose closing ends the worker.
        pidfd: Descriptor that shows its end; None where there are none.
        stacks: Where it writes its stack if it is asked; None: it is never asked.
        exitcode: Exit code of the process, once it is known.
        gone: Whether the pidfd has shown its end.
        began: When it was started.
    """

    def __init__(
        self,
        index: int,
        method: str,
        process: Launched,
        channel: ItemReceiver,
        inbox: ProcessInbox,
        lifeline: Descriptor,
        pidfd: Descriptor | None,
        shards: tuple[int, ...],
        stacks: Stacks | None = None,
    ) -> None:
        self.index = index
        self.method = method
        self.process = process
        self.channel = channel
        self.inbox = inbox
        self.lifeline = lifeline
        self.pidfd = pidfd
        self.shards = shards
        self.stacks = stacks
        self.state = WorkerState.STARTING
        self.exitcode: int | None = None
        self.gone = False
        self.began = clock()
        self.is_leaving = False

    def move(self, new: WorkerState) -> None:
        """Change state; the only method that assigns `state` after the start."""
        assert new in _NEXT_STATE[self.state], f"{self.state} -> {new}"
        self.state = new

    def begin(self, epoch: Epoch) -> None:
        """Have it run its shards for an epoch."""
        self.channel.begin(epoch)

    def ask_to_exit(self) -> None:
        """Have it exit; what it cannot finish, another worker does."""
        self.is_leaving = True
        self.channel.ask_to_stop()

    def death(self) -> Death:
        """Return how it ended, once it is dead."""
        return Death(how_it_ended(self), death_message(self), self.exitcode)

    def measure(self) -> WorkerStats:
        """Return what it has done so far."""
        channel, pid = self.channel, self.process.pid
        return worker_stats(
            self.index,
            str(self),
            self.shards,
            channel.meter,
            channel.sent,
            usage.of_process(pid),
            self.began,
            channel.memory,
        )

    def send_signal(self, number: int) -> None:
        """Signal the process, and never another one that has got its pid."""
        with contextlib.suppress(ProcessLookupError):
            if self.pidfd is not None and _signalled(self.pidfd, number):
                return
            if self.process.has_pid():
                os.kill(self.process.pid, number)

    def handles(self, number: int) -> bool:
        """Return whether the process has a handler for a signal; True if that is not known."""
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


def open_pidfd(process: Launched) -> Descriptor | None:
    """Return a descriptor that shows a process's end; None where there are none."""
    if is_portable() or not hasattr(os, "pidfd_open"):
        return None
    try:
        pidfd = Descriptor(os.pidfd_open(process.pid))
    except OSError:
        # The process was reaped already, the kernel is older than 5.3, or a sandbox forbids it.
        return None
    # Asked only now: before, the process could still be reaped in between.
    if not process.has_pid():
        pidfd.close()
        return None
    close_in_children(pidfd)
    return pidfd


def has_ended(worker: ProcessWorker, timeout: float = 0) -> bool:
    """Return whether the process is gone, or goes within `timeout` seconds."""
    if worker.pidfd is None:
        return worker.channel.ended
    poller = select.poll()
    poller.register(worker.pidfd.fileno(), select.POLLIN)
    return bool(poller.poll(timeout * 1000))


def wait_for_exitcode(worker: ProcessWorker, timeout: float) -> int | None:
    """Wait for the process to end; return its exit code, None if it is not known."""
    # It can be collected once; other code may have asked for it.
    if worker.exitcode is not None:
        return worker.exitcode
    if worker.pidfd is not None and not has_ended(worker, timeout):
        return None
    return worker.process.exitcode(timeout)


def how_it_ended(worker: ProcessWorker) -> str:
    """Say how a worker that was not asked to ended: "was killed by SIGKILL"."""
    code = worker.exitcode
    if code is None:
        return "ended with an unknown exit code (other code of this program collected it)"
    if code < 0:
        return f"was killed by {_signal_name(-code)}"
    return f"ended with exit code {code} and said nothing"


def death_message(worker: ProcessWorker) -> str:
    """Return a message that names the worker, its end, and a remedy."""
    advice = {
        -signal.SIGKILL: "Unless you killed it, the system was probably out of memory: try "
        "fewer workers, smaller batches or a smaller max_queue_size.",
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
