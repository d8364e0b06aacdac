"""Bunches of items that C code sends."""

from enqueuer.workers.loop import Bunch


def fill(bunch, sent, seen):
    def values():
        for number in range(5):
            seen.append(len(sent))
            yield number

    bunch.fill(0, values())


def test_a_loop_that_sleeps_is_woken_behind_the_first_item():
    sent, seen, woken = [], [], []

    class Sleeper:
        def put(self, _):
            woken.append((len(sent), len(seen)))

    bunch = Bunch([0] * 5, sent.extend, Sleeper().put)
    fill(bunch, sent, seen)
    assert [item[2] for item in sent] == [0, 1, 2, 3]
    # Once, with one item, and before the second one is made.
    assert woken == [(1, 1)]


def test_a_gate_that_is_cleared_ends_a_bunch_that_wakes():
    sent, seen = [], []
    bunch = Bunch([0] * 5, sent.extend, lambda _: bunch.gate.clear())
    fill(bunch, sent, seen)
    assert [item[2] for item in sent] == [0]
    assert bunch.made == 1
