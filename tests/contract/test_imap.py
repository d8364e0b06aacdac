"""`imap`: a plain generator of results in order, made ahead."""

import itertools
import threading

import pytest

from enqueuer import imap


def tenfold(number):
    return number * 10


def workers():
    return [t for t in threading.enumerate() if t.name.startswith("enqueuer-worker")]


def test_results_come_in_order(backend):
    assert list(imap(tenfold, range(50), workers=3, **backend)) == list(range(0, 500, 10))


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
