"""Datasets for torch's DataLoader, whose items an enqueuer makes.

A dataset is copied into each DataLoader worker. Its `LocalLoader` knows in which process it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from enqueuer.adapters.ranks import Ranks
from enqueuer.adapters.torch.local import LocalLoader
from enqueuer.common import checks
from enqueuer.common.extras import framework
from enqueuer.enqueuers.enqueuer import BaseEnqueuer

torch = framework("torch", "torch", "2.1")

_Dataset: Any = torch.utils.data.Dataset
_IterableDataset: Any = torch.utils.data.IterableDataset


class EnqueuerIterableDataset(_IterableDataset):
    """An iterable dataset whose items are the batches of an enqueuer.

    Use it as `DataLoader(dataset, batch_size=None)`, where torch needs a DataLoader. Without
    DataLoader workers the enqueuer's own workers make the batches, which is faster. With
    `num_workers` each DataLoader worker has an enqueuer of its own and makes a part: together they
    give each batch of one enqueuer once. An `OrderedEnqueuer` keeps its order, too. So does a
    `GeneratorEnqueuer` with given `shards` that are equally long and a multiple of `num_workers`.
    For others a warning says that the order changes.

    Each DataLoader worker begins a new epoch when the DataLoader is iterated. Epochs are counted,
    so that each has random numbers of its own, with persistent workers and without.

    Args:
        enqueuer: Enqueuer that makes the batches; for DataLoader workers it must not run.
        steps_per_epoch: As for `TorchLoader`.
        rank: As for `TorchLoader`; read from `torch.distributed` now, in this process.
        world_size: As for `TorchLoader`.

    Raises:
        ValueError: As for `TorchLoader`.
        InvalidState: As for `TorchLoader`.

    Example:
        >>> import numpy as np
        >>> from torch.utils.data import DataLoader
        >>> from enqueuer import GeneratorEnqueuer
        >>> def batches(shard):
        ...     for number in shard.split(range(2)):
        ...         yield np.full(2, number)
        >>> dataset = EnqueuerIterableDataset(GeneratorEnqueuer(batches))
        >>> list(DataLoader(dataset, batch_size=None))
        [tensor([0, 0]), tensor([1, 1])]
    """

    def __init__(
        self,
        enqueuer: BaseEnqueuer[Any],
        steps_per_epoch: int | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        self._here = LocalLoader(enqueuer, steps_per_epoch, Ranks(rank, world_size))

    def __iter__(self) -> Iterator[Any]:
        """Iterate over an epoch: all of it, or the part of this DataLoader worker."""
        return self._here.epoch()

    def __len__(self) -> int:
        """Return the number of batches in an epoch, over all DataLoader workers.

        Raises:
            TypeError: It is not known: give `steps_per_epoch`.
        """
        return len(self._here)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, counted from 0.

        You can call it before each epoch, as is usual with torch. It has an effect on the workers
        of a DataLoader, too. After an epoch that was read to its end, the next one costs nothing.
        Any other epoch, and the same one after a `break`, restart the enqueuer. A loaded position
        within the epoch is kept.

        Raises:
            InvalidState: The caller has started the enqueuer, which is at another epoch.
        """
        self._here.set_epoch(checks.count("epoch", epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the position in this process: of all batches, or of a DataLoader worker's part.

        A DataLoader with workers has no position. torchdata's StatefulDataLoader saves those of
        its workers.
        """
        return self._here.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, at the next iteration in this process.

        Raises:
            InvalidState: The enqueuer runs in this process.
            StateMismatch: The state is of another source, or of another part.
        """
        self._here.load_state_dict(state_dict)

    def stop(self) -> None:
        """Stop the enqueuer of this process, if this has started it."""
        self._here.stop()


class EnqueuerMapDataset(_Dataset):
    """A map-style dataset whose items come from an enqueuer.

    It is for code that needs `__len__` and `__getitem__`. The items can be samples, from which a
    DataLoader makes batches, or batches, for `batch_size=None`. The enqueuer decides their order:
    `OrderedEnqueuer(shuffle=True)` shuffles, the DataLoader cannot.

    Without DataLoader workers each call takes the enqueuer's next item, for any index, and one
    epoch follows another without an end. It is the pattern in which reader threads fill a buffer
    and `__getitem__` takes from it.

    With `num_workers` each DataLoader worker has an enqueuer of its own. `dataset[i]` is then item
    `i` of the epoch, so each item comes once, for any `batch_size` and `num_workers`. The
    indices must be in order: `shuffle=True` and samplers are refused. For an `OrderedEnqueuer`
    of a sequence without `length`, each worker makes only its own items. Any other enqueuer makes
    all items in each worker, with a warning. `EnqueuerIterableDataset` divides that work, and
    `num_workers=0` leaves it to the enqueuer's workers.

    Args:
        enqueuer: Enqueuer that makes the items; for DataLoader workers it must not run.
        length: Number of items in an epoch of the DataLoader. By default that of the enqueuer,
            if it has a length. In DataLoader workers an epoch of the enqueuer begins with each
            epoch of the DataLoader. If it has fewer items, items of the next epoch follow.
        rank: As for `TorchLoader`.
        world_size: As for `TorchLoader`.

    Raises:
        TypeError: There is no `length`, and the enqueuer has none either.
        ValueError: As for `TorchLoader`.
        InvalidState: As for `TorchLoader`.

    Example:
        >>> import numpy as np
        >>> from torch.utils.data import DataLoader
        >>> from enqueuer import GeneratorEnqueuer
        >>> def samples(shard):
        ...     for number in shard.split(range(3)):
        ...         yield np.array(number)
        >>> dataset = EnqueuerMapDataset(GeneratorEnqueuer(samples), length=4)
        >>> list(DataLoader(dataset, batch_size=2))
        [tensor([0, 1]), tensor([2, 0])]
    """

    def __init__(
        self,
        enqueuer: BaseEnqueuer[Any],
        length: int | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._here = LocalLoader(enqueuer, None, Ranks(rank, world_size))
        self._length = len(self._here) if length is None else length
        checks.positive("length", self._length)

    def __getitem__(self, index: int) -> Any:
        """Return the enqueuer's next item, as tensors; in a DataLoader worker item `index`.

        Raises:
            IndexError: `index` is out of range.
            ValueError: In a DataLoader worker, the indices are not in order.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the items of a batch; torch calls this."""
        for index in indices:
            if not -self._length <= index < self._length:
                raise IndexError(f"index {index} is out of range: the length is {self._length}")
        info = torch.utils.data.get_worker_info()
        if info is None:
            items = self._here.endless()
            return [next(items) for _ in indices]
        asked = self._here.asked(self._length, info.id, info.num_workers)
        return asked.items([index % self._length for index in indices])

    def __len__(self) -> int:
        return self._length

    def stop(self) -> None:
        """Stop the enqueuer of this process, if this has started it."""
        self._here.stop()
