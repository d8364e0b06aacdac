"""`imap`: a plain generator of results in order, made ahead."""

import itertools
import threading

import pytest
from helpers import raise_value_error

from enqueuer import imap


def tenfold(number):
    return number * 10


def noisy(number, task):
    return number + task.rng.random()


def fail_at_three(number):
    if number == 3:
        raise_value_error()
    return number


def workers():
    return [t for t in threading.enumerate() if t.name.startswith("enqueuer-worker")]


def test_results_come_in_order(backend):
    assert list(imap(tenfold, range(50), workers=3, **backend)) == list(range(0, 500, 10))


def test_any_iterable_will_do(backend):
    assert list(imap(tenfold, (n for n in range(20)), workers=2, **backend)) == [
        n * 10 for n in range(20)
    ]


def test_a_function_may_take_its_task(backend):
    one = list(imap(noisy, range(9), random_seed=7))
    assert list(imap(noisy, range(9), random_seed=7, workers=3, **backend)) == one


def test_nothing_starts_before_the_first_next():
    results = imap(tenfold, [1, 2])
    assert workers() == []
    assert next(results) == 10
    assert len(workers()) == 1
    results.close()
    assert workers() == []


@pytest.mark.parametrize("count", [1, 5, 100])
def test_workers_are_gone_when_it_is_dropped_or_ends(count, backend):
    results = imap(tenfold, range(100), workers=2, **backend)
    assert list(itertools.islice(results, count)) == [n * 10 for n in range(count)]
    del results


def test_no_more_is_read_than_may_wait():
    read = []

    def elements():
        for number in range(100):
            read.append(number)
            yield number

    results = imap(tenfold, elements(), max_queue_size=3)
    assert next(results) == 0
    assert len(read) <= 6  # 3 that wait, one in the worker's hand, one taken, one read
    results.close()


def test_an_error_comes_as_itself_in_its_turn(backend):
    results = imap(fail_at_three, range(9), workers=2, **backend)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="bad value"):
        next(results)
    assert list(results) == []


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ((None, [1]), {}, TypeError),
        (([1], tenfold), {}, TypeError),
        ((tenfold, 5), {}, TypeError),
        ((tenfold, [1]), {"workers": -1}, ValueError),
        ((tenfold, [1]), {"max_queue_size": "many"}, TypeError),
        ((tenfold, [1]), {"shards": 2}, TypeError),
    ],
)
def test_arguments_are_checked_at_once(arguments, options, error):
    with pytest.raises(error):
        imap(*arguments, **options)
