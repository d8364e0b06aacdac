"""The option `epochs`, and `get()` of tasks: the next epoch begins early, as if it did not."""

import functools
import gc
import itertools
import math
import os
import random
import re
import signal

import numpy as np
import pytest
from helpers import Counting, Reversed, backend_of, kill_once, packed, run_in_threads, wait_until

from enqueuer import (
    Closed,
    GeneratorEnqueuer,
    OrderedEnqueuer,
    WorkerDied,
    imap,
    merge_states,
    prefetch,
)
from enqueuer.enqueuers.enqueuer import core_of
from enqueuer.enqueuers.tasks import ElementReader, TaskEpoch


def pairs(*epochs, count=6):
    return [(epoch, element) for epoch in epochs for element in range(count)]


def wait_for(path):
    wait_until(path.exists)


# --- six elements an epoch, by two shards in turn, or as tasks ---


def of_shard(work, shard):
    """Do the work of every other one of six elements."""
    for number in range(3):
        yield work(2 * number + shard.index, shard.epoch)


def of_task(work, element, task):
    return work(element, task.epoch)


def with_shards(work, **options):
    return GeneratorEnqueuer(functools.partial(of_shard, work), shards=2, **options)


def with_tasks(work, **options):
    return OrderedEnqueuer(range(6), functools.partial(of_task, work), **options)


def skip_if_it_waits(make, options):
    """Skip where no epoch begins before the loop does."""
    if make is with_shards and backend_of(options) == "ray":
        pytest.skip("the shards of actors wait for the loop")


BOTH = pytest.mark.parametrize("make", [with_shards, with_tasks], ids=["shards", "tasks"])


def where(element, epoch):
    return epoch, element


def told(folder, element, epoch):
    """Return where this is, and leave a file of that name."""
    (folder / f"{epoch}-{element}").touch()
    return epoch, element


def told_with_a_gate(folder, element, epoch):
    """Wait for the file "open" at the last element of the first epoch."""
    if (epoch, element) == (0, 5):
        wait_for(folder / "open")
    return told(folder, element, epoch)


@pytest.fixture(params=[with_shards, with_tasks], ids=["shards", "tasks"])
def gated(request, backend, tmp_path):
    """An enqueuer whose loop has all of the first epoch but the last batch, whose gate is shut.

    The worker that is free has made batches of the next epoch.
    """
    skip_if_it_waits(request.param, backend)
    work = functools.partial(told_with_a_gate, tmp_path)
    options = dict(workers=2, max_queue_size=10, epochs=3, random_seed=7, **backend)
    with request.param(work, **options) as enqueuer:
        batches = iter(enqueuer)
        assert [next(batches) for _ in range(5)] == pairs(0)[:5]
        # The loop looks whether there is a batch, and there is none.
        assert enqueuer.queue.empty()
        for element in (0, 2, 4):
            wait_for(tmp_path / f"1-{element}")
        yield enqueuer, batches
        (tmp_path / "open").touch()


@pytest.mark.ahead
def test_without_the_option_a_worker_has_nothing_to_do_after_its_shards(backend, tmp_path):
    work = functools.partial(told_with_a_gate, tmp_path)
    with with_shards(work, workers=2, max_queue_size=10, **backend) as enqueuer:
        batches = iter(enqueuer)
        assert [next(batches) for _ in range(5)] == pairs(0)[:5]
        had = enqueuer.stats()
        wait_until(lambda: enqueuer.stats().since(had).workers[0].idle_s > 0)
        (tmp_path / "open").touch()
        assert list(batches) == [(0, 5)]
        had = enqueuer.stats()
        wait_until(lambda: all(w.idle_s > 0 for w in enqueuer.stats().since(had).workers))
        assert not list(tmp_path.glob("1-*"))
        rested = enqueuer.stats().workers
        assert sum(worker.items for worker in rested) == 6
        assert list(enqueuer) == pairs(1)
        # The workers were kept.
        assert [w.name for w in enqueuer.stats().workers] == [w.name for w in rested]


@BOTH
@pytest.mark.ahead
def test_the_next_epoch_begins_at_once_if_there_is_room(make, backend, tmp_path):
    skip_if_it_waits(make, backend)
    work = functools.partial(told, tmp_path)
    with make(work, workers=2, max_queue_size=20, epochs=2, **backend) as enqueuer:
        for element in range(6):
            wait_for(tmp_path / f"1-{element}")
        assert [list(enqueuer) for _ in range(2)] == [pairs(0), pairs(1)]


@BOTH
@pytest.mark.parametrize("epochs", [1, 3])
def test_nothing_is_begun_behind_the_last_epoch(make, epochs, backend, tmp_path):
    work = functools.partial(told, tmp_path)
    with make(work, workers=2, max_queue_size=20, epochs=epochs, **backend) as enqueuer:
        for epoch in range(epochs):
            assert list(enqueuer) == pairs(epoch)
        assert {path.name[0] for path in tmp_path.iterdir()} == set(map(str, range(epochs)))
        # A further loop is like one without the option.
        assert list(enqueuer) == pairs(epochs)
    assert {path.name[0] for path in tmp_path.iterdir()} == set(map(str, range(epochs + 1)))


@BOTH
@pytest.mark.ahead
def test_the_queue_limit_is_that_of_both_epochs(make, backend, tmp_path):
    work = functools.partial(told, tmp_path)
    with make(work, workers=2, max_queue_size=3, epochs=math.inf, **backend) as enqueuer:
        taken = 0
        for _ in range(5):
            for _ in enqueuer:
                taken += 1
                assert len(list(tmp_path.iterdir())) <= taken + 3 + 2


# --- all that the loop sees is as without ---


def drawn(shard):
    """Yield some batches of this shard's random numbers; their count depends on the epoch."""
    for number in range((shard.index + shard.epoch) % 4):
        yield shard.epoch, shard.index, number, int(shard.rng.integers(1000))


def drawn_task(element, task):
    return task.epoch, element, int(task.rng.integers(1000))


def drawn_by_shards(shards=5, **options):
    return GeneratorEnqueuer(drawn, shards=shards, random_seed=7, **options)


def drawn_by_tasks(**options):
    return OrderedEnqueuer(range(7), drawn_task, True, random_seed=7, **options)


DRAWN = pytest.mark.parametrize("make", [drawn_by_shards, drawn_by_tasks], ids=["shards", "tasks"])


def read(enqueuer, epochs):
    """Return the epochs, and the state after each batch and at the end of each epoch."""
    found, states = [], []
    with enqueuer:
        for _ in range(epochs):
            batches = []
            for batch in enqueuer:
                batches.append(batch)
                states.append(packed(enqueuer.state_dict()))
            found.append(batches)
            states.append(packed(enqueuer.state_dict()))
    return found, states


@pytest.mark.thorough("processes")
@DRAWN
@pytest.mark.parametrize("max_queue_size", [1, 4, 30])
@pytest.mark.parametrize("epochs", [4, math.inf])
def test_epochs_and_states_are_those_without_the_option(make, epochs, max_queue_size, backend):
    without = read(make(), 4)
    options = dict(workers=3, max_queue_size=max_queue_size, epochs=epochs, **backend)
    assert read(make(**options), 4) == without


@pytest.mark.ahead
def test_the_queue_has_the_batches_of_this_epoch_alone(gated, tmp_path):
    enqueuer, batches = gated
    # What has just come counts as of this epoch until it is sorted.
    wait_until(lambda: (enqueuer.queue.qsize(), enqueuer.stats().queue_size) == (0, 0))
    assert enqueuer.stats().epoch == 0
    wait_until(lambda: "0/10 waiting" in repr(enqueuer))
    (tmp_path / "open").touch()
    wait_until(lambda: enqueuer.queue.qsize() == 1)
    assert enqueuer.stats().queue_size == 1
    assert list(batches) == [(0, 5)]
    assert (enqueuer.queue.qsize(), enqueuer.queue.empty()) == (0, True)
    assert enqueuer.stats().queue_size == 0
    assert not enqueuer.is_running()
    batches = iter(enqueuer)
    wait_until(lambda: enqueuer.queue.qsize() >= 3)
    assert list(batches) == pairs(1)


@pytest.mark.ahead
def test_the_position_is_that_of_the_loop(gated):
    enqueuer, _ = gated
    make = with_shards if isinstance(enqueuer, GeneratorEnqueuer) else with_tasks
    with make(where, random_seed=7) as plain:
        assert len(list(itertools.islice(plain, 5))) == 5
        assert plain.state_dict() == enqueuer.state_dict()


@pytest.mark.ahead
def test_stop_drops_what_was_made_ahead(gated, tmp_path):
    enqueuer, batches = gated
    state = enqueuer.state_dict()
    (tmp_path / "open").touch()
    enqueuer.stop()
    assert list(batches) == []
    enqueuer.load_state_dict(state)
    with enqueuer:
        assert [list(enqueuer) for _ in range(3)] == [[(0, 5)], pairs(1), pairs(2)]


@pytest.mark.ahead
def test_other_workers_go_on_with_both_epochs(gated, tmp_path):
    enqueuer, batches = gated
    (tmp_path / "open").touch()
    enqueuer.reconfigure(workers=1)
    assert list(batches) == [(0, 5)]
    assert (enqueuer.queue.qsize(), enqueuer.stats().queue_size) == (0, 0)
    enqueuer.reconfigure(workers=3)
    assert enqueuer.stats().queue_size == 0
    assert [list(enqueuer) for _ in range(2)] == [pairs(1), pairs(2)]


@BOTH
def test_the_queue_gives_each_epoch(make, backend):
    with make(where, workers=2, epochs=3, **backend) as enqueuer:
        for epoch in range(3):
            first = next(iter(enqueuer))
            assert [first] + [enqueuer.queue.get() for _ in range(5)] == pairs(epoch)
            with pytest.raises(Closed):
                enqueuer.queue.get()


@pytest.mark.thorough
@pytest.mark.parametrize("taken", [(3, 2), (4, 5), (0, 4)])
def test_ranks_that_go_on_from_merged_states_begin_their_usual_shards(taken, backend):
    def of_rank(rank, count):
        return drawn_by_shards(shards=7, rank=rank, world_size=count)

    states = []
    for rank, count in enumerate(taken):
        with of_rank(rank, 2) as enqueuer:
            for _ in range(2):
                list(enqueuer)
            assert len(list(itertools.islice(enqueuer, count))) == count
            states.append(enqueuer.state_dict())
    merged = merge_states(states)

    def rest(options):
        found = []
        for rank in range(3):
            later = drawn_by_shards(shards=7, rank=rank, world_size=3, **options)
            later.load_state_dict(merged)
            found.append(read(later, 3))
        return found

    assert rest(dict(workers=2, epochs=5, **backend)) == rest({})


# --- errors and deaths in the next epoch ---


def broken(element, epoch):
    if (epoch, element) == (1, 2):
        raise ValueError(f"a bad file: {element}")
    return epoch, element


@BOTH
def test_an_error_of_the_next_epoch_comes_in_its_turn(make, backend):
    with make(broken, workers=2, max_queue_size=20, epochs=3, **backend) as enqueuer:
        assert list(enqueuer) == pairs(0)
        found = []
        with pytest.raises(ValueError, match="a bad file: 2") as caught:
            found.extend(enqueuer)
        assert found == pairs(1)[:2]
        assert caught.value.enqueuer_origin.epoch == 1


@BOTH
def test_a_skipped_error_of_the_next_epoch_counts_in_its_turn(make, backend):
    options = dict(workers=2, max_queue_size=20, on_error="skip", epochs=3, **backend)
    with make(broken, **options) as enqueuer:
        assert list(enqueuer) == pairs(0)
        assert enqueuer.error_count == 0
        assert (1, 2) not in list(enqueuer)
        assert enqueuer.error_count == 1
        assert list(enqueuer) == pairs(2)


def killed_ahead(folder, element, epoch, until="killed"):
    """Kill the worker once in the second epoch, while the loop waits for the first one."""
    if (epoch, element) == (0, 5):
        wait_for(folder / until)
    if (epoch, element) == (1, 2):
        kill_once(folder / "killed")
        (folder / "replaced").touch()
    return epoch, element


@BOTH
def test_a_worker_that_died_ahead_is_replaced_in_its_turn(make, process, tmp_path, caplog):
    skip_if_it_waits(make, process)
    # Of tasks, it is replaced while the loop waits, and the log names the epoch of its task.
    until = "replaced" if make is with_tasks else "killed"
    work = functools.partial(killed_ahead, tmp_path, until=until)
    plain = read(make(where, random_seed=7), 4)
    options = dict(workers=2, max_queue_size=20, max_restarts=1, epochs=4, **process)
    enqueuer = make(work, random_seed=7, **options)
    assert read(enqueuer, 4) == plain
    assert enqueuer.restart_count == 1
    if make is with_tasks and backend_of(process) == "process":
        assert "goes on with task 2 of epoch 1" in caplog.text


@BOTH
def test_a_death_in_the_next_epoch_is_raised_in_its_turn(make, process, tmp_path):
    skip_if_it_waits(make, process)
    work = functools.partial(killed_ahead, tmp_path)
    with make(work, workers=2, max_queue_size=20, epochs=4, **process) as enqueuer:
        assert list(enqueuer) == pairs(0)
        found = []
        with pytest.raises(WorkerDied) as caught:
            found.extend(enqueuer)
        # It may be told before the batch of a worker that lives.
        assert found == pairs(1)[: len(found)]
        assert len(found) <= 2
        assert caught.value.enqueuer_origin.epoch == 1
        assert enqueuer.state_dict()["epoch"] == 1


# --- all of it at random ---


def lengths_of(seed, shard):
    """Yield as many batches as are drawn for a shard and an epoch."""
    dice = random.Random(f"{seed} {shard.epoch} {shard.index}")
    for number in range(dice.choice((0, 1, 1, 2, 5))):
        yield shard.epoch, shard.index, number


def killed_at(seed, folder, shard):
    """The same, and kill the worker at some places, once at each."""
    for place in lengths_of(seed, shard):
        if random.Random(f"{seed} {place}").random() < 0.1:
            kill_once(folder / str(place))
        yield place


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::enqueuer.EmptyEpochWarning")  # some are empty
@pytest.mark.parametrize("seed", range(4))
def test_any_course_of_a_run_gives_the_same_batches(seed, process, tmp_path):
    dice, epochs = random.Random(seed), 8
    shards = dice.randint(1, 5)
    plain = GeneratorEnqueuer(functools.partial(lengths_of, seed), shards=shards, random_seed=1)
    expected = read(plain, epochs)
    source = functools.partial(killed_at, seed, tmp_path)
    options = dict(shards=shards, random_seed=1, max_restarts=1000, **process)

    def new():
        sizes = dict(workers=dice.randint(1, 3), max_queue_size=dice.randint(1, 9))
        return GeneratorEnqueuer(source, epochs=dice.choice((epochs, math.inf)), **sizes, **options)

    enqueuer, found, states = new(), [], []
    for _ in range(epochs):
        batches = []
        while True:
            left_early = False
            for batch in enqueuer:
                batches.append(batch)
                states.append(packed(enqueuer.state_dict()))
                if dice.random() < 0.2:
                    left_early = True
                    break
            if not left_early:
                break
            if dice.random() < 0.3:
                enqueuer.reconfigure(workers=dice.randint(1, 3))
            if dice.random() < 0.3:
                state = enqueuer.state_dict()
                enqueuer.stop()
                enqueuer = new()
                enqueuer.load_state_dict(state)
        found.append(batches)
        states.append(packed(enqueuer.state_dict()))
    enqueuer.stop()
    assert found == expected[0]
    # The functions differ.
    assert [state | {"source": None} for state in states] == [
        state | {"source": None} for state in expected[1]
    ]


# --- what does not begin early ---


def doubled(element):
    return 2 * element


def test_the_elements_of_an_iterable_are_read_when_the_loop_reaches_its_epoch(backend):
    elements = Counting()
    with OrderedEnqueuer(elements, doubled, workers=2, epochs=3, **backend) as enqueuer:
        for epoch in range(3):
            assert len(list(enqueuer)) == 6
            assert elements.begun == epoch + 1


class Stateful(Counting):
    """The same with a position, which is that of the end after each epoch."""

    def state_dict(self):
        return {"begun": self.begun}

    def load_state_dict(self, state):
        self.begun = state["begun"]


@pytest.mark.parametrize("kind", [Counting, Stateful])
def test_a_running_iterator_is_read_when_the_loop_reaches_its_epoch(kind):
    elements = kind()
    with GeneratorEnqueuer(elements, max_queue_size=20, epochs=3) as enqueuer:
        for epoch in range(3):
            assert list(enqueuer) == list(range(6))
            had = enqueuer.stats()
            wait_until(lambda had=had: enqueuer.stats().since(had).workers[0].idle_s > 0)
            assert elements.begun == epoch + 1


def test_a_sequence_that_sees_the_end_of_an_epoch_is_not_read_beyond(backend):
    with OrderedEnqueuer(Reversed(), workers=2, epochs=4, **backend) as enqueuer:
        for elements in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]) * 2:
            assert list(enqueuer) == elements


def test_shards_that_come_as_they_are_ready_begin_with_the_loop(backend, tmp_path):
    work = functools.partial(told, tmp_path)
    options = dict(workers=2, max_queue_size=20, ordered=False, epochs=3, **backend)
    with with_shards(work, **options) as enqueuer:
        for epoch in range(3):
            assert sorted(enqueuer) == pairs(epoch)
            assert {path.name[0] for path in tmp_path.iterdir()} == set(map(str, range(epoch + 1)))


# --- threads pass on the objects themselves ---


def filled(shard):
    """Yield three arrays, which differ from those of all other epochs."""
    for number in range(3):
        yield np.full(100, 10 * shard.epoch + number)


def test_equal_numbers_of_two_epochs_are_not_taken_for_one_array(no_warnings):
    with GeneratorEnqueuer(filled, max_queue_size=20, epochs=4) as enqueuer:
        for epoch in range(4):
            batches, made = iter(enqueuer), 3 * min(epoch + 2, 4)
            # Both epochs wait.
            wait_until(lambda made=made: enqueuer.stats().workers[0].items == made)
            assert [int(array[0]) for array in batches] == [10 * epoch + n for n in range(3)]


# --- get() of tasks, which reads all epochs by the same code ---


def outstanding(enqueuer):
    """Return how many tasks were submitted and not taken."""
    return len(core_of(enqueuer).run.backend.tasks.results.tickets)


@pytest.mark.thorough("processes")
@pytest.mark.parametrize("max_queue_size", [1, 4, 30])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("batches", [{}, {"batch_size": 3, "collate": list}])
def test_the_epochs_are_those_of_single_loops(backend, ordered, batches, max_queue_size):
    epochs, _ = read(drawn_by_tasks(**batches), 4)
    options = dict(workers=3, ordered=ordered, max_queue_size=max_queue_size, **backend)
    with drawn_by_tasks(**batches, **options) as enqueuer:
        count = len(enqueuer)
        found = list(itertools.islice(enqueuer.get(), 4 * count))
    found = [found[at : at + count] for at in range(0, 4 * count, count)]
    if not ordered:
        epochs, found = ([sorted(epoch) for epoch in both] for both in (epochs, found))
    assert found == epochs


@pytest.mark.ahead
def test_a_single_loop_reads_the_epoch_that_has_begun(backend, tmp_path):
    work = functools.partial(told, tmp_path)
    with with_tasks(work, workers=2, max_queue_size=20, **backend) as enqueuer:
        batches = enqueuer.get()
        assert [next(batches) for _ in range(5)] == pairs(0)[:5]
        wait_for(tmp_path / "1-0")
        assert list(enqueuer) == [(0, 5)]
        assert list(enqueuer) == pairs(1)
        assert outstanding(enqueuer) == 0
        assert list(enqueuer) == pairs(2)


def test_threads_share_the_epochs(backend):
    found = [[], [], []]
    with drawn_by_tasks(workers=2, **backend) as enqueuer:

        def read(own):
            own.extend(itertools.islice(enqueuer.get(), 35))

        run_in_threads([functools.partial(read, own) for own in found])
    together = [(epoch, element) for own in found for epoch, element, _ in own]
    assert sorted(together) == pairs(*range(15), count=7)


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


def killed_from_outside(folder, element, epoch):
    """Tell the process and wait, at the last element of an epoch and at one of the next."""
    if (epoch, element) in [(0, 5), (1, 3)]:
        (folder / f"{epoch}-{element}-{os.getpid()}").touch()
        wait_for(folder / "never")
    return epoch, element


@pytest.mark.local
def test_workers_that_die_together_are_named_by_their_own_epochs(process, tmp_path):
    work = functools.partial(killed_from_outside, tmp_path)
    with with_tasks(work, workers=2, max_queue_size=20, **process) as enqueuer:
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


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, 2])
def test_earlier_epochs_are_forgotten(backend, count):
    epochs = 500 if backend_of(backend) == "thread" else 100
    with OrderedEnqueuer(range(count), drawn_task, workers=2, **backend) as enqueuer:
        taken = sum(1 for _ in itertools.islice(enqueuer.get(), count * epochs))
        assert taken == count * epochs
        gc.collect()
        kinds = [type(thing) for thing in gc.get_objects()]
        assert kinds.count(TaskEpoch) <= 2
        assert kinds.count(ElementReader) <= 2
        assert outstanding(enqueuer) <= 12


# --- the option itself ---


@pytest.mark.parametrize("shortcut", [functools.partial(prefetch, drawn), imap])
def test_shortcuts_for_one_epoch_refuse_it(shortcut):
    given = () if isinstance(shortcut, functools.partial) else (doubled, [1])
    with pytest.raises(TypeError, match="give one epoch"):
        shortcut(*given, epochs=2)
