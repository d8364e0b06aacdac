"""A loop's headroom: batches as they come, then some of them again and again."""

import time

import pytest
from conftest import BACKENDS
from helpers import twelve

from enqueuer import GeneratorEnqueuer, Headroom, headroom


@pytest.fixture(params=[one for one in BACKENDS if "portable" not in one.id])
def backend(request):
    return request.param


def slow(shard):
    """Yield 0, 1, 2 ..., every 20 ms."""
    number = 0
    while True:
        time.sleep(0.02)
        yield number
        number += 1


def measured(batches, step=lambda batch: None, **options):
    """Return what a loop is given, and the result."""
    found, given = [], []
    for batch in headroom(batches, report=found.append, **({"seconds": 0.3} | options)):
        given.append(batch)
        step(batch)
    assert len(found) == 1
    return given, found[0]


def test_a_loop_that_waits_could_be_faster(backend):
    with GeneratorEnqueuer(slow, **backend) as enqueuer:
        _, found = measured(enqueuer, keep=2)
    assert found.gain > 1.5
    assert found.waiting_share > 0.5
    assert found.kept == 2
    assert "times as fast" in str(found)


def test_a_loop_that_does_not_wait_could_not_be_much_faster(backend):
    with GeneratorEnqueuer(slow, **backend) as enqueuer:
        _, found = measured(enqueuer, lambda batch: time.sleep(0.06), keep=2, seconds=0.5)
    assert found.gain < 1.5
    assert found.waiting_share < 0.5


def test_batches_come_in_order_then_the_first_ones_again():
    given, found = measured(iter(range(10**9)), lambda batch: time.sleep(0.01), keep=3)
    first = 3 + found.steps
    assert given[:first] == list(range(first))
    again = given[first:]
    assert again == [number % 3 for number in range(len(again))]
    assert len(again) > 3


def test_what_ends_too_soon_is_gone_through_again(backend):
    with GeneratorEnqueuer(twelve, **backend) as enqueuer:
        given, found = measured(enqueuer, seconds=0.5)
    first = 8 + found.steps
    assert first > 12
    assert given[:first] == [number % 12 for number in range(first)]
    assert given[first : first + 8] == [*range(8)]
    assert found.kept == 8


def test_an_iterator_that_ends_is_measured_up_to_there():
    given, found = measured(iter("abcd"), keep=2, seconds=0.01)
    assert given[:6] == ["a", "b", "c", "d", "a", "b"]
    assert found.steps == 2


@pytest.mark.parametrize("batches", [iter("ab"), iter(""), []], ids=["as many", "none", "empty"])
def test_too_few_batches_are_an_error(batches):
    with pytest.raises(ValueError, match="headroom needs more than keep=2 batches"):
        list(headroom(batches, keep=2))


def test_an_error_of_the_source_is_raised_as_itself():
    def broken():
        yield 1
        raise KeyError("no such file")

    with GeneratorEnqueuer(broken) as enqueuer, pytest.raises(KeyError, match="no such file"):
        list(headroom(enqueuer, keep=1))


def test_a_break_leaves_nothing(backend):
    with GeneratorEnqueuer(slow, **backend) as enqueuer:
        for _ in headroom(enqueuer):
            break
        assert next(iter(enqueuer)) == 1


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ((3,), {}, TypeError),
        (([1],), {"keep": 0}, ValueError),
        (([1],), {"seconds": -1}, ValueError),
        (([1],), {"seconds": "3"}, TypeError),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, options, error):
    with pytest.raises(error):
        headroom(*arguments, **options)


def test_the_result_is_printed_in_a_sentence(capsys):
    list(headroom(range(3), keep=1, seconds=0.0))
    assert capsys.readouterr().out.count("steps a second, and ") == 1


def test_a_result_says_whether_it_is_worth_anything():
    assert str(Headroom(50, 125, 0.6, 100, 8)) == (
        "50 steps a second, and 125 if data cost nothing: 2.50 times as fast. "
        "The loop waits 60 % of its time for batches."
    )
    assert str(Headroom(1234, 1250, 0.01, 100, 8)).endswith(
        "nothing: faster data would not make it faster."
    )
