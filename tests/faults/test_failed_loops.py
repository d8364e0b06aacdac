"""An exception outside the user's code ends a worker's loop: the training loop gets an error."""

import ctypes
import gc
import os
import re
import signal
import threading
from collections import deque

import pytest
from helpers import METHODS, alive, wait_until

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Processes, WorkerDied
from enqueuer.backends.thread_channel import ThreadSender
from enqueuer.order.messages import Failure
from enqueuer.transport.sender import ItemSender

BACKENDS = [
    pytest.param("thread", id="thread"),
    pytest.param(Processes(start_method="fork"), id="process-fork"),
]


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """Return a backend whose workers cannot send a failure."""
    for sender in (ThreadSender, ItemSender):
        monkeypatch.setattr(sender, "send", _no_failure(sender.send))
    return request.param


def _no_failure(send):
    def no_failure(sender, message):
        if isinstance(message, Failure):
            raise MemoryError("no room for the failure")
        return send(sender, message)

    return no_failure


class NoCopy:
    """A state that cannot be copied."""

    def __deepcopy__(self, memo):
        raise ValueError("cannot copy")


class Stateful:
    """An iterator whose state at the end cannot be copied."""

    def __init__(self):
        self._left = 3
        self._has_ended = False

    def __iter__(self):
        return self

    def __next__(self):
        if not self._left:
            self._has_ended = True
            raise StopIteration
        self._left -= 1
        return self._left

    def state_dict(self):
        return NoCopy() if self._has_ended else {"left": self._left}

    def load_state_dict(self, state):
        self._left = state["left"]


def fails_at_five(index):
    if index == 5:
        raise KeyError(index)
    return index


def until_death(enqueuer):
    """Return what comes before the death of a worker, and the error."""
    items = []
    with pytest.raises(WorkerDied) as caught:
        for item in enqueuer:
            items.append(item)  # it raises
    return items, caught.value


@pytest.mark.filterwarnings("ignore:max_restarts has no effect with threads")
@pytest.mark.parametrize("max_restarts", [0, 1])
@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_task_whose_failure_cannot_be_sent_is_a_death(
    backend, workers, concurrency, max_restarts
):
    with OrderedEnqueuer(
        range(20),
        map=fails_at_five,
        workers=workers,
        concurrency=concurrency,
        max_restarts=max_restarts,
        backend=backend,
    ) as enqueuer:
        items, error = until_death(enqueuer)
    # Nothing says which tasks a thread had, so its death comes before results that others make.
    # With several threads, the worker may die before it has run an element before that one.
    is_alone = workers == 1 or backend != "thread"
    assert items == list(range(5 if concurrency == 1 and is_alone else len(items)))
    assert len(items) <= 5
    if backend == "thread":
        assert isinstance(error.__cause__, MemoryError)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_shard_whose_failure_cannot_be_sent_is_a_death(backend, ordered):
    def source(shard):
        yield from [(number, shard.index) for number in range(4)]
        if shard.index == 1:
            raise KeyError

    with GeneratorEnqueuer(source, workers=2, ordered=ordered, backend=backend) as enqueuer:
        items, error = until_death(enqueuer)
    if ordered:
        assert items == [(number, shard) for number in range(4) for shard in range(2)]
    else:
        # The other worker may not have run yet when this one dies.
        assert [number for number, shard in items if shard == 1] == [0, 1, 2, 3]
        others = [number for number, shard in items if shard == 0]
        assert others == list(range(len(others)))
    assert error.worker == 1
    assert "shard 1, item 4" in error.__notes__[0]


def test_a_state_that_cannot_be_copied_at_the_end_is_an_error():
    with GeneratorEnqueuer(Stateful()) as enqueuer:
        items, error = until_death(enqueuer)
    assert items == [2, 1, 0]
    assert isinstance(error.__cause__, ValueError)


def test_an_exception_that_other_code_sends_to_a_waiting_worker_is_an_error():
    threads = []

    def source():
        threads.append(threading.get_ident())
        yield 1

    with GeneratorEnqueuer(source) as enqueuer:
        assert list(enqueuer) == [1]
        kind = ctypes.py_object(ZeroDivisionError)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threads[0]), kind)
        with pytest.raises(WorkerDied, match="ZeroDivisionError") as caught:
            list(enqueuer)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.thorough
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_after_a_death_that_is_caught_no_worker_outlives_its_enqueuer(method, ordered):
    backend = Processes(start_method=method)
    options = {"workers": 2, "max_queue_size": 2, "ordered": ordered, "backend": backend}
    gc.disable()
    try:
        for _ in range(5):
            workers = list(workers_of_a_death(options))
            wait_until(lambda workers=workers: not any(map(alive, workers)))
    finally:
        gc.enable()


def workers_of_a_death(options):
    """Return the processes of an enqueuer that has told of a death, and that nobody has now."""
    enqueuer = OrderedEnqueuer(range(10**6), abs, **options)
    loop = iter(enqueuer)
    next(loop)
    names = [worker.name for worker in enqueuer.stats().workers]
    workers = [int(re.search(r"process (\d+)", name)[1]) for name in names]
    os.kill(workers[0], signal.SIGKILL)
    with pytest.raises(WorkerDied):
        deque(loop, maxlen=0)
    return workers
