"""stop() is bounded in whatever state the workers are, and prompt if they can hear it."""

import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import helpers
import pytest
from helpers import LIMIT, counting, run_in_threads, start_method_of, wait_until

from enqueuer import GeneratorEnqueuer, InvalidState, OrderedEnqueuer, Processes, StopWarning
from enqueuer.enqueuers import run
from enqueuer.enqueuers.enqueuer import core_of
from enqueuer.enqueuers.run import Locks, OwnedBackends

PROMPT_S = 1.5  # 0.1 s, with nothing else to do; one that does not listen takes 2
SLACK_S = 0.7  # over `timeout`


def state_of(pid):
    """Return the letter of /proc: R(unning), S(leeping), T (stopped) ..."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def timed_stop(enqueuer, what, process, **options):
    """Stop and return the seconds that it took."""
    before = time.monotonic()
    enqueuer.stop(**options)
    took = time.monotonic() - before
    print(f"stop {what} {start_method_of(process)}: {took * 1000:.0f} ms")
    return took


def between_epochs(shard):
    yield os.getpid()


def full(shard):
    yield os.getpid()
    yield from counting(shard)


def full_of_large_items(shard):
    yield os.getpid()
    while True:
        yield bytes(1_000_000)


def slow(shard):
    yield os.getpid()
    while True:
        time.sleep(0.01)
        yield 1


def yields_none(shard):
    yield os.getpid()
    while True:
        yield None


@pytest.mark.parametrize("source", [between_epochs, full, full_of_large_items, slow, yields_none])
@helpers.retry_if_disturbed
def test_cooperative_workers_stop_at_once(process, source):
    with GeneratorEnqueuer(source, workers=2, max_queue_size=2, **process) as enqueuer:
        batches = iter(enqueuer)
        pids = [next(batches), next(batches)]
        if source in (between_epochs, full):
            wait_until(lambda: all(state_of(pid) == "S" for pid in pids))
        helpers.check_prompt(timed_stop(enqueuer, source.__name__, process), PROMPT_S)
        assert not any(map(helpers.alive, pids))


class Hanging:
    """Tell the pid, then hang."""

    def __init__(self, act):
        self.act = act

    def __call__(self, shard):
        yield os.getpid()
        self.act()
        yield 1


@pytest.mark.parametrize(
    ("act", "timeout"),
    [
        (helpers.hang_deaf, 0),
        pytest.param(helpers.hang_deaf, 1, marks=pytest.mark.thorough),
        pytest.param(helpers.hang, 1, marks=pytest.mark.thorough),
        pytest.param(helpers.hang_in_c, 1, marks=pytest.mark.thorough),
        pytest.param(helpers.stop_self, 1, marks=pytest.mark.thorough),
    ],
)
@helpers.retry_if_disturbed
def test_workers_that_do_not_listen_are_ended_in_time(process, act, timeout):
    with GeneratorEnqueuer(Hanging(act), workers=2, **process) as enqueuer:
        batches = iter(enqueuer)
        pids = [next(batches), next(batches)]
        wait_until(lambda: all(state_of(pid) in "ST" for pid in pids))
        took = timed_stop(enqueuer, act.__name__, process, timeout=timeout)
        helpers.check_prompt(took, timeout + SLACK_S)
        assert not any(map(helpers.alive, pids))


@helpers.retry_if_disturbed
def test_workers_that_have_just_begun_are_stopped(process):
    enqueuer = GeneratorEnqueuer(counting, workers=2, **process)
    enqueuer.start()
    limit = 3 if start_method_of(process) == "spawn" else PROMPT_S  # it must have come to listen
    helpers.check_prompt(timed_stop(enqueuer, "just begun", process), limit)


@pytest.mark.parametrize("times", range(5))
def test_stop_while_another_thread_starts(backend, times):
    """Whichever is first: afterwards another stop() leaves nothing, and it can be started again."""
    enqueuer = GeneratorEnqueuer(counting, workers=2, **backend)
    ready = threading.Barrier(2)

    def start():
        ready.wait()
        enqueuer.start()

    starter = threading.Thread(target=start)
    starter.start()
    ready.wait()
    enqueuer.stop()
    starter.join(LIMIT)
    assert not starter.is_alive()
    enqueuer.stop()
    with enqueuer:
        assert next(iter(enqueuer)) == (0, 0)


def test_many_threads_stop_at_once(backend):
    with GeneratorEnqueuer(counting, workers=2, **backend) as enqueuer:
        next(iter(enqueuer))
        run_in_threads([enqueuer.stop] * 8)
    assert "STOPPED" in repr(enqueuer)


@helpers.retry_if_disturbed
def test_a_thread_that_hangs_is_left_with_a_warning_that_shows_where():
    gate = threading.Event()

    def source():
        yield 1
        gate.wait(LIMIT)

    with warnings.catch_warnings():
        warnings.simplefilter("error", StopWarning)
        with GeneratorEnqueuer(source) as enqueuer:
            next(iter(enqueuer))
            before = time.monotonic()
            with pytest.raises(StopWarning, match=r"gate\.wait\(LIMIT\)"):
                enqueuer.stop(timeout=0.2)
            helpers.check_prompt(time.monotonic() - before, 0.2 + SLACK_S)
        gate.set()


def test_a_thread_makes_only_the_stop_that_was_asked_for_in_it():
    locks, stopped = Locks(), []

    def read():
        with locks.reading():
            pass

    with locks.reading():
        assert locks.defer_stop(lambda: stopped.append(threading.get_ident()))
        other = threading.Thread(target=read)
        other.start()
        # Releases the lock, as a loop does that waits for new workers.
        locks.changed.wait_for(lambda: not other.is_alive(), 0.5)
        other.join(LIMIT)
        assert not other.is_alive()
        assert stopped == []
    assert stopped == [threading.get_ident()]


def test_a_backend_is_seen_while_another_thread_removes_the_one_before(monkeypatch):
    """`reconfigure()` has ended the old workers, and the new ones are to be stopped."""

    class Removed:
        """The finalizer of the old ones; another thread removes them while it is asked."""

        detach = staticmethod(lambda: None)

        @property
        def alive(self):
            owned.stop(0, but=(new,))
            return False

    finalizers = iter([Removed(), SimpleNamespace(alive=True)])
    monkeypatch.setattr(run, "Finalizer", lambda *args: next(finalizers))
    owner = Locks()
    owned, new = OwnedBackends(owner), SimpleNamespace()
    owned.add(SimpleNamespace(stop=lambda timeout: None))
    owned.add(new)
    assert owned.are_running


def with_eight_ready():
    """Return an enqueuer whose loop has two batches, and eight are ready, the last ones."""
    first_is_taken = threading.Event()

    def number(element):
        if element:
            first_is_taken.wait(LIMIT)
        return element

    enqueuer = OrderedEnqueuer(range(10), number, max_queue_size=256, random_seed=1)
    enqueuer.start()
    batches = iter(enqueuer)
    assert next(batches) == 0
    first_is_taken.set()
    wait_until(lambda: enqueuer.stats().queue_size == 9)
    assert next(batches) == 1
    # More than one at once is taken only with a long queue.
    assert len(core_of(enqueuer).reader.ready) == 8
    return enqueuer


@pytest.mark.parametrize("act", ["state_dict", "next", "get"])
def test_what_another_thread_does_during_stop_loses_no_batch(act, monkeypatch):
    """Batches were ready; stop() has taken them away, and has not yet recorded where it ends."""
    states = []

    def interfere():
        try:
            if act == "state_dict":
                states.append(enqueuer.state_dict())
            elif act == "next":
                next(batches)
            else:
                enqueuer.queue.get()
        except (StopIteration, InvalidState):
            pass

    def position(ready):
        other.start()
        other.join(0.2)  # it may wait until stop() has recorded the position
        return find_position(ready)

    other = threading.Thread(target=interfere)
    enqueuer = with_eight_ready()
    batches = iter(enqueuer)
    expected = enqueuer.state_dict()
    assert expected["positions"] == [[0, 2]]
    reader = core_of(enqueuer).reader
    find_position = reader.position
    with monkeypatch.context() as patch:
        patch.setattr(reader, "position", position)
        enqueuer.stop()
    other.join(LIMIT)
    assert enqueuer.state_dict() == expected
    assert states in ([], [expected])


class Loaded:
    """An item that the loop takes its time to load, the first time that it is the last one."""

    is_loading = threading.Event()
    is_stopped = threading.Event()

    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        return load, (self.number,)


def load(number):
    if number == 5:
        Loaded.is_loading.set()
        assert Loaded.is_stopped.wait(LIMIT)
    return Loaded(number)


def six(shard):
    yield from map(Loaded, shard.split(range(6)))


@pytest.mark.local
@pytest.mark.parametrize("shards", [1, 2])
def test_what_is_loaded_while_stop_does_not_wait_comes_once(shards):
    """The loop's thread has the lock for longer than stop() waits for it."""
    Loaded.is_loading.clear()
    Loaded.is_stopped.clear()
    fork = Processes(start_method="fork")
    with GeneratorEnqueuer(six, shards=shards, workers=shards, backend=fork) as enqueuer:
        # All wait, and are loaded by one call.
        wait_until(lambda: enqueuer.stats().queue_size == 6)
        with ThreadPoolExecutor() as pool:
            found = pool.submit(lambda: [item.number for item in enqueuer])
            assert Loaded.is_loading.wait(LIMIT)
            enqueuer.stop(0)
            Loaded.is_stopped.set()
            seen = found.result(LIMIT)
        enqueuer.load_state_dict(enqueuer.state_dict())
        enqueuer.start()
        assert seen + [item.number for item in enqueuer] == list(range(6))


def test_a_queue_of_a_stopped_enqueuer_ends_no_epoch():
    """A signal handler stops it while `get()` is on its way to the workers."""
    enqueuer = with_eight_ready()
    reader = core_of(enqueuer).reader
    expected = enqueuer.state_dict()
    enqueuer.stop()
    assert not reader.has_item(None)  # as `get()` calls it after the handler
    assert not reader.is_over
    assert enqueuer.state_dict() == expected
