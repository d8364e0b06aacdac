"""Datasets, functions and samplers that torch's own tests of its DataLoader use."""

import numpy as np
import pytest
from helpers import needs

torch = needs("torch")
torch.set_num_threads(1)  # its thread pool does not survive a fork

from enqueuer.adapters.torch import DataLoader  # noqa: E402  (torch may be missing)

data = torch.utils.data
WORKERS = pytest.mark.parametrize("workers", [0, 2])


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
