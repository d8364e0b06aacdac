"""Items of quick generators in threads: each arrives by itself, whatever the loop does."""

import itertools
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import LIMIT, timeout_of, wait_until

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, WorkerError
from enqueuer.backends.thread_channel import wait_for_any
from enqueuer.enqueuers.enqueuer import core_of

AT = 40  # an item behind the first 16, each of which is weighed
COUNT = 100


class Source:
    """Numbers; at one of them it waits until it may go on."""

    def __init__(self, at=AT):
        self.at, self.made = at, []
        self.reached, self.may_go_on = threading.Event(), threading.Event()
        self.has_ended = False

    def __call__(self):
        try:
            for number in range(COUNT):
                if number == self.at:
                    self.reached.set()
                    assert self.may_go_on.wait(LIMIT)
                self.made.append(number)
                yield number
        finally:
            self.has_ended = True


def test_a_loop_that_waits_gets_an_item_at_once():
    source = Source()

    def blocks_after():
        for number in source():
            yield number
            if number == AT:
                assert ended.wait(LIMIT)

    ended = threading.Event()
    with GeneratorEnqueuer(blocks_after, max_queue_size=64) as enqueuer:
        assert source.reached.wait(LIMIT)
        assert [enqueuer.queue.get(timeout=LIMIT) for _ in range(AT)] == list(range(AT))
        taken = []
        loop = threading.Thread(target=lambda: taken.append(enqueuer.queue.get(timeout=LIMIT)))
        loop.start()
        wait_until(lambda: core_of(enqueuer).run.meter.since)  # it waits
        source.may_go_on.set()
        loop.join(LIMIT)
        assert taken == [AT]
        ended.set()
        assert list(enqueuer) == list(range(AT + 1, COUNT))


@pytest.mark.parametrize("line", range(6))
def test_a_loop_gets_an_item_that_comes_while_it_begins_to_wait(line):
    source, lines = Source(), itertools.count()

    def blocks_after():
        for number in source():
            yield number
            if number == AT:
                assert taken.wait(LIMIT)

    def trace(frame, event, _):
        if frame.f_code is not wait_for_any.__code__:
            return None
        if event == "line" and next(lines) == line:
            source.may_go_on.set()
            (inbox,) = frame.f_locals["inboxes"]
            wait_until(lambda: inbox.waiting)
        return trace

    taken = threading.Event()
    with GeneratorEnqueuer(blocks_after, max_queue_size=64) as enqueuer:
        assert source.reached.wait(LIMIT)
        batches = iter(enqueuer)
        assert list(itertools.islice(batches, AT)) == list(range(AT))
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            assert next(batches) == AT
        finally:
            sys.settrace(before)
        taken.set()
        assert list(batches) == list(range(AT + 1, COUNT))


def test_items_are_visible_one_by_one():
    source = Source()
    with GeneratorEnqueuer(source, max_queue_size=64) as enqueuer:
        assert source.reached.wait(LIMIT)
        assert enqueuer.queue.qsize() == AT
        assert enqueuer.stats().workers[0].items == AT
        assert list(itertools.islice(enqueuer, AT)) == list(range(AT))
        source.may_go_on.set()
        assert list(enqueuer) == list(range(AT, COUNT))


@pytest.mark.parametrize("size", [1, 2, 5, 10, 64, 256])
def test_no_more_is_made_than_there_is_room_for(size):
    made, taken, most = [0], [0], [0]

    def source():
        for number in range(20 * size + 200):
            made[0] += 1
            most[0] = max(most[0], made[0] - taken[0])
            yield number

    with GeneratorEnqueuer(source, max_queue_size=size) as enqueuer:
        batches = iter(enqueuer)
        wait_until(lambda: made[0] == size + 1)
        for _ in range(5):
            for _ in range(size + size // 3):
                next(batches)
                taken[0] += 1
        for _ in batches:
            taken[0] += 1
    # One is in hand, and one was taken and not counted yet.
    assert size + 1 <= most[0] <= size + 2


def test_an_error_comes_after_the_items_before_it():
    def source():
        yield from range(AT)
        raise KeyError("here")

    with GeneratorEnqueuer(source, max_queue_size=64) as enqueuer:
        wait_until(lambda: enqueuer.queue.qsize() == AT)
        batches = iter(enqueuer)
        assert list(itertools.islice(batches, AT)) == list(range(AT))
        with pytest.raises(KeyError, match="here") as raised:
            next(batches)
    assert raised.value.enqueuer_origin.item == AT


def test_stop_ends_a_generator_after_the_item_that_is_made():
    source = Source()
    enqueuer = GeneratorEnqueuer(source, max_queue_size=64)
    enqueuer.start()
    (worker,) = core_of(enqueuer).run.backend.pool.workers
    assert source.reached.wait(LIMIT)
    stopping = threading.Thread(target=enqueuer.stop, args=(LIMIT,))
    stopping.start()
    wait_until(lambda: worker.inbox.closed)
    source.may_go_on.set()
    stopping.join(LIMIT)
    assert source.has_ended
    assert source.made == list(range(AT + 1))


@pytest.mark.parametrize("taken", [30, 39, 40, 45])
def test_a_position_counts_items_of_none(taken):
    def source():
        for number in range(COUNT):
            yield None if number % 7 == 3 else number

    expected = [number for number in range(COUNT) if number % 7 != 3]
    with GeneratorEnqueuer(source, max_queue_size=64, random_seed=1) as enqueuer:
        assert list(itertools.islice(enqueuer, taken)) == expected[:taken]
        state = enqueuer.state_dict()
    resumed = GeneratorEnqueuer(source, random_seed=1)
    resumed.load_state_dict(state)
    with resumed:
        assert list(resumed) == expected[taken:]


def reporting_once(shard):
    for number in range(COUNT):
        if number == AT:
            shard.report(ValueError("spoilt"), log=False)
        yield number


def test_each_of_several_reports_before_an_item_is_counted():
    def source(shard):
        for number in range(COUNT):
            for _ in range(number % 4):
                shard.report(ValueError("spoilt"), log=False)
            yield None if number % 7 == 3 else number

    with GeneratorEnqueuer(source, max_queue_size=2 * COUNT) as enqueuer:
        counts = [(number, enqueuer.error_count) for number in enqueuer]
    expected = list(itertools.accumulate(number % 4 for number in range(COUNT)))
    assert counts == [(at, count) for at, count in enumerate(expected) if at % 7 != 3]


def test_threads_of_a_generator_may_report():
    def source(shard):
        def load(number):
            if number % 3 == 0:
                shard.report(ValueError("spoilt"), log=False)

        with ThreadPoolExecutor(4) as pool:
            for number in range(0, 20 * COUNT, 4):
                list(pool.map(load, range(number, number + 4)))
                yield number

    with GeneratorEnqueuer(source, max_queue_size=64) as enqueuer:
        counts = [(number, enqueuer.error_count) for number in enqueuer]
    assert counts == [(at, len(range(0, at + 4, 3))) for at in range(0, 20 * COUNT, 4)]


def test_a_report_beyond_max_errors_is_raised_at_its_place():
    seen = []
    with (
        pytest.raises(ValueError, match="spoilt") as raised,
        GeneratorEnqueuer(reporting_once, max_queue_size=2 * COUNT, max_errors=0) as enqueuer,
    ):
        wait_until(lambda: enqueuer.queue.qsize() == COUNT)
        seen.extend(enqueuer)
    assert raised.value.enqueuer_origin.item == AT


class Batch:
    """An item to which weak references are possible."""


def test_a_worker_keeps_no_item_that_the_loop_has_dropped():
    kept, source = [], Source()

    def batches():
        for _ in source():
            batch = Batch()
            kept.append(weakref.ref(batch))
            yield batch
            del batch

    with GeneratorEnqueuer(batches, max_queue_size=64) as enqueuer:
        assert source.reached.wait(LIMIT)
        for _ in itertools.islice(enqueuer, AT):
            pass
        del _
        assert [ref for ref in kept if ref() is not None] == []
        source.may_go_on.set()


def test_what_is_made_is_shown_when_it_hangs():
    source = Source()
    with GeneratorEnqueuer(source, max_queue_size=64, timeout=0.2) as enqueuer:
        assert source.reached.wait(LIMIT)
        batches = iter(enqueuer)
        assert list(itertools.islice(batches, AT)) == list(range(AT))
        text = timeout_of(enqueuer)
        assert "is here:" in text and "may_go_on.wait" in text
        source.may_go_on.set()


# --- tasks ---


@pytest.mark.parametrize("error", [KeyError("here"), StopIteration(5)])
def test_an_error_of_a_quick_task_comes_at_its_place(error):
    def task(number):
        if number == AT:
            raise error
        return number

    taken = []
    with (
        pytest.raises((KeyError, WorkerError)) as raised,
        OrderedEnqueuer(range(COUNT), task, workers=2) as enqueuer,
    ):
        taken.extend(enqueuer)
    assert taken == list(range(AT))
    assert error.args == (raised.value.__cause__ or raised.value).args
