"""What a Ray actor does: the worker's loop in one of its threads, a stream of packets in another.

    driver: tell() --epochs, tickets--> Outbox --> serve(), in the thread of work()
            allow() --credit----------> Outbox
            packets() <--lists of frames- Outbox <--/

The stream is a streaming generator of Ray's, so that each packet is copied once, into the object
store, and belongs to the driver: it outlives the actor.
"""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace

from enqueuer.backends.lifecycle import WorkerThread
from enqueuer.backends.ray.outbox import Credit, Ended, Frame, Outbox, Ready
from enqueuer.backends.stall import Stack
from enqueuer.monitoring import usage
from enqueuer.monitoring.meters import BYTES, clock
from enqueuer.monitoring.worker_stats import WorkerStats, worker_stats
from enqueuer.workers import allocator, logs
from enqueuer.workers.messages import Epoch
from enqueuer.workers.remote import WorkerConfig, serve_failure

GROUPS = {"work": 1, "packets": 1, "tell": 1, "inspect": 1}
"""The threads of an actor, by what they do; each does one thing after the other."""

_MOST_PACKETS = 10_000  # of one stream; Ray remembers each of them until its end


@dataclass(frozen=True)
class ActorConfig:
    """Configuration of one actor.

    Attributes:
        index: Index of the worker.
        shards: Indices of its shards; empty for tasks.
        worker: Configuration that is not special to actors.
        path: Directories from which the driver imports.
        asks: Whether it sends a frame when it may not send the item that it has.
    """

    index: int
    shards: tuple[int, ...]
    worker: WorkerConfig
    path: tuple[str, ...]
    asks: bool


class RayWorker:
    """The actor. Its methods run in the threads of GROUPS, as the backend asks for them.

    Args:
        config: Its configuration.
        credit: How much it may send at once.
        payload: The pickled source and `on_error`.
    """

    def __init__(self, config: ActorConfig, credit: Credit, payload: bytes) -> None:
        allocator.keep_freed_memory()
        self._config = config
        self._payload = payload
        self._outbox = Outbox(credit, config.asks)
        self._began = clock()
        self._thread: threading.Thread | None = None
        self._cpu_s = usage.of_process(os.getpid()).cpu_s or 0.0
        known = set(sys.path)
        sys.path.extend(path for path in config.path if path not in known)

    def work(self) -> None:
        """Run the worker's loop until the driver hangs up."""
        # a thread of its own kind: the collector must know it, see `backends.forget`
        self._thread = WorkerThread(target=self._work, name=f"enqueuer-worker-{self._config.index}")
        self._thread.start()
        self._thread.join()

    def _work(self) -> None:
        ended = Ended()
        try:
            self._serve()
        except BaseException as error:  # or the driver would wait forever
            traceback.print_exc()
            ended = Ended(f"Its loop ended by {error!r}")
        finally:
            self._outbox.say(ended)

    def _serve(self) -> None:
        config, outbox = self._config, self._outbox
        outbox.say(Ready(os.getpid(), _node()))
        if config.worker.levels is not None:
            logs.forward(outbox.send_record, config.worker.levels)
        try:
            source, on_error = pickle.loads(self._payload)
        except BaseException as error:
            serve_failure(error, config.shards, outbox, outbox)
        else:
            outbox.meter.begin()
            config.worker.serve(config.index, config.shards, source, on_error, outbox, outbox)

    def packets(self) -> Iterator[list[Frame]]:
        """Yield what there is, in the order in which it was sent."""
        for _ in range(_MOST_PACKETS):
            frames = self._outbox.take()
            yield frames
            if isinstance(frames[-1], Ended):
                return
            del frames  # or an item would live on while the next one is made

    def tell(self, orders: list[Epoch], tickets: list[tuple[int, bytes]]) -> None:
        """Take in what there is to do."""
        self._outbox.tell(orders, tickets)

    def allow(self, items: int, size: int | None, wanted: int) -> None:
        """Take in how much may have been sent, as the fields of a Credit."""
        self._outbox.allow(Credit(items, size, wanted))

    def close(self) -> None:
        """Have the loop end; what it has still to say comes before the last packet."""
        self._outbox.close()

    def stack(self) -> Stack | None:
        """Return where the worker's loop is."""
        thread = self._thread
        frame = None if thread is None else sys._current_frames().get(thread.ident or 0)
        # without the values of variables, which may be anything
        return None if frame is None else list(traceback.extract_stack(frame))

    def account(self) -> WorkerStats:
        """Return what the worker has done so far."""
        outbox, thread = self._outbox, self._thread
        used = usage.of_process(os.getpid())
        if thread is not None and used.cpu_s is not None:
            cpu_s = used.cpu_s - self._cpu_s  # without what Ray took to start
            used = replace(used, cpu_s=cpu_s, cpu_wait_s=usage.of_thread(thread).cpu_wait_s)
        return worker_stats(
            self._config.index,
            "",
            self._config.shards,
            outbox.meter.words,
            (outbox.sent, outbox.meter.words[BYTES]),
            used,
            self._began,
        )


def _node() -> str:
    util = importlib.import_module("ray.util")
    return f"{socket.gethostname()} ({util.get_node_ip_address()})"
