"""Positions of DataLoaders whose samplers the loader cannot know: exact, or a clear error."""

import json

import numpy as np
import pytest
from helpers import needs

from enqueuer import StateMismatch

torch = needs("torch")
torch.set_num_threads(1)  # its thread pool does not survive a fork

from enqueuer.adapters.torch import DataLoader  # noqa: E402  (torch may be missing)

data = torch.utils.data
ROWS = range(40)
WORKERS = pytest.mark.parametrize("workers", [0, 2])


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
    state = json.loads(json.dumps(loader.state_dict()))
    return state, [batch.tolist() for batch in batches]


def resumed(make, state):
    loader = make()
    loader.load_state_dict(state)
    return [batch.tolist() for batch in loader]


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
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [batch.tolist() for batch in batches]
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
