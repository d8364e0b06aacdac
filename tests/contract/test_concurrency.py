"""`concurrency=n`: each worker runs n elements at once, and all else is as with one."""

import json
import os
import threading
import time

import numpy as np
import pytest
from conftest import BACKENDS, chosen, without
from helpers import LIMIT, augmented, kill_self, text_when, wait_until

from enqueuer import OrderedEnqueuer, StopWarning, WorkerDied, imap, replay
from enqueuer.enqueuers.enqueuer import core_of


# The loop's own thread runs one element at a time.
@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    return chosen(request.param, monkeypatch, request.node)


class Meeting:
    """A map whose elements wait for each other, by files, until `count` of them run at once."""

    def __init__(self, folder, count):
        self.folder, self.count = folder, count

    def __call__(self, x):
        group = x // self.count
        (self.folder / f"{group}-{x}").touch()
        wait_until(lambda: len(list(self.folder.glob(f"{group}-*"))) == self.count)
        return x


class Gates:
    """A map whose elements note that they have begun, and then wait for a file."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, x):
        (self.folder / f"begun-{x}").touch()
        wait_until((self.folder / f"gate-{x}").exists)
        return x

    def wait_for(self, *elements):
        wait_until(lambda: all((self.folder / f"begun-{x}").exists() for x in elements))

    def open(self, *elements):
        for x in elements:
            (self.folder / f"gate-{x}").touch()

    @property
    def begun(self):
        return len(list(self.folder.glob("begun-*")))


def flat(batches):
    return [element for batch in batches for element in batch]


def run(epochs=2, **options):
    with OrderedEnqueuer(range(23), augmented, shuffle=True, random_seed=7, **options) as enqueuer:
        return [list(enqueuer) for _ in range(epochs)]


@pytest.fixture(scope="module")
def whole():
    return run()


# --- order and seeds ---


def test_the_results_are_those_of_one_element_at_a_time(backend, whole):
    assert run(workers=2, concurrency=5, **backend) == whole


def test_the_batches_are_those_of_one_element_at_a_time(backend):
    batches = dict(batch_size=4, collate=list)
    assert run(workers=2, concurrency=5, **batches, **backend) == run(**batches)


def test_as_they_come_each_comes_once(backend, whole):
    found = run(workers=2, concurrency=5, ordered=False, **backend)
    assert [sorted(epoch) for epoch in found] == [sorted(epoch) for epoch in whole]


@pytest.mark.parametrize("size", [None, 4])
def test_elements_of_an_iterable_come_in_their_order(backend, size):
    elements = (x for x in range(30))
    options = dict(concurrency=4, workers=2, batch_size=size, collate=list if size else None)
    found = list(imap(abs, elements, **options, **backend))
    assert (found if size is None else flat(found)) == list(range(30))


@pytest.mark.parametrize("size", [None, 4])
def test_elements_run_at_once_also_those_of_one_batch(backend, tmp_path, size):
    options = dict(concurrency=4, batch_size=size, collate=list if size else None)
    found = list(imap(Meeting(tmp_path, 4), range(8), max_queue_size=1, **options, **backend))
    assert (found if size is None else flat(found)) == list(range(8))


# A socket for datagrams does not show on every system that there is room.
@pytest.mark.parametrize("options", without("thread", "process-fork-portable"))
def test_elements_run_at_once_of_which_few_fit_into_a_socket(options, tmp_path):
    """Not even one result comes before all of them run."""
    elements, meeting = ((x, bytes(15_000)) for x in range(32)), Meeting(tmp_path, 32)
    found = imap(lambda pair: meeting(pair[0]), elements, 32, concurrency=32, **options)
    assert list(found) == list(range(32))


def test_no_more_than_the_bound_is_done_ahead(backend, tmp_path):
    gates = Gates(tmp_path)
    gates.open(*range(100))
    options = dict(concurrency=3, workers=2, max_queue_size=4)
    with OrderedEnqueuer(range(100), gates, **options, **backend) as enqueuer:
        assert next(enqueuer.get()) == 0
        wait_until(lambda: enqueuer.queue.qsize() >= 4)
        assert gates.begun <= 1 + 4 + 2 * 3


# --- work on a whole batch ---


def scaled(elements, tasks):
    """Work on a list of elements at once, each with the random numbers of its task."""
    return [
        (x, task.index, float(task.rng.random())) for x, task in zip(elements, tasks, strict=True)
    ]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_collate_alone_works_on_all_elements_of_a_batch(backend, concurrency):
    options = dict(shuffle=True, random_seed=7, batch_size=4, concurrency=concurrency)
    with OrderedEnqueuer(range(10), collate=scaled, **options, **backend) as enqueuer:
        batches = list(enqueuer)
    assert [len(batch) for batch in batches] == [4, 4, 2]

    def draw(x, task):
        return x, task.index, float(task.rng.random())

    assert flat(batches) == list(OrderedEnqueuer(range(10), draw, True, random_seed=7))


def test_collate_alone_works_on_an_iterable(backend):
    options = dict(batch_size=3, concurrency=2)
    batches = OrderedEnqueuer(iter(range(7)), collate=sum, **options, **backend)
    assert list(batches) == [3, 12, 6]


class Many(list):
    """A sequence with `__getitems__`, of which one call fails."""

    def __init__(self, items, bad=()):
        super().__init__(items)
        self.bad = bad

    def __getitem__(self, index):
        if index in self.bad:
            raise KeyError(index)
        return super().__getitem__(index)

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def test_elements_that_were_fetched_at_once_are_mapped_at_once(backend, tmp_path):
    options = dict(concurrency=4, batch_size=4, collate=list)
    found = list(imap(Meeting(tmp_path, 4), Many(range(8)), **options, **backend))
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_error_of_fetching_at_once_is_that_of_its_element(backend):
    options = dict(concurrency=4, batch_size=4, collate=list, on_error="skip")
    with OrderedEnqueuer(Many(range(8), bad=[5]), abs, **options, **backend) as enqueuer:
        assert list(enqueuer) == [[0, 1, 2, 3], [4, 6, 7]]
        assert enqueuer.error_count == 1


# --- errors ---


class FailsInReverse:
    """A map whose elements 3 and 5 fail, 5 first."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, x):
        if x == 5:
            (self.folder / "5").touch()
        if x == 3:
            wait_until((self.folder / "5").exists)
        if x in (3, 5):
            raise ValueError(x)
        return x


@pytest.mark.parametrize("size", [None, 8])
def test_the_error_of_the_first_element_in_order_is_raised(backend, tmp_path, size):
    fails = FailsInReverse(tmp_path)
    options = dict(concurrency=8, batch_size=size, collate=list if size else None)
    with (
        OrderedEnqueuer(range(20), fails, **options, **backend) as enqueuer,
        pytest.raises(ValueError, match="3") as caught,
    ):
        assert list(enqueuer) == []
    assert caught.value.args == (3,)
    assert "element 3" in "".join(getattr(caught.value, "__notes__", ["element 3"]))
    with pytest.raises(ValueError, match="3"):
        replay(caught.value)


def test_skipped_elements_leave_their_batch(backend, tmp_path):
    options = dict(concurrency=8, batch_size=8, collate=list, on_error="skip")
    with OrderedEnqueuer(range(10), FailsInReverse(tmp_path), **options, **backend) as enqueuer:
        assert list(enqueuer) == [[0, 1, 2, 4, 6, 7], [8, 9]]
        assert enqueuer.error_count == 2


def test_elements_behind_one_that_failed_are_not_begun(backend, tmp_path):
    def fail_first(x):
        (tmp_path / str(x)).touch()
        if x == 0:
            raise ValueError(x)
        wait_until(lambda: False, 0.2) if x == 1 else None
        return x

    options = dict(concurrency=2, batch_size=50, collate=list, max_queue_size=1)
    with (
        OrderedEnqueuer(range(50), fail_first, **options, **backend) as enqueuer,
        pytest.raises(ValueError, match="0"),
    ):
        next(iter(enqueuer))
    assert len(list(tmp_path.iterdir())) < 50


# --- deaths ---


class DiesAt:
    """A map that kills its worker once, when others have begun to run beside it."""

    def __init__(self, folder, at, begun):
        self.folder, self.at, self.begun = folder, at, begun

    def __call__(self, x):
        (self.folder / f"begun-{x}").touch()
        if x == self.at:
            wait_until(lambda: len(list(self.folder.glob("begun-*"))) >= self.begun)
            try:
                (self.folder / "died").touch(exist_ok=False)
            except FileExistsError:
                return x
            kill_self()
        return x


@pytest.mark.parametrize("size", [None, 4])
def test_all_tasks_of_a_dead_worker_are_done_again(process, tmp_path, size):
    options = dict(concurrency=4, workers=2, batch_size=size, collate=list if size else None)
    dies = DiesAt(tmp_path, at=9, begun=11)
    with OrderedEnqueuer(range(40), dies, max_restarts=1, **options, **process) as enqueuer:
        found = list(enqueuer)
        assert enqueuer.restart_count == 1
    assert (found if size is None else flat(found)) == list(range(40))


@pytest.mark.local
def test_a_task_that_runs_is_known_to_be_its_workers(process, tmp_path):
    """Or what living workers do is done again when another one dies."""
    gates = Gates(tmp_path)
    with OrderedEnqueuer(range(4), gates, concurrency=2, workers=2, **process) as enqueuer:
        gates.wait_for(0, 1, 2, 3)
        pool = core_of(enqueuer).run.backend.pool
        known = [pool.dispatch.current(worker) for worker in pool.workers]
        assert sorted(map(len, known)) == [2, 2]
        assert sorted(flat(known)) == [0, 1, 2, 3]
        gates.open(0, 1, 2, 3)
        assert list(enqueuer) == [0, 1, 2, 3]


@pytest.mark.local
def test_a_death_is_raised_at_the_first_task_that_the_worker_had(process, tmp_path):
    class Dies(Gates):
        def __call__(self, x):
            (self.folder / f"pid-{os.getpid()}").touch()
            super().__call__(x)
            if x == 1:
                kill_self()
            return x

    gates = Dies(tmp_path)
    with OrderedEnqueuer(range(4), gates, concurrency=4, **process) as enqueuer:
        gates.wait_for(0, 1, 2, 3)
        gates.open(0)
        batches = iter(enqueuer)
        assert next(batches) == 0
        gates.open(1)
        with pytest.raises(WorkerDied) as caught:
            next(batches)
    assert "task 1" in "".join(getattr(caught.value, "__notes__", ["task 1"]))


# --- stop, stalls and statistics ---


def test_stop_does_not_wait_for_elements_that_have_not_begun(backend, tmp_path):
    gates = Gates(tmp_path)
    with OrderedEnqueuer(range(100), gates, concurrency=2, batch_size=50, **backend) as enqueuer:
        gates.wait_for(0, 1)
        stopping = threading.Thread(target=enqueuer.stop, args=(LIMIT,))
        stopping.start()
        # Otherwise the next two elements may begin before.
        wait_until(lambda: core_of(enqueuer).run.backend.is_closed)
        gates.open(0, 1)
        stopping.join(LIMIT)
        assert not stopping.is_alive()
    assert gates.begun <= 4


def test_a_thread_that_hangs_is_named(tmp_path):
    gates = Gates(tmp_path)
    enqueuer = OrderedEnqueuer(range(2), gates, concurrency=2)
    enqueuer.start()
    gates.wait_for(0, 1)
    gates.open(0)
    with pytest.warns(StopWarning, match=r"enqueuer-worker-0\.\d did not end"):
        enqueuer.stop(timeout=0.2)
    gates.open(1)
    wait_until(lambda: not any("enqueuer-worker" in t.name for t in threading.enumerate()))


def test_a_process_that_hangs_is_ended(process, tmp_path):
    gates = Gates(tmp_path)
    enqueuer = OrderedEnqueuer(range(2), gates, concurrency=2, **process)
    enqueuer.start()
    gates.wait_for(0, 1)
    enqueuer.stop(timeout=0.5)


@pytest.mark.thorough
def test_a_stall_report_names_the_elements_of_the_threads(backend, tmp_path):
    gates = Gates(tmp_path)
    options = dict(concurrency=3, batch_size=3, timeout=0.3)
    with OrderedEnqueuer(range(3), gates, **options, **backend) as enqueuer:
        gates.wait_for(0, 1, 2)
        text_when(enqueuer, "elements 0, 1, 2 is here")
        gates.open(1)
        text = text_when(enqueuer, "elements 0, 2 is here")
        gates.open(0, 2)
    assert "2 threads" in text
    assert "wait_until" in text
    assert "task_loop.py" not in text


def test_the_shares_of_a_worker_are_those_of_its_threads(backend, tmp_path):
    gates = Gates(tmp_path)
    with OrderedEnqueuer(range(2), gates, concurrency=4, **backend) as enqueuer:
        gates.wait_for(0, 1)
        before = enqueuer.stats()
        time.sleep(0.3)
        gates.open(0, 1)
        assert list(enqueuer) == [0, 1]
        seen = enqueuer.stats().since(before)
    (worker,) = seen.workers
    # Two of four threads had an element.
    spent = worker.making_s + worker.sending_s + worker.waiting_s + worker.idle_s
    assert spent <= 1.1 * seen.seconds
    assert 0.3 < worker.busy_share < 0.7


# --- options ---


def test_concurrency_is_a_number_of_threads():
    for wrong in (0, 1025):
        with pytest.raises(ValueError, match="concurrency must be"):
            OrderedEnqueuer(range(3), abs, concurrency=wrong)
    with pytest.raises(TypeError, match="concurrency must be an int"):
        imap(abs, range(3), concurrency=4.0)


def test_collate_takes_results_or_results_and_tasks():
    with pytest.raises(TypeError, match="collate must take the list of results"):
        OrderedEnqueuer(range(3), batch_size=2, collate=lambda a, b, c: a)


def test_global_generators_differ_between_workers(process):
    """They are not seeded for each element, but forked workers must not repeat each other."""

    def draw(x):
        time.sleep(0.01)
        return os.getpid(), float(np.random.random())

    with OrderedEnqueuer(range(40), draw, workers=2, concurrency=2, **process) as enqueuer:
        drawn = list(enqueuer)
    assert len({number for _, number in drawn}) == 40


def test_a_trace_has_a_row_for_each_thread(backend, tmp_path):
    path = tmp_path / "trace.json"
    gates = Meeting(tmp_path, 3)
    options = dict(concurrency=3, batch_size=3, collate=list, trace=path)
    assert flat(imap(gates, range(6), **options, **backend)) == list(range(6))
    events = json.loads(path.read_text())
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    of_threads = {*names.values()} - {"the loop", "worker 0"}
    assert of_threads >= {"worker 0.0", "worker 0.1", "worker 0.2"}
    rows = {"next": [], "send": []}
    for event in events:
        if event["name"] in rows:
            rows[event["name"]].append(names[event["pid"], event["tid"]])
    assert len(rows["next"]) >= 6
    assert len(rows["send"]) == 2
    assert all("worker 0." in row for row in rows["next"] + rows["send"])
