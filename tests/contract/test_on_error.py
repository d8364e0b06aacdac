"""Errors that are not raised: skipped, counted, logged, replaced; and the one too many."""

import logging
import os
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import helpers
import numpy as np
import pytest
from helpers import Failing, Resumable, kill_once, packed, pid_of, rest_of, taken

from enqueuer import BlockMemoryError, GeneratorEnqueuer, ItemNotPicklable, OrderedEnqueuer, empty


def bad():
    raise ValueError("a bad file")


def test_skip_goes_on_with_the_other_shards(backend, caplog):
    with GeneratorEnqueuer(
        Failing(2, bad, shard=1), workers=2, shards=3, on_error="skip", **backend
    ) as enqueuer:
        with caplog.at_level(logging.ERROR):
            assert list(enqueuer) == [
                (0, 0),
                (1, 0),
                (2, 0),
                (0, 1),
                (1, 1),
                (2, 1),
                (0, 2),
                (2, 2),
            ]
        assert enqueuer.error_count == 1
        assert len(list(enqueuer)) == 8
        assert enqueuer.error_count == enqueuer.stats().error_count == 2
    record = caplog.records[0]
    assert "shard 1, item 2" in record.message
    assert "ValueError: a bad file" in caplog.text
    assert "in bad" in caplog.text  # the worker's traceback


def test_a_callable_gives_a_replacement(backend):
    with GeneratorEnqueuer(
        Failing(2, bad, shard=1), shards=2, on_error=lambda error: f"for {error}", **backend
    ) as enqueuer:
        assert list(enqueuer) == [
            (0, 0), (1, 0), (0, 1), (1, 1), (0, 2), "for a bad file"
        ]  # fmt: skip
        assert enqueuer.error_count == 1


def test_a_callable_that_gives_nothing_leaves_the_place_empty(backend, caplog):
    with GeneratorEnqueuer(Failing(2, bad), on_error=lambda error: None, **backend) as enqueuer:
        assert list(enqueuer) == [(0, 0), (0, 1)]
    assert not caplog.records


def test_a_callable_that_fails_is_a_failure(backend):
    def again(error):
        raise KeyError("worse") from error

    with GeneratorEnqueuer(Failing(2, bad), on_error=again, **backend) as enqueuer:
        with pytest.raises(KeyError) as caught:
            list(enqueuer)
    assert isinstance(caught.value.__cause__, ValueError)


def test_one_error_too_many_is_raised(backend):
    with GeneratorEnqueuer(Failing(1, bad), on_error="skip", max_errors=2, **backend) as enqueuer:
        assert list(enqueuer) == list(enqueuer) == [(0, 0)]
        with pytest.raises(ValueError, match="a bad file") as caught:
            list(enqueuer)
    assert "max_errors=2" in caught.value.__notes__[-1]


def test_an_exit_is_never_skipped(backend):
    with GeneratorEnqueuer(Failing(1, helpers.exit_zero), on_error="skip", **backend) as enqueuer:
        with pytest.raises(Exception, match="SystemExit"):
            list(enqueuer)


class Stubborn(Resumable):
    """An iterator that raises in the place of item 2, and goes on."""

    def __init__(self, shard):
        super().__init__([(shard.index, number) for number in range(5)])

    def __next__(self):
        item = super().__next__()
        if self.at == 3:
            bad()
        return item


def not_even_begun(shard):
    bad()


def begins_anywhere(shard, first_item=0):
    for number in range(first_item, 6):
        if number == 2:
            bad()
        yield number


@pytest.mark.thorough("processes")
@pytest.mark.parametrize(
    "source", [Failing(2, bad, shard=1), Stubborn, not_even_begun, begins_anywhere]
)
def test_what_was_put_in_its_place_does_not_come_again(backend, source):
    """The state after it says so: what raised is over, and counts once, though it is run again."""
    options = dict(shards=2, on_error=str, random_seed=7, **backend)
    with GeneratorEnqueuer(source, **options) as enqueuer:
        whole = list(enqueuer)
        errors = enqueuer.error_count
    assert whole.count("a bad file") == errors
    with GeneratorEnqueuer(source, **options) as enqueuer:
        batches = iter(enqueuer)
        states = [(next(batches), packed(enqueuer.state_dict()))[1] for _ in whole]
    for count, state in enumerate(states, 1):
        later = GeneratorEnqueuer(source, **options)
        assert rest_of(later, state) == whole[count:]
        assert later.error_count == errors


def unsendable_at_first(shard):
    """Yield (shard, number), of which some cannot be sent."""
    for number in range(4):
        bad = (shard.index, number) in [(0, 0), (2, 1), (2, 2), (3, 3)]
        yield iter(x for x in "ab") if bad else (shard.index, number)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_a_shard_whose_item_cannot_be_sent_keeps_its_turn(process, workers, caplog):
    """As with None; and so the order does not depend on the number of workers."""
    with GeneratorEnqueuer(
        unsendable_at_first, workers=workers, shards=4, on_error="skip", **process
    ) as enqueuer:
        assert list(enqueuer) == [
            (0, 1), (1, 0), (2, 0), (3, 0), (0, 2), (1, 1), (2, 3), (3, 1),
            (0, 3), (1, 2), (3, 2), (1, 3),
        ]  # fmt: skip
        assert enqueuer.error_count == 4
    assert ItemNotPicklable.__name__ in caplog.text


class Unsendable:
    def __reduce__(self):
        raise ValueError("no" * 1000)


def many_unsendable():
    for _ in range(200):
        yield Unsendable()
    yield "the end"


@pytest.mark.thorough
@pytest.mark.parametrize("ordered", [True, False])
def test_more_errors_are_skipped_than_a_socket_holds(process, ordered, caplog):
    caplog.set_level(logging.CRITICAL)
    with GeneratorEnqueuer(
        many_unsendable, on_error="skip", ordered=ordered, **process
    ) as enqueuer:
        assert list(enqueuer) == ["the end"]
        assert enqueuer.error_count == 200


def test_a_replacement_is_not_lost_with_its_worker(process):
    enqueuer = GeneratorEnqueuer(
        Failing(2, bad), on_error=str, max_queue_size=1, max_restarts=1, **process
    )
    with enqueuer:
        iterator = iter(enqueuer)
        assert next(iterator) == (0, 0)
        time.sleep(0.3)  # it has the replacement in hand, or is about to
        os.kill(pid_of(enqueuer), signal.SIGKILL)
        assert list(iterator) == [(0, 1), "a bad file"]


# --- what the generator catches and reports ------------------------------------------------------


class Reporting:
    """Yields 0 to 5 over all shards; reports `each` errors where a number is bad."""

    def __init__(self, bad=(1, 4), each=1, log=True, path=None):
        self.bad, self.each, self.log, self.path = bad, each, log, path

    def __call__(self, shard):
        for number in shard.split(range(6)):
            if number not in self.bad:
                yield number
                continue
            for nth in range(self.each):
                try:
                    raise OSError(f"cannot read {number}.{nth}")
                except OSError as error:
                    shard.report(error, self.log)
            if self.path is not None:
                kill_once(self.path)


def test_what_is_reported_quietly_is_counted_and_not_logged(backend, caplog):
    source = Reporting(each=3, log=False)
    with GeneratorEnqueuer(source, workers=2, shards=2, **backend) as enqueuer:
        assert sorted(enqueuer) == [0, 2, 3, 5]
        assert enqueuer.error_count == 6
        list(enqueuer)
        assert enqueuer.error_count == 12
    assert not caplog.records


def test_what_is_reported_is_logged_once(backend, caplog):
    with GeneratorEnqueuer(Reporting(), workers=2, shards=3, **backend) as enqueuer:
        for _ in range(3):
            list(enqueuer)
    logged = [record for record in caplog.records if record.name == "enqueuer"]
    assert len(logged) == 2
    assert all("in __call__" in record.exc_text for record in logged)  # the traceback
    assert "shard 1, item 0: OSError('cannot read 1.0')" in caplog.text


def test_equal_reports_of_different_items_are_each_logged(backend, caplog):
    class Bad:
        def __call__(self, shard):
            for number in range(5):
                if number % 2:
                    shard.report(OSError("cannot read"))
                yield number

    with GeneratorEnqueuer(Bad(), **backend) as enqueuer:
        for _ in range(3):
            list(enqueuer)
    logged = [record for record in caplog.records if record.name == "enqueuer"]
    assert [record.message.split(", ")[-1] for record in logged] == [
        "item 1: OSError('cannot read')",
        "item 3: OSError('cannot read')",
    ]
    assert [origin.item for origin, _ in enqueuer.skipped] == 3 * [1, 3]
    assert [origin.epoch for origin, _ in enqueuer.skipped] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("second", ["collate", "send"])
@pytest.mark.parametrize("bad", [0, 1])
def test_each_error_of_a_batch_is_skipped_on_its_own(process, bad, second, caplog):
    def load(number):
        if number == bad:
            raise OSError("cannot read")
        return number

    def collate(results):
        if second == "collate":
            raise ValueError("cannot be collated")
        return threading.Lock()

    options = dict(batch_size=2, collate=collate, random_seed=1, **process)
    with OrderedEnqueuer(range(2), load, on_error="skip", **options) as enqueuer:
        assert list(enqueuer) == []
        assert enqueuer.error_count == 2
        assert "cannot read" in enqueuer.skipped[0][1]
        assert len([r for r in caplog.records if r.name == "enqueuer"]) == 2
    with (
        pytest.raises((ValueError, ItemNotPicklable)),
        OrderedEnqueuer(range(2), load, on_error="skip", max_errors=1, **options) as enqueuer,
    ):
        list(enqueuer)


def test_an_error_behind_the_position_is_counted_once(backend):
    """The loop meets errors while it looks at what is next, and they come again."""

    def make():
        return OrderedEnqueuer(
            range(6), lambda n: n // (n % 3), on_error=lambda e: -1, random_seed=1, **backend
        )

    with make() as enqueuer:
        batches = iter(enqueuer)
        assert [next(batches) for _ in range(3)] == [-1, 1, 1]
        helpers.wait_until(lambda: not enqueuer.queue.empty())
        assert enqueuer.error_count == 2
        state = enqueuer.state_dict()
        assert state["error_count"] == 1
    later = make()
    assert rest_of(later, state) == [-1, 4, 2]
    assert later.error_count == 2


def test_a_report_too_many_is_raised(backend):
    with GeneratorEnqueuer(Reporting(bad=(2, 3, 4)), max_errors=2, **backend) as enqueuer:
        got = []
        with pytest.raises(OSError, match=r"cannot read 4\.0") as caught:
            got.extend(enqueuer)
    assert got == [0, 1]
    assert caught.value.enqueuer_origin.item == 2
    assert "max_errors=2" in caught.value.__notes__[-1]


def test_threads_of_a_generator_may_report():
    def source(shard):
        def load(number):
            if number % 3 == 0:
                shard.report(ValueError("spoilt"), log=False)

        with ThreadPoolExecutor(4) as pool:
            for number in range(0, 2000, 4):
                list(pool.map(load, range(number, number + 4)))
                yield number

    with GeneratorEnqueuer(source, max_queue_size=64) as enqueuer:
        counts = [(number, enqueuer.error_count) for number in enqueuer]
    assert counts == [(at, len(range(0, at + 4, 3))) for at in range(0, 2000, 4)]


def test_a_report_before_an_error_is_told_before_it(backend):
    def source(shard):
        yield 0
        shard.report(KeyError("first"), log=False)
        raise ValueError("then")

    with GeneratorEnqueuer(source, **backend) as enqueuer:
        with pytest.raises(ValueError, match="then"):
            list(enqueuer)
        assert enqueuer.error_count == 1
    with GeneratorEnqueuer(source, on_error="skip", **backend) as enqueuer:
        assert list(enqueuer) == [0]
        assert enqueuer.error_count == 2


def test_a_report_counts_once_though_the_worker_is_replaced(process, tmp_path, caplog):
    source = Reporting(bad=(2,), each=2, path=tmp_path / "died")
    with GeneratorEnqueuer(source, max_restarts=1, **process) as enqueuer:
        assert list(enqueuer) == [0, 1, 3, 4, 5]
        assert (enqueuer.error_count, enqueuer.restart_count) == (2, 1)
    assert caplog.text.count("skipped in worker 0") == 2


def test_a_report_that_was_told_is_not_told_after_resuming(backend):
    options = dict(random_seed=1, **backend)
    had, state = taken(GeneratorEnqueuer(Reporting(log=False), **options), 2)
    later = GeneratorEnqueuer(Reporting(log=False), **options)
    assert had + rest_of(later, state) == [0, 2, 3, 5]
    assert later.error_count == 2  # the one of before, and another


# --- iterators that go on ---


class Cursor:
    """An iterator that raises for some of its numbers, and goes on."""

    def __init__(self, shard=None, bad=(5, 6, 13), count=20):
        self.numbers = iter(range(count) if shard is None else shard.split(range(count)))
        self.bad = bad

    def __iter__(self):
        return self

    def __next__(self):
        number = next(self.numbers)
        if number in self.bad:
            raise ValueError(f"{number} is damaged")
        return number


def damaged(shard):
    return Cursor(shard)


def mapped(shard):
    return map(whole, shard.split(range(20)))


def whole(number):
    if number in (5, 6, 13):
        raise ValueError(f"{number} is damaged")
    return number


WHOLE = [number for number in range(20) if number not in (5, 6, 13)]


@pytest.mark.parametrize("source", [damaged, mapped])
def test_an_iterator_that_can_go_on_loses_the_bad_items_only(backend, source):
    with GeneratorEnqueuer(source, workers=2, on_error="skip", **backend) as enqueuer:
        for _ in range(2):
            assert sorted(enqueuer) == WHOLE
        assert enqueuer.error_count == 6
    options = dict(on_error=lambda error: -1, shards=1, **backend)
    assert list(GeneratorEnqueuer(source, **options)) == [
        -1 if number in (5, 6, 13) else number for number in range(20)
    ]


def test_a_running_iterator_goes_on(backend):
    if helpers.start_method_of(backend) not in (None, "fork"):
        pytest.skip("it can only be inherited")
    assert list(GeneratorEnqueuer(Cursor(), on_error="skip", **backend)) == WHOLE


@pytest.mark.parametrize("count", [0, 4, 5, 6, 13])
def test_a_run_of_an_iterator_that_goes_on_is_resumed(backend, count):
    options = dict(shards=2, on_error="skip", random_seed=1, **backend)
    had, state = taken(GeneratorEnqueuer(damaged, **options), count)
    later = GeneratorEnqueuer(damaged, **options)
    assert sorted(had + rest_of(later, state)) == WHOLE
    assert later.error_count == 3


def test_the_samples_of_an_incomplete_batch_are_dropped(backend):
    options = dict(shards=1, batch_size=4, collate=list, on_error="skip", **backend)
    assert list(GeneratorEnqueuer(damaged, **options)) == [
        *([0, 1, 2, 3], [7, 8, 9, 10], [14, 15, 16, 17], [18, 19])
    ]


def test_samples_of_a_shuffle_buffer_are_not_dropped(backend):
    options = dict(shards=1, shuffle_buffer=4, on_error="skip", random_seed=1, **backend)
    assert sorted(GeneratorEnqueuer(damaged, **options)) == WHOLE


def test_an_iterator_that_goes_on_is_closed_at_its_end(backend, tmp_path):
    class Closing(Cursor):
        def close(self):
            (tmp_path / "closed").touch()

    def source(shard):
        return Closing(shard, count=10_000)

    options = dict(shards=1, batch_size=4, collate=list, on_error="skip", max_queue_size=1)
    with GeneratorEnqueuer(source, **options, **backend) as enqueuer:
        assert next(enqueuer.get()) == [0, 1, 2, 3]
    assert (tmp_path / "closed").exists()


class Broken(Cursor):
    def __next__(self):
        raise OSError("the disk is gone")


def broken(shard):
    return Broken(shard)


def test_an_iterator_that_raises_for_ever_ends(backend, caplog):
    with GeneratorEnqueuer(broken, on_error="skip", shards=1, **backend) as enqueuer:
        assert list(enqueuer) == []
        assert enqueuer.error_count == 100
    assert "ends so after 100 errors in a row" in caplog.text
    with GeneratorEnqueuer(broken, on_error="skip", max_errors=3, **backend) as enqueuer:
        with pytest.raises(OSError, match="the disk is gone"):
            list(enqueuer)


def test_a_later_error_of_an_iterator_that_goes_on_is_made_again(backend):
    with GeneratorEnqueuer(damaged, shards=1, on_error="skip", max_errors=2, **backend) as enqueuer:
        with pytest.raises(ValueError, match="13 is damaged") as caught:
            list(enqueuer)
        with pytest.raises(ValueError, match="13 is damaged"):
            enqueuer.replay(caught.value)


def take_descriptors():
    """Let this worker open nothing more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))


@pytest.mark.local
@pytest.mark.parametrize("on_error", ["skip", repr])
@pytest.mark.parametrize("make", [np.zeros, empty])
@pytest.mark.parametrize("as_tasks", [False, True])
def test_a_lack_of_shared_memory_is_no_fault_of_an_item(process, on_error, make, as_tasks):
    def array(number):
        if number == 1:
            take_descriptors()
        return make(100_000 * (1 + number))

    def source():
        for number in range(4):
            yield array(number)

    if as_tasks:
        enqueuer = OrderedEnqueuer(range(4), array, workers=1, on_error=on_error, **process)
    else:
        enqueuer = GeneratorEnqueuer(source, on_error=on_error, **process)
    with enqueuer:
        batches = iter(enqueuer)
        assert len(next(batches)) == 100_000
        with pytest.raises(BlockMemoryError, match="could not allocate"):
            next(batches)
        assert enqueuer.error_count == 0


def test_a_memory_error_of_the_users_code_is_skipped(backend):
    def load(number):
        if number == 1:
            raise MemoryError("a file of 80 GB")
        return number

    with OrderedEnqueuer(range(4), load, on_error="skip", **backend) as enqueuer:
        assert list(enqueuer) == [0, 2, 3]
