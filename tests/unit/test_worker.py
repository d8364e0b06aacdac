"""The loop of a worker, with a list as its sender."""

import logging

import pytest

from enqueuer import Closed
from enqueuer.order.messages import End, Epoch, Failure, Item, Reported, Start
from enqueuer.workers.loop import serve, turns
from enqueuer.workers.plan import Plan
from enqueuer.workers.sources import as_source


class Sender(list):
    """A Sender that keeps what is sent, and closes after `limit` messages."""

    def __init__(self, limit=1000, epochs=()):
        self.limit = limit
        self.epochs = list(epochs)

    def send_item(self, shard, number, value, state=None):
        self.send(Item(shard, number, value, state))

    def send(self, message):
        if len(self) >= self.limit:
            raise Closed("enough")
        self.append(message)

    def check(self):
        if len(self) >= self.limit:
            raise Closed("enough")

    def next_epoch(self):
        return self.epochs.pop(0) if self.epochs else None


def ran(function, sender, shards=2, enter=lambda shard: None, starts=None, on_error="raise"):
    starts = starts or dict.fromkeys(range(shards), Start())
    plan = Plan(as_source(function), tuple(starts), shards, 7, on_error)
    assert list(turns(plan, Epoch(0, starts), sender, enter)) == []
    return sender


def test_shards_go_in_turn_and_ended_ones_drop_out():
    sender = ran(lambda shard: iter("ab"[: shard.index + 1]), Sender())
    assert sender == [
        Item(0, 0, "a"),
        Item(1, 0, "a"),
        End(0, number=1),
        Item(1, 1, "b"),
        End(1, number=2),
    ]


def test_a_source_of_nothing_but_none_can_be_stopped():
    with pytest.raises(Closed):
        ran(lambda: iter(lambda: None, 1), Sender(limit=0), shards=1)


def test_the_first_exception_ends_the_run_and_closes_all():
    closed = []

    def source(shard):
        try:
            yield 1
            if shard.index == 1:
                raise ValueError("bad")
            yield 2
            yield 3
        finally:
            closed.append(shard.index)

    *items, failure = ran(source, Sender())
    assert [(item.shard, item.number) for item in items] == [(0, 0), (1, 0), (0, 1)]
    assert isinstance(failure, Failure)
    assert (failure.shard, failure.number, str(failure.error)) == (1, 1, "bad")
    assert sorted(closed) == [0, 1]


def test_closed_closes_the_generators_and_goes_up():
    closed = []

    def source(shard):
        try:
            while True:
                yield 1
        finally:
            closed.append(shard.index)

    with pytest.raises(Closed, match="enough"):
        ran(source, Sender(limit=3))
    assert sorted(closed) == [0, 1]


def test_what_goes_wrong_in_finally_is_logged(caplog):
    def source():
        try:
            yield 1
            raise KeyError("first")
        finally:
            raise ValueError("second")

    def stubborn():
        while True:
            try:
                yield 1
            except GeneratorExit:
                yield 2

    assert isinstance(ran(source, Sender(), shards=1)[-1].error, ValueError)
    with caplog.at_level(logging.ERROR), pytest.raises(Closed):
        ran(stubborn, Sender(limit=2), shards=1)
    assert "closing the generator of shard 0 failed" in caplog.text
    assert "generator ignored GeneratorExit" in caplog.text


def test_the_shards_code_runs_in_its_own_global_state():
    entered = []
    ran(lambda: iter("ab"), Sender(), enter=lambda shard: entered.append(shard.index))
    assert entered == [0, 1, 0, 1, 0, 1]


def test_serve_runs_epochs_until_there_are_no_orders():
    plan = Plan(as_source(lambda shard: iter([shard.epoch])), (1,), 2, 7)
    sender = Sender(epochs=[Epoch(0), Epoch(1)])
    serve(plan, sender)
    assert sender == [Item(1, 0, 0), End(1, number=1), Item(1, 0, 1), End(1, number=1)]


def test_reports_go_before_the_item_they_came_before():
    errors = [KeyError(n) for n in range(3)]

    def source(shard):
        shard.report(errors[0])
        shard.report(errors[1], log=False)
        yield "a"
        shard.report(errors[2])

    assert ran(source, Sender(), shards=1) == [
        Reported(0, 0, errors[0], nth=1),
        Reported(0, 0, errors[1], nth=2, log=False),
        Item(0, 0, "a"),
        Reported(0, 1, errors[2], nth=1),
        End(0, number=1),
    ]


def test_a_consumer_that_leaves_at_a_report_is_no_failure():
    def source(shard):
        shard.report(KeyError("bad"))
        yield "a"

    sender = Sender(limit=0)
    with pytest.raises(Closed, match="enough"):
        ran(source, sender, shards=1)
    assert sender == []


def test_closed_by_the_users_own_code_is_a_failure():
    def source():
        yield 1
        raise Closed("the user's")

    assert isinstance(ran(source, Sender(), shards=1)[-1], Failure)


def test_stop_iteration_of_the_function_is_a_failure_and_no_end():
    def source():
        raise StopIteration(5)

    (failure,) = ran(source, Sender(), shards=1)
    assert (failure.shard, failure.number) == (0, 0)
    assert type(failure.error) is RuntimeError
    assert type(failure.error.__cause__) is StopIteration
