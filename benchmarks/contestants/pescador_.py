"""pescador: arrays over ZeroMQ, by TCP. Its queue is ZeroMQ's own, which nothing sets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pescador

from contestants import Setup


@contextmanager
def open(setup: Setup) -> Iterator[Iterator[Any]]:
    """Give the items of `setup`."""
    streams = [pescador.ZMQStreamer(pescador.Streamer(setup.source)) for _ in range(setup.workers)]
    mux = pescador.RoundRobinMux(streams, "exhaustive")
    stream = streams[0] if len(streams) == 1 else mux
    with closing(stream.iterate()) as items:
        yield items
