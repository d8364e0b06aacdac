"""State: saved at any item, loaded elsewhere, and the rest comes out as it would have."""

import itertools
import json
import pickle
import re
import time

import numpy as np
import pytest
from helpers import Reiterable, Resumable, bytes_of, random_batches, rest_of, taken

from enqueuer import GeneratorEnqueuer, InvalidState, OrderedEnqueuer, Processes, StateMismatch

THREADS = {"backend": "thread"}


def epochs(enqueuer, count=2):
    """Return the batches of this epoch's rest and of those up to `count`, as plain data."""
    return [[bytes_of(batch) for batch in enqueuer] for _ in range(count)]


def make(workers=1, **options):
    return GeneratorEnqueuer(random_batches, workers=workers, random_seed=7, shards=3, **options)


@pytest.fixture(scope="module")
def whole():
    with make() as enqueuer:
        return epochs(enqueuer)


def saved_after(count):
    return taken(make(), count)[1]


def test_every_backend_loads_what_another_saved(backend, whole):
    enqueuer = make(workers=2, **backend)
    enqueuer.load_state_dict(saved_after(7))
    with enqueuer:
        assert epochs(enqueuer) == [whole[0][7:], whole[1]]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"random_seed": 8}, "random_seed is 7 in the state and 8 here"),
        ({"shards": 2}, "shards is 3 in the state and 2 here"),
        ({"ordered": False}, "ordered is True in the state and False here"),
        ({"rank": 1, "world_size": 5}, "3 shards, which cannot be divided over 5 ranks"),
    ],
)
def test_a_state_of_something_else_is_refused(options, says):
    enqueuer = GeneratorEnqueuer(random_batches, **options)
    with pytest.raises(StateMismatch, match=says):
        enqueuer.load_state_dict(saved_after(4))


@pytest.mark.parametrize("state", [{}, {"version": 1}, {"version": 99, "kind": "x"}, None, 5])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(StateMismatch):
        make().load_state_dict(state)


def test_what_was_spoilt_is_refused_and_changes_nothing():
    enqueuer = GeneratorEnqueuer(random_batches)
    before = enqueuer.state_dict()
    with pytest.raises(StateMismatch, match="not the state of an enqueuer"):
        enqueuer.load_state_dict(saved_after(4) | {"positions": [[0, "x"]]})
    assert enqueuer.state_dict() == before


def test_a_state_with_an_ended_shard_is_loaded():
    ended = saved_after(13)
    assert len(ended["ended"]) == 1
    make().load_state_dict(ended)


def test_a_state_of_before_errors_were_counted_is_loaded(whole):
    state = saved_after(4)
    for name in ("ended", "error_count", "total_items"):
        del state[name]
    enqueuer = make()
    enqueuer.load_state_dict(state)
    assert enqueuer.error_count == enqueuer.stats().total_items == 0
    with enqueuer:
        assert epochs(enqueuer, 1) == [whole[0][4:]]


def test_the_number_of_all_batches_goes_on_from_a_state(backend):
    enqueuer = make(workers=2, **backend)
    enqueuer.load_state_dict(saved_after(7))
    assert enqueuer.stats().total_items == 7
    with enqueuer:
        for _ in range(5):
            next(enqueuer.get())
        assert enqueuer.state_dict()["total_items"] == enqueuer.stats().total_items == 12
    assert enqueuer.state_dict()["total_items"] == enqueuer.stats().total_items == 12
    # A start without a state begins anew with the batches, and counts on.
    with enqueuer:
        assert enqueuer.stats().total_items == 12
        assert (len(list(enqueuer)), enqueuer.stats().total_items) == (15, 27)
    enqueuer.load_state_dict(saved_after(4))
    assert enqueuer.state_dict()["total_items"] == 4


def test_a_copy_has_the_loaded_position_too(whole):
    later = make()
    later.load_state_dict(saved_after(4))
    with pickle.loads(pickle.dumps(later)) as copied:
        assert epochs(copied, 1) == [whole[0][4:]]


def test_a_state_of_other_shards_is_refused():
    state = saved_after(4) | {"positions": [[17, 3]]}
    with pytest.raises(StateMismatch, match="17"):
        make().load_state_dict(state)


def test_a_running_enqueuer_loads_nothing():
    with make() as enqueuer, pytest.raises(InvalidState, match="stop"):
        enqueuer.load_state_dict(enqueuer.state_dict())


def test_a_source_that_ends_earlier_than_it_did_is_told(backend):
    state = saved_after(7)
    enqueuer = GeneratorEnqueuer(lambda: iter("a"), **backend)
    enqueuer.load_state_dict(state)
    with enqueuer, pytest.raises(StateMismatch, match="shard 1 ended after 1 items"):
        list(enqueuer)


class Noting(Resumable):
    """One that notes what it is asked for."""

    def __init__(self, asked):
        super().__init__(range(20))
        self.asked = asked

    def __next__(self):
        self.asked.append(self.at)
        return super().__next__()


def test_an_iterator_of_its_own_state_is_not_run_again(backend):
    enqueuer = GeneratorEnqueuer(lambda shard: Resumable(range(20)), shards=2, **backend)
    had, state = taken(enqueuer, 7)
    assert had == [0, 0, 1, 1, 2, 2, 3]
    assert state["states"] == [[1, {"at": 3}], [0, {"at": 4}]]
    asked = []
    later = GeneratorEnqueuer(lambda shard: Noting(asked))
    assert rest_of(later, state) == [3, *(n for n in range(4, 20) for _ in "ab")]
    assert min(asked) == 3


def test_an_iterable_of_its_own_state_is_not_run_again(backend):
    had, state = taken(GeneratorEnqueuer(Reiterable, **backend), 7)
    assert had == list(range(7))
    assert state["states"] == [[0, {"at": 7}]]
    assert rest_of(GeneratorEnqueuer(Reiterable, **backend), state) == list(range(7, 20))


class Epochs:
    """An iterable that counts its own epochs."""

    def __init__(self):
        self.at = {"epoch": 0, "item": 0}

    def __iter__(self):
        while self.at["item"] < 3:
            self.at["item"] += 1
            yield (10 * self.at["epoch"] + self.at["item"] - 1)
        self.at = {"epoch": self.at["epoch"] + 1, "item": 0}

    def state_dict(self):
        return self.at  # its own, which goes on

    def load_state_dict(self, state):
        self.at = state


FORKED = {"backend": Processes(start_method="fork")}
MAKERS = {
    "thread": lambda: GeneratorEnqueuer(Epochs(), **THREADS),
    "process": lambda: GeneratorEnqueuer(Epochs(), **FORKED),
    "out of order": lambda: GeneratorEnqueuer(Epochs(), ordered=False, **THREADS),
    "tasks": lambda: OrderedEnqueuer(Epochs(), int, workers=2, **THREADS),
    "batches": lambda: OrderedEnqueuer(Epochs(), int, batch_size=1, collate=max, **THREADS),
}


class Tensor:
    """As that of torch, in a state."""

    def __eq__(self, other):
        raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")

    __hash__ = None


class Restarting:
    """An iterable whose `__iter__` begins anew unless a state was loaded."""

    def __init__(self):
        self.at, self.is_loaded = 0, False

    def __iter__(self):
        if not self.is_loaded:
            self.at = 0
        self.is_loaded = False
        while self.at < 3:
            self.at += 1
            yield self.at

    def state_dict(self):
        return {"at": self.at, "generator": Tensor()}

    def load_state_dict(self, state):
        self.at, self.is_loaded = state["at"], True


def test_states_with_tensors_are_resumed_between_epochs():
    with GeneratorEnqueuer(Restarting(), **THREADS) as enqueuer:
        assert list(enqueuer) == [1, 2, 3]
        state = enqueuer.state_dict()
    later = GeneratorEnqueuer(Restarting(), **THREADS)
    later.load_state_dict(state)
    with later:
        assert [list(later), list(later)] == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.thorough("processes")
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("count", range(8))
def test_a_source_that_counts_its_epochs_goes_on_after_the_end_of_one(make, count):
    def some(enqueuer, count):
        while count > 0:
            epoch = list(itertools.islice(enqueuer, count))
            yield from epoch
            count -= len(epoch)

    expected = [0, 1, 2, 10, 11, 12, 20, 21, 22]
    with make() as enqueuer:
        assert list(some(enqueuer, count)) == expected[:count]
        if count % 3 == 0 and count:
            assert list(enqueuer) == []  # the end is read
        state = json.loads(json.dumps(enqueuer.state_dict()))
        if count == 3:
            iter(enqueuer)  # the next epoch has begun
            assert enqueuer.state_dict()["states"] == state["states"]
    later = make()
    later.load_state_dict(state)
    assert later.state_dict() == state
    with later:
        assert list(some(later, 9 - count)) == expected[count:]


def test_a_function_gives_each_epoch_an_iterator_of_its_own(backend):
    """Its state at the end is that of an iterator which nobody will use again."""
    with GeneratorEnqueuer(lambda: Resumable(range(3)), **backend) as enqueuer:
        assert list(enqueuer) == [0, 1, 2]
        state = enqueuer.state_dict()
    assert rest_of(GeneratorEnqueuer(lambda: Resumable(range(3)), **THREADS), state) == [0, 1, 2]


def test_a_state_of_the_sources_own_needs_a_source_that_loads_it(backend):
    _, state = taken(GeneratorEnqueuer(Reiterable, **backend), 1)
    with pytest.raises(StateMismatch, match="no load_state_dict"):
        rest_of(GeneratorEnqueuer(lambda: iter("abc"), **backend), state)


def test_a_fresh_live_iterator_goes_on_and_a_read_one_is_refused():
    enqueuer = GeneratorEnqueuer(iter(range(9)))
    had, state = taken(enqueuer, 4)
    assert had == [0, 1, 2, 3]
    with pytest.raises(InvalidState, match="rewound"):
        enqueuer.load_state_dict(state)
    assert rest_of(GeneratorEnqueuer(iter(range(9))), state) == [4, 5, 6, 7, 8]


# --- functions that can begin with any item ---

calls = []


def rows_from(shard, first_item=0):
    calls.append((shard.index, first_item))
    for number in range(first_item, 6):
        rng = np.random.default_rng([shard.seed, number])
        yield shard.index, number, int(rng.integers(1000))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_function_that_can_begin_with_any_item_makes_none_again(workers):
    plain = list(GeneratorEnqueuer(rows_from, shards=3, random_seed=7))
    had, state = taken(GeneratorEnqueuer(rows_from, shards=3, random_seed=7), 7)
    later = GeneratorEnqueuer(rows_from, shards=3, random_seed=7, workers=workers)
    later.load_state_dict(state)
    calls.clear()
    with later:
        assert had + list(later) == plain
        assert sorted(calls) == [(0, 3), (1, 2), (2, 2)]
        # The next epoch begins with the first item of each.
        list(later)
    assert sorted(calls[3:]) == [(0, 0), (1, 0), (2, 0)]


def test_in_other_processes_too(backend):
    plain = list(GeneratorEnqueuer(rows_from, shards=3, random_seed=7))
    enqueuer = GeneratorEnqueuer(rows_from, shards=3, random_seed=7, workers=2, **backend)
    with enqueuer:
        had = [next(enqueuer.get()) for _ in range(7)]
        enqueuer.reconfigure(workers=3)
        assert had + list(enqueuer) == plain


def test_another_parameter_of_that_name_is_the_functions_own():
    def other(shard, first_item=2):
        yield from range(first_item, 6)

    had, state = taken(GeneratorEnqueuer(other), 2)
    assert had + rest_of(GeneratorEnqueuer(other), state) == [2, 3, 4, 5]


def test_samples_are_made_again():
    """How many samples a batch took is known to the batches alone."""
    options = dict(shards=1, random_seed=7, batch_size=2, collate=list)
    plain = list(GeneratorEnqueuer(rows_from, **options))
    had, state = taken(GeneratorEnqueuer(rows_from, **options), 2)
    assert had + rest_of(GeneratorEnqueuer(rows_from, **options), state) == plain


# --- items that are made again ---


def ticking(seconds):
    def ticks(shard):
        for number in range(30):
            # Enough for the worker to log it; one that runs both shards need not wait twice.
            time.sleep(seconds if shard.index == 0 and number < 22 else 0)
            yield number, shard.index

    return ticks


def resumed(seconds, caplog, **options):
    """Return what an enqueuer logs that goes on at item 25 of two shards."""
    had, state = taken(GeneratorEnqueuer(ticking(0), shards=2, random_seed=7), 50)
    later = GeneratorEnqueuer(ticking(seconds), shards=2, random_seed=7, **options)
    expected = [(number, shard) for number in range(30) for shard in range(2)]
    caplog.clear()
    assert had + rest_of(later, state) == expected
    return [record.getMessage() for record in caplog.records]


@pytest.mark.thorough
def test_a_worker_that_makes_items_again_for_long_logs_how_long_it_takes(backend, caplog):
    (text,) = resumed(0.1, caplog, workers=2, **backend)
    found = re.fullmatch(
        r"this worker makes (?:25|50) items again that the loop has had, .*: (\d+) are made after "
        r"2\.\d s, and the rest will take about (.*) m?s; .* parameter first_item=0 .*",
        text,
    )
    assert 10 <= int(found[1]) <= 20


def test_what_is_made_again_quickly_is_not_logged(caplog):
    assert resumed(0, caplog, workers=2) == []


@pytest.mark.thorough
def test_time_in_which_the_loop_works_is_not_counted(caplog):
    enqueuer = GeneratorEnqueuer(ticking(0), shards=3, random_seed=7, max_queue_size=1)
    _, state = taken(enqueuer, 30)
    later = GeneratorEnqueuer(ticking(0), shards=3, random_seed=7, max_queue_size=1)
    later.load_state_dict(state)
    with later:
        next(later.get())
        # A shard makes its items again in its own turn, for which there is no room meanwhile.
        time.sleep(2.2)
        list(later)
    assert caplog.records == []
