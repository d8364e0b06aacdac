"""PyTorch: a DataLoader, a loader of tensors, and datasets whose items an enqueuer makes.

DataLoader:               a torch dataset -> workers of an enqueuer -> batches
TorchLoader:              enqueuer -> tensors -> the loop
EnqueuerIterableDataset:  enqueuer -> tensors -> DataLoader(dataset, batch_size=None)
EnqueuerMapDataset:       the same for libraries that need __getitem__ and __len__
"""

from enqueuer.adapters.ranks import RankStats, gather_state, gather_stats
from enqueuer.adapters.torch.data_loader import DataLoader
from enqueuer.adapters.torch.loader import (
    EnqueuerIterableDataset,
    EnqueuerMapDataset,
    TorchLoader,
    as_tensors,
)

__all__ = [
    "DataLoader",
    "EnqueuerIterableDataset",
    "EnqueuerMapDataset",
    "RankStats",
    "TorchLoader",
    "as_tensors",
    "gather_state",
    "gather_stats",
]
