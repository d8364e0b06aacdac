"""Results between their arrival and their turn."""

import dataclasses

from enqueuer.backends.task_schedule import ReorderBuffer, TaskOrder
from enqueuer.order.messages import Empty, Failure, Item, Start, Ticket


def buffer_of(count, ordered=True, measure=False):
    buffer = ReorderBuffer(measure)
    buffer.tickets = {number: Ticket(number, 0, (number,)) for number in range(count)}
    order = TaskOrder(0, Start(), (), ordered)
    order.end_at(count)
    return buffer, order


def taken(buffer, order):
    return [item.number for item in buffer.take(order, 100)]


def test_results_come_by_their_numbers():
    buffer, order = buffer_of(4)
    for number in (2, 0, 1):
        buffer.put(Item(0, number, "x"))
    assert buffer.peek(order) is True
    assert taken(buffer, order) == [0, 1, 2]
    assert buffer.peek(order) is False
    assert buffer.undone() == list(buffer.tickets) == [3]


def test_results_of_the_next_epoch_wait_for_it():
    for ordered in (True, False):
        buffer, order = buffer_of(4, ordered)
        order.end_at(2)
        assert (buffer.waiting_before(2, 0), buffer.waiting_before(2, 1)) == (0, 1)
        for message in (Item(0, 2, "of the next one"), Item(0, 1, "x"), Failure(0, 3, OSError())):
            buffer.put(message)
        assert (buffer.waiting_before(2, 0), buffer.waiting_before(2, 5)) == (1, 2)
        buffer.put(Item(0, 0, "x"))
        assert sorted(taken(buffer, order)) == [0, 1]
        assert buffer.peek(order) is False
        assert order.done
        assert buffer.waiting_before(2, 5) == 0
        following = TaskOrder(2, Start(), (), ordered)
        assert taken(buffer, following) == [2]
        assert isinstance(buffer.peek(following), Failure)


def test_an_epoch_ends_with_an_empty_task_before_a_failure_of_the_next_one():
    for ordered in (True, False):
        buffer, order = buffer_of(3, ordered)
        order.end_at(2)
        for message in (Item(0, 0, "x"), Empty(1), Failure(0, 2, OSError())):
            buffer.put(message)
        assert taken(buffer, order) == [0]
        assert buffer.peek(order) is True
        assert order.done


def test_a_second_result_of_a_task_is_dropped_before_and_after_its_turn():
    for ordered in (True, False):
        buffer, order = buffer_of(2, ordered)
        buffer.put(Item(0, 0, "first"))
        buffer.put(Item(0, 0, "second"))
        (item,) = buffer.take(order, 100)
        assert item.value == "first"
        buffer.put(Item(0, 0, "third"))
        assert taken(buffer, order) == []
        assert buffer.waiting_before(None, 0) == 0


def test_a_task_without_a_result_is_passed_over():
    buffer, order = buffer_of(3)
    for message in (Empty(0), Item(0, 1, "x"), Empty(2)):
        buffer.put(message)
    assert buffer.peek(order) is True
    assert taken(buffer, order) == [1]
    assert buffer.peek(order) is True
    assert order.done


def test_skipped_errors_come_once_each_and_before_the_result():
    buffer, order = buffer_of(2)
    first, second = (Failure(0, 0, KeyError(n), skipped=True) for n in (1, 2))
    for message in (first, second, Item(0, 0, "rest"), Item(0, 1, "next")):
        buffer.put(message)
    for nth, error in enumerate((first, second), start=1):
        numbered = dataclasses.replace(error, nth=nth)
        found = buffer.peek(order)
        assert found == buffer.peek(order) == numbered
        assert taken(buffer, order) == []
        buffer.pass_over(found)
        buffer.pass_over(found)
    assert buffer.peek(order) is True
    assert taken(buffer, order) == [0, 1]


def test_a_task_that_is_done_again_tells_its_errors_again_and_once():
    buffer, order = buffer_of(1)
    buffer.put(Failure(0, 0, KeyError(1), skipped=True))
    buffer.forget_skipped(0)
    again = Failure(0, 0, KeyError(1), skipped=True)
    for message in (again, Empty(0)):
        buffer.put(message)
    found = buffer.peek(order)
    assert found == dataclasses.replace(again, nth=1)
    buffer.pass_over(found)
    assert buffer.peek(order) is True
    assert order.done


def test_a_failure_waits_for_its_turn_and_stays():
    buffer, order = buffer_of(2)
    failure = Failure(0, 1, KeyError())
    buffer.put(failure)
    assert buffer.peek(order) is False
    buffer.put(Item(0, 0, "x"))
    assert taken(buffer, order) == [0]
    assert buffer.peek(order) == buffer.peek(order) == Failure(1, 1, failure.error, nth=1)


def test_the_largest_result_is_known_if_they_are_measured():
    for measure, largest in ((False, 0), (True, 7)):
        buffer, _ = buffer_of(2, measure=measure)
        buffer.put(Item(0, 0, b"1234567"))
        buffer.put(Item(0, 1, [b"12"]))
        assert buffer.largest_bytes == largest


def test_an_error_is_told_by_the_index_of_its_element():
    buffer, order = buffer_of(1)
    buffer.tickets[0] = Ticket(0, 0, (40, 41, 42))
    error = KeyError()
    buffer.put(Failure(2, 0, error))
    assert buffer.peek(order) == Failure(42, 0, error, nth=1)
