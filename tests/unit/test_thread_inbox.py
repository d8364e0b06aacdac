"""The inbox of threads, where a signal handler runs within its methods."""

import sys
import threading

import pytest
from helpers import LIMIT, wait_until

from enqueuer.backends.thread.inbox import ThreadInbox
from enqueuer.errors import Closed
from enqueuer.monitoring.meters import Meter

new_lock = threading.Lock


class Taken:
    def __init__(self):
        self.numbers, self.last = {}, -1


class Lock:
    """A lock behind one method of which a signal handler runs, once."""

    def __init__(self, handlers):
        self.lock, self.handlers = new_lock(), handlers
        self.acquire = self.lock.acquire

    def locked(self):
        is_locked = self.lock.locked()
        self.handlers.pop("locked", int)()
        return is_locked

    def release(self):
        self.lock.release()
        self.handlers.pop("release", int)()


def is_below_put(thread):
    """Return whether a thread is in a function that `put()` has called."""
    frame = sys._current_frames()[thread.ident]
    return frame.f_back is not None and frame.f_back.f_code is ThreadInbox.put.__code__


@pytest.mark.parametrize("method", ["locked", "release"])
def test_a_handler_may_close_an_inbox_that_wakes_a_worker(method, monkeypatch):
    handlers, ends = {}, []
    inbox = ThreadInbox(max_size=1)
    inbox.put((0, 0, "a", None), 0, Meter())

    def put():
        monkeypatch.setattr(threading, "Lock", lambda: Lock(handlers))
        with pytest.raises(Closed):
            inbox.put((0, 1, "b", None), 0, Meter())
        ends.append(method)

    putter = threading.Thread(target=put)
    putter.start()
    wait_until(lambda: is_below_put(putter))
    monkeypatch.undo()
    assert [item[2] for item in inbox.items(1, Taken())] == ["a"]
    handlers[method] = inbox.close
    inbox.acknowledge()
    putter.join(LIMIT)
    assert not handlers
    assert ends == [method]
