"""`get()` of an OrderedEnqueuer: the next epoch begins early, and the loop sees nothing of that."""

import functools
import gc
import itertools
import logging
import os
import re
import signal
import threading

import pytest
from helpers import LIMIT, Counting, Reversed, backend_of, kill_self, packed, wait_until

from enqueuer import OrderedEnqueuer, WorkerDied, replay
from enqueuer.enqueuers.enqueuer import core_of
from enqueuer.enqueuers.tasks import ElementReader, TaskEpoch


def told(folder, element, task):
    """Return where a task is, and leave a file of that name."""
    (folder / f"{task.epoch}-{task.index}").touch()
    return task.epoch, element


def wait_for(path):
    wait_until(path.exists)


def told_with_a_gate(folder, element, task):
    """Wait for the file "open" at the last element of the first epoch."""
    if (task.epoch, task.index) == (0, 5):
        wait_for(folder / "open")
    return told(folder, element, task)


def drawn(element, task):
    return task.epoch, element, int(task.rng.integers(1000))


def as_list(results):
    return results


def pairs(*epochs, count=6):
    return [(epoch, element) for epoch in epochs for element in range(count)]


def outstanding(enqueuer):
    """Return how many tasks were submitted and not taken."""
    return core_of(enqueuer).run.backend.tasks.results.outstanding


@pytest.fixture
def gated(backend, tmp_path):
    """An enqueuer whose loop has all of the first epoch but the last batch, whose gate is shut.

    All tasks of the next epoch are done.
    """
    work = functools.partial(told_with_a_gate, tmp_path)
    enqueuer = OrderedEnqueuer(range(6), work, workers=2, max_queue_size=10, **backend)
    with enqueuer:
        batches = enqueuer.get()
        assert [next(batches) for _ in range(5)] == pairs(0)[:5]
        # The loop looks whether there is a batch, and there is none.
        assert enqueuer.queue.empty()
        for element in range(5):
            wait_for(tmp_path / f"1-{element}")
        yield enqueuer, batches
        (tmp_path / "open").touch()


@pytest.mark.ahead
def test_the_next_epoch_begins_before_the_last_batch_is_taken(backend, tmp_path):
    work = functools.partial(told, tmp_path)
    with OrderedEnqueuer(range(6), work, workers=2, max_queue_size=20, **backend) as enqueuer:
        batches = enqueuer.get()
        assert next(batches) == (0, 0)
        for element in range(6):
            wait_for(tmp_path / f"1-{element}")
        assert [next(batches) for _ in range(17)] == pairs(0, 1, 2)[1:]


@pytest.mark.ahead
def test_a_loop_over_one_epoch_begins_no_other(backend):
    with OrderedEnqueuer(range(6), drawn, workers=2, max_queue_size=20, **backend) as enqueuer:
        for _ in range(3):
            assert len(list(enqueuer)) == 6
            assert outstanding(enqueuer) == 0
        assert len([*itertools.islice(enqueuer.get(), 8)]) == 8


@pytest.mark.thorough("processes")
@pytest.mark.parametrize("max_queue_size", [1, 4, 30])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_the_epochs_are_those_of_single_loops(backend, ordered, batch_size, max_queue_size):
    collate = None if batch_size is None else as_list
    options = dict(shuffle=True, random_seed=7, batch_size=batch_size, collate=collate)
    with OrderedEnqueuer(range(7), drawn, **options) as enqueuer:
        epochs = [list(enqueuer) for _ in range(4)]
    options |= dict(workers=3, ordered=ordered, max_queue_size=max_queue_size, **backend)
    with OrderedEnqueuer(range(7), drawn, **options) as enqueuer:
        count = len(enqueuer)
        found = list(itertools.islice(enqueuer.get(), 4 * count))
    found = [found[at : at + count] for at in range(0, 4 * count, count)]
    if ordered:
        assert found == epochs
    else:
        assert [sorted(epoch) for epoch in found] == [sorted(epoch) for epoch in epochs]


@pytest.mark.ahead
def test_the_queue_has_the_batches_of_this_epoch_alone(gated, tmp_path):
    enqueuer, batches = gated
    # A worker tells by a file that it has done a task, and then sends the result.
    wait_until(lambda: enqueuer.queue.qsize() == enqueuer.stats().queue_size == 0)
    assert enqueuer.stats().epoch == 0
    assert "0/10 waiting" in repr(enqueuer)
    (tmp_path / "open").touch()
    wait_until(lambda: enqueuer.queue.qsize() == 1)
    assert enqueuer.stats().queue_size == 1
    assert [next(batches) for _ in range(3)] == pairs(0, 1)[5:8]
    assert enqueuer.stats().epoch == 1
    wait_until(lambda: enqueuer.queue.qsize() >= 4)


@pytest.mark.ahead
def test_the_window_is_not_exceeded(backend):
    with OrderedEnqueuer(range(5), drawn, workers=2, max_queue_size=3, **backend) as enqueuer:
        for _ in itertools.islice(enqueuer.get(), 40):
            assert outstanding(enqueuer) <= 5


@pytest.mark.ahead
def test_the_position_is_that_of_the_loop(gated):
    enqueuer, _ = gated
    state = enqueuer.state_dict()
    assert (state["epoch"], state["positions"]) == (0, [[0, 5]])


def test_a_resumed_loop_goes_on_with_the_very_next_batch(backend):
    options = dict(shuffle=True, random_seed=7, workers=2, max_queue_size=9, **backend)
    with OrderedEnqueuer(range(4), drawn, **options) as enqueuer:
        batches = enqueuer.get()
        found, states = [], []
        for _ in range(12):
            found.append(next(batches))
            states.append(packed(enqueuer.state_dict()))
    with OrderedEnqueuer(range(4), drawn, shuffle=True, random_seed=7) as plain:
        batches = plain.get()
        for state in states:
            next(batches)
            assert plain.state_dict() == state
    for taken in (3, 4, 6):
        later = OrderedEnqueuer(range(4), drawn, **options)
        later.load_state_dict(states[taken - 1])
        with later:
            assert list(itertools.islice(later.get(), 12 - taken)) == found[taken:]


@pytest.mark.thorough("processes")
@pytest.mark.ahead
def test_stop_drops_the_next_epoch(gated, tmp_path):
    enqueuer, batches = gated
    (tmp_path / "open").touch()
    enqueuer.stop()
    assert list(batches) == []
    assert enqueuer.state_dict()["positions"] == [[0, 5]]
    with enqueuer:
        assert list(itertools.islice(enqueuer.get(), 14)) == pairs(0, 1, 2)[:14]


@pytest.mark.ahead
def test_other_workers_go_on_with_both_epochs(gated, tmp_path):
    enqueuer, batches = gated
    (tmp_path / "open").touch()
    enqueuer.reconfigure(workers=3)
    assert [next(batches) for _ in range(13)] == pairs(0, 1, 2)[5:]


@pytest.mark.ahead
def test_a_single_loop_reads_the_epoch_that_has_begun(gated, tmp_path):
    enqueuer, _ = gated
    (tmp_path / "open").touch()
    assert list(enqueuer) == [(0, 5)]
    assert list(enqueuer) == pairs(1)
    assert outstanding(enqueuer) == 0
    assert list(enqueuer) == pairs(2)


def test_threads_share_the_epochs(backend):
    found = [[], [], []]
    with OrderedEnqueuer(range(7), drawn, workers=2, random_seed=7, **backend) as enqueuer:

        def read(own):
            own.extend(itertools.islice(enqueuer.get(), 35))

        threads = [threading.Thread(target=read, args=(own,)) for own in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
    together = [(epoch, element) for own in found for epoch, element, _ in own]
    assert sorted(together) == pairs(*range(15), count=7)


# --- errors ---


def broken(epoch, element, task):
    if (task.epoch, element) == (epoch, 2):
        raise ValueError(f"a bad file: {element}")
    return task.epoch, element


def test_an_error_of_the_next_epoch_comes_in_its_turn(backend):
    work, found = functools.partial(broken, 1), []
    with OrderedEnqueuer(range(6), work, workers=2, max_queue_size=20, **backend) as enqueuer:
        with pytest.raises(ValueError, match="a bad file: 2") as caught:
            found.extend(enqueuer.get())
        assert found == pairs(0, 1)[:8]
        assert "task 2, element 2" in caught.value.__notes__[0]
        origin = caught.value.enqueuer_origin
        assert (origin.epoch, origin.item, origin.element) == (1, 2, 2)
        with pytest.raises(ValueError, match="a bad file: 2"):
            replay(caught.value)


def test_a_skipped_error_of_the_next_epoch_counts_in_its_turn(backend):
    work = functools.partial(broken, 1)
    options = dict(workers=2, max_queue_size=20, on_error="skip", **backend)
    with OrderedEnqueuer(range(6), work, **options) as enqueuer:
        batches, counts = enqueuer.get(), []
        for _ in range(12):
            next(batches)
            counts.append(enqueuer.error_count)
    assert counts[:6] == [0] * 6
    assert counts[-4:] == [1] * 4


class Vanishing:
    """A sequence whose length cannot be read any more once `is_gone`."""

    is_gone = False

    def __len__(self):
        if self.is_gone:
            raise OSError("the disk is gone")
        return 4

    def __getitem__(self, index):
        return index


def test_an_error_of_reading_the_next_epoch_comes_in_its_turn(backend):
    found = []
    sequence = Vanishing()
    with OrderedEnqueuer(sequence, workers=2, max_queue_size=20, **backend) as enqueuer:
        sequence.is_gone = True
        with pytest.raises(OSError, match="the disk is gone") as caught:
            found.extend(enqueuer.get())
        assert "while the elements of task 0 were read" in caught.value.__notes__[0]
        sequence.is_gone = False
    assert found == [0, 1, 2, 3]


def killed_in_the_next(folder, element, task):
    """Kill the worker once at element 3 of the next epoch, while the loop waits for this one."""
    flag = folder / "killed"
    if (task.epoch, element) == (0, 5):
        wait_for(folder / "1-4")
    if (task.epoch, element) == (1, 3) and not flag.exists():
        flag.touch()
        kill_self()
    return told(folder, element, task)


def test_a_restart_names_the_task_by_its_own_epoch(process, tmp_path, caplog):
    work = functools.partial(killed_in_the_next, tmp_path)
    options = dict(workers=2, max_queue_size=20, max_restarts=1, **process)
    with caplog.at_level(logging.WARNING, "enqueuer"):
        with OrderedEnqueuer(range(6), work, **options) as enqueuer:
            assert list(itertools.islice(enqueuer.get(), 18)) == pairs(0, 1, 2)
            assert enqueuer.restart_count == 1
    if backend_of(process) == "process":
        assert "goes on with task 3 of epoch 1" in caplog.text


def killed(element, task):
    if (task.epoch, element) == (1, 3):
        kill_self()
    return task.epoch, element


def test_a_death_in_the_next_epoch_comes_in_its_turn(process):
    found = []
    with OrderedEnqueuer(range(6), killed, max_queue_size=20, **process) as enqueuer:
        with pytest.raises(WorkerDied) as caught:
            found.extend(enqueuer.get())
    assert found == pairs(0, 1)[:9]
    assert "task 3, element 3" in caught.value.__notes__[0]


def killed_from_outside(folder, element, task):
    """Tell the process and wait, at the last element of an epoch and at one of the next."""
    if (task.epoch, element) in [(0, 5), (1, 3)]:
        (folder / f"{task.epoch}-{element}-{os.getpid()}").touch()
        wait_for(folder / "never")
    return task.epoch, element


@pytest.mark.local
def test_workers_that_die_together_are_named_by_their_own_epochs(process, tmp_path):
    work = functools.partial(killed_from_outside, tmp_path)
    with OrderedEnqueuer(range(6), work, workers=2, max_queue_size=20, **process) as enqueuer:
        batches = enqueuer.get()
        assert [next(batches) for _ in range(5)] == pairs(0)[:5]
        assert enqueuer.queue.empty()
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        for path in tmp_path.iterdir():
            os.kill(int(path.name.rpartition("-")[2]), signal.SIGKILL)
        with pytest.raises(WorkerDied) as caught:
            next(batches)
        assert re.search(r"task (5|3 of epoch 1), ", caught.value.__notes__[0])
        origin = caught.value.enqueuer_origin
        assert (origin.epoch, origin.item) in [(0, 5), (1, 3)]


# --- what does not begin early ---


@pytest.mark.ahead
def test_a_sequence_that_sees_the_end_of_an_epoch_is_not_read_beyond(backend):
    with OrderedEnqueuer(Reversed(), workers=2, max_queue_size=20, **backend) as enqueuer:
        batches = enqueuer.get()
        for elements in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]) * 2:
            assert [next(batches) for _ in range(6)] == elements
            assert outstanding(enqueuer) == 0


def test_an_iterable_is_begun_when_the_loop_reaches_its_epoch(backend):
    elements = Counting()
    with OrderedEnqueuer(elements, drawn, workers=2, max_queue_size=20, **backend) as enqueuer:
        batches = enqueuer.get()
        for epoch in range(3):
            assert len([next(batches) for _ in range(6)]) == 6
            assert elements.begun == epoch + 1


# --- what is left ---


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, 2])
def test_earlier_epochs_are_forgotten(backend, count):
    epochs = 500 if backend_of(backend) == "thread" else 100
    with OrderedEnqueuer(range(count), drawn, workers=2, **backend) as enqueuer:
        taken = sum(1 for _ in itertools.islice(enqueuer.get(), count * epochs))
        assert taken == count * epochs
        gc.collect()
        kinds = [type(thing) for thing in gc.get_objects()]
        assert kinds.count(TaskEpoch) <= 2
        assert kinds.count(ElementReader) <= 2
        assert len(core_of(enqueuer).run.backend.tasks.tickets()) <= 12
