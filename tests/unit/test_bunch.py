"""Bunches of items, and of the results of tasks, that C code sends."""

from collections import deque

import pytest

from enqueuer.workers.bunch import Bunch
from enqueuer.workers.messages import Ticket


def fill(bunch, sent, seen):
    def values():
        for number in range(5):
            seen.append(len(sent))
            yield number

    bunch.fill(0, values())


def fill_tasks(bunch, sent, seen):
    tickets = deque(Ticket(number, 0, (number,)) for number in range(5))

    def take():
        if not tickets:
            raise IndexError
        return tickets.popleft()

    def results_of(all_indices):
        for indices in all_indices:
            seen.append(len(sent))
            yield indices[0]

    bunch.fill_tasks(take, results_of)


@pytest.mark.parametrize("method", [fill, fill_tasks])
def test_a_loop_that_sleeps_is_woken_behind_the_first_item(method):
    sent, seen, woken = [], [], []

    class Sleeper:
        def put(self, _):
            woken.append((len(sent), len(seen)))

    bunch = Bunch([0] * 5, sent.extend, Sleeper().put)
    method(bunch, sent, seen)
    assert [item[2] for item in sent] == [0, 1, 2, 3]
    # Once, with one item, and before the second one is made.
    assert woken == [(1, 1)]


@pytest.mark.parametrize("method", [fill, fill_tasks])
def test_a_gate_that_is_cleared_ends_a_bunch_that_wakes(method):
    sent, seen = [], []
    bunch = Bunch([0] * 5, sent.extend, lambda _: bunch.gate.clear())
    method(bunch, sent, seen)
    assert [item[2] for item in sent] == [0]
    assert bunch.made == 1
