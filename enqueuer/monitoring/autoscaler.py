"""Deciding the number of workers after each window of a run, for `workers="auto"`.

    Stats, now and then --> Autoscaler.next(stats) --> number of workers, and of elements at once

                     the loop waits, and the workers do not
        n workers --------------------------------------------> as many as the times ask for
                  <--------------------------------------------
                     they made it hardly faster; or it does not wait, and some workers are idle

The time of a worker has three parts: it computes, it could compute but has no CPU, or it waits for
something else, such as a file or the GIL. The time that it computes, and the shortest time that it
was seen to wait, show for how many workers there are CPUs, also on a busy machine. The rate after
a step up shows whether they wait for each other: for the GIL, a lock or a disk.

If it may choose `concurrency`, elements that wait get more of it, as threads cost less than
workers, until the Python code of a worker fills a CPU; without a GIL, all CPUs. Only then, and for
elements that compute, it adds workers.

The autoscaler only decides: it neither waits nor reads a clock, and has no access to the workers.
Each step up raises the lower limit, and each step that did not help lowers the upper limit. So the
number stays the same while the load does. Only another load resets the limits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from enqueuer.common.text import percent, ratio
from enqueuer.monitoring import usage
from enqueuer.monitoring.stats import (
    HARDLY_WAITS,
    OFTEN_LACKS_CPU,
    PASSING_S,
    Stats,
    elements_wait,
    fills_gil,
    is_cheap,
    longest_s,
    max_concurrency,
    max_on,
    of_elements,
    total,
    use_s,
    workers_often_wait,
)

# Seconds; in a shorter window, the numbers of a load that varies are mostly chance.
WINDOW_S = 1.0
# Elements; the times of fewer are mostly chance.
FEWEST_ELEMENTS = 8
# Seconds between decisions when nothing changes any more, as each costs a little.
LONGEST_WINDOW_S = 16.0
# Seconds; a loop that stands still for longer seems to hang.
MAX_COST_S = 10.0
# Share of the gain that more workers could give, for them to stay.
LEAST_GAIN = 0.2
# Ratio to the rate before; a step to a rate below that is taken back at once.
WORSE = 0.8
# Ratio to the number of workers that are busy all the time.
SPARE = 1.2
# Ratio to the number of workers that would be as fast if none waited for another one. Some do, by
# chance, even if there are enough.
MARGIN = 1.5
# Windows in a row in which fewer workers would do, before some exit.
CALM = 3
# Part of the workers; fewer of them are not added nor ended.
LEAST_STEP = 8
# Windows in which a step up hardly helped, before it is taken back.
DOUBTS = 2
# Ratio of the times for a batch, twice in a row, by which it is another load.
OTHER = 2.0
# Ratio of the time to make a batch to the time to use it, from which on the latter is no matter.
_LITTLE_USE = 100


class Autoscaler:
    """Decide how many workers there should be.

    Args:
        workers: Number of workers at first.
        most: Largest number of workers.
        shards: Number of shards that they share; None for tasks, which any number can share.
        longest_wait_s: Seconds that the loop waits for a batch before it warns or raises; a
            change takes at most half of it. None if there is no limit.
        elements: Number of elements in each item, such as a batch.
        concurrency: Number of elements at once in each worker at first.
        max_concurrency: Largest number of elements at once in each worker.

    Attributes:
        concurrency: Number of elements at once in each worker from now on.
        due_s: Time of the next decision, in seconds since the start.
        reason: Reason for the last decision, in words.
        wanted: Number of workers that the load seemed to need in the last window, allowed or not.
        waiting_share: Share of its time in which the loop waited then.
    """

    def __init__(
        self,
        workers: int,
        most: int,
        shards: int | None = None,
        longest_wait_s: float | None = None,
        elements: int = 1,
        concurrency: int = 1,
        max_concurrency: int = 1,
    ) -> None:
        self.due_s = 0.0
        self.reason = ""
        self.wanted = workers
        self.waiting_share = 0.0
        self.concurrency = concurrency
        self._max_concurrency_ever = max_concurrency
        self._chooses_concurrency = max_concurrency > concurrency
        self._workers = workers
        self._shards = shards
        self._fewest_items = -(-FEWEST_ELEMENTS // elements)
        self._max_cost_s = min(MAX_COST_S, (longest_wait_s or math.inf) / 2)
        self._max_ever = self._as_fast_as(most)
        self._window_s = WINDOW_S
        # Snapshot when the number of workers changed last.
        self._arrived: Stats | None = None
        # Snapshot when the window began; None until all workers have delivered something.
        self._base: Stats | None = None
        self._change: _Change | None = None
        self._forget()

    def next(self, stats: Stats, replay_s: float | None = None) -> int:
        """Return the number of workers that there should be from now on.

        Args:
            stats: Statistics now.
            replay_s: Seconds of work that would have to be repeated, by all workers together;
                None if a change costs nothing.
        """
        if self._base is None:
            self._warm_up(stats)
            return self._workers
        seen = stats.since(self._base)
        remaining_s = self._window_s - seen.seconds
        if remaining_s <= 0 and seen.items >= max(self._fewest_items, self._workers):
            self._change = self._decide(_Window(seen))
            self._base, self._window_s = stats, min(2 * self._window_s, LONGEST_WINDOW_S)
            remaining_s = self._window_s
        self.due_s = stats.seconds + max(remaining_s, WINDOW_S / 8)
        if self._change is not None and self._change.cost_s(stats, replay_s) <= self._max_cost_s:
            self._go_to(self._change)
        return self._workers

    def refused(self, workers: int, concurrency: int) -> None:
        """Set the limits to the present numbers, as no more workers could be started."""
        self._max_ever = self._most = self._workers = workers
        self._max_concurrency_ever = self._max_concurrency = self.concurrency = concurrency
        self._arrive()

    # --- inside ---

    def _forget(self) -> None:
        """Discard the measurements of the load, and reset the limits."""
        self._fewest, self._most = 1, self._max_ever
        self._max_concurrency = self._max_concurrency_ever
        self._step: _Step | None = None
        # The first window with this number of workers.
        self._known: _Window | None = None
        # Shortest time of a worker for an item, without its waits for a CPU.
        self._least_s = math.inf
        self._calm = self._unlike = 0

    def _warm_up(self, stats: Stats) -> None:
        """Begin the window when all workers have delivered an item, or have had time to."""
        self.due_s = stats.seconds + WINDOW_S / 8
        if self._arrived is None:
            self._arrived = stats
        came = stats.items - self._arrived.items
        all_work = all(worker.items for worker in stats.workers)
        all_are_ready = all(worker.busy_s + worker.waiting_s for worker in stats.workers)
        if stats.first_batch_s is None or not all_are_ready:
            return
        if all_work or came >= 4 * self._workers:
            self._base = stats
            self.due_s = stats.seconds + self._window_s

    def _decide(self, window: _Window) -> _Change | None:
        known = self._known
        is_other = known is not None and window.differs_from(known)
        if is_other or (known is not None and window.waits and not known.waits):
            self._unlike += 1
            # The first time it may be a pause of the loop, or a window with parts of two loads.
            if self._unlike == 1:
                return None
        if is_other:
            self._forget()
        self._unlike = 0
        self._known = self._known or window
        self._least_s = min(self._least_s, window.service_s)
        self.wanted, self.waiting_share = window.wanted, window.seen.waiting_share
        step = self._step
        at_once = self._workers * self.concurrency
        if step is not None and not step.has_helped(at_once, window):
            self._step = step._replace(doubts=step.doubts + 1)
            return self._back(step, window) if self._step.doubts >= DOUBTS else None
        self._step = None
        return self._more(window) if window.waits else self._fewer(window)

    def _back(self, step: _Step, window: _Window) -> _Change:
        is_slower = window.rate < step.last.rate
        reason = f"{step.before} were as fast" if is_slower else "that hardly helped"
        is_urgent = window.rate < WORSE * step.last.rate
        needed, workers, each = step.needed_for(window.rate), self._workers, self.concurrency
        if step.concurrency < each:
            each = min(each, math.ceil(needed / workers))
        else:
            workers = self._enough_for(min(workers, math.ceil(needed / each)))
        return _Change(workers, each, window, is_urgent, reason, is_back=True)

    def _more(self, window: _Window) -> _Change | None:
        self._calm = 0
        now, most = self._workers, self._most
        # As many as there are CPUs for, by what each item needs.
        computing_share = ratio(window.compute_s, self._least_s)
        most = min(most, self._as_fast_as(max_on(window.seen.cpus, computing_share)))
        if workers_often_wait(window.seen) or is_cheap(window.seen):
            return None
        reason = f"the loop waited {percent(window.seen.waiting_share)} of its time"
        if self._chooses_concurrency and window.elements_wait:
            if not fills_gil(window.seen):
                return self._more_at_once(window, reason)
            if window.seen.backend == "thread":
                return None
        if now + now // LEAST_STEP >= most:
            return None
        # The effect of a smaller step could not be distinguished from chance.
        workers = self._enough_for(max(now + max(1, now // 4), window.wanted))
        return _Change(min(workers, most), self.concurrency, window, True, reason)

    def _more_at_once(self, window: _Window, reason: str) -> _Change | None:
        """Return a change to more elements at once in each worker, as these wait."""
        workers, now = self._workers, self.concurrency
        cpus = 1.0 if usage.has_gil() else max(1.0, window.seen.cpus / workers)
        most = min(
            self._max_concurrency,
            max_concurrency(workers, now),
            # With a GIL, the Python code of all threads of a process runs one at a time. That they
            # take jobs in turn makes an element slower, so more of them fill a CPU than its own
            # waits ask.
            max_on(cpus, ratio(window.compute_s, window.element_s)),
        )
        if now + now // LEAST_STEP >= most:
            return None
        wanted = math.ceil(min(now * window.make_s / window.use_s / workers, most))
        each = min(max(now + max(1, now // 4), wanted), most)
        return _Change(workers, each, window, True, reason)

    def _fewer(self, window: _Window) -> _Change | None:
        workers = max(self._fewest, self._enough_for(math.ceil(SPARE * window.busy)))
        now = self._workers
        self._calm = self._calm + 1 if workers < now - now // LEAST_STEP else 0
        if self._calm < CALM:
            return None
        waited = percent(window.seen.waiting_share)
        reason = f"the loop waited {waited} of its time, and some workers more"
        return _Change(workers, self.concurrency, window, False, reason)

    # The loop takes all shards in turn, so it is as fast as the worker that has most of them: of
    # 16 shards, 5 workers are as fast as 4, and only 6 are faster.

    def _as_fast_as(self, workers: int) -> int:
        """Return the smallest number of workers that is as fast as `workers`."""
        shards = self._shards
        return workers if shards is None else -(-shards // -(-shards // workers))

    def _enough_for(self, workers: int) -> int:
        """Return the smallest number of workers that do as much as `workers` with equal shares."""
        shards = self._shards
        return workers if shards is None else -(-shards // max(1, shards // max(1, workers)))

    def _go_to(self, change: _Change) -> None:
        now, each = self._workers, self.concurrency
        if change.concurrency < each:
            self._max_concurrency = change.concurrency
        elif change.is_back:
            self._fewest = self._most = change.workers
        elif change.workers > now:
            self._fewest = max(self._fewest, now + 1)
        is_more = change.workers > now or change.concurrency > each
        self._step = _Step(now * each, each, change.window) if is_more else None
        self._workers, self.concurrency = change.workers, change.concurrency
        self.reason = change.reason
        self._arrive()

    def _arrive(self) -> None:
        self.due_s, self._window_s = 0.0, WINDOW_S
        self._calm = self._unlike = 0
        self._arrived = self._base = self._known = self._change = None


class _Change(NamedTuple):
    """A number of workers, the window that shows it, whether it is urgent, and the reason."""

    workers: int
    # Number of elements at once in each of them.
    concurrency: int
    window: _Window
    is_urgent: bool
    reason: str
    # Whether it is the number before the last step.
    is_back: bool = False

    def cost_s(self, stats: Stats, replay_s: float | None) -> float:
        """Return the seconds for which the loop would stand still; inf if that is not worth it."""
        if replay_s is None:
            return 0.0
        if not self.is_urgent:
            return math.inf
        starting_s = max((worker.starting_s for worker in stats.workers), default=0.0)
        return replay_s / self.workers + starting_s


class _Step(NamedTuple):
    """A step up, from some elements at once in all workers and in each, and who doubts it.

    `last` is the window before it; `doubts` is the number of windows in which it did not help.
    """

    before: int
    concurrency: int
    last: _Window
    doubts: int = 0

    def has_helped(self, at_once: int, window: _Window) -> bool:
        """Return whether so many are faster than those before, by a part of what is possible."""
        hoped = 1 + LEAST_GAIN * (at_once / self.before - 1)
        if not window.waits:
            # The loop is the limit itself. If it did little but receive batches, more workers can
            # have made that slower; any other loop is slower for reasons of its own.
            hoped = 1 - HARDLY_WAITS if self.last.use_s < PASSING_S else 0.0
        # If other programs have taken the CPUs, the rate does not show the effect of the step.
        return window.rate >= self.last.rate * (min(hoped, WORSE) if window.lacks_cpus else hoped)

    def needed_for(self, rate: float) -> int:
        """Return the number of elements at once for a rate, if none waits for another one."""
        gain = ratio(rate, self.last.rate)
        return self.before if gain < 1 + LEAST_GAIN else math.ceil(MARGIN * self.before * gain)


class _Window:
    """The numbers of a window.

    Attributes:
        rate: Batches a second that the workers made.
        seen: All numbers of the window.
        waits: Whether it waits so much that this matters.
        make_s: Seconds that one worker takes for a batch.
        service_s: The same without the time in which the worker had no CPU.
        element_s: The same if all elements of a batch were made one after the other.
        compute_s: Seconds of CPU time for a batch; inf if the system does not report it.
        lacks_cpus: Whether the workers often had no CPU.
        use_s: Seconds that the loop takes for a batch.
        busy: Number of workers that were busy, on average.
        elements_wait: Whether elements mostly wait.
    """

    def __init__(self, seen: Stats) -> None:
        made, busy_s = max(1, total(seen, "items")), total(seen, "busy_s")
        is_known = all(worker.cpu_s is not None for worker in seen.workers)
        cpu_s = sum(min(worker.cpu_s or 0.0, worker.busy_s) for worker in seen.workers)
        self.rate = made / max(longest_s(seen), 1e-9)
        self.seen = seen
        self.waits = seen.waiting_share >= HARDLY_WAITS
        self.make_s = busy_s / made
        self.service_s = max(busy_s - total(seen, "lacked_s"), cpu_s) / made
        self.element_s = (of_elements(seen, "busy_s") - of_elements(seen, "lacked_s")) / made
        self.compute_s = cpu_s / made if is_known else math.inf
        self.lacks_cpus = self.service_s < (1 - OFTEN_LACKS_CPU) * self.make_s
        self.use_s = max(use_s(seen), 1e-9)
        self.busy = busy_s / max(seen.seconds - seen.idle_s, 1e-9)
        self.elements_wait = is_known and elements_wait(seen)

    @property
    def wanted(self) -> int:
        """Number of workers that would keep up with the loop; a tenth of one is chance."""
        return max(1, math.ceil(min(self.make_s / self.use_s, 1e6) - 0.1))

    def differs_from(self, other: _Window) -> bool:
        """Return whether a batch takes another time to make, or to use."""
        # A loop that does little more than take the batches varies by chance.
        least_s = min(self.service_s, other.service_s) / _LITTLE_USE
        uses = max(self.use_s, least_s), max(other.use_s, least_s)
        pairs = (self.service_s, other.service_s), uses
        return any(max(pair) > OTHER * min(pair) for pair in pairs)
