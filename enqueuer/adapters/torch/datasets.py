"""Datasets for torch's DataLoader, whose items an enqueuer makes in the process of the loop.

The enqueuer has workers of its own. DataLoader workers would each have a copy of the dataset, and
so of the enqueuer, and are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from enqueuer.adapters.torch.loader import TorchLoader
from enqueuer.common import checks
from enqueuer.common.extras import framework
from enqueuer.common.text import an
from enqueuer.enqueuers.enqueuer import BaseEnqueuer
from enqueuer.errors import InvalidState

torch = framework("torch", "torch", "2.1")

_Dataset: Any = torch.utils.data.Dataset
_IterableDataset: Any = torch.utils.data.IterableDataset
# Attributes that are of no use in a copy, and cannot be sent; each dataset has one of them.
_OF_LOADERS = ("_reader", "state_dict", "load_state_dict", "_loader", "_items")


class EnqueuerIterableDataset(TorchLoader[Any], _IterableDataset):
    """An iterable dataset whose items are the batches of an enqueuer.

    Use it as `DataLoader(dataset, batch_size=None)`, where code needs a DataLoader of torch. The
    enqueuer's own workers make the batches, so `num_workers` of the DataLoader must be 0.

    Args:
        enqueuer: Enqueuer that makes the batches.
        steps_per_epoch: As for `TorchLoader`.
        rank: As for `TorchLoader`.
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
        super().__init__(
            enqueuer, steps_per_epoch=steps_per_epoch, rank=rank, world_size=world_size
        )

    def __iter__(self) -> Iterator[Any]:
        """Iterate over an epoch, or over the rest of one.

        Raises:
            InvalidState: It is called in a worker of a DataLoader.
        """
        _check_not_copied(self)
        return super().__iter__()

    def __getstate__(self) -> dict[str, Any]:
        # torch sends a copy to each worker; the copy refuses to be read.
        return {name: value for name, value in vars(self).items() if name not in _OF_LOADERS}


class EnqueuerMapDataset(_Dataset):
    """A map-style dataset whose items come from an enqueuer.

    It is for code that needs `__len__` and `__getitem__`. The items can be samples, from which a
    DataLoader makes batches, or batches, for `batch_size=None`. The enqueuer decides their order:
    `OrderedEnqueuer(shuffle=True)` shuffles, the DataLoader cannot.

    Each call takes the enqueuer's next item, for any index, and one epoch follows another without
    an end. It is the pattern in which reader threads fill a buffer and `__getitem__` takes from
    it. The enqueuer's own workers make the items, so `num_workers` of the DataLoader must be 0.

    Args:
        enqueuer: Enqueuer that makes the items.
        length: Number of items in an epoch of the DataLoader. By default that of the enqueuer,
            if it has a length. If an epoch of the enqueuer has fewer items, items of its next one
            follow.
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
        self._loader: TorchLoader[Any] = TorchLoader(enqueuer, rank=rank, world_size=world_size)
        self._length = len(self._loader) if length is None else checks.positive("length", length)
        self._items: Iterator[Any] | None = None

    def __getitem__(self, index: int) -> Any:
        """Return the enqueuer's next item, as tensors.

        Raises:
            IndexError: `index` is out of range.
            InvalidState: It is called in a worker of a DataLoader.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the items of a batch; torch calls this."""
        _check_not_copied(self)
        for index in indices:
            if not -self._length <= index < self._length:
                raise IndexError(f"index {index} is out of range: the length is {self._length}")
        if self._items is None:
            self._items = _endless(self._loader)
        return [next(self._items) for _ in indices]

    def __len__(self) -> int:
        return self._length

    def stop(self) -> None:
        """Stop the enqueuer, if this has started it."""
        self._loader.stop()
        self._items = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _OF_LOADERS}


def _check_not_copied(dataset: EnqueuerIterableDataset | EnqueuerMapDataset) -> None:
    is_copy = vars(dataset).keys().isdisjoint(_OF_LOADERS)
    if is_copy or torch.utils.data.get_worker_info() is not None:
        raise InvalidState(
            f"{an(type(dataset).__name__)} was copied, as for a worker of a DataLoader, but its "
            "enqueuer has workers of its own, which copies cannot share: give the DataLoader "
            "num_workers=0, or take TorchLoader(enqueuer) in its place; for a dataset of torch, "
            "take enqueuer.adapters.torch.DataLoader(dataset, num_workers=...)"
        )


def _endless(loader: TorchLoader[Any]) -> Iterator[Any]:
    while True:
        is_empty = True
        for item in loader:
            is_empty = False
            yield item
        if is_empty:
            raise ValueError("the enqueuer has nothing: an epoch without a single item")
