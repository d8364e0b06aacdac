"""When the threads of a worker have room for another ticket."""

import threading

import pytest

from enqueuer.monitoring.meters import Meter
from enqueuer.order.messages import Ticket
from enqueuer.workers import task_loop
from enqueuer.workers.task_loop import ElementThreads
from tests.helpers import LIMIT, wait_until


class Waits:
    """A job that ends when it may."""

    indices, ticket = (0,), Ticket(0, 0, (0,))

    def __init__(self, may_end, is_work=True):
        self.may_end = may_end
        self.is_work = is_work
        self.has_begun = threading.Event()

    def run(self):
        self.has_begun.set()
        assert self.may_end.wait(LIMIT)


@pytest.fixture
def gate():
    return threading.Event()


@pytest.fixture
def threads(gate):
    """Two threads."""
    threads = ElementThreads(2, Meter(), list)
    threads.start("worker-0")
    yield threads
    gate.set()
    threads.join()


def submit(threads, *gates, is_work=True):
    jobs = [Waits(gate, is_work) for gate in gates]
    threads.submit(jobs)
    return jobs


def end_one_of_three(threads, gate, is_work=True):
    """Have a job end while room is awaited; then each thread runs one that does not end."""
    first = threading.Event()
    submit(threads, first, is_work=is_work)
    jobs = submit(threads, gate, is_work=is_work)
    found = []
    waiting = threading.Thread(target=lambda: found.append(threads.wait_for_room()))
    waiting.start()
    wait_until(lambda: threads.is_awaited)
    first.set()
    waiting.join(LIMIT)
    assert found == [True]
    for job in jobs + submit(threads, gate, is_work=is_work):
        assert job.has_begun.wait(LIMIT)


@pytest.fixture
def late(monkeypatch):
    """Whoever waits for room always comes late, and no job takes long."""
    monkeypatch.setattr(task_loop, "LATE_NS", -1)
    monkeypatch.setattr(task_loop, "LATE_FOR_NS", 1e18)
    monkeypatch.setattr(task_loop, "SHORT_NS", 1e18)


def test_a_first_job_for_each_thread_finds_room(threads, gate):
    assert threads.has_room
    submit(threads, gate)
    assert threads.has_room
    submit(threads, gate)
    assert not threads.has_room


def test_who_comes_late_has_room_for_the_next_job_of_each_thread(threads, gate, late):
    end_one_of_three(threads, gate)
    for _ in range(2):
        assert threads.has_room
        submit(threads, gate)
    assert not threads.has_room


@pytest.mark.parametrize(
    ("limit", "value"),
    [("LATE_NS", 1e18), ("LATE_FOR_NS", 0), ("SHORT_NS", 0)],
    ids=["in time", "late long ago", "after a long job"],
)
def test_others_have_room_for_the_present_jobs_only(threads, gate, late, monkeypatch, limit, value):
    with monkeypatch.context() as patched:
        patched.setattr(task_loop, limit, value)
        end_one_of_three(threads, gate)
    assert not threads.has_room


def test_who_came_late_is_late_for_a_while(threads, gate, late, monkeypatch):
    """Although it then comes in time."""
    end_one_of_three(threads, gate)
    monkeypatch.setattr(task_loop, "LATE_NS", 1e18)
    other = threading.Event()
    others = submit(threads, other, other)
    waiting = threading.Thread(target=threads.wait_for_room, daemon=True)
    waiting.start()
    wait_until(lambda: threads.is_awaited)
    gate.set()
    waiting.join(LIMIT)
    assert not waiting.is_alive()
    for job in others:
        assert job.has_begun.wait(LIMIT)
    submit(threads, other)
    assert threads.has_room
    other.set()


def test_behind_a_job_that_has_run_for_long_there_is_no_room(threads, gate, late, monkeypatch):
    end_one_of_three(threads, gate)
    assert threads.has_room
    monkeypatch.setattr(task_loop, "SHORT_NS", 0)
    assert not threads.has_room


def test_a_job_that_is_no_work_shows_nothing(threads, gate, late):
    end_one_of_three(threads, gate, is_work=False)
    assert not threads.has_room


def test_when_all_threads_have_nothing_to_do_it_was_never_late(threads, gate, late):
    end_one_of_three(threads, gate)
    gate.set()
    wait_until(lambda: threads.is_idle)
    other = threading.Event()
    submit(threads, other, other)
    assert not threads.has_room
    other.set()
