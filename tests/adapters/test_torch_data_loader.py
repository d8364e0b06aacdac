"""The DataLoader: torch's order of indices, batches and random numbers, and exact positions."""

import collections
import copy
import itertools
import json
import pickle
import random

import numpy as np
import pytest
from helpers import needs

from enqueuer import EnqueuerWarning, InvalidState, Processes, StateMismatch, WorkerDied

torch = needs("torch")
torch.set_num_threads(1)  # its thread pool does not survive a fork

from enqueuer.adapters.torch import DataLoader  # noqa: E402  (torch may be missing)

data = torch.utils.data
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
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


def test_random_numbers_of_workers_do_not_depend_on_their_number():
    seen = []
    for workers in (1, 3):
        seeded()
        loader = DataLoader(Rows(), 4, shuffle=True, num_workers=workers)
        seen.append([drawn(loader), drawn(loader)])
        assert seen[-1][0] != seen[-1][1]
    assert seen[0] == seen[1]


@KINDS
@pytest.mark.parametrize("order", ORDERS)
def test_a_state_continues_with_the_next_batch(order, workers, persistent):

    def loader():
        rows = Rows()
        options = ORDERS[order](rows) | {"persistent_workers": persistent}
        return DataLoader(rows, num_workers=workers, **options)

    seeded()
    first = loader()
    list(first)
    given, states = [], []
    for batch in first:
        given.append(batch["index"].tolist())
        states.append(json.loads(json.dumps(first.state_dict())))
    torch.manual_seed(99)
    next_epoch = indices(first)
    for step in (len(given) // 2, len(given) - 1):
        later = loader()
        later.load_state_dict(states[step])
        torch.manual_seed(98)
        assert indices(later) == given[step + 1 :]
        # What the program sets is what the next epoch draws from.
        torch.manual_seed(99)
        assert indices(later) == next_epoch


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
            states.append((loader.state_dict(), torch.get_rng_state()))
    further = [indices(loader) for _ in range(2)]
    has_own = "generator" in order or epochs[0] == epochs[1]
    for step in (0, len(epochs[0]) - 1, len(epochs[0]), len(states) - 1):
        epoch, done = divmod(step, len(epochs[0]))
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


def test_a_state_of_another_loader_is_refused():
    state = DataLoader(Rows(), 4).state_dict()
    with pytest.raises(StateMismatch, match="batch_size is 4 in the state and 5 here"):
        DataLoader(Rows(), 5).load_state_dict(state)
    with pytest.raises(StateMismatch):
        DataLoader(Rows(), 4).load_state_dict({"step": 3})


class Killed(Rows):
    def __getitem__(self, index):
        if index == 5 and data.get_worker_info() is not None:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_killed_worker_is_an_error_of_torch_and_of_ours():
    loader = DataLoader(Killed(), 2, num_workers=1)
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid\(s\) \d+\) exited") as caught:
        list(loader)
    assert isinstance(caught.value, WorkerDied)
    assert caught.value.exitcode == -9


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


@pytest.mark.parametrize("workers", [0, 2])
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
        DataLoader(range(8), num_workers=workers).load_state_dict(json.loads(json.dumps(state)))
    del outer
    list(loader)
    assert loader.state_dict()["step"] == 0


def test_a_state_of_another_dataset_or_sampler_is_refused():
    loader = DataLoader(range(20), batch_size=2)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(StateMismatch, match="samples is 20 in the state and 12 here"):
        DataLoader(range(12), batch_size=2).load_state_dict(state)
    with pytest.raises(StateMismatch, match="sampler is 'SequentialSampler'"):
        DataLoader(range(20), batch_size=2, shuffle=True).load_state_dict(state)


def test_on_error_needs_workers():
    with pytest.raises(ValueError, match="on_error needs num_workers >= 1"):
        DataLoader(range(3), on_error="skip")


def seed_as_torch_documents(index):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


class Drawing(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return np.random.rand(), random.random(), index


def test_the_recipe_for_seeds_in_workers_gives_the_same_numbers_for_any_number_of_workers():
    def numbers(workers):
        generator = torch.Generator().manual_seed(7)
        loader = DataLoader(
            Drawing(),
            batch_size=2,
            num_workers=workers,
            worker_init_fn=seed_as_torch_documents,
            generator=generator,
        )
        return [torch.stack(batch).tolist() for batch in loader]

    assert numbers(1) == numbers(3)


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


class DrawingRows(Drawing):
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
