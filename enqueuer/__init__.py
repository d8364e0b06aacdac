"""Prefetch the batches of any Python generator on workers, in order.

>>> from enqueuer import prefetch
>>> list(prefetch(iter("abc")))
['a', 'b', 'c']
"""

import importlib
from typing import TYPE_CHECKING, Any

from enqueuer.errors import (
    BatchTimeout,
    BlockMemoryError,
    Closed,
    DataFileError,
    DuplicateDataWarning,
    ElementTimeout,
    EmptyEpochWarning,
    EnqueuerError,
    EnqueuerWarning,
    FrameworkUnavailable,
    InvalidState,
    ItemNotLoadable,
    ItemNotPicklable,
    OverwrittenDataWarning,
    SourceNotPicklable,
    StallWarning,
    StartError,
    StateMismatch,
    StopWarning,
    TransportError,
    WorkerDied,
    WorkerError,
)
from enqueuer.workers.arrays import empty, empty_like
from enqueuer.workers.shards import Shard, Task

if TYPE_CHECKING:
    from enqueuer.buffer import Buffer
    from enqueuer.enqueuers.failures import replay
    from enqueuer.enqueuers.generator import GeneratorEnqueuer, prefetch
    from enqueuer.enqueuers.options import Auto, Processes, Ray
    from enqueuer.enqueuers.ordered import OrderedEnqueuer, imap
    from enqueuer.mixing import mix
    from enqueuer.monitoring.meters import WorkerStats
    from enqueuer.monitoring.stats import Bottleneck, Stats
    from enqueuer.order.ranks import merge_states
    from enqueuer.sequences.lengths import balance, pad
    from enqueuer.sequences.packing import pack
    from enqueuer.sequences.stages import batch_by_length

__version__ = "0.2.0.dev0"

__all__ = [
    "Auto",
    "BatchTimeout",
    "BlockMemoryError",
    "Bottleneck",
    "Buffer",
    "Closed",
    "DataFileError",
    "DuplicateDataWarning",
    "ElementTimeout",
    "EmptyEpochWarning",
    "EnqueuerError",
    "EnqueuerWarning",
    "FrameworkUnavailable",
    "GeneratorEnqueuer",
    "InvalidState",
    "ItemNotLoadable",
    "ItemNotPicklable",
    "OrderedEnqueuer",
    "OverwrittenDataWarning",
    "Processes",
    "Ray",
    "Shard",
    "SourceNotPicklable",
    "StallWarning",
    "StartError",
    "StateMismatch",
    "Stats",
    "StopWarning",
    "Task",
    "TransportError",
    "WorkerDied",
    "WorkerError",
    "WorkerStats",
    "balance",
    "batch_by_length",
    "empty",
    "empty_like",
    "imap",
    "merge_states",
    "mix",
    "pack",
    "pad",
    "prefetch",
    "replay",
]

# Names that are imported when they are first used: a worker process needs none of them, and a
# quarter of the start of a fork server would be spent on them.
_MODULES = {
    "Auto": "enqueuers.options",
    "Bottleneck": "monitoring.stats",
    "Buffer": "buffer",
    "GeneratorEnqueuer": "enqueuers.generator",
    "OrderedEnqueuer": "enqueuers.ordered",
    "Processes": "enqueuers.options",
    "Ray": "enqueuers.options",
    "Stats": "monitoring.stats",
    "WorkerStats": "monitoring.meters",
    "balance": "sequences.lengths",
    "batch_by_length": "sequences.stages",
    "imap": "enqueuers.ordered",
    "merge_states": "order.ranks",
    "mix": "mixing",
    "pack": "sequences.packing",
    "pad": "sequences.lengths",
    "prefetch": "enqueuers.generator",
    "replay": "enqueuers.failures",
}

# Public names of other modules, for the error of one that is looked for here.
_ELSEWHERE = {
    "adapters.accelerate": "prepare_data_loader",
    "adapters.cuda": "CudaDataLoader",
    "adapters.jax": "JaxLoader",
    "adapters.keras": "EnqueuerDataset",
    "adapters.tensorflow": "as_dataset",
    "adapters.torch": "DataLoader TorchLoader EnqueuerIterableDataset EnqueuerMapDataset",
    "datasets.arrays": "ArraySource",
    "datasets.files": "find_files image_folder load_audio load_image read_list",
    "datasets.hdf5": "HDF5Source describe",
}

# Type checkers see the imports above; with this function they would accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a public name that is used for the first time."""
        if name not in _MODULES:
            places = [place for place, names in _ELSEWHERE.items() if name in names.split()]
            use = "".join(f"; use: from enqueuer.{place} import {name}" for place in places)
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{use}")
        value = getattr(importlib.import_module(f"enqueuer.{_MODULES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
