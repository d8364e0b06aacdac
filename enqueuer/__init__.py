"""Prefetch the batches of any Python generator on workers, in order.

>>> from enqueuer import prefetch
>>> list(prefetch(iter("abc")))
['a', 'b', 'c']
"""

from enqueuer.backends.thread.buffer import Buffer
from enqueuer.enqueuers.configs import Auto, Processes, Ray
from enqueuer.enqueuers.generator import GeneratorEnqueuer
from enqueuer.enqueuers.ordered import OrderedEnqueuer
from enqueuer.enqueuers.replay import replay
from enqueuer.enqueuers.shortcuts import imap, prefetch
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
from enqueuer.generators.mixing import mix
from enqueuer.monitoring.bottleneck_texts import Bottleneck
from enqueuer.monitoring.headroom import Headroom, headroom
from enqueuer.monitoring.stats import Stats
from enqueuer.monitoring.worker_stats import WorkerStats
from enqueuer.workers.arrays import empty, empty_like
from enqueuer.workers.shards import Shard, Task

__version__ = "0.1.0"

__all__ = [
    "Auto",
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
    "empty",
    "empty_like",
    "headroom",
    "imap",
    "mix",
    "prefetch",
    "replay",
]
