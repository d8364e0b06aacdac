"""What others call a dataset, as the sequence of an OrderedEnqueuer."""

import itertools
import os

import numpy as np
import pytest
from helpers import backend_of, needs, start_method_of

from enqueuer import OrderedEnqueuer, Processes, SourceNotPicklable
from enqueuer.workers.tasks import TaskSource


def test_a_torch_dataset(backend):
    torch = needs("torch")
    if start_method_of(backend) == "fork":
        pytest.skip("torch hangs in a fork once it has used its threads")

    dataset = torch.utils.data.TensorDataset(torch.arange(10.0).reshape(5, 2), torch.arange(5))
    with OrderedEnqueuer(dataset, batch_size=2, workers=2, **backend) as enqueuer:
        x, y = zip(*enqueuer, strict=True)
    assert torch.equal(torch.cat(x), dataset.tensors[0])
    assert torch.cat(y).tolist() == [0, 1, 2, 3, 4]


def test_an_h5py_dataset_on_threads(tmp_path):
    h5py = needs("h5py")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        data = file.create_dataset("x", data=np.arange(60).reshape(20, 3), chunks=(4, 3))
        with OrderedEnqueuer(data, batch_size=6, shuffle=True, workers=3) as enqueuer:
            rows = np.concatenate(list(enqueuer))
    assert sorted(rows[:, 0].tolist()) == list(range(0, 60, 3))


class Opened:
    """The rows of a dataset in a file that each process opens for itself."""

    def __init__(self, path, length):
        self.path, self.length, self.data = path, length, None

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.data is None:
            import h5py

            self.data = h5py.File(self.path)["x"]
        return self.data[index]


def test_an_h5py_file_that_is_opened_in_the_worker(backend, tmp_path):
    h5py = needs("h5py")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = np.arange(20)
    rows = Opened(tmp_path / "data.h5", 20)
    with OrderedEnqueuer(rows, workers=2, **backend) as enqueuer:
        assert [int(x) for x in enqueuer] == list(range(20))


def test_an_open_h5py_dataset_cannot_be_sent(tmp_path):
    h5py = needs("h5py")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = np.arange(20)
        with pytest.raises(SourceNotPicklable, match="the sequence"):
            OrderedEnqueuer(file["x"], backend=Processes(start_method="spawn")).start()


def test_a_keras_py_dataset(backend, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", os.environ.get("KERAS_BACKEND", "torch"))
    needs("torch")
    keras = needs("keras")
    if start_method_of(backend) == "fork":
        pytest.skip("torch hangs in a fork once it has used its threads")

    class Squares(keras.utils.PyDataset):
        def __init__(self):
            super().__init__()
            self.order = np.arange(12)

        def __len__(self):
            return 4

        def __getitem__(self, index):
            x = self.order[3 * index : 3 * index + 3].copy()  # threads copy nothing
            return x, x**2

        def on_epoch_end(self):
            np.random.shuffle(self.order)

    enqueuer = OrderedEnqueuer(Squares(), backend_of(backend) == "process", True)
    enqueuer.start(workers=2, max_queue_size=5)
    batches = enqueuer.get()
    epochs = [[next(batches) for _ in range(4)] for _ in range(2)]
    enqueuer.stop()
    assert all((y == x**2).all() for epoch in epochs for x, y in epoch)
    seen = [np.concatenate([x for x, _ in epoch]).tolist() for epoch in epochs]
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(12))
    assert seen[0] != seen[1]


def test_a_keras_py_dataset_without_a_length(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", os.environ.get("KERAS_BACKEND", "torch"))
    needs("torch")
    keras = needs("keras")

    class Squares(keras.utils.PyDataset):
        count = None

        @property
        def num_batches(self):
            return self.count

        def __getitem__(self, index):
            return index**2

    with OrderedEnqueuer(Squares(), workers=2) as enqueuer:
        assert list(itertools.islice(enqueuer, 5)) == [0, 1, 4, 9, 16]
    Squares.count = 4
    with OrderedEnqueuer(Squares(), workers=2) as enqueuer:
        assert list(enqueuer) == [0, 1, 4, 9]
        assert len(enqueuer) == 4


@pytest.fixture
def plain_dataset(monkeypatch):
    """Return a class of `PyDataset` without methods for epochs of its own."""
    monkeypatch.setenv("KERAS_BACKEND", os.environ.get("KERAS_BACKEND", "torch"))
    needs("torch")
    keras = needs("keras")

    class Plain(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return index

    return Plain


def test_methods_of_a_keras_py_dataset_that_do_nothing_hinder_no_early_epoch(plain_dataset):
    class Changing(plain_dataset):
        def on_epoch_end(self):
            pass

    def may_overlap(items):
        return TaskSource(items, None, None, list, 0).may_overlap

    assert may_overlap(plain_dataset())
    assert not may_overlap(Changing())
    # It shuffles at the end of an epoch.
    legacy = pytest.importorskip("keras.src.legacy.preprocessing.image")
    assert not may_overlap(legacy.Iterator(8, 2, True, 7))


def test_an_iterable_torch_dataset_is_read_and_not_indexed():
    torch = needs("torch")

    class Rows(torch.utils.data.IterableDataset):
        def __len__(self):
            return 9

        def __iter__(self):
            return iter(range(9))

    with OrderedEnqueuer(Rows(), lambda x: 2 * x, workers=2) as enqueuer:
        assert list(enqueuer) == list(enqueuer) == [2 * x for x in range(9)]


def test_a_keras_py_dataset_without_own_methods_goes_back_to_an_earlier_epoch(plain_dataset):
    enqueuer = OrderedEnqueuer(plain_dataset(), workers=1, max_queue_size=10)
    with enqueuer:
        batches = enqueuer.get()
        first = next(batches)
        # The next epoch begins early.
        state, rest = enqueuer.state_dict(), [next(batches) for _ in range(2)]
    enqueuer.load_state_dict(state)
    assert [first, *rest] == [0, 1, 2]
    with enqueuer:
        assert list(enqueuer) == [1, 2, 3]
