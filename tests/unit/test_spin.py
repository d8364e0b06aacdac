"""Spinning for a moment before a sleep."""

import itertools

import pytest

from enqueuer.transport import ring
from enqueuer.transport.ring import Spin


@pytest.fixture(autouse=True)
def slow_clock(monkeypatch):
    """Have each reading of the clock take 10 us."""
    monkeypatch.setattr(ring, "clock", itertools.count(0, 10_000).__next__)


def tries(waits):
    """Return how often a wait asks whether it is over, for each of some waits in vain."""
    asked = []
    spinning = Spin(True)
    for _ in range(waits):
        count = itertools.count()
        assert not spinning.until(lambda count=count: next(count) < 0)
        asked.append(next(count))
    return asked


def test_a_wait_is_over_as_soon_as_its_condition_holds():
    answers = iter([False, False, True])
    assert Spin(True).until(lambda: next(answers))


def test_waits_in_vain_make_more_and_more_of_the_next_ones_sleep_at_once():
    assert [count > 0 for count in tries(13)] == [n in (0, 2, 5, 10) for n in range(13)]


def test_a_wait_that_was_not_in_vain_makes_the_next_one_spin():
    spinning = Spin(True)
    assert not spinning.until(lambda: False)
    assert not spinning.until(lambda: True)
    assert spinning.until(lambda: True)
    assert not spinning.until(lambda: False)
    assert not spinning.until(lambda: True)
    assert spinning.until(lambda: True)


def test_nothing_spins_without_a_cpu_for_each_process():
    assert not Spin(False).until(lambda: True)
