"""Results between their arrival and their turn."""

from enqueuer.backends.shelf import Look, Shelf
from enqueuer.merging import TaskOrder
from enqueuer.messages import Empty, Failure, Item, Start, Ticket


def shelf_of(count, ordered=True, measure=False):
    shelf = Shelf(measure)
    shelf.tickets = {number: Ticket(number, 0, (number,)) for number in range(count)}
    order = TaskOrder(0, Start(), (), ordered)
    order.end_at(count)
    return shelf, order


def taken(shelf, order):
    return [item.number for item in shelf.items(order, 100)]


def test_results_come_by_their_numbers():
    shelf, order = shelf_of(4)
    for number in (2, 0, 1):
        shelf.put(Item(0, number, "x"))
    assert shelf.look(order) is Look.ITEM
    assert taken(shelf, order) == [0, 1, 2]
    assert shelf.look(order) is Look.NOTHING
    assert shelf.undone() == list(shelf.tickets) == [3]


def test_a_second_result_of_a_task_is_dropped_before_and_after_its_turn():
    for ordered in (True, False):
        shelf, order = shelf_of(2, ordered)
        shelf.put(Item(0, 0, "first"))
        shelf.put(Item(0, 0, "second"))
        (item,) = shelf.items(order, 100)
        assert item.value == "first"
        shelf.put(Item(0, 0, "third"))
        assert taken(shelf, order) == []
        assert shelf.waiting == 0


def test_a_task_without_a_result_is_passed_over():
    shelf, order = shelf_of(3)
    for message in (Empty(0), Item(0, 1, "x"), Empty(2)):
        shelf.put(message)
    assert shelf.look(order) is Look.ITEM
    assert taken(shelf, order) == [1]
    assert shelf.look(order) is Look.ROOM
    assert order.done


def test_skipped_errors_come_once_each_and_before_the_result():
    shelf, order = shelf_of(2)
    first, second = (Failure(0, 0, KeyError(n), skipped=True) for n in (1, 2))
    for message in (first, second, Item(0, 0, "rest"), Item(0, 1, "next")):
        shelf.put(message)
    for error in (first, second):
        assert shelf.look(order) == shelf.look(order) == error
        assert taken(shelf, order) == []
        shelf.pass_over()
    assert shelf.look(order) is Look.ITEM
    assert taken(shelf, order) == [0, 1]


def test_a_task_that_is_done_again_tells_its_errors_again_and_once():
    shelf, order = shelf_of(1)
    shelf.put(Failure(0, 0, KeyError(1), skipped=True))
    shelf.begin_again(0)
    again = Failure(0, 0, KeyError(1), skipped=True)
    for message in (again, Empty(0)):
        shelf.put(message)
    assert shelf.look(order) == again
    shelf.pass_over()
    assert shelf.look(order) is Look.ROOM
    assert order.done


def test_a_failure_waits_for_its_turn_and_stays():
    shelf, order = shelf_of(2)
    failure = Failure(0, 1, KeyError())
    shelf.put(failure)
    assert shelf.look(order) is Look.NOTHING
    shelf.put(Item(0, 0, "x"))
    assert taken(shelf, order) == [0]
    assert shelf.look(order) == shelf.look(order) == Failure(1, 1, failure.error)


def test_the_largest_result_is_known_if_they_are_measured():
    for measure, largest in ((False, 0), (True, 7)):
        shelf, _ = shelf_of(2, measure=measure)
        shelf.put(Item(0, 0, b"1234567"))
        shelf.put(Item(0, 1, [b"12"]))
        assert shelf.largest_bytes == largest


def test_an_error_is_told_by_the_index_of_its_element():
    shelf, order = shelf_of(0)
    shelf.tickets[0] = Ticket(0, 0, (40, 41, 42))
    error = KeyError()
    shelf.put(Failure(2, 0, error))
    assert shelf.look(order) == Failure(42, 0, error)
