"""SPDL: a process and a `multiprocessing.Queue`; or a pipeline of threads."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from spdl.pipeline import PipelineBuilder, SharedMemorySegmentPool, iterate_in_subprocess

from contestants import Setup


@contextmanager
def open(setup: Setup, arena: SharedMemorySegmentPool | None = None) -> Iterator[Iterator[Any]]:
    """Give the items of `setup`."""
    parts = [
        iterate_in_subprocess(
            setup.source,
            buffer_size=setup.queue_size,
            mp_context=setup.start_method,
            arena=arena,
        )
        for _ in range(setup.workers)
    ]
    try:
        yield iter(parts[0]) if len(parts) == 1 else _in_turn(parts)
    finally:
        for part in parts:
            part._shutdown()  # what happens when the last reference to it is gone


@contextmanager
def open_threads(setup: Setup) -> Iterator[Iterator[Any]]:
    """Give what `setup.call` returns, called by threads."""
    pipeline = (
        PipelineBuilder()
        .add_source(itertools.count())
        .pipe(setup.call, concurrency=setup.workers)
        .add_sink(setup.queue_size)
        .build(num_threads=setup.workers)
    )
    with pipeline.auto_stop():
        yield iter(pipeline)


def _in_turn(parts: list[Iterable[Any]]) -> Iterator[Any]:
    for items in zip(*parts, strict=True):
        yield from items
