"""The inside of a Ray actor: the worker's loop in one thread, a stream of packets in another.

    driver: assign() --epochs, tickets--> the outbox --> serve(), in the thread of work()
            grant() --credit------------> the outbox
            packets() <--lists of frames- the outbox <--/

The stream is a streaming generator of Ray. Each packet is copied once, into the object store, and
belongs to the driver, so it outlives the actor.
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
from dataclasses import dataclass

from enqueuer.backends.pool import Stack
from enqueuer.backends.ray.channel import Ended, Frame, Outbox, Ready, TotalCredit
from enqueuer.common.interrupts import WorkerThread
from enqueuer.monitoring import usage
from enqueuer.monitoring.meters import BYTES, WorkerStats, clock, worker_stats
from enqueuer.order.messages import Epoch
from enqueuer.workers import logs, native
from enqueuer.workers.event_loop import ThreadSnapshot, snapshots_of
from enqueuer.workers.plan import serve_failure
from enqueuer.workers.running import WorkerConfig
from enqueuer.workers.settings import Settings, be_worker, load_source

GROUPS = {"work": 1, "packets": 1, "orders": 1, "inspect": 1}
"""The concurrency groups of an actor, each with one thread, in which its methods run."""

# Packets of one stream; Ray remembers each of them until the stream ends.
_MOST_PACKETS = 10_000


@dataclass(frozen=True)
class ActorConfig:
    """Configuration of one actor.

    Attributes:
        index: Index of the worker, from 0.
        shards: Indices of its shards; empty for tasks.
        worker: Configuration that it shares with worker processes.
        settings: Settings of the driver.
        path: Directories from which the driver imports.
        asks: Whether it sends a frame when it has an item and no credit.
        keep_freed_memory: Whether the C library keeps the memory that is freed.
    """

    index: int
    shards: tuple[int, ...]
    worker: WorkerConfig
    settings: Settings
    path: tuple[str, ...]
    asks: bool
    keep_freed_memory: bool

    def __str__(self) -> str:
        # The driver knows its name.
        return ""


class RayWorker:
    """The class of the actors; the pool calls each method in a concurrency group of GROUPS.

    It has an outbox and is none: Ray wraps each method of this class, and each call of it.

    Args:
        config: Configuration of the actor.
        credit: Credit that it begins with.
        payload: Pickles of the program, and of the source and `on_error`.
    """

    def __init__(
        self, config: ActorConfig, credit: TotalCredit, payload: tuple[bytes, bytes]
    ) -> None:
        if config.keep_freed_memory:
            native.keep_freed_memory()
        # Ray has set OMP_NUM_THREADS, which OpenCV does not read. These hold for libraries that
        # the source imports; numpy is loaded already.
        os.environ.update(native.limits(1, False, os.environ))
        self._config = config
        self._payload = payload
        self._outbox = Outbox(credit, config.asks)
        self._began = clock()
        self._thread: threading.Thread | None = None
        self._cpu_s = usage.of_process(os.getpid()).cpu_s or 0.0
        known = set(sys.path)
        sys.path.extend(path for path in config.path if path not in known)

    def work(self) -> None:
        """Run the worker's loop until the driver closes the outbox."""
        # `forget` recognizes the thread by this class, and stops no backend in it.
        self._thread = WorkerThread(target=self._work, name=f"enqueuer-worker-{self._config.index}")
        self._thread.start()
        self._thread.join()

    def _work(self) -> None:
        ended = Ended()
        try:
            self._serve()
        except BaseException as error:
            # Without a last frame, the driver would wait forever.
            traceback.print_exc()
            ended = Ended(f"Its loop ended by {error!r}")
        finally:
            self._outbox.send_frame(ended)

    def _serve(self) -> None:
        be_worker()
        config, outbox = self._config, self._outbox
        outbox.send_frame(Ready(os.getpid(), _node()))
        if config.worker.levels is not None:
            logs.forward(outbox.send_frame, config.worker.levels)
        try:
            program, pickled = self._payload
            pickle.loads(program).install()
            config.settings.apply()
            source, on_error = load_source(pickled, config.index)
        except BaseException as error:
            serve_failure(error, config.shards, outbox)
        else:
            outbox.meter.begin()
            config.worker.serve(config.index, config.shards, source, on_error, outbox)

    def packets(self) -> Iterator[list[Frame]]:
        """Yield the frames in the order in which they were sent, as many at once as there are."""
        for _ in range(_MOST_PACKETS):
            frames = self._outbox.take()
            yield frames
            if isinstance(frames[-1], Ended):
                return
            # Otherwise an item would live on while the next one is made.
            del frames

    def assign(self, orders: list[Epoch], tickets: list[tuple[int, bytes]]) -> None:
        """Add epochs to run, or tasks to do."""
        self._outbox.assign(orders, tickets)

    def grant(self, items: int, size: int | None, wanted: int) -> None:
        """Replace the credit; the arguments are the fields of a `TotalCredit`."""
        self._outbox.grant(TotalCredit(items, size, wanted))

    def close(self) -> None:
        """End the loop; its remaining frames come before the last packet."""
        self._outbox.close()

    def stack(self) -> tuple[Stack | None, list[ThreadSnapshot]]:
        """Return the stack of the worker's loop, None if it does not run; its threads or shards."""
        thread = self._thread
        frame = None if thread is None else sys._current_frames().get(thread.ident or 0)
        # A stack without the values of variables can always be pickled.
        stack = None if frame is None else list(traceback.extract_stack(frame))
        return stack, snapshots_of(None if thread is None else thread.ident)

    def stats(self) -> WorkerStats:
        """Return a snapshot of the worker's work."""
        outbox, thread = self._outbox, self._thread
        used = usage.of_process(os.getpid())
        if thread is not None and used.cpu_s is not None:
            # Without the time that Ray took to start the process.
            cpu_s = used.cpu_s - self._cpu_s
            used = used._replace(cpu_s=cpu_s, cpu_wait_s=usage.of_thread(thread).cpu_wait_s)
        words = outbox.meter.words
        return worker_stats(self._config, words, (outbox.sent, words[BYTES]), used, self._began)


def _node() -> str:
    util = importlib.import_module("ray.util")
    return f"{socket.gethostname()} ({util.get_node_ip_address()})"
