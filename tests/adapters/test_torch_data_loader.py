"""The DataLoader: torch's order of indices, batches and random numbers, and exact positions."""

import collections
import copy
import itertools
import pickle
import random

import numpy as np
import pytest
from helpers import needs, packed

from enqueuer import EnqueuerWarning, InvalidState, Processes, StateMismatch

torch = needs("torch")
torch.set_num_threads(1)  # its thread pool does not survive a fork

from enqueuer.adapters.torch import DataLoader  # noqa: E402  (torch may be missing)

data = torch.utils.data
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
WORKERS = pytest.mark.parametrize("workers", [0, 2])
KINDS = pytest.mark.parametrize(
    ("workers", "persistent"),
    [(0, False), (2, False), (2, True)],
    ids=["no workers", "workers", "persistent workers"],
)


class Rows(data.Dataset):
    """Rows that also draw from the global generators of torch, numpy and random."""

    def __init__(self, count=30):
        self.count = count
        self.fetched = []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.fetched.append(index)
        drawn = torch.rand(()).item() + np.random.random() + random.random()
        return {"index": index, "large": torch.full((4000,), float(index)), "drawn": drawn}


class EagerSampler:
    """A sampler that draws when it is iterated, and not at the first index."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(torch.randperm(self.count).tolist())

    def __len__(self):
        return self.count


class EagerBatches(EagerSampler):
    """The same for batches, with a generator of its own."""

    def __init__(self, count):
        super().__init__(count)
        self.generator = torch.Generator().manual_seed(7)

    def __iter__(self):
        order = torch.randperm(self.count, generator=self.generator).tolist()
        return iter([order[at : at + 4] for at in range(0, self.count, 4)])

    def __len__(self):
        return -(-self.count // 4)


def lists(loader):
    return [batch.tolist() for batch in loader]


def indices(loader):
    return [batch["index"].tolist() for batch in loader]


def drawn(loader):
    return [(batch["index"].tolist(), batch["drawn"].tolist()) for batch in loader]


def seeded():
    torch.manual_seed(3)
    np.random.seed(4)
    random.seed(5)


ORDERS = {
    "in order": lambda rows: {"batch_size": 4},
    "shuffled": lambda rows: {"batch_size": 4, "shuffle": True},
    "generator": lambda rows: {
        "batch_size": 4,
        "shuffle": True,
        "generator": torch.Generator().manual_seed(7),
    },
    "replacement": lambda rows: {
        "batch_size": 4,
        "sampler": data.RandomSampler(rows, replacement=True, num_samples=50),
    },
    "weighted": lambda rows: {
        "batch_size": 4,
        "drop_last": True,
        "sampler": data.WeightedRandomSampler([1.0, 2.0] * 15, 26),
    },
    "generator of a sampler": lambda rows: {
        "batch_size": 4,
        "sampler": data.RandomSampler(rows, generator=torch.Generator().manual_seed(9)),
    },
    "batch sampler": lambda rows: {
        "batch_sampler": data.BatchSampler(data.RandomSampler(rows), 7, False)
    },
    "list of batches": lambda rows: {"batch_sampler": [[1, 2], [5], [3, 3, 3]]},
    "eager": lambda rows: {"batch_size": 4, "sampler": EagerSampler(len(rows))},
    "generator of eager batches": lambda rows: {"batch_sampler": EagerBatches(len(rows))},
}


@KINDS
@pytest.mark.parametrize("order", ORDERS)
def test_the_order_and_all_draws_are_torchs(order, workers, persistent):
    seen = []
    for kind in (data.DataLoader, DataLoader):
        seeded()
        rows = Rows()
        loader = kind(
            rows, num_workers=workers, persistent_workers=persistent, **ORDERS[order](rows)
        )
        epochs = [indices(loader) for _ in range(2)]
        seen.append((epochs, torch.rand(3).tolist(), np.random.random(), random.random()))
    assert seen[0] == seen[1]


def seed_as_torch_documents(index):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def test_random_numbers_of_workers_do_not_depend_on_their_number():
    """Nor on a `worker_init_fn`, unless it seeds."""
    seen = []
    for init in (None, lambda index: None, seed_as_torch_documents):
        for workers in (1, 3):
            seeded()
            loader = DataLoader(Rows(), 4, True, num_workers=workers, worker_init_fn=init)
            seen.append([drawn(loader), drawn(loader)])
            assert seen[-1][0] != seen[-1][1]
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert seen[4] == seen[5]


@KINDS
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("restores", [False, True])
def test_later_epochs_draw_from_the_generator_of_the_loader_or_that_of_the_program(
    order, workers, persistent, restores
):
    """The program begins with a seed, and may restore torch's generator itself."""

    def script(seed):
        torch.manual_seed(seed)
        rows = Rows()
        options = ORDERS[order](rows) | {"persistent_workers": persistent}
        return DataLoader(rows, num_workers=workers, **options)

    loader, states, epochs = script(0), [], []
    for _ in range(2):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(batch["index"].tolist())
            state = packed(loader.state_dict())
            states.append((state, torch.get_rng_state()))
    further = [indices(loader) for _ in range(2)]
    has_own = "generator" in order or epochs[0] == epochs[1]
    last = len(epochs[0]) - 1
    for step in (0, last // 2, last, last + 1, len(states) - 1):
        epoch, done = divmod(step, last + 1)
        later = script(1)
        later.load_state_dict(states[step][0])
        if restores:
            torch.set_rng_state(states[step][1])
        before = torch.get_rng_state()
        assert indices(later) == epochs[epoch][done + 1 :]
        # Without workers, the rows draw from the program's generator.
        assert not workers or torch.equal(torch.get_rng_state(), before)
        rest = [indices(later) for _ in range(3 - epoch)]
        assert (rest == [*epochs[epoch + 1 :], *further]) == (restores or has_own)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_state_fits_any_number_of_workers(workers):
    seeded()
    first = DataLoader(Rows(), 4, shuffle=True, num_workers=2)
    given = []
    for step, batch in enumerate(first):
        given.append((batch["index"].tolist(), batch["drawn"].tolist()))
        if step == 2:
            state = first.state_dict()
    later = DataLoader(Rows(), 4, shuffle=True, num_workers=workers)
    later.load_state_dict(state)
    assert drawn(later) == given[3:]


@pytest.mark.parametrize("persistent", [False, True], ids=["new workers", "persistent"])
def test_a_state_between_two_epochs_begins_the_next_one(persistent):
    def loader(seed):
        options = {"shuffle": True, "generator": torch.Generator().manual_seed(seed)}
        return DataLoader(Rows(), 4, num_workers=2, persistent_workers=persistent, **options)

    first = loader(7)
    list(first)
    state = first.state_dict()
    later = loader(8)
    later.load_state_dict(state)
    assert drawn(first) == drawn(later)


def test_a_resumed_loader_does_not_fetch_what_was_given():
    first = DataLoader(Rows(), 4, shuffle=True)
    batches = iter(first)
    given = [next(batches)["index"].tolist() for _ in range(2)]
    rows = Rows()
    later = DataLoader(rows, 4, shuffle=True, num_workers=1, backend="thread")
    later.load_state_dict(first.state_dict())
    rest = indices(later)
    assert sorted(itertools.chain(*given, *rest)) == list(range(30))
    assert rows.fetched == list(itertools.chain(*rest))


class Counted(data.Dataset):
    """Half a million samples, and the number of those that were fetched."""

    fetched = 0

    def __len__(self):
        return 500_000

    def __getitem__(self, index):
        self.fetched += 1
        return index


def test_a_hundred_thousand_batches_are_skipped_without_the_dataset():
    def loader(seed):
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(Counted(), 4, shuffle=True, generator=generator, collate_fn=list)

    first = loader(7)
    batches = iter(first)
    collections.deque(itertools.islice(batches, 100_000), maxlen=0)
    state = first.state_dict()
    rest = [next(batches) for _ in range(3)]
    assert first.dataset.fetched == 4 * 100_003
    later = loader(8)
    later.load_state_dict(state)
    assert list(itertools.islice(later, 3)) == rest
    assert later.dataset.fetched == 4 * 3


def test_without_an_iteration_there_are_no_statistics():
    loader = DataLoader(Rows(), 2, num_workers=1)
    with pytest.raises(InvalidState):
        loader.stats()
    batches = iter(loader)
    next(batches)
    assert loader.stats().items >= 1
    list(batches)
    del batches
    assert loader.stats().items == 15


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))]
)
def test_a_loader_can_be_copied(copied):
    loader = DataLoader(Rows(8), 2, num_workers=1, persistent_workers=True, backend="thread")
    first = indices(loader)
    other = copied(loader)
    assert (other.batch_size, len(other)) == (2, 4)
    assert indices(other) == first
    assert other.state_dict()["step"] == 0


def test_options_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="multiprocessing_context is the start method"):
        DataLoader(Rows(), num_workers=1, multiprocessing_context="fork", backend="thread")
    with pytest.raises(TypeError, match="there is no option 'worker'; give num_w"):
        DataLoader(Rows(), worker=3)
    assert len(DataLoader(Rows(), num_workers=1, backend=Processes(start_method="fork"))) == 30


# --- positions that were wrong once --------------------------------------------------------------


class OneBad(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 2:
            raise ValueError("bad")
        return index


def test_a_batch_that_was_left_out_counts_in_the_position():
    def make():
        return DataLoader(OneBad(), batch_size=1, num_workers=2, on_error="skip")

    loader = make()
    batches = iter(loader)
    assert [int(next(batches)) for _ in range(4)] == [0, 1, 3, 4]
    state = loader.state_dict()
    del batches
    loader = make()
    loader.load_state_dict(state)
    assert [int(batch) for batch in loader] == [5, 6, 7]


@WORKERS
def test_a_batch_that_failed_counts_in_the_position(workers):
    loader = DataLoader(OneBad(), batch_size=1, num_workers=workers)
    batches = iter(loader)
    next(batches), next(batches)
    with pytest.raises(ValueError, match="bad") as caught:
        next(batches)
    assert caught.traceback[-1].name == "__getitem__"
    assert int(next(batches)) == 3
    state = loader.state_dict()
    del batches
    loader = DataLoader(OneBad(), batch_size=1, num_workers=workers)
    loader.load_state_dict(state)
    assert [int(batch) for batch in loader] == [4, 5, 6, 7]


@pytest.mark.parametrize("workers", [0, 1])
def test_two_iterators_in_use_have_no_position(workers):
    loader = DataLoader(range(8), num_workers=workers)
    outer = iter(loader)
    next(outer)
    list(loader)
    next(outer)
    reason = "two iterators of this DataLoader were in use"
    with pytest.warns(EnqueuerWarning, match=f"cannot be loaded: {reason}"):
        state = loader.state_dict()
    # A trainer saves often.
    assert loader.state_dict() == state
    with pytest.raises(InvalidState, match=f"this state has no position: {reason}"):
        DataLoader(range(8), num_workers=workers).load_state_dict(packed(state))
    del outer
    list(loader)
    assert loader.state_dict()["step"] == 0


@pytest.mark.parametrize(
    ("count", "size", "shuffle", "says"),
    [
        (20, 5, False, "batch_size is 2 in the state and 5 here"),
        (12, 2, False, "samples is 20 in the state and 12 here"),
        (20, 2, True, "sampler is 'SequentialSampler'"),
    ],
)
def test_a_state_of_another_loader_is_refused(count, size, shuffle, says):
    loader = DataLoader(range(20), batch_size=2)
    next(iter(loader))
    with pytest.raises(StateMismatch, match=says):
        DataLoader(range(count), size, shuffle).load_state_dict(loader.state_dict())
    with pytest.raises(StateMismatch):
        DataLoader(range(20), 2).load_state_dict({"step": 3})


def test_on_error_needs_workers():
    with pytest.raises(ValueError, match="on_error needs num_workers >= 1"):
        DataLoader(range(3), on_error="skip")


def seed_by_hand(index):
    np.random.seed(7 + index)
    random.seed(7 + index)


def seed_numpy(index):
    np.random.seed(7 + index)


def seed_torch(index):
    torch.manual_seed(7 + index)


class DrawingStream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return ((np.random.rand(), random.random(), torch.rand(()).item()) for _ in range(4))


class DrawingRows(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return np.random.rand(), random.random(), torch.rand(()).item()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    ("init", "fixed"), [(seed_by_hand, (0, 1)), (seed_numpy, (0,)), (seed_torch, (2,))]
)
@pytest.mark.parametrize("dataset", [DrawingRows, DrawingStream])
def test_numbers_that_a_worker_init_fn_seeds_are_the_same_in_each_run(
    dataset, init, fixed, persistent
):
    """torch draws another seed for its workers in each of them."""

    def numbers(kind):
        loader = kind(dataset(), num_workers=2, worker_init_fn=init, persistent_workers=persistent)
        epochs = [[tuple(map(float, batch)) for batch in loader] for _ in range(2)]
        # By generator.
        return [[[row[k] for row in epoch] for epoch in epochs] for k in range(3)]

    first, second, of_torch = numbers(DataLoader), numbers(DataLoader), numbers(data.DataLoader)
    for k in range(3):
        assert (first[k] == second[k]) == (k in fixed)
        assert (first[k][0] == first[k][1]) == (of_torch[k][0] == of_torch[k][1])
        assert len({*first[k][0]}) == len(first[k][0])


class Odd(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(8))


def refuse_three(samples):
    if 3 in samples:
        raise ValueError("three")
    return samples


@pytest.mark.parametrize("workers", [0, 1])
def test_the_batch_after_an_error_of_collate_follows(workers):
    batches = iter(DataLoader(Odd(), batch_size=2, num_workers=workers, collate_fn=refuse_three))
    assert next(batches) == [0, 1]
    with pytest.raises(ValueError, match="three"):
        next(batches)
    assert list(batches) == [[4, 5], [6, 7]]


# --- samplers that the loader cannot know: exact, or a clear error -------------------------------

ROWS = range(40)


class Sampler:
    """A sampler of all rows, shuffled by the generator that `rng` returns."""

    def __init__(self, seed):
        self.seed = seed

    def __iter__(self):
        return iter(self.rng().permutation(len(ROWS)).tolist())

    def __len__(self):
        return len(ROWS)


class InAnObject(Sampler):
    def __init__(self, seed):
        super().__init__(seed)
        self.streams = {"order": np.random.default_rng(seed)}

    def rng(self):
        return self.streams["order"]


class MadeLater(Sampler):
    _rng = None

    def rng(self):
        self._rng = self._rng or np.random.default_rng(self.seed)
        return self._rng


class FromEntropy(Sampler):
    def rng(self):
        return np.random.default_rng()


class SameEachEpoch(Sampler):
    def rng(self):
        return np.random.default_rng(self.seed)


def saved(make, epochs=1, steps=3):
    """Return the state after some epochs and steps, and the rest of the last epoch."""
    loader = make()
    for _ in range(epochs):
        list(loader)
    batches = iter(loader)
    for _ in range(steps):
        next(batches)
    state = packed(loader.state_dict())
    return state, lists(batches)


def resumed(make, state):
    loader = make()
    loader.load_state_dict(state)
    return lists(loader)


@WORKERS
@pytest.mark.parametrize("kind", [InAnObject, MadeLater, FromEntropy])
def test_another_order_than_before_is_an_error(kind, workers):
    def make():
        return DataLoader(ROWS, 4, sampler=kind(7), num_workers=workers)

    state, _ = saved(make)
    loader = make()
    loader.load_state_dict(state)
    with pytest.raises(StateMismatch, match=f"{kind.__name__} gave another order than before"):
        list(loader)


@WORKERS
def test_a_sampler_that_ends_too_early_is_an_error(workers):
    rows = list(range(12))
    state, _ = saved(lambda: DataLoader(ROWS, 2, sampler=rows, num_workers=workers), steps=4)
    del rows[5:]
    with pytest.raises(StateMismatch, match="list ended after 3 batches, and gave 4 before"):
        resumed(lambda: DataLoader(ROWS, 2, sampler=rows, num_workers=workers), state)


@pytest.mark.parametrize("options", [{"on_error": "skip"}, {"in_order": False}], ids=str)
@pytest.mark.parametrize("kind", [SameEachEpoch, InAnObject])
def test_batches_that_were_left_out_or_passed_by_others_are_compared(kind, options):
    class Failing(data.Dataset):
        def __len__(self):
            return len(ROWS)

        def __getitem__(self, index):
            if index < 4 and "on_error" in options:
                raise LookupError(f"no row {index}")
            return index

    def make():
        return DataLoader(Failing(), 1, sampler=kind(7), num_workers=2, **options)

    state, rest = saved(make, steps=20)
    if kind is InAnObject:
        with pytest.raises(StateMismatch, match="InAnObject gave another order"):
            resumed(make, state)
    else:
        assert sorted(resumed(make, state)) == sorted(rest)


@WORKERS
@pytest.mark.parametrize("keys", [list("hdaebcgf"), [0.5, 2.5], [(1, "a"), (2, "b")]], ids=str)
def test_indices_may_be_of_any_type(keys, workers):
    class Keyed(data.Dataset):
        def __getitem__(self, key):
            return keys.index(key)

        def __len__(self):
            return len(keys)

    def make():
        return DataLoader(Keyed(), 1, sampler=keys, num_workers=workers)

    state, rest = saved(make, steps=1)
    assert resumed(make, state) == rest


def test_the_indices_themselves_are_compared_if_each_is_a_batch():
    def make(order):
        return DataLoader(ROWS, batch_size=None, sampler=order, num_workers=1)

    def state_of(order):
        loader = make(order)
        next(iter(loader))
        return loader.state_dict()

    loader = make([3, 1, 2])
    loader.load_state_dict(state_of([3, 1, 2]))
    assert list(loader) == [1, 2]
    loader.load_state_dict(state_of([1, 3, 2]))
    with pytest.raises(StateMismatch, match="list gave another order"):
        list(loader)


@WORKERS
@pytest.mark.parametrize("persistent", [False, True], ids=["new workers", "persistent"])
def test_torchdatas_distributed_sampler_is_resumed_in_any_epoch(workers, persistent):
    stateful = pytest.importorskip("torchdata.stateful_dataloader.sampler")
    loaders = []

    def make():
        sampler = stateful.StatefulDistributedSampler(ROWS, num_replicas=2, rank=1, seed=3)
        options = {"num_workers": workers, "persistent_workers": persistent and workers > 0}
        loaders.append(DataLoader(ROWS, 4, sampler=sampler, **options))
        return loaders[-1]

    for epoch in range(3):
        loader = make()
        for before in range(epoch):
            loader.set_epoch(before)
            list(loader)
        loader.set_epoch(epoch)
        batches = iter(loader)
        next(batches), next(batches)
        state = packed(loader.state_dict())
        rest = lists(batches)
        assert len(rest) == 3
        assert resumed(make, state) == rest
        # And the epoch after it is whole.
        for one in loaders[-2:]:
            one.set_epoch(epoch + 1)
        assert [b.tolist() for b in loaders[-1]] == [b.tolist() for b in loaders[-2]]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("name", "value"),
    [("epoch", 10**12), ("epoch", -1), ("step", "3"), ("drawn", [1]), ("drawn", None)],
)
def test_a_damaged_state_is_refused_at_once(name, value, workers):
    state, _ = saved(lambda: DataLoader(ROWS, 4, shuffle=True, num_workers=workers))
    with pytest.raises(StateMismatch, match="this is not the state of a DataLoader"):
        DataLoader(ROWS, 4, shuffle=True).load_state_dict({**state, name: value})


@WORKERS
def test_a_position_may_be_far_from_the_first_epoch(workers):
    def make():
        return DataLoader(ROWS, 4, shuffle=True, num_workers=workers)

    state, rest = saved(make)
    assert resumed(make, {**state, "epoch": 2**32}) == rest


# --- datasets and samplers that torch's own tests of its DataLoader use --------------------------


class Numbers(data.IterableDataset):
    """Numbers of one worker after the other, as far as the dataset divides them."""

    def __init__(self, start, end):
        self.start = start
        self.end = end

    def __iter__(self):
        info = data.get_worker_info()
        index, count = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(self.start, self.end)[index::count])


DATASETS = {
    "concatenated": lambda: data.ConcatDataset([range(5), [10, 11], range(20, 24)]),
    "added": lambda: data.TensorDataset(torch.arange(4)) + data.TensorDataset(torch.arange(3)),
    "subset": lambda: data.Subset(range(20), [3, 1, 19, 4, 4]),
    "stacked": lambda: data.StackDataset(a=range(5), b=range(5, 10)),
    "chained": lambda: data.ChainDataset([Numbers(0, 5), Numbers(10, 13)]),
    "numpy": lambda: np.arange(12).reshape(6, 2),
    "dict": lambda: {0: 1.5, 1: 2.5, 2: 3.5},
}


@WORKERS
@pytest.mark.parametrize("name", DATASETS)
def test_datasets_of_torch_give_its_batches(name, workers):
    seen = [
        str(list(kind(DATASETS[name](), 2, num_workers=workers)))
        for kind in (data.DataLoader, DataLoader)
    ]
    assert seen[0] == seen[1]


@WORKERS
@pytest.mark.parametrize("size", [1, 3, None], ids=str)
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_length_is_the_number_of_batches(size, drop_last, workers):
    drop_last = drop_last and size is not None
    loader = DataLoader(range(8), size, num_workers=workers, drop_last=drop_last)
    assert len(loader) == len(list(loader))


def test_a_stream_without_a_length_has_none():
    with pytest.raises(TypeError):
        len(DataLoader(Numbers(0, 3)))


@WORKERS
def test_after_a_break_the_next_loop_begins_again(workers):
    loader = DataLoader(range(40), 2, num_workers=workers, persistent_workers=workers > 0)
    for steps in (1, 3, 20):
        found = [batch.tolist() for _, batch in zip(range(steps), loader, strict=False)]
        assert found == [[2 * step, 2 * step + 1] for step in range(steps)]


@WORKERS
def test_an_empty_sampler_or_dataset_gives_no_batch(workers):
    assert list(DataLoader(range(3), sampler=[], num_workers=workers)) == []
    assert list(DataLoader([], num_workers=workers)) == []
    assert list(DataLoader(Numbers(0, 0), num_workers=workers)) == []
