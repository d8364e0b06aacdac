"""Failure: what was made before arrives first, then the original exception, again and again."""

import functools
import itertools
import traceback

import helpers
import pytest
from helpers import Failing, TwoArguments

from enqueuer import (
    GeneratorEnqueuer,
    ItemNotPicklable,
    OrderedEnqueuer,
    Processes,
    WorkerError,
    mix,
)

needs_fidelity = pytest.mark.parametrize("workers", [1, 2])


def until_error(enqueuer, kind=BaseException):
    """Return what comes before the error, and the error."""
    batches = []
    with pytest.raises(kind) as caught:
        for batch in enqueuer:
            batches.append(batch)  # it raises
    return batches, caught.value


@needs_fidelity
def test_earlier_items_come_first_then_the_original(backend, workers):
    source = Failing(3, helpers.raise_value_error)
    with GeneratorEnqueuer(source, workers=workers, shards=2, **backend) as enqueuer:
        batches, error = until_error(enqueuer)
    assert batches == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert type(error) is ValueError
    assert error.args == ("bad value", 7)


def test_the_workers_frames_are_in_the_traceback(backend):
    with GeneratorEnqueuer(Failing(0, helpers.raise_value_error), **backend) as enqueuer:
        _, error = until_error(enqueuer)
    frames = traceback.extract_tb(error.__traceback__)
    assert "raise_value_error" in [frame.name for frame in frames]
    assert frames[-1].line == 'raise ValueError("bad value", 7)'


@pytest.mark.ahead
def test_a_note_names_worker_shard_and_item(backend):
    source = Failing(2, helpers.raise_value_error, shard=1)
    with GeneratorEnqueuer(source, workers=2, **backend) as enqueuer:
        _, error = until_error(enqueuer)
    (note,) = error.__notes__
    assert note.startswith("in worker 1 (")
    assert note.endswith("), shard 1, item 2")


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (helpers.raise_key_error, KeyError),
        (helpers.raise_two_arguments, TwoArguments),
        (helpers.raise_unicode_error, UnicodeDecodeError),
        (helpers.recurse, RecursionError),
    ],
)
def test_any_exception_keeps_its_type_and_text(backend, act, kind):
    with GeneratorEnqueuer(Failing(1, act), **backend) as enqueuer:
        batches, error = until_error(enqueuer)
    assert batches == [(0, 0)]
    assert type(error) is kind
    with pytest.raises(kind) as expected:
        act()
    assert str(error) == str(expected.value)


def test_attributes_survive(backend):
    with GeneratorEnqueuer(Failing(1, helpers.raise_two_arguments), **backend) as enqueuer:
        _, error = until_error(enqueuer)
    assert (error.a, error.b) == (1, "two")


def test_what_cannot_be_pickled_arrives_as_worker_error(process):
    with GeneratorEnqueuer(Failing(1, helpers.raise_holds_lock), **process) as enqueuer:
        batches, error = until_error(enqueuer)
    assert batches == [(0, 0)]
    assert type(error) is WorkerError
    assert "HoldsLock: holds a lock" in str(error)
    assert "raise_holds_lock" in error.traceback_text


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (helpers.exit_zero, SystemExit),
        pytest.param(helpers.interrupt, KeyboardInterrupt, marks=pytest.mark.ahead),
    ],
)
def test_what_would_end_the_program_arrives_as_worker_error(backend, act, kind):
    with GeneratorEnqueuer(Failing(2, act), **backend) as enqueuer:
        batches, error = until_error(enqueuer)
    assert batches == [(0, 0), (0, 1)]
    assert type(error) is WorkerError
    assert kind.__name__ in str(error)
    assert type(error.__cause__) is kind


def test_stop_iteration_in_a_generator_is_a_runtime_error(backend):
    with GeneratorEnqueuer(Failing(1, helpers.raise_stop_iteration), **backend) as enqueuer:
        batches, error = until_error(enqueuer)
    assert batches == [(0, 0)]
    assert type(error) is RuntimeError
    assert "StopIteration" in str(error)


def test_stop_iteration_in_a_task_is_a_worker_error(backend):
    def work(element):
        return helpers.raise_stop_iteration() if element == 2 else element

    with OrderedEnqueuer(range(4), work, workers=2, **backend) as enqueuer:
        batches, error = until_error(enqueuer, WorkerError)
    assert batches == [0, 1]
    assert error.__cause__.args == (5,)


def fails_at_its_end():
    try:
        yield from itertools.repeat(1)
    finally:
        raise OSError("no end")


async def awaited_that_fails_at_its_end(shard):
    try:
        for number in itertools.count():
            yield number
    finally:
        raise OSError("no end")


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (fails_at_its_end, {}),
        (fails_at_its_end, {"batch_size": 2}),
        (mix({"a": lambda: iter(range(9)), "b": fails_at_its_end}), {}),
        (awaited_that_fails_at_its_end, {}),
    ],
    ids=["plain", "samples", "mixed", "async"],
)
def test_an_error_of_finally_is_logged(backend, source, options, caplog):
    with GeneratorEnqueuer(source, **options, **backend) as enqueuer:
        assert len([next(enqueuer.get()) for _ in range(2)]) == 2
    assert "closing the generator of shard 0 failed" in caplog.text


@pytest.mark.thorough("processes")
def test_a_failure_is_sticky_until_stop(backend):
    enqueuer = GeneratorEnqueuer(Failing(1, helpers.raise_value_error), **backend)
    with enqueuer:
        _, first = until_error(enqueuer)
        assert not enqueuer.is_running()
        for _ in range(3):
            batches, again = until_error(enqueuer)
            assert batches == []
            assert type(again) is ValueError
            assert again is not first
            assert again.args == first.args
            assert again.__notes__ == first.__notes__
            assert len(traceback.extract_tb(again.__traceback__)) <= len(
                traceback.extract_tb(first.__traceback__)
            )
    with enqueuer:
        assert next(iter(enqueuer)) == (0, 0)


def test_a_timeout_error_of_the_generator_is_itself(backend):
    def source():
        raise TimeoutError("the server did not answer")
        yield

    with GeneratorEnqueuer(source, **backend) as enqueuer:
        with pytest.raises(TimeoutError, match="the server did not answer"):
            enqueuer.queue.get(timeout=helpers.LIMIT)


def test_an_item_that_cannot_be_pickled_is_named_and_loses_nothing(process):
    def source():
        import threading

        yield "first"
        yield {"x": [1, threading.Lock()]}
        yield "never"

    with GeneratorEnqueuer(source, **process) as enqueuer:
        batches, error = until_error(enqueuer)
    assert batches == ["first"]
    assert type(error) is ItemNotPicklable
    assert "item['x'][1] is a _thread.lock, which cannot be sent" in str(error)
    assert "shard 0, item 1" in error.__notes__[0]


def local_class():
    class Made:
        pass

    return Made


Made = local_class()


def makes_one():
    yield Made()


def test_an_object_of_a_local_class_at_the_top_of_a_module_is_its_own_after_a_fork():
    with GeneratorEnqueuer(makes_one, backend=Processes("fork")) as enqueuer:
        assert [type(item) is Made for item in enqueuer] == [True]


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_local_class_that_was_sent_along_arrives_as_itself(method):
    class Odd(Exception):
        pass

    class Batch:
        def __init__(self, value):
            self.value = value

    def source():
        yield Batch(5)
        raise Odd("local")

    with GeneratorEnqueuer(source, backend=Processes(start_method=method)) as enqueuer:
        batches, error = until_error(enqueuer)
    assert type(batches[0]) is Batch
    assert batches[0].value == 5
    assert type(error) is Odd


class Unruly(Exception):
    """An error one of whose methods raises what ends a process."""

    method = ""

    def __str__(self):
        return self.raised("__str__") or super().__str__()

    def __repr__(self):
        return self.raised("__repr__") or super().__repr__()

    def __reduce__(self):
        return self.raised("__reduce__") or super().__reduce__()

    def raised(self, method):
        if method == self.method:
            raise SystemExit(3)


class NoText(Unruly):
    method = "__str__"


class NoForm(Unruly):
    method = "__repr__"


class NoPickle(Unruly):
    method = "__reduce__"


def raise_at_one(kind, element):
    if element == 1:
        raise kind("unruly")
    return element


@pytest.mark.parametrize("kind", [NoText, NoForm, NoPickle])
def test_methods_of_an_error_end_neither_the_worker_nor_the_loop(backend, kind):
    work = functools.partial(raise_at_one, kind)
    with OrderedEnqueuer(range(3), work, workers=1, **backend) as enqueuer:
        for _ in range(2):
            # One that cannot be sent comes as text.
            with pytest.raises((kind, WorkerError)) as caught:
                list(enqueuer)
            assert isinstance(caught.value, kind) or kind.__name__ in str(caught.value)
    with OrderedEnqueuer(range(3), work, workers=1, on_error="skip", **backend) as enqueuer:
        assert list(enqueuer) == [0, 2]
        assert enqueuer.error_count == 1
