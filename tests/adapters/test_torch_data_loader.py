"""The DataLoader: torch's order of indices, batches and random numbers, and exact positions."""

import copy
import itertools
import json
import pickle
import random

import numpy as np
import pytest
from helpers import needs

from enqueuer import InvalidState, Processes, StateMismatch, WorkerDied

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

    def __init__(self, count=30, fails_at=()):
        self.count = count
        self.fails_at = fails_at
        self.fetched = []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index in self.fails_at:
            raise LookupError(f"no row {index}")
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


def test_batches_are_those_of_torch():
    for ours, theirs in zip(
        DataLoader(Rows(), 4, num_workers=2), data.DataLoader(Rows(), 4), strict=True
    ):
        assert [*ours] == [*theirs]
        for name in ("index", "large"):
            assert torch.equal(ours[name], theirs[name])
            assert ours[name].dtype == theirs[name].dtype


def test_random_numbers_of_workers_do_not_depend_on_their_number():
    seen = []
    for workers in (1, 3):
        seeded()
        seen.append(drawn(DataLoader(Rows(), 4, shuffle=True, num_workers=workers)))
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
        torch.manual_seed(99)
        assert indices(later) == given[step + 1 :]
        # Resuming has drawn nothing that another epoch would miss, but without workers the rows.
        if workers:
            assert indices(later) == next_epoch


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


def test_an_error_has_its_type_and_the_loop_may_go_on():
    batches = iter(DataLoader(Rows(8, fails_at=[2]), 2, num_workers=2))
    assert next(batches)["index"].tolist() == [0, 1]
    with pytest.raises(LookupError, match="no row 2") as caught:
        next(batches)
    assert caught.traceback[-1].name == "__getitem__"
    assert next(batches)["index"].tolist() == [4, 5]


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
    with pytest.raises(TypeError, match="unexpected keyword argument 'worker'"):
        DataLoader(Rows(), worker=3)
    assert len(DataLoader(Rows(), num_workers=1, backend=Processes(start_method="fork"))) == 30
