"""The autoscaler on numbers alone: a clock that only counts, and loads whose answer is known."""

import dataclasses
import itertools
import math

import pytest

from enqueuer.monitoring import autoscaler
from enqueuer.monitoring.autoscaler import Autoscaler
from enqueuer.monitoring.meters import WorkerStats
from enqueuer.monitoring.stats import Stats

ALL_TIMES = dict(starting_s=0.0, idle_s=0.0, rss_bytes=None)


class Load:
    """A loop and its workers, as they would be measured, second by second.

    Args:
        make_s: What a worker needs for a batch; called with how many there are.
        use_s: What the loop needs for a batch; called in the same way.
        autoscaler: Asked every quarter of a second.
        cpu_share: How much of the making is computing.
        send_share: How much of it is sending.
        shards: Number of shards, divided among the workers; the loop waits for the slowest.
        replay_s: Function of the time and the number of workers: seconds that a change repeats.
    """

    def __init__(
        self,
        make_s,
        use_s,
        autoscaler,
        cpu_share=0.0,
        cpus=64,
        shards=None,
        replay_s=None,
        send_share=0.0,
    ):
        self.make_s, self.use_s, self.send_share = make_s, use_s, send_share
        self.autoscaler, self.cpu_share, self.cpus, self.shards = (
            autoscaler,
            cpu_share,
            cpus,
            shards,
        )
        self.replay_s = replay_s or (lambda time_s, workers: None)
        self.workers, self.time_s = 1, 0.0
        self.items = self.waiting_s = self.working_s = 0.0
        # Items, making and waiting of the present workers.
        self.each = {}
        self.generation = 0
        self.history = [1]

    def run(self, seconds):
        """Let time pass; return how many workers there were, without repetitions."""
        for _ in range(int(seconds * 4)):
            self._pass(0.25)
            if self.time_s >= self.autoscaler.due_s:
                self._ask(self.replay_s(self.time_s, self.workers))
        return self.history

    def begin_epoch(self):
        """Ask between two epochs, when nothing is done again; return the same."""
        self._ask(None)
        return self.history

    def _ask(self, replay_s):
        workers = self.autoscaler.next(self.stats(), replay_s)
        if workers != self.workers:
            self.workers, self.generation = workers, self.generation + 1
            self.each = {}
            self.history.append(workers)

    def _pass(self, seconds):
        make_s, use_s = self.make_s(self.workers), self.use_s(self.workers)
        # Share of the work of the worker that has most of it.
        share = 1 / self.workers
        if self.shards is not None:
            share = math.ceil(self.shards / self.workers) / self.shards
        rate = min(1 / use_s, 1 / (make_s * share))
        self.time_s += seconds
        self.items += rate * seconds
        self.working_s += rate * seconds * use_s
        self.waiting_s += seconds * (1 - rate * use_s)
        for index in range(self.workers):
            items, making, waiting = self.each.get(index, (0.0, 0.0, 0.0))
            own = rate * seconds / self.workers
            busy = own * make_s
            self.each[index] = items + own, making + busy, waiting + seconds - busy

    def stats(self):
        workers = [
            WorkerStats(
                index, "", (), items, 0, self.generation,
                making_s=making * (1 - self.send_share), sending_s=making * self.send_share,
                waiting_s=waiting, cpu_s=making * self.cpu_share, **ALL_TIMES,
            )
            for index, (items, making, waiting) in self.each.items()
        ]  # fmt: skip
        return Stats(
            self.time_s, "thread", True, 0, self.items, 0.0, 0.0, self.waiting_s,
            0.0, self.working_s, 0.0, {}, {}, 0, 10, 0, 0, self.cpus, 0.0, tuple(workers),
        )  # fmt: skip


def load(make_s, use_s, most=32, shards=None, longest_wait_s=None, **options):
    make = make_s if callable(make_s) else lambda workers: make_s
    use = use_s if callable(use_s) else lambda workers: use_s
    scaler = Autoscaler(1, most, shards, longest_wait_s)
    return Load(make, use, scaler, shards=shards, **options)


def without_cpus(stats, share):
    """Return statistics in which the workers had no CPU for a share of their work."""
    workers = [
        dataclasses.replace(worker, cpu_wait_s=share * (worker.making_s + worker.sending_s))
        for worker in stats.workers
    ]
    return dataclasses.replace(stats, workers=tuple(workers))


@pytest.mark.parametrize(
    ("times", "workers"), [(0.1, 1), (1, 1), (2, 2), (3, 3), (4, 4), (7, 7), (16, 16)]
)
def test_as_many_workers_as_making_takes_longer_than_using(times, workers):
    assert load(0.01 * times, 0.01).run(60)[-1] == workers


def test_it_goes_to_the_number_at_once_and_comes_to_rest():
    one = load(0.16, 0.01)
    assert one.run(2) == [1, 16]
    assert one.run(3600) == [1, 16]


HISTORIES = {
    "never more than the most": (1.0, 0.001, {"most": 6}, 100, [1, 6]),
    # As threads that hold the GIL do: two make as much as one.
    "taken back if they hinder each other": (lambda n: 0.01 * n, 0.001, {}, 600, [1, 10, 1]),
    # Although the loop does not wait any more.
    "taken back if the loop gets slower": (13e-6, lambda n: 10e-6 * n, {}, 3600, [1, 2, 1]),
    "the same of a slower loop": (26e-6, lambda n: 20e-6 * n, {}, 3600, [1, 2, 1]),
    "kept if the loop is the limit then": (12e-6, 10e-6, {}, 3600, [1, 2]),
    # As it takes longer to pass it.
    "none for what is cheap to make": (20e-6, 15e-6, {"send_share": 0.7}, 60, [1]),
    "more for what is not": (20e-6, 15e-6, {"send_share": 0.2}, 60, [1, 2]),
    # Four disks, say.
    "found if they help only so far": (lambda n: 0.04 * max(1, n / 4), 0.001, {}, 600, [1, 32, 6]),
}


@pytest.mark.parametrize(
    ("make_s", "use_s", "options", "seconds", "history"), HISTORIES.values(), ids=HISTORIES
)
def test_the_number_of_workers(make_s, use_s, options, seconds, history):
    assert load(make_s, use_s, **options).run(seconds) == history


@pytest.mark.parametrize(
    ("cpu_share", "cpus", "workers"),
    [(0.0, 2, 32), (0.05, 2, 32), (0.1, 2, 29), (0.25, 2, 11), (0.5, 2, 5), (1, 2, 2), (1, 3.5, 3)],
)
def test_what_waits_gets_as_many_workers_as_there_are_cpus_for(cpu_share, cpus, workers):
    """Each needs only a part of one; of those that wait, there are half as many more."""
    one = load(0.32, 0.01, most=64, cpu_share=cpu_share, cpus=cpus)
    assert one.run(200)[-1] == workers


def test_where_the_cpu_time_is_not_known_there_are_no_more_workers_than_cpus():
    one = load(0.32, 0.01, most=64, cpus=4)
    one.stats = lambda stats=one.stats: dataclasses.replace(
        stats(),
        workers=tuple(dataclasses.replace(w, cpu_s=None) for w in stats().workers),
    )
    assert one.run(200)[-1] == 4


def test_waiting_for_a_cpu_is_computing_too():
    """As on a machine where others compute, too."""
    one = load(1.0, 0.001, cpu_share=0.4, cpus=2)
    one.stats = lambda stats=one.stats: without_cpus(stats(), 0.5)
    assert one.run(200)[-1] == 2


def test_what_made_it_a_little_slower_is_taken_back_after_a_long_epoch():
    one = load(13e-6, lambda workers: 10e-6 if workers == 1 else 14.2e-6, replay_s=all_again)
    assert one.run(60) == [1, 2]
    assert one.begin_epoch() == [1, 2, 1]


@pytest.mark.parametrize("lacked", [0.0, 0.4])
def test_a_loop_that_becomes_slower_for_its_own_reasons_keeps_the_workers(lacked):
    one = load(0.013, lambda workers: 0.01 if workers == 1 else 0.019)
    one.stats = lambda stats=one.stats: without_cpus(stats(), lacked)
    assert one.run(3600) == [1, 2]


def test_one_bad_window_does_not_show_that_a_step_did_not_help():
    one = load(0.04, 0.01)
    one.make_s = lambda workers: 0.15 if workers == 4 and one.time_s < 2.6 else 0.04
    assert one.run(60) == [1, 4]


def test_what_was_too_few_is_not_tried_again():
    """Although three seem to be enough while there are four."""
    one = load(lambda workers: 0.02 if workers > 3 else 0.08, 0.01)
    assert one.run(600)[-1] == 4
    changes = len(one.history)
    one.run(3600)
    assert len(one.history) == changes


def test_a_queue_that_is_too_short_is_no_reason_for_more():
    """The workers have no room half of their time, and yet the loop waits."""
    one = load(0.04, 0.01)
    one._pass = lambda seconds: _half(one, seconds)
    assert one.run(100) == [1]


def _half(one, seconds):
    one.time_s += seconds
    one.items += seconds * 10
    one.working_s += seconds / 2
    one.waiting_s += seconds / 2
    items, making, waiting = one.each.get(0, (0.0, 0.0, 0.0))
    one.each[0] = items + seconds * 10, making + seconds / 2, waiting + seconds / 2


def test_those_who_have_nothing_to_do_are_retired_but_one_in_five():
    one = load(0.16, 0.01)
    assert one.run(30)[-1] == 16
    # Now four workers are enough.
    one.use_s = lambda workers: 0.04
    assert one.run(600)[-1] == 5
    assert one.run(3600)[-1] == 5
    assert len(one.history) <= 8


def test_no_worker_exits_for_one_pause_of_the_loop():
    one = load(0.08, 0.01)
    one.run(30)
    # For example, a model is validated.
    one.time_s += 300
    one.working_s += 300
    assert one.run(300) == [1, 8]


def test_another_load_is_tuned_anew():
    one = load(0.04, 0.01)
    assert one.run(30)[-1] == 4
    one.make_s = lambda workers: 0.12
    assert one.run(120)[-1] == 12
    one.make_s = lambda workers: 0.01
    assert one.run(300)[-1] == 2


def test_of_shards_only_numbers_that_divide_them_better():
    """16 of them are as fast on 15 workers as on 8."""
    for times in (1, 2, 3, 4, 5, 7, 9, 16, 40):
        assert set(load(0.01 * times, 0.01, shards=16).run(200)) <= {1, 2, 3, 4, 6, 8, 16}
    assert load(0.05, 0.01, shards=16).run(200)[-1] == 6
    assert load(1.0, 0.01, shards=16, most=15).run(200)[-1] == 8


# --- what it costs ---


def all_again(time_s, workers):
    return time_s * workers


def test_a_change_is_no_reason_for_a_stall():
    patient = load(0.04, 0.01, longest_wait_s=60.0, replay_s=all_again)
    assert patient.run(20) == [1, 4]
    hasty = load(0.04, 0.01, longest_wait_s=0.5, replay_s=all_again)
    assert hasty.run(20) == [1]


def test_late_it_waits_for_the_next_epoch():
    late = load(0.01, 0.02, replay_s=all_again)
    late.run(100)
    late.use_s = lambda workers: 0.0025
    assert late.run(100) == [1]
    assert late.begin_epoch() == [1, 4]


def test_no_worker_exits_in_the_middle_of_an_epoch():
    one = load(0.16, 0.01, replay_s=lambda time_s, workers: 0.1)
    assert one.run(30)[-1] == 16
    one.use_s = lambda workers: 0.04
    assert one.run(600)[-1] == 16
    assert one.begin_epoch()[-1] == 5


def test_what_has_become_slower_is_taken_back_in_the_middle_too():
    one = load(lambda workers: 0.01 * workers**2, 0.001, replay_s=lambda time_s, workers: 0.1)
    assert one.run(100) == [1, 10, 1]


def test_workers_that_take_long_to_start_are_changed_between_epochs():
    one = load(0.04, 0.01, replay_s=lambda time_s, workers: 0.0)
    one.stats = lambda stats=one.stats: _slow_to_start(stats())
    assert one.run(100) == [1]
    assert one.begin_epoch()[-1] == 4


def _slow_to_start(stats):
    workers = [dataclasses.replace(w, starting_s=2 * autoscaler.MAX_COST_S) for w in stats.workers]
    return dataclasses.replace(stats, workers=tuple(workers))


# --- details ---


def test_the_first_window_begins_when_all_workers_have_delivered():
    one = load(0.04, 0.01)
    silent = itertools.count()
    stats = one.stats

    def not_yet():
        found = stats()
        if next(silent) < 20:
            workers = [dataclasses.replace(worker, items=0) for worker in found.workers]
            return dataclasses.replace(found, workers=tuple(workers), items=0)
        return found

    one.stats = not_yet
    assert one.run(3) == [1]


def test_too_few_batches_say_nothing():
    one = load(2.0, 0.5)
    assert one.run(15) == [1]
    assert one.run(10)[:2] == [1, 4]


def test_what_was_refused_is_not_asked_for_again():
    one = load(0.04, 0.01)
    one.run(30)
    one.autoscaler.refused(2, 1)
    one.workers, one.each, one.history = 2, {}, [2]
    assert one.run(600) == [2]


def test_the_reason_has_the_numbers():
    one = load(0.04, 0.01)
    one.run(2)
    assert one.history == [1, 4]
    assert one.autoscaler.reason == "the loop waited 75 % of its time"
    assert (one.autoscaler.wanted, one.autoscaler.waiting_share) == (4, pytest.approx(0.75))
