"""The buffer that threads share."""

import threading
from queue import Empty, Full

import pytest
from helpers import LIMIT, wait_until

import enqueuer.backends.thread.buffer
from enqueuer import Buffer, Closed


def started(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    return thread


def test_first_in_is_first_out():
    buffer = Buffer(3)
    for number in (1, 2, 3):
        buffer.put(number)
    assert buffer.snapshot() == [1, 2, 3]
    assert [buffer.get() for _ in range(3)] == [1, 2, 3]


def test_none_is_an_item():
    buffer = Buffer()
    buffer.put(None)
    assert buffer.get() is None


def test_a_full_buffer_takes_no_more():
    buffer = Buffer(1)
    buffer.put("a")
    with pytest.raises(Full):
        buffer.put_nowait("b")
    with pytest.raises(Full):
        buffer.put("b", timeout=0.01)
    assert buffer.snapshot() == ["a"]


def test_an_empty_buffer_gives_nothing():
    with pytest.raises(Empty):
        Buffer().get_nowait()
    with pytest.raises(Empty):
        Buffer().get(timeout=0.01)


def test_a_waiting_putter_is_woken_by_get():
    buffer = Buffer(1)
    buffer.put("a")
    thread = started(buffer.put, "b")
    wait_until(lambda: "1 in put()" in repr(buffer))
    assert buffer.get() == "a"
    thread.join(LIMIT)
    assert buffer.get_nowait() == "b"


def test_bytes_are_bounded():
    buffer = Buffer(10, max_bytes=100)
    buffer.put("a", size_bytes=60)
    with pytest.raises(Full):
        buffer.put_nowait("b", size_bytes=41)
    buffer.put_nowait("b", size_bytes=40)
    assert buffer.get() == "a"
    buffer.put_nowait("c", size_bytes=60)


def test_an_item_larger_than_the_bound_goes_to_who_waits_for_it():
    buffer = Buffer(10, max_bytes=100)
    thread = started(buffer.put, "huge", None, 1000)
    wait_until(lambda: "1 in put()" in repr(buffer))
    assert len(buffer) == 0
    assert buffer.get(timeout=LIMIT) == "huge"
    thread.join(LIMIT)


def test_a_buffer_of_size_0_hands_over_from_hand_to_hand():
    buffer = Buffer(0)
    with pytest.raises(Full):
        buffer.put_nowait("a")
    thread = started(buffer.put, "a")
    wait_until(lambda: "1 in put()" in repr(buffer))
    assert buffer.get_nowait() == "a"
    thread.join(LIMIT)


def test_close_ends_putters_at_once_and_getters_when_it_is_empty():
    buffer = Buffer(1)
    buffer.put("left")
    errors = []

    def put():
        try:
            buffer.put("late")
        except Closed as error:
            errors.append(error)

    thread = started(put)
    wait_until(lambda: "1 in put()" in repr(buffer))
    buffer.close()
    thread.join(LIMIT)
    assert len(errors) == 1
    assert buffer.closed
    assert buffer.get() == "left"
    with pytest.raises(Closed):
        buffer.get()
    with pytest.raises(Closed):
        buffer.put("more")


def test_close_wakes_a_waiting_getter():
    buffer = Buffer()
    items = []
    thread = started(lambda: items.extend(buffer))
    wait_until(lambda: "1 in get()" in repr(buffer))
    buffer.put(1)
    buffer.close()
    thread.join(LIMIT)
    assert items == [1]


def test_clear_throws_away_and_makes_room():
    buffer = Buffer(1, max_bytes=10)
    buffer.put("a", size_bytes=10)
    thread = started(buffer.put, "b", None, 10)
    wait_until(lambda: "1 in put()" in repr(buffer))
    buffer.clear()
    thread.join(LIMIT)
    assert buffer.snapshot() == ["b"]


def test_many_threads_move_each_item_once():
    buffer = Buffer(3)
    taken = [[] for _ in range(4)]
    putters = [started(lambda at=at: [buffer.put((at, n)) for n in range(500)]) for at in range(4)]
    getters = [started(mine.extend, buffer) for mine in taken]
    for thread in putters:
        thread.join(LIMIT)
    buffer.close()
    for thread in getters:
        thread.join(LIMIT)
    assert sorted(item for mine in taken for item in mine) == [
        (at, n) for at in range(4) for n in range(500)
    ]


def test_spurious_wake_ups_do_no_harm(monkeypatch):
    class Jumpy(threading.Condition):
        """wait() returns at once now and then, as it may by its contract."""

        lies = 5

        def wait(self, timeout=None):
            if self.lies:
                self.lies -= 1
                return True
            return super().wait(timeout)

    monkeypatch.setattr(enqueuer.backends.thread.buffer.threading, "Condition", Jumpy)
    buffer = Buffer(1)
    items = []
    thread = started(lambda: items.extend(buffer))
    for number in range(20):
        buffer.put(number)
    buffer.close()
    thread.join(LIMIT)
    assert items == list(range(20))


def test_repr_is_a_status_line():
    buffer = Buffer(2)
    buffer.put(1)
    assert repr(buffer) == "<Buffer 1/2 open>"
    buffer.close()
    assert repr(buffer) == "<Buffer 1/2 closed>"


def test_bad_bounds_are_refused():
    with pytest.raises(ValueError, match="max_size must be >= 0, got -1"):
        Buffer(-1)
    with pytest.raises(ValueError, match="max_bytes must be >= 1 or None, got 0"):
        Buffer(max_bytes=0)


def test_an_offer_is_taken_only_if_there_is_room():
    buffer = Buffer(max_size=1)
    assert buffer.offer("a")
    assert not buffer.offer("b")
    assert buffer.get() == "a"
    buffer.close()
    with pytest.raises(Closed):
        buffer.offer("c")


def test_a_poll_waits_for_nothing():
    buffer = Buffer(max_size=1)
    assert buffer.poll() is None
    buffer.put("a")
    assert buffer.poll() == "a"
    buffer.close()
    assert buffer.poll() is None
