"""The autoscaler on simulated machines: CPUs, a GIL and other programs, and six kinds of work."""

import dataclasses
import functools
import itertools
import random
import sys
from dataclasses import dataclass

import pytest

from enqueuer.monitoring.autoscaler import Autoscaler
from enqueuer.monitoring.meters import WorkerStats
from enqueuer.monitoring.stats import Stats

CPUS = 2
STEP_S = 0.05
# Largest number of workers.
MOST = 128
# Time within which the rate has to be near the best one, and how near.
SOON_S, NEAR = 5.0, 0.9


@dataclass(frozen=True)
class Work:
    """Seconds of a worker for an element: waiting, Python code, and code without the GIL.

    `use_s` are those of the loop for an item, and each item has so many `elements`. A server gives
    `max_concurrency`.
    """

    wait_s: float
    python_s: float
    native_s: float
    in_threads: bool
    use_s: float = 0.0001
    elements: int = 1
    max_concurrency: int = 1000


class Machine:
    """Workers and a loop on CPUs that other programs use, too.

    Args:
        work: Kind of work.
        others: Number of other programs that compute all the time.
        seed: Seed of the noise of the rate.
        max_concurrency: Largest number of elements at once in each worker.
    """

    def __init__(self, work, others=0, seed=0, max_concurrency=1):
        self.work, self.others = work, others
        self.noise = random.Random(seed)
        self.autoscaler = Autoscaler(1, MOST, None, None, work.elements, 1, max_concurrency)
        self.max_concurrency = max_concurrency
        self.concurrency = 1
        self.time_s = self.done = self.given = 0.0
        self.waiting_s = self.working_s = 0.0
        self.workers, self.generation = 1, 0
        # Items, and seconds of making, waiting for a task, CPU and waiting for a CPU.
        self.sums = [0.0] * 5
        self.history = [(0.0, 1, 1)]

    def rate(self, workers, concurrency=1):
        """Return the number of items a second, and whether the CPUs or the GIL are the limit."""
        work, at_once = self.work, workers * concurrency
        cpu_s = work.python_s + work.native_s
        runnable = min(at_once, CPUS) + self.others
        cpus = min(at_once, CPUS) * min(1.0, CPUS / runnable)
        limits = {
            "workers": at_once / (work.wait_s + cpu_s),
            "cpus": cpus / cpu_s if cpu_s else 1e9,
            "gil": 1e9,
            "server": work.max_concurrency / (work.wait_s + cpu_s),
        }
        if work.python_s:
            # The thread that holds it may wait for a CPU meanwhile.
            gils = 1 if work.in_threads else workers
            limits["gil"] = gils * min(1.0, CPUS / (1 + self.others)) / work.python_s
        # Near a limit, some of what it allows is lost.
        made = sum(limit**-32 for limit in limits.values()) ** (-1 / 32) / work.elements
        name = min(limits, key=limits.get)
        return min(made, 1 / work.use_s), name

    def rates(self):
        return rates_of(self.work, self.others, self.max_concurrency)

    def best(self):
        return max(self.rates().values())

    def fewest_at_once(self):
        """Return the least number of elements at once with the best rate."""
        best = self.best()
        return min(w * c for (w, c), rate in self.rates().items() if rate >= 0.95 * best)

    def run(self, seconds):
        """Let time pass; return the times and the numbers of workers since then."""
        while self.time_s < seconds:
            has_item = self._pass()
            if has_item and self.time_s >= self.autoscaler.due_s:
                workers = self.autoscaler.next(self.stats())
                setting = workers, self.autoscaler.concurrency
                if setting != (self.workers, self.concurrency):
                    self.generation += 1
                    self.workers, self.concurrency = setting
                    self.sums = [0.0] * 5
                    self.history.append((self.time_s, *setting))
        return self.history

    def _pass(self):
        """Let a moment pass; return whether the loop has taken an item."""
        work, n = self.work, self.workers
        rate, limit = self.rate(n, self.concurrency)
        rate *= self.noise.uniform(0.8, 1.2)
        rate = min(rate, 1 / work.use_s)
        cpu_s = (work.python_s + work.native_s) * work.elements
        made_s = rate * STEP_S * (work.wait_s * work.elements + cpu_s) / self.concurrency
        busy = n * STEP_S if rate < 0.9 / work.use_s else min(n * STEP_S, made_s)
        extra = max(0.0, busy - made_s)
        lacked = extra if limit == "cpus" or self.others else 0.0
        for index, more in enumerate(
            [rate * STEP_S, busy, n * STEP_S - busy, rate * STEP_S * cpu_s, lacked]
        ):
            self.sums[index] += more
        self.time_s += STEP_S
        before, self.done = int(self.done), self.done + rate * STEP_S
        self.given = int(self.done)
        self.working_s += rate * STEP_S * work.use_s
        self.waiting_s += STEP_S * (1 - rate * work.use_s)
        return self.given > before

    def stats(self):
        n = self.workers
        items, making, waiting, cpu, lacked = (total / n for total in self.sums)
        workers = tuple(
            WorkerStats(
                index, "", (), items, 0, self.generation, 0.0, making, 0.0, waiting, 0.0,
                cpu_s=cpu, cpu_wait_s=lacked * self.concurrency, concurrency=self.concurrency,
            )
            for index in range(n)
        )  # fmt: skip
        backend = "thread" if self.work.in_threads else "process"
        return Stats(
            self.time_s, backend, True, 0, self.given, 0.0, 0.0, self.waiting_s,
            0.0, self.working_s, 0.0, {}, {}, 0, 10, 0, 0, CPUS, 0.0, workers,
        )  # fmt: skip

    def soon_near_best(self):
        """Return the time from which on the rate was near the best one."""
        best = self.best()
        good = [self.rate(*setting)[0] >= NEAR * best for _, *setting in self.history]
        assert good[-1], self.history
        bad = [index for index, is_good in enumerate(good) if not is_good]
        return self.history[bad[-1] + 1][0] if bad else 0.0


@functools.cache
def rates_of(work, others, max_concurrency):
    """Return the rates of all possible numbers of workers, and of elements at once in each."""
    machine, numbers = Machine(work, others), range(1, MOST + 1)
    settings = itertools.product(numbers, numbers if max_concurrency > 1 else [1])
    return {setting: machine.rate(*setting)[0] for setting in settings}


WORKS = {
    "waiting in threads": Work(0.035, 0.003, 0.0, True),
    "waiting in processes": Work(0.035, 0.003, 0.0, False),
    "waiting, in batches": Work(0.035, 0.003, 0.0, False, elements=16),
    "waiting, in large batches": Work(0.035, 0.003, 0.0, True, elements=48),
    "only waiting": Work(0.1, 0.0001, 0.0, True, use_s=0.001),
    "computing": Work(0.0, 0.01, 0.0, False),
    "numpy in threads": Work(0.0, 0.0005, 0.01, True),
    "Python in threads": Work(0.0, 0.01, 0.0, True),
    "half of it waiting": Work(0.01, 0.01, 0.0, False),
    "quick": Work(0.0, 0.000004, 0.0, True, use_s=0.000003),
    "slow loop": Work(0.005, 0.0, 0.0, True, use_s=0.02),
}


@pytest.mark.thorough
@pytest.mark.parametrize("others", [0, 1, 4])
@pytest.mark.parametrize("name", WORKS)
def test_within_seconds_the_rate_is_near_the_best(name, others):
    for seed in range(5):
        machine = Machine(WORKS[name], others, seed)
        machine.run(60)
        assert machine.soon_near_best() <= SOON_S, (seed, machine.history)


@pytest.mark.parametrize("name", ["computing", "numpy in threads"])
def test_what_computes_gets_as_many_workers_as_cpus(name):
    assert Machine(WORKS[name]).run(60)[-1][1] == CPUS


@pytest.mark.parametrize("name", ["Python in threads", "quick", "slow loop"])
def test_one_worker_stays_where_more_do_not_help(name):
    for seed in range(5):
        assert Machine(WORKS[name], seed=seed).run(60)[-1][1] == 1


def test_a_step_is_kept_if_other_programs_took_the_cpus_after_it():
    machine = Machine(WORKS["waiting in processes"])
    while len(machine.history) < 2:
        machine.run(machine.time_s + 0.1)
    machine.others = 6
    machine.run(30)
    assert machine.workers >= 0.8 * machine.history[1][1]


def test_other_programs_do_not_reduce_the_number_of_workers_that_wait():
    alone = Machine(WORKS["waiting in processes"]).run(60)[-1][1]
    beside = Machine(WORKS["waiting in processes"], others=4).run(60)[-1][1]
    assert 0.8 * alone <= beside <= 1.25 * alone


@pytest.mark.thorough
@pytest.mark.parametrize("name", WORKS)
def test_the_number_comes_to_rest(name):
    machine = Machine(WORKS[name])
    machine.run(60)
    changes = len(machine.history)
    assert changes <= 4
    assert len(machine.run(600)) == changes


def test_a_load_that_begins_to_wait_gets_more_workers():
    machine = Machine(WORKS["computing"])
    machine.run(30)
    machine.work = WORKS["waiting in processes"]
    machine.run(90)
    assert machine.rate(machine.workers)[0] >= NEAR * machine.best()


def test_batches_are_judged_by_their_elements():
    """A window of eight batches of 48 elements would take 15 s."""
    times = [time for time, *_ in Machine(WORKS["waiting, in large batches"]).run(5)]
    assert len(times) > 1


@pytest.mark.thorough
@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("name", [name for name in WORKS if name != "quick"])
def test_elements_that_wait_are_made_at_once_and_not_too_many(name, others):
    for seed in range(5):
        machine = Machine(WORKS[name], others, seed, max_concurrency=1024)
        machine.run(60)
        assert machine.soon_near_best() <= SOON_S, (seed, machine.history)
        assert machine.workers * machine.concurrency <= 2 * machine.fewest_at_once()


def test_elements_that_a_server_gives_a_few_at_a_time_get_few_threads():
    machine = Machine(
        dataclasses.replace(WORKS["only waiting"], max_concurrency=8), max_concurrency=1024
    )
    machine.run(60)
    assert machine.workers == 1
    assert 8 <= machine.concurrency <= 16


def test_without_a_gil_one_workers_threads_fill_all_cpus(monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    work = Work(wait_s=0.01, python_s=0.0, native_s=0.005, in_threads=True)
    machine = Machine(work, max_concurrency=1024)
    machine.run(60)
    assert machine.soon_near_best() <= SOON_S, machine.history
    assert machine.workers == 1


def test_what_computes_gets_workers_where_concurrency_could_be_chosen():
    machine = Machine(WORKS["computing"], max_concurrency=1024)
    machine.run(60)
    assert (machine.workers, machine.concurrency) == (CPUS, 1)
