"""The numbers from which the bottleneck is found, and sums and shares of them.

WorkerInputs (one a worker) --> RunInputs --> sums, shares, CPUs, whether threads wait for the GIL
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from enqueuer.common.text import ratio

# Share of one CPU, which is all that Python code can use.
GIL_IS_BUSY = 0.85
# Number of CPUs; threads that use more are not kept from it by the GIL.
MORE_THAN_GIL = 1.2
# Ratio of the workers that wait to the least number that could keep the CPUs busy.
_SPARE_WAITS = 1.5
# Share of the threads' waits, other than for a CPU, that were too long for the GIL.
IS_OUTSIDE = 0.25
# Share of the threads' work; several threads of Python code wait longer than that for the GIL.
LEAST_GIL_WAIT = 0.15
# Number of threads that work at a time; fewer do not wait for each other.
SEVERAL = 1.5


class WorkerInputs(NamedTuple):
    """The work of one worker: seconds, and `items` of so many `bytes`; None if not known."""

    name: str
    items: int
    bytes: int
    making_s: float
    sending_s: float
    waiting_s: float
    cpu_s: float | None
    cpu_wait_s: float | None
    # Time that the loop waited for it.
    waited_for_s: float
    runs_shards: bool
    # Number of times that it gave up its CPU to wait.
    switches: int | None = None

    @property
    def busy_s(self) -> float:
        """Seconds in which it worked."""
        return self.making_s + self.sending_s

    @property
    def waiting_share(self) -> float:
        """Share of its time in which it waited, from 0 to 1."""
        return ratio(self.waiting_s, self.busy_s + self.waiting_s)

    @property
    def per_item_s(self) -> float:
        """Seconds of work for each item."""
        return ratio(self.busy_s, self.items)

    @property
    def lacked_s(self) -> float:
        """Seconds of its work in which it had no CPU; the system counts its waits, too."""
        return min(self.cpu_wait_s or 0.0, self.busy_s)

    @property
    def computed_s(self) -> float:
        """Seconds of its work in which it computed, or would have with a CPU of its own."""
        return min((self.cpu_s or 0.0) + self.lacked_s, self.busy_s)

    @property
    def other_wait_s(self) -> float:
        """Seconds of its work in which it waited for a file, a network, a lock or the GIL."""
        return self.busy_s - self.computed_s

    def outside_s(self, switch_s: float) -> float:
        """Return the least time that a thread can have waited for something other than the GIL.

        A thread that waits for the GIL asks for it again each `switch_s`, and gives up its CPU
        each time. If it waited longer than that, it waited for a file, a network or a sleep.

        Example:
            >>> facts = dict(name="", items=9, bytes=0, sending_s=0.0, waiting_s=0.0, cpu_s=1.0,
            ...              cpu_wait_s=0.0, waited_for_s=0.0, runs_shards=True)
            >>> WorkerInputs(making_s=10.0, switches=300, **facts).outside_s(0.005)
            7.5
            >>> WorkerInputs(making_s=10.0, switches=3000, **facts).outside_s(0.005)
            0.0
        """
        if self.switches is None or self.cpu_s is None:
            return 0.0
        return max(0.0, self.other_wait_s - self.switches * switch_s)


class RunInputs(NamedTuple):
    """All numbers from which the bottleneck is found, of a run of so many `seconds`.

    `is_inline` says that the loop's own thread makes the batches.
    `switch_s` is the time after which a thread that waits for the GIL asks for it again; None if
    there is no GIL. `gil_share` is the share of the time in which workers held it; None if it was
    not measured.
    """

    seconds: float
    items: int
    first_wait_s: float
    waiting_s: float
    reading_s: float
    working_s: float
    wait_p99_s: float
    in_threads: bool
    ordered: bool
    max_queue_size: int
    cpus: float
    loop_cpu_s: float
    workers: Sequence[WorkerInputs]
    switch_s: float | None = 0.005
    gil_share: float | None = None
    is_inline: bool = False

    @property
    def waiting_share(self) -> float:
        """Share of its time in which the loop waited, after the first batch."""
        return ratio(self.waiting_s, self.waiting_s + self.working_s)

    def on_average(self, name: str) -> float:
        """Return the number of workers, or of their CPUs, that were busy at a time, on average."""
        # Not by the time of the run: workers may be idle between epochs, or be started later.
        times = [worker.busy_s + worker.waiting_s for worker in self.workers]
        return ratio(self.total(name), max(times, default=0.0))

    @property
    def use_s(self) -> float:
        """Seconds that the loop takes for each batch, without its waits."""
        return ratio(self.working_s, self.items)

    @property
    def computing_share(self) -> float:
        """Share of its work in which a worker computes, if it never lacks a CPU, from 0 to 1."""
        worked = self.total("busy_s") - self.total("lacked_s")
        return min(1.0, ratio(self.total("cpu_s"), max(worked, 1e-9)))

    @property
    def other_wait_share(self) -> float:
        """Share of its work in which a worker waited, but not for a CPU, from 0 to 1."""
        return ratio(self.total("other_wait_s"), self.total("busy_s"))

    @property
    def has_several_busy(self) -> bool:
        """Whether several workers worked at a time, on average."""
        return self.on_average("busy_s") > SEVERAL

    @property
    def most_that_help(self) -> int:
        """Number of workers for which there are CPUs, by what each needs of one."""
        return most_on(self.cpus, self.computing_share)

    @property
    def loop_gil_share(self) -> float:
        """Share of the time in which the loop may have held the GIL: not while it waited."""
        return loop_gil_share(self.loop_cpu_s, self.total("cpu_s"), self.working_s, self.seconds)

    def total(self, name: str) -> float:
        """Return the sum of an attribute over the workers."""
        return sum(getattr(worker, name) or 0.0 for worker in self.workers)

    @property
    def cpus_used(self) -> float:
        """Number of CPUs that were busy with the loop and the workers, on average."""
        by_loop = ratio(self.loop_cpu_s, self.seconds)
        return by_loop if self.in_threads else by_loop + self.on_average("cpu_s")

    @property
    def worker_cpus(self) -> float:
        """Number of CPUs that all workers used while there was something to do."""
        return self.per_s("cpu_s")

    def per_s(self, name: str) -> float:
        """Return the sum of an attribute over the workers, per second of the longest at work."""
        longest = max((worker.busy_s + worker.waiting_s for worker in self.workers), default=0.0)
        return ratio(self.total(name), longest)

    @property
    def holds_gil(self) -> bool:
        """Whether threads wait for the GIL, rather than for something outside of Python."""
        used, switch_s = self.worker_cpus, self.switch_s
        if not self.in_threads or switch_s is None or used > MORE_THAN_GIL:
            return False
        if self.has_several_busy and self.other_wait_share < LEAST_GIL_WAIT:
            # They compute at the same time, or would on a free machine.
            return False
        by_loop, worked = self.loop_gil_share, self.total("busy_s")
        # With the waits for a CPU: a thread that holds the GIL keeps it meanwhile. That is the
        # most of the time that it can have been held, and what follows is the least.
        if used + self.per_s("lacked_s") + by_loop < GIL_IS_BUSY:
            return False
        on_a_free_machine = used * ratio(worked, worked - self.total("lacked_s"))
        if on_a_free_machine + by_loop >= GIL_IS_BUSY:
            return True
        # Others take the CPUs, so that either may be: then it is the GIL unless the threads have
        # waited longer at a time than the GIL lets them.
        outside = sum(work.outside_s(switch_s) for work in self.workers)
        return outside < IS_OUTSIDE * self.total("other_wait_s")


def loop_gil_share(cpu_s: float, workers_cpu_s: float, working_s: float, seconds: float) -> float:
    """Return the share of the time in which a loop may have held the GIL.

    Args:
        cpu_s: CPU time of the loop's process, with its threads, in seconds.
        workers_cpu_s: CPU time of the workers, which are threads of it, in seconds.
        working_s: Seconds in which the loop did not wait.
        seconds: Seconds of all.
    """
    return ratio(min(max(0.0, cpu_s - workers_cpu_s), working_s), seconds)


def most_on(cpus: float, computing_share: float) -> int:
    """Return the number of workers for which there are CPUs, if each computes for some of its time.

    These are as many as there are CPUs, and those that wait meanwhile. Waits are not spread evenly
    over time, so half as many more of the latter keep the CPUs busy.

    Example:
        >>> most_on(4, 1.0), most_on(4, 0.9), most_on(2, 0.1), most_on(0.5, 1.0)
        (4, 4, 29, 1)
        >>> most_on(4, 0.0) > 1000
        True
    """
    share = min(max(computing_share, 1e-6), 1.0)
    return max(1, int(cpus * (1 + _SPARE_WAITS * (1 - share) / share)))
