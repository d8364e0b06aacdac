"""What torch's DataLoader promises of datasets and samplers with a state of their own."""

import dataclasses
import itertools
import json
import multiprocessing
import os
import pickle
import random
import subprocess
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from enqueuer import Auto, OrderedEnqueuer, StateMismatch, WorkerDied

torch = pytest.importorskip("torch")

from torch.utils import data  # noqa: E402  (torch may be missing)

from enqueuer.adapters.torch import DataLoader, iterating  # noqa: E402  (torch may be missing)


class Augmented(data.Dataset):
    """Rows that a generator of the dataset's own augments, as MONAI's transforms do."""

    def __init__(self):
        self.transform = SimpleNamespace(steps=[SimpleNamespace(R=np.random.RandomState(0))])

    def __len__(self):
        return 23

    def __getitem__(self, index):
        # Rows take different times, so that workers do not take turns by chance.
        sum(range(index * 7919 % 10 * 20_000))
        return index, self.transform.steps[0].R.randint(1 << 30)


class Plain(Augmented):
    """The same, seeded by `worker_init_fn` only."""

    def __init__(self):
        pass

    def __getitem__(self, index):
        sum(range(index * 7919 % 10 * 20_000))
        return index, own.randint(0, 1 << 30)


own = random.Random()


def seed_transforms(worker):
    random_state = data.get_worker_info().dataset.transform.steps[0].R
    random_state.seed(torch.initial_seed() % 2**32)


def seed_own(worker):
    own.seed(torch.initial_seed())


class Late(Augmented):
    """The same, with a generator that each worker makes when it is first asked."""

    def __init__(self):
        self.own = None

    def __getitem__(self, index):
        sum(range(index * 7919 % 10 * 20_000))
        if self.own is None:
            self.own = random.Random(data.get_worker_info().seed)
        return index, self.own.randint(0, 1 << 30)


def subset():
    return data.Subset(Late(), range(23))


CASES = [
    (Late, None),
    (subset, None),
    (Augmented, None),
    (Augmented, seed_transforms),
    (Plain, seed_own),
]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(("dataset", "init"), CASES)
def test_a_state_of_the_dataset_has_the_same_numbers_as_with_torch(dataset, init, persistent):
    def epochs(kind):
        torch.manual_seed(3)
        loader = kind(
            dataset(),
            2,
            shuffle=True,
            num_workers=3,
            worker_init_fn=init,
            persistent_workers=persistent,
        )
        return [[[part.tolist() for part in batch] for batch in loader] for _ in range(2)]

    assert epochs(DataLoader) == epochs(data.DataLoader)


def test_round_robin_can_be_chosen():
    def is_chosen(dataset, **options):
        return DataLoader(dataset, num_workers=2, **options).is_round_robin

    assert not is_chosen(range(4))
    assert is_chosen(range(4), round_robin=True)
    assert not is_chosen(Augmented(), round_robin=False)
    with pytest.raises(ValueError, match="fixed number of worker processes"):
        is_chosen(range(4), round_robin=True, backend="thread")


def fails_in_one(worker):
    if worker == 1:
        raise LookupError("no such disk")


@pytest.mark.parametrize("persistent", [False, True])
def test_an_error_of_worker_init_fn_in_one_worker_ends_each_epoch(persistent):
    loader = DataLoader(
        range(20), num_workers=2, worker_init_fn=fails_in_one, persistent_workers=persistent
    )
    for _ in range(3):
        with pytest.raises(LookupError, match="no such disk"):
            list(loader)


class OwnGenerator(data.Dataset):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self):
        return 23

    def __getitem__(self, index):
        return float(torch.rand((), generator=self.generator))


@pytest.mark.parametrize("at", [1, 3])
def test_after_a_break_the_workers_have_made_what_those_of_torch_have(at):
    def numbers(kind):
        loader = kind(OwnGenerator(), 4, num_workers=2, persistent_workers=True)
        return [
            batch.tolist()
            for batches in (itertools.islice(loader, at), loader)
            for batch in batches
        ]

    wanted = numbers(data.DataLoader)
    for _ in range(3):
        assert numbers(DataLoader) == wanted


class DiesUnseen(data.Dataset):
    """Worker 1 dies while the loop is stopped, after all that it was assigned was made."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        if index == 0:
            time.sleep(0.8)
        if index == 7:
            loop, me = os.getppid(), os.getpid()
            command = f"kill -STOP {loop}; sleep .4; kill -9 {me}; sleep .1; kill -CONT {loop}"
            subprocess.Popen(["sh", "-c", command])
            time.sleep(0.1)
        return index


def test_a_death_with_nothing_assigned_ends_the_loop():
    options = {"prefetch_factor": 16, "multiprocessing_context": "fork"}
    loader = DataLoader(DiesUnseen(), num_workers=2, round_robin=True, **options)
    with pytest.raises(WorkerDied):
        list(loader)


class Numbers(data.IterableDataset):
    """A worker's share of the numbers, shuffled with numbers of torch, numpy and Python."""

    def __iter__(self):
        info = data.get_worker_info()
        order = torch.randperm(12) + np.random.randint(2) * 100
        yield from order.tolist()[info.id :: info.num_workers]
        yield random.randrange(1 << 30)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_stream_that_shuffles_is_resumed_in_each_epoch(persistent, workers):
    def script(kind=DataLoader):
        options = {"persistent_workers": persistent, "generator": torch.Generator().manual_seed(0)}
        return kind(Numbers(), 4, num_workers=workers, **options)

    loader, states, epochs = script(), [], []
    for _ in range(3):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(batch.tolist())
            states.append((len(epochs) - 1, len(epochs[-1]), loader.state_dict()))
    # The first one is torch's; later ones must not depend on what a worker drew before.
    assert [batch.tolist() for batch in script(data.DataLoader)] == epochs[0]
    for epoch, step, state in states:
        later = script()
        later.load_state_dict(json.loads(json.dumps(state)))
        assert [batch.tolist() for batch in later] == epochs[epoch][step:]
        for following in epochs[epoch + 1 :]:
            assert [batch.tolist() for batch in later] == following


class KeepsGenerator(data.IterableDataset):
    def __init__(self):
        self.rng = random.Random(0)

    def __iter__(self):
        yield from self.rng.sample(range(100), 5)


def test_a_stream_with_a_generator_of_its_own_is_not_resumed_in_a_later_epoch():
    loader = DataLoader(KeepsGenerator(), None, num_workers=1, persistent_workers=True)
    list(loader)
    next(iter(loader))
    state = loader.state_dict()
    later = DataLoader(KeepsGenerator(), None, num_workers=1, persistent_workers=True)
    later.load_state_dict(state)
    with pytest.raises(StateMismatch, match="KeepsGenerator keeps a random generator"):
        list(later)


class FailsOnce(data.Sampler):
    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        yield from range(3)
        if self.epoch == 1:
            raise LookupError("the index is gone")
        yield 3


def test_an_error_of_a_sampler_does_not_come_again():
    loader = DataLoader(range(4), sampler=FailsOnce(), num_workers=2, persistent_workers=True)
    with pytest.raises(LookupError):
        list(loader)
    for _ in range(2):
        assert [batch.item() for batch in loader] == [0, 1, 2, 3]


class Drawing(data.Sampler):
    """An endless sampler that shares its generator with the loop."""

    def __init__(self, generator):
        self.generator = generator

    def __iter__(self):
        while True:
            yield int(torch.randint(100, (), generator=self.generator))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("prefetch", [2, 5])
def test_a_sampler_that_shares_its_generator_with_the_loop_draws_as_with_torch(
    prefetch, persistent
):
    def numbers(kind):
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(7)
        loader = kind(
            range(100),
            2,
            sampler=Drawing(generator),
            num_workers=2,
            prefetch_factor=prefetch,
            persistent_workers=persistent,
        )
        seen = []
        for _ in range(3):
            for batch in itertools.islice(loader, 6):
                seen += [*batch.tolist(), int(torch.randint(100, (), generator=generator))]
        return seen

    assert numbers(DataLoader) == numbers(data.DataLoader)


def test_an_epoch_that_is_left_near_its_end_is_followed_by_that_of_torch():
    def orders(kind, at):
        generator = torch.Generator().manual_seed(7)
        loader = kind(range(8), shuffle=True, num_workers=2, generator=generator)
        left = [batch.item() for batch in itertools.islice(loader, at)]
        return left, [[batch.item() for batch in loader] for _ in range(2)]

    for at in range(1, 9):
        assert orders(DataLoader, at) == orders(data.DataLoader, at)


def test_automatic_workers_go_on_with_their_number_and_are_no_more_than_batches(monkeypatch):
    begun = []

    class Noting(OrderedEnqueuer):
        def __init__(self, *args, **options):
            begun.append(options["workers"])
            super().__init__(*args, **options)

    monkeypatch.setattr(iterating, "OrderedEnqueuer", Noting)
    loader = DataLoader(range(6), num_workers="auto", backend="thread")
    list(loader)
    assert begun == [Auto(most=6, first=1)]
    last = loader.stats()
    workers = (*last.workers, *last.workers, *last.workers)
    monkeypatch.setattr(
        OrderedEnqueuer, "stats", lambda _: dataclasses.replace(last, workers=workers)
    )
    list(loader)
    assert begun[1:] == [Auto(most=6, first=3)]


@pytest.mark.parametrize("step", [0, 1])
def test_a_state_knows_the_rank_of_its_sampler(step):
    def loader(rank, ranks):
        sampler = data.DistributedSampler(range(12), num_replicas=ranks, rank=rank)
        return DataLoader(range(12), 2, sampler=sampler, num_workers=1)

    first = loader(0, 2)
    list(itertools.islice(iter(first), step))
    state = json.loads(json.dumps(first.state_dict()))
    loader(0, 2).load_state_dict(state)
    for rank, ranks in ((1, 2), (0, 3)):
        reason = f"the sampler is of rank 0 of 2 in the state and of rank {rank} of {ranks} here"
        with pytest.raises(StateMismatch, match=reason):
            loader(rank, ranks).load_state_dict(state)


class ThreadProcess(threading.Thread):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.pid = None


class ThreadContext(multiprocessing.context.SpawnContext):
    """As MONAI's ThreadDataLoader has it."""

    _name = "spawn"
    Process = ThreadProcess


class OwnProcess(multiprocessing.context.SpawnProcess):
    pass


class OwnContext(multiprocessing.context.SpawnContext):
    Process = OwnProcess


class UnknownMethod(multiprocessing.context.BaseContext):
    _name = "threads"

    def get_start_method(self, allow_none=False):
        return "threads"


def test_a_context_of_threads_has_threads():
    rows = [lambda: 0] * 4  # cannot be pickled
    loader = DataLoader(
        rows, num_workers=2, multiprocessing_context=ThreadContext(), collate_fn=len
    )
    assert list(loader) == [1] * 4
    assert "thread" in loader.stats().workers[0].name


@pytest.mark.parametrize(
    ("context", "reason"),
    [(OwnContext(), "Process class of its own, .*OwnProcess"), (UnknownMethod(), "'threads'")],
)
def test_any_other_context_is_refused_at_once(context, reason):
    with pytest.raises(ValueError, match=reason):
        DataLoader(range(3), num_workers=1, multiprocessing_context=context)


class Nested(data.Dataset):
    def __init__(self):
        rows = [torch.ones(2, 3), torch.ones(3, 3)]
        self.rows = torch.nested.nested_tensor(rows).transpose(1, 2)

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return int(self.rows.unbind()[index].sum())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_nested_tensor_reaches_the_workers(method):
    loader = DataLoader(Nested(), num_workers=1, multiprocessing_context=method)
    assert [batch.item() for batch in loader] == [6, 9]


class Endless:
    """A batch sampler whose attributes are others of its kind, as those of a mock."""

    def __iter__(self):
        return iter([[0], [1]])

    def __getattr__(self, name):
        if name.startswith("_") or name in ("epoch", "generator", "state_dict", "set_epoch"):
            raise AttributeError(name)
        return Endless()


def test_an_endless_chain_of_samplers_has_an_end():
    assert len(list(DataLoader(range(2), batch_sampler=Endless()))) == 2


class Wrapper:
    """Passes on attributes, as accelerate's adapter does."""

    def __init__(self, loader):
        self.loader = loader

    def __getattr__(self, name):
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def test_a_pickled_wrapper_around_a_loader_stays_one():
    loader = DataLoader(range(5), 2)
    list(itertools.islice(loader, 1))
    copied = pickle.loads(pickle.dumps(Wrapper(loader)))
    assert set(vars(copied)) == {"loader"}
    assert [batch.tolist() for batch in copied.loader] == [[0, 1], [2, 3], [4]]
