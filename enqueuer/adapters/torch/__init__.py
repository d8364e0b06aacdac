"""PyTorch: a loader of tensors without a DataLoader, and datasets whose items an enqueuer makes.

    TorchLoader:              enqueuer -> tensors -> the loop
    EnqueuerIterableDataset:  enqueuer -> tensors -> DataLoader(dataset, batch_size=None)
    EnqueuerMapDataset:       the same for what wants __getitem__ and __len__

In the workers of a DataLoader each has an enqueuer of its own, for its part of the batches.
"""

from enqueuer.adapters.torch.datasets import EnqueuerIterableDataset, EnqueuerMapDataset
from enqueuer.adapters.torch.loader import TorchLoader, as_tensors

__all__ = ["EnqueuerIterableDataset", "EnqueuerMapDataset", "TorchLoader", "as_tensors"]
