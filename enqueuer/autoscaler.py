"""How many workers: a decision after each window of a run, for `workers="auto"`.

    Stats, now and then --> Autoscaler.next(stats) --> how many workers

                     the loop waits, and the workers do not
        n workers --------------------------------------------> up to 2 n
                  <--------------------------------------------
                     they made it hardly faster; or it does not wait, and some have nothing to do

It only decides: it neither waits nor looks at a clock, and knows no worker. Each step up raises
the fewest that will be tried again, and each that did not help lowers the most, so that on one and
the same load it comes to rest. Only another load begins anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from enqueuer.bottleneck import FEWEST_BATCHES, HARDLY_WAITS, OFTEN_WAITS, most_on
from enqueuer.formats import percent, ratio
from enqueuer.stats import Stats, WorkerStats

WINDOW_S = 1.0  # the shortest look that tells something of loads that vary
LONGEST_WINDOW_S = 16.0  # nothing changes any more, and looking costs a little
MOST_COST_S = 10.0  # a loop that stands still for longer seems to hang
LEAST_GAIN = 0.2  # of what so many more workers could give, for them to stay
WORSE = 0.8  # of the rate before; what is worse than that is taken back at once
SPARE = 1.2  # times as many workers as are busy all the time
CALM = 3  # windows in a row, in which fewer would do, before some are retired
DOUBTS = 2  # windows in which a step up hardly helped, before it is taken back
OTHER = 2.0  # times the time for a batch, twice in a row: it is another load


class Autoscaler:
    """Decides how many workers there should be.

    Args:
        workers: How many there are at first.
        most: How many there may be.
        shards: How many shards they share; None of tasks, which any number can share.
        longest_wait_s: For how long the loop waits for a batch before something is said, or raised;
            a change takes at most half of it. None: for ever.

    Attributes:
        due_s: When there is something to decide, in seconds since the start.
        reason: Why the last decision was so, in words.
        wanted: How many workers the load seemed to need in the last window, allowed or not.
        waiting_share: How much of its time the loop waited then.
    """

    def __init__(
        self,
        workers: int,
        most: int,
        shards: int | None = None,
        longest_wait_s: float | None = None,
    ) -> None:
        self.due_s = 0.0
        self.reason = ""
        self.wanted = workers
        self.waiting_share = 0.0
        self._workers = workers
        self._shards = shards
        self._most_cost_s = min(
            MOST_COST_S, math.inf if longest_wait_s is None else longest_wait_s / 2
        )
        self._most_ever = self._as_fast_as(most)
        self._window_s = WINDOW_S
        self._arrived: Stats | None = None  # since then there are so many workers
        self._base: Stats | None = None  # the window began; None: not all have delivered yet
        self._wish: _Wish | None = None
        self._forget()

    def next(self, stats: Stats, again_s: float | None = None) -> int:
        """Return how many workers there should be from now on.

        Args:
            stats: Of now.
            again_s: Seconds of work that would have to be done again, by all workers together;
                None: a change costs nothing.
        """
        if self._base is None:
            self._warm_up(stats)
            return self._workers
        seen = stats.since(self._base)
        left_s = self._window_s - seen.seconds
        if left_s <= 0 and seen.items >= FEWEST_BATCHES:
            self._wish = self._decide(_Look.at(seen))
            self._base, self._window_s = stats, min(2 * self._window_s, LONGEST_WINDOW_S)
            left_s = self._window_s
        self.due_s = stats.seconds + max(left_s, WINDOW_S / 8)
        if self._wish is not None and self._wish.cost_s(stats, again_s) <= self._most_cost_s:
            self._go_to(self._wish)
        return self._workers

    def refused(self, workers: int) -> None:
        """Note that there cannot be more workers than so many, and that there are so many."""
        self._most_ever = self._most = self._workers = workers
        self._arrive()

    # --- inside ---

    def _forget(self) -> None:
        """Know nothing of the load."""
        self._fewest, self._most = 1, self._most_ever
        self._before: tuple[int, float] | None = None  # the last step up: from what, how fast
        self._known: _Look | None = None  # the first look at so many workers
        self._calm = self._strange = self._doubts = 0

    def _warm_up(self, stats: Stats) -> None:
        """Begin the window when all workers have delivered something, or could have."""
        self.due_s = stats.seconds + WINDOW_S / 8
        if self._arrived is None:
            self._arrived = stats
        came = stats.items - self._arrived.items
        all_work = all(worker.items for worker in stats.workers)
        if stats.first_batch_s is not None and (all_work or came >= 4 * self._workers):
            self._base = stats
            self.due_s = stats.seconds + self._window_s

    def _decide(self, look: _Look) -> _Wish | None:
        known = self._known
        is_other = known is not None and look.differs_from(known)
        if is_other or (known is not None and look.waits and not known.waits):
            self._strange += 1
            if self._strange == 1:
                return None  # a pause of the loop, or a window that has something of two loads
        if is_other:
            self._forget()
        self._strange = 0
        self._known = self._known or look
        self.wanted, self.waiting_share = look.wanted, look.waiting_share
        if not look.waits:
            self._before = None
            return self._fewer(look)
        if self._before is not None:
            workers, rate = self._before
            hoped = LEAST_GAIN * (self._workers / workers - 1)
            if look.rate < rate * (1 + hoped):
                self._doubts += 1
                if self._doubts < DOUBTS:
                    return None
                reason = f"{workers} were as fast" if look.rate < rate else "that hardly helped"
                return _Wish(workers, look, look.rate < WORSE * rate, reason, is_back=True)
            self._before = None
        return self._more(look)

    def _more(self, look: _Look) -> _Wish | None:
        self._calm = 0
        now, most = self._workers, min(self._most, self._as_fast_as(look.most_that_help))
        if now >= most or look.has_no_room:
            return None
        step = now + max(1, now // 4)  # what less would change could not be told from chance
        workers = self._enough_for(min(2 * now, max(step, look.wanted)))
        reason = f"the loop waited {percent(look.waiting_share)} of its time"
        return _Wish(min(workers, most), look, True, reason)

    def _fewer(self, look: _Look) -> _Wish | None:
        workers = max(self._fewest, self._enough_for(math.ceil(SPARE * look.busy)))
        self._calm = self._calm + 1 if workers < self._workers else 0
        if self._calm < CALM:
            return None
        reason = f"the loop waited {percent(look.waiting_share)} of its time, and some workers more"
        return _Wish(workers, look, False, reason)

    # The loop takes all shards in turn, so it is as fast as the worker that has most of them: of
    # 16 shards, 5 workers are as fast as 4, and only 6 are faster.

    def _as_fast_as(self, workers: int) -> int:
        """Return the fewest workers that are as fast as so many."""
        shards = self._shards
        return workers if shards is None else -(-shards // -(-shards // workers))

    def _enough_for(self, workers: int) -> int:
        """Return the fewest workers that do as much as so many could if they shared evenly."""
        shards = self._shards
        return workers if shards is None else -(-shards // max(1, shards // max(1, workers)))

    def _go_to(self, wish: _Wish) -> None:
        now = self._workers
        if wish.is_back:
            self._fewest = self._most = wish.workers
        elif wish.workers > now:
            self._fewest = max(self._fewest, now + 1)
        self._before = (now, wish.look.rate) if wish.workers > now else None
        self._workers, self.reason = wish.workers, wish.reason
        self._arrive()

    def _arrive(self) -> None:
        self.due_s, self._window_s = 0.0, WINDOW_S
        self._calm = self._strange = self._doubts = 0
        self._arrived = self._base = self._known = self._wish = None


@dataclass(frozen=True)
class _Wish:
    """A number of workers, the look that says so, whether it is urgent, and why."""

    workers: int
    look: _Look
    is_urgent: bool
    reason: str
    is_back: bool = False  # to what was before the last step

    def cost_s(self, stats: Stats, again_s: float | None) -> float:
        """Return for how long the loop would stand still; for ever if that is not worth it."""
        if again_s is None:
            return 0.0
        if not self.is_urgent:
            return math.inf
        starting_s = max((worker.starting_s for worker in stats.workers), default=0.0)
        return again_s / self.workers + starting_s


def _busy_s(worker: WorkerStats) -> float:
    return worker.making_s + worker.sending_s


@dataclass(frozen=True)
class _Look:
    """What a window tells."""

    rate: float  # batches a second
    waiting_share: float  # of the loop's time
    make_s: float  # for each batch, by one worker
    use_s: float  # for each batch, by the loop
    busy: float  # workers, on average
    idle_share: float  # of the workers' time, in which they waited for room or a task
    most_that_help: int  # for more there are no CPUs, by what each computes

    @staticmethod
    def at(seen: Stats) -> _Look:
        """Look at the statistics of a window."""
        busy_s = sum(map(_busy_s, seen.workers))
        waiting_s = sum(worker.waiting_s for worker in seen.workers)
        made = sum(worker.items for worker in seen.workers)
        is_known = all(worker.cpu_s is not None for worker in seen.workers)
        # with what they had no CPU for: on a busy machine they compute no less
        computed_s = sum(
            min((worker.cpu_s or 0.0) + (worker.starved_s or 0.0), _busy_s(worker))
            for worker in seen.workers
        )
        return _Look(
            rate=seen.items / max(seen.waiting_s + seen.working_s, 1e-9),
            waiting_share=seen.waiting_share,
            make_s=busy_s / max(made, 1),
            use_s=seen.working_s / max(seen.items, 1),
            busy=busy_s / max(seen.seconds - seen.idle_s, 1e-9),
            idle_share=waiting_s / max(waiting_s + busy_s, 1e-9),
            most_that_help=most_on(seen.cpus, ratio(computed_s, busy_s) if is_known else 1.0),
        )

    @property
    def waits(self) -> bool:
        return self.waiting_share >= HARDLY_WAITS

    @property
    def has_no_room(self) -> bool:
        return self.idle_share > OFTEN_WAITS

    @property
    def wanted(self) -> int:
        """How many workers would keep up with the loop; a tenth of one is chance."""
        return max(1, math.ceil(min(self.make_s / max(self.use_s, 1e-9), 1e6) - 0.1))

    def differs_from(self, other: _Look) -> bool:
        """Tell whether a batch takes another time to make, or to use."""
        pairs = (self.make_s, other.make_s), (self.use_s, other.use_s)
        return any(max(pair) > OTHER * min(pair) for pair in pairs)
