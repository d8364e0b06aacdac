"""Grain: a spawned process."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import grain
from absl import flags

from faults import COUNT, sources

# Grain reads flags of absl, which a program must parse first.
if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


def items(fault: str) -> Iterable[Any]:
    """Return what a worker makes."""
    call = functools.partial(sources.item, fault=fault)
    data = grain.MapDataset.source(range(COUNT)).map(call)
    # one reader: with more, later items are begun before the first is made, and die with the worker
    one = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return data.to_iter_dataset(one).mp_prefetch(grain.MultiprocessingOptions(num_workers=1))
