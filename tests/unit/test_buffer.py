"""The buffer that threads share."""

import threading
from queue import Empty, Full

import pytest
from helpers import LIMIT

import enqueuer.buffer
from enqueuer import Buffer, Closed


def started(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    return thread


def is_waiting(thread):
    """Return whether a thread still waits after a moment."""
    thread.join(0.05)
    return thread.is_alive()


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
    assert (buffer.get(), len(buffer)) == ("a", 0)


def test_an_empty_buffer_gives_nothing():
    with pytest.raises(Empty):
        Buffer().get_nowait()
    with pytest.raises(Empty):
        Buffer().get(timeout=0.01)


def test_a_waiting_putter_is_woken_by_get():
    buffer = Buffer(1)
    buffer.put("a")
    thread = started(buffer.put, "b")
    assert is_waiting(thread)
    assert buffer.get() == "a"
    thread.join(LIMIT)
    assert buffer.get_nowait() == "b"


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
    assert is_waiting(thread)
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
    assert is_waiting(thread)
    buffer.put(1)
    buffer.close()
    thread.join(LIMIT)
    assert items == [1]


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

    monkeypatch.setattr(enqueuer.buffer.threading, "Condition", Jumpy)
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


def test_a_bound_below_1_is_refused():
    with pytest.raises(ValueError, match="max_size must be >= 1, got 0"):
        Buffer(0)
