"""Hand over any Python generator; get its batches back ahead of time, in order.

>>> from enqueuer import prefetch
>>> list(prefetch(iter("abc")))
['a', 'b', 'c']
"""

from enqueuer.arrays import empty, empty_like
from enqueuer.bottleneck import Bottleneck
from enqueuer.buffer import Buffer
from enqueuer.enqueuers import GeneratorEnqueuer, OrderedEnqueuer, imap, prefetch
from enqueuer.errors import (
    BatchTimeout,
    BlockMemoryError,
    Closed,
    DataFileError,
    DuplicateDataWarning,
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
from enqueuer.reach import Headroom, headroom
from enqueuer.replaying import replay
from enqueuer.shards import Shard, Task
from enqueuer.stats import Stats, WorkerStats

__version__ = "0.1.0"

__all__ = [
    "BatchTimeout",
    "BlockMemoryError",
    "Bottleneck",
    "Buffer",
    "Closed",
    "DataFileError",
    "DuplicateDataWarning",
    "EmptyEpochWarning",
    "EnqueuerError",
    "EnqueuerWarning",
    "FrameworkUnavailable",
    "GeneratorEnqueuer",
    "Headroom",
    "InvalidState",
    "ItemNotLoadable",
    "ItemNotPicklable",
    "OrderedEnqueuer",
    "OverwrittenDataWarning",
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
    "empty",
    "empty_like",
    "headroom",
    "imap",
    "prefetch",
    "replay",
]
