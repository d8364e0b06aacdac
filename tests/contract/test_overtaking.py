"""`ordered=k`: at most k later results overtake one, and the order that came about is repeated."""

import json
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers import LIMIT, Gated, packed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enqueuer import (
    OrderedEnqueuer,
    StateMismatch,
    WorkerDied,
    imap,
    merge_states,
)
from enqueuer.backends.order_log import numbers_in
from enqueuer.enqueuers.enqueuer import core_of

THREADS = {"backend": "thread"}


def most_overtaken(seen):
    """Return by how many later ones the number was overtaken that was overtaken most."""
    return max((sum(n > number for n in seen[:at]) for at, number in enumerate(seen)), default=0)


def uneven(number, task):
    """Return the number and something random; some take much longer, and some have no result."""
    sum(range(20_000 if number % 5 == 1 else 10))
    return None if number % 7 == 3 else (number, int(task.rng.integers(1 << 30)))


def numbers(items):
    return [number for number, _ in items]


def make(length=40, **options):
    options = {"random_seed": 7, "ordered": 4, "workers": 3} | options
    return OrderedEnqueuer(range(length), uneven, **options)


def recorded(**options):
    """Return an epoch, and the state at its end."""
    with make(**options) as enqueuer:
        seen = list(enqueuer)
        return seen, packed(enqueuer.state_dict())


class GatedTasks(Gated):
    """The map of tasks of which the first one waits at the gate."""

    def __init__(self, folder):
        super().__init__(folder, stops=[(0, 0)])

    def __call__(self, number):
        return self.item(0, number)[1]


# --- the bound ---


@pytest.mark.parametrize("most", [1, 6, 40])
def test_a_slow_task_is_overtaken_by_so_many_and_no_more(options, most, tmp_path):
    work = GatedTasks(tmp_path)
    options = dict(workers=2, max_queue_size=2, **options)
    with OrderedEnqueuer(range(60), work, ordered=most, **options) as enqueuer:
        batches = iter(enqueuer)
        first = [next(batches) for _ in range(most)]
        work.let_on()
        seen = [*first, *batches]
    assert 0 not in first
    assert sorted(seen) == list(range(60))
    assert most_overtaken(seen) == most == seen.index(0)


def test_without_a_bound_a_slow_task_stops_nothing(tmp_path):
    work = GatedTasks(tmp_path)
    with OrderedEnqueuer(range(60), work, workers=2, max_queue_size=2, ordered=False) as enqueuer:
        batches = iter(enqueuer)
        assert sorted(next(batches) for _ in range(59)) == list(range(1, 60))
        work.let_on()
        assert list(batches) == [0]


def test_the_queue_keeps_its_bound(tmp_path):
    made, gate = [], GatedTasks(tmp_path)

    def work(number):
        made.append(number)
        return gate(number)

    with OrderedEnqueuer(range(60), work, workers=2, max_queue_size=3, ordered=20) as enqueuer:
        batches = iter(enqueuer)
        for taken in range(1, 21):
            next(batches)
            assert len(made) <= taken + 3 + 2
        gate.let_on()
        assert len(list(batches)) == 40


def test_no_later_one_overtakes_by_default_and_with_0(backend):
    for ordered in ({}, {"ordered": 0}, {"ordered": True}):
        with OrderedEnqueuer(range(30), abs, workers=3, **ordered, **backend) as enqueuer:
            assert list(enqueuer) == list(range(30))
            assert "order" not in enqueuer.state_dict()


# --- the log, and its repetition ---


@settings(
    derandomize=True,
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
@pytest.mark.repeats
# A run may be of no elements.
@pytest.mark.filterwarnings("ignore::enqueuer.EmptyEpochWarning")
def test_saved_anywhere_the_bound_holds_and_the_order_is_repeated(backend, data):
    length, ordered = data.draw(st.integers(0, 40)), data.draw(st.sampled_from([1, 3, 10, False]))
    wanted = [number for number in range(length) if number % 7 != 3]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wanted)), max_size=2)))
    sizes = st.fixed_dictionaries(
        {"workers": st.integers(1, 4), "max_queue_size": st.sampled_from([1, 2, 10])}
    )
    seen, states = [], []
    for at, end in enumerate([*cuts, None]):
        options = backend if at % 2 == 0 else THREADS
        enqueuer = make(length, ordered=ordered, **data.draw(sizes), **options)
        if states:
            enqueuer.load_state_dict(states[-1])
        with enqueuer:
            batches = iter(enqueuer)
            while end is None or len(seen) < end:
                batch = next(batches, None)
                if batch is None:
                    break
                seen.append(batch)
                assert numbers_in(enqueuer.state_dict()["order"][1]) == numbers(seen)
            states.append(packed(enqueuer.state_dict()))
    assert sorted(numbers(seen)) == wanted
    assert ordered is False or most_overtaken(numbers(seen)) <= ordered
    again = dict(ordered=ordered, **data.draw(sizes))
    with make(length, replay_order=states[-1], **again, **backend) as enqueuer:
        assert list(enqueuer) == seen
    # what of the order was not saved comes as `ordered` says
    with make(length, replay_order=states[0], **again, **backend) as enqueuer:
        other = list(enqueuer)
    known = len(numbers_in(states[0]["order"][1]))
    assert other[:known] == seen[:known]
    assert sorted(other) == sorted(seen)
    later = make(length, replay_order=states, **again, **backend)
    if cuts:
        later.load_state_dict(states[0])
        with later:
            assert seen[: cuts[0]] + list(later) == seen


@pytest.mark.parametrize("workers", [0, 1, 5])
def test_the_order_does_not_depend_on_workers(backend, workers):
    seen, state = recorded(length=120, workers=4, max_queue_size=16, ordered=9)
    options = dict(workers=workers, max_queue_size=1, **backend)
    with make(120, ordered=9, replay_order=state, **options) as enqueuer:
        assert list(enqueuer) == seen
        assert enqueuer.state_dict()["order"] == state["order"]


def test_each_epoch_has_its_order_and_others_come_as_usual(backend):
    def read(replay=None):
        batches, states, epochs = make(replay_order=replay, **backend), [], []
        with batches:
            for _ in range(3):
                epochs.append(list(batches))
                states.append(packed(batches.state_dict()))
        return epochs, states

    epochs, states = read()
    assert [state["order"][0] for state in states] == [0, 1, 2]
    again, _ = read([states[2], states[0]])
    assert (again[0], again[2]) == (epochs[0], epochs[2])
    assert sorted(again[1]) == sorted(epochs[1])
    assert most_overtaken(numbers(again[1])) <= 4


def test_an_endless_loop_repeats_the_order_of_each_epoch(backend):
    def read(**options):
        with make(20, **options, **backend) as enqueuer:
            batches, states = enqueuer.get(), []
            seen = []
            for at in range(17 * 3):
                seen.append(next(batches))
                if at % 17 == 16:
                    states.append(packed(enqueuer.state_dict()))
        return seen, states

    seen, states = read()
    assert read(replay_order=states, workers=1, max_queue_size=2)[0] == seen


def test_an_epoch_that_begins_early_stays_within_the_bound():
    """Its order begins with a task for which others must be submitted that come later."""
    went_on, has_begun = threading.Event(), threading.Event()

    def late(number, task):
        if task.epoch == 1 and number < 10:
            assert went_on.wait(LIMIT)
        return number

    def last(number, task):
        if task.epoch == 1:
            has_begun.set()
        elif number == 19:
            assert has_begun.wait(LIMIT)
        return number

    options = dict(ordered=False, random_seed=7, **THREADS)
    with OrderedEnqueuer(range(20), late, workers=12, **options) as enqueuer:
        list(enqueuer)
        batches = iter(enqueuer)
        first = next(batches)
        went_on.set()
        seen, state = [first, *batches], packed(enqueuer.state_dict())
    assert first >= 10
    options |= dict(workers=2, max_queue_size=1, replay_order=state)
    with OrderedEnqueuer(range(20), last, epochs=2, **options) as enqueuer:
        batches = iter(enqueuer)
        assert {next(batches) for _ in range(20)} == set(range(20))
        assert core_of(enqueuer).run.backend.tasks.results.outstanding <= 1 + 2
        assert (list(batches), list(enqueuer)) == ([], seen)


def test_an_iterable_is_read_on_for_the_order(backend):
    def read(**options):
        with OrderedEnqueuer(
            iter(range(50)), uneven, random_seed=7, ordered=6, **options
        ) as enqueuer:
            return list(enqueuer), packed(enqueuer.state_dict())

    seen, state = read(workers=4, max_queue_size=20, **THREADS)
    assert read(workers=1, max_queue_size=1, replay_order=state, **backend)[0] == seen


def test_an_iterable_that_ends_before_the_order_is_told_of():
    def read(length, **options):
        elements = iter(range(length))
        with OrderedEnqueuer(elements, abs, random_seed=7, ordered=6, **options) as enqueuer:
            return list(enqueuer), enqueuer.state_dict()

    _, state = read(20, workers=3)
    with pytest.raises(StateMismatch, match=r"ended after 12 tasks .* task 19 of it was done"):
        read(12, replay_order=state)


def test_imap_repeats_an_order():
    seen, state = recorded()
    options = dict(random_seed=7, ordered=4, workers=1, replay_order=state)
    assert list(imap(uneven, range(40), **options)) == seen


def failing(number, task):
    if number % 4 == 2:
        raise KeyError(number)
    return uneven(number, task)


def test_errors_that_are_skipped_have_no_place_in_the_order(backend):
    def read(**options):
        options = dict(random_seed=7, ordered=3, on_error=lambda error: None, **options)
        with OrderedEnqueuer(range(40), failing, **options) as enqueuer:
            return list(enqueuer), enqueuer.state_dict()

    seen, state = read(workers=3, **backend)
    again, later = read(workers=2, max_queue_size=1, replay_order=state, **backend)
    assert (again, later["error_count"]) == (seen, 10)
    assert most_overtaken(numbers(seen)) <= 3


class KillOnce:
    """The map of tasks of which one kills its worker, the first time."""

    def __init__(self, folder):
        self.flag = str(Path(folder, "died"))

    def __call__(self, number, task):
        if number == 11 and not Path(self.flag).exists():
            Path(self.flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return uneven(number, task)


def test_a_death_changes_nothing_and_the_order_is_repeated_without_it(process, tmp_path):
    options = dict(random_seed=7, ordered=5, max_restarts=1)
    work = KillOnce(tmp_path)
    with OrderedEnqueuer(range(40), work, workers=3, **options, **process) as enqueuer:
        seen, state = list(enqueuer), enqueuer.state_dict()
        assert enqueuer.restart_count == 1
    assert sorted(numbers(seen)) == [n for n in range(40) if n % 7 != 3]
    assert most_overtaken(numbers(seen)) <= 5
    options = dict(options, workers=1, replay_order=state)
    os.remove(work.flag)
    with OrderedEnqueuer(range(40), work, **options, **process) as enqueuer:
        assert list(enqueuer) == seen
        assert enqueuer.restart_count == 1


class Kills:
    """The map of tasks of which one kills its worker."""

    def __call__(self, number, task):
        if number == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        return uneven(number, task)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_death_in_a_repeated_order_is_raised_at_its_place(process, workers):
    seen, state = recorded(ordered=9)
    options = dict(random_seed=7, ordered=9, workers=workers, replay_order=state, **process)
    had = []
    with OrderedEnqueuer(range(40), Kills(), **options) as enqueuer, pytest.raises(WorkerDied):
        had.extend(enqueuer)
    assert seen[: len(had)] == had
    assert 11 not in numbers(had)


def test_other_workers_in_the_middle_change_nothing(backend):
    seen, state = recorded()
    with make(replay_order=state, **backend) as enqueuer:
        batches = iter(enqueuer)
        first = [next(batches) for _ in range(9)]
        enqueuer.reconfigure(2)
        assert first + list(batches) == seen


# --- states ---


def test_a_state_has_a_few_characters_for_a_batch():
    with OrderedEnqueuer(range(2000), abs, workers=3, ordered=64) as enqueuer:
        batches = iter(enqueuer)
        for _ in range(1000):
            next(batches)
        state = enqueuer.state_dict()
    assert len(json.dumps(state)) < 3 * 1000


def test_the_order_is_that_of_the_epoch_that_was_read_last():
    with make() as enqueuer:
        assert enqueuer.state_dict()["order"] == [0, ""]
        seen = list(enqueuer)
        assert enqueuer.state_dict()["order"][0] == 0
        assert numbers_in(enqueuer.state_dict()["order"][1]) == numbers(seen)
        second = next(iter(enqueuer))
        state = enqueuer.state_dict()
        assert (state["order"][0], numbers_in(state["order"][1])) == (1, numbers([second]))
    assert enqueuer.state_dict() == state
    later = make()
    later.load_state_dict(state)
    assert later.state_dict() == state


def test_a_state_of_before_there_were_orders_is_loaded():
    with make() as enqueuer:
        batches = iter(enqueuer)
        first = [next(batches) for _ in range(9)]
        state = enqueuer.state_dict()
    del state["order"]
    later = make()
    later.load_state_dict(state)
    with later:
        rest = list(later)
        assert sorted(first + rest) == sorted(recorded()[0])
        # the beginning is not known, and so neither is the order
        assert "order" not in later.state_dict()
        assert most_overtaken(numbers(list(later))) <= 4
        assert later.state_dict()["order"][0] == 1


def test_each_rank_has_an_order_and_merged_states_have_none():
    def of(rank, world_size, **options):
        return make(rank=rank, world_size=world_size, **options)

    states, seen = [], []
    for rank in range(2):
        with of(rank, 2) as enqueuer:
            batches = iter(enqueuer)
            seen += [next(batches) for _ in range(5 + rank)]
            states.append(packed(enqueuer.state_dict()))
    assert [len(numbers_in(state["order"][1])) for state in states] == [5, 6]
    merged = merge_states(states)
    assert "order" not in merged
    for rank in range(3):
        later = of(rank, 3)
        later.load_state_dict(merged)
        with later:
            seen += list(later)
            # The tasks were divided anew, and so have other numbers.
            assert "order" not in later.state_dict()
            list(later)
            assert later.state_dict()["order"][0] == 1
    assert sorted(numbers(seen)) == [n for n in range(40) if n % 7 != 3]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"random_seed": 8}, "random_seed is 7 in the state and 8 here"),
        ({"length": 41}, "length is 40 in the state and 41 here"),
        ({"batch_size": 2}, "batch_size is None in the state and 2 here"),
        ({"ordered": 5}, "ordered is 4 in the state and 5 here"),
        ({"ordered": True}, "ordered is 4 in the state and True here"),
    ],
)
def test_the_order_of_another_run_is_refused(options, says):
    _, state = recorded()
    with pytest.raises(StateMismatch, match=says):
        make(replay_order=state, **options).start()


def test_an_order_is_not_repeated_from_a_position_that_it_does_not_have():
    _, state = recorded()
    with make() as enqueuer:
        next(iter(enqueuer))
        merged = merge_states([packed(enqueuer.state_dict())])
    later = make(replay_order=state)
    later.load_state_dict(merged)
    with pytest.raises(StateMismatch, match="does not say how far this order was followed"):
        later.start()


def test_a_flag_of_numpy_is_a_flag():
    with make(ordered=np.True_) as enqueuer:
        assert enqueuer.state_dict()["ordered"] is True


def test_ordered_1_is_not_true():
    with make(ordered=1) as enqueuer:
        next(iter(enqueuer))
        state = packed(enqueuer.state_dict())
    with pytest.raises(StateMismatch, match="ordered is 1 in the state and True here"):
        make(ordered=True).load_state_dict(state)


def test_a_state_without_an_order_is_refused():
    for ordered, options in ((4, {}), (True, {"ordered": True})):
        state = make(ordered=ordered).state_dict()
        with pytest.raises(StateMismatch, match="replay_order needs the order of an epoch"):
            make(replay_order=state, **options).start()


def test_different_orders_of_one_epoch_are_refused():
    _, state = recorded()
    other = {**state, "order": [0, "CC"]}
    with make(replay_order=[{**state, "order": [0, "C"]}, other]) as enqueuer:
        assert numbers(list(enqueuer))[:2] == [0, 1]
    with pytest.raises(StateMismatch, match="two states have different orders of epoch 0"):
        make(replay_order=[other, {**state, "order": [0, "E"]}]).start()


@pytest.mark.parametrize(
    "order", [None, [0], [0, 5], [0, ["C"]], [0, "!"], [0, "g"], [0, "DD"], [0, "CA"], [3, "C"]]
)
def test_an_order_that_was_spoilt_is_refused(order):
    state = recorded()[1] | {"order": order}
    with pytest.raises(StateMismatch, match="not the state of an enqueuer"):
        make().load_state_dict(state)
    with pytest.raises(StateMismatch, match="not the state of an enqueuer"):
        make(replay_order=state).start()
