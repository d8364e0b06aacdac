"""Workers as threads: start, watch and end them; buffers are the roads.

    ordered:     one buffer a worker, read in turn     worker 0 -> [..] \\
                                                       worker 1 -> [..] -> the consumer
    as they come: one buffer for all                   workers  -> [......] -> the consumer

A thread cannot be killed: one that hangs in the generator is left behind, daemonic, with a
warning that shows where it hangs. No thread holds a reference to the enqueuer, or it could
never be garbage-collected.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from queue import Empty as NothingYet
from typing import Any, TypeVar

from enqueuer import usage
from enqueuer.backends import (
    Job,
    WorkerThread,
    owners_of,
    size_at_sight,
    size_of,
    split_bound,
    until,
)
from enqueuer.buffer import Buffer
from enqueuer.errors import Closed, StartError, StopWarning
from enqueuer.merging import Order
from enqueuer.messages import Empty, End, Epoch, Failure, Item, Message
from enqueuer.meters import BEGAN, BYTES, IDLE, WAITING, Meter, Waits, clock
from enqueuer.sources import LiveSource
from enqueuer.stalls import Late, Sight, View, awaited, first_for, stacks_of_threads
from enqueuer.stats import WorkerStats, worker_stats
from enqueuer.tracing import traced
from enqueuer.worker import Plan, serve

_WEIGHED_EVERY = 64  # of so many items; to look at each would take longer than to send it

T = TypeVar("T")


class ThreadBackend:
    """See `enqueuer.backends.Backend`."""

    def __init__(self, job: Job, waits: Waits) -> None:
        if isinstance(job.source, LiveSource) and job.shards > 1:
            raise AssertionError("a live iterator is one shard: threads cannot share it in order")
        self._plans = job.plans()
        self._owners = owners_of(self._plans)
        self._waits = waits
        self._patience_s = job.patience_s
        self._began = clock()
        self._measured = job.max_queue_bytes is not None
        self._trace = job.trace
        self._buffers = _buffers(job, len(self._plans))
        self._orders: list[Buffer[Epoch]] = [Buffer(max_size=1) for _ in self._plans]
        self._roads: list[Road] = []
        self._threads: list[threading.Thread] = []
        self._held: Item | None = None  # what is next, between wait() and take()

    @property
    def restarts(self) -> int:
        return 0  # a thread does not die alone

    def start(self) -> None:
        try:
            for index, plan in enumerate(self._plans):
                self._threads.append(self._start_one(index, plan))
        except RuntimeError as error:
            self.stop(1.0)
            raise StartError(
                f"thread {index} of {len(self._plans)} could not be started: {error}; "
                "try fewer workers"
            ) from error

    def _start_one(self, index: int, plan: Plan) -> threading.Thread:
        buffer = self._buffers[index % len(self._buffers)]
        road = Road(index, buffer, self._orders[index], self._measured)
        self._roads.append(road)
        thread = WorkerThread(
            target=traced(serve, self._trace, index),
            args=(plan, road, road),
            name=f"enqueuer-worker-{index}",
            daemon=True,
        )
        thread.start()
        return thread

    def begin(self, epoch: Epoch) -> None:
        for plan, orders in zip(self._plans, self._orders, strict=True):
            orders.put(epoch.part(plan.shards))

    def wait(self, order: Order, deadline: float | None) -> Failure | None:
        while self._held is None and not order.done:
            shard = order.turn()
            worker = None if shard is None else self._owners[shard]
            buffer = self._buffers[0 if worker is None else worker % len(self._buffers)]
            message = buffer.poll()
            if message is None:
                self._waits.pause(worker)
                deadline = until(deadline, self._patience_s)
                timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
                try:
                    message = buffer.get(timeout)
                except NothingYet:
                    raise Late("no batch in time") from None
            match message:
                case Item():
                    self._held = message
                case End(shard=ended):
                    order.ended(ended)
                case Failure():
                    return message
        return None

    def take(self, order: Order) -> Iterator[Item]:
        item = self._held
        if item is not None:
            order.took(item.shard, item.number, item.state)
            self._held = None
            yield item

    def settle(self) -> None:
        pass  # what is taken from a buffer makes room in it at once

    def cpus(self) -> float:
        return usage.cpus()

    def measures(self) -> list[WorkerStats]:
        return [
            worker_stats(
                road.index,
                _name(road),
                plan.shards,
                road.meter.words,
                road.sent,
                usage.of_thread(thread),
                self._began,
            )
            for plan, road, thread in zip(
                self._plans,
                self._roads,
                self._threads,
                strict=False,  # it may be stopping
            )
        ]

    def waiting(self) -> int:
        messages = (message for buffer in self._buffers for message in buffer.snapshot())
        held = self._held is not None
        return held + sum(isinstance(message, Item) for message in messages)

    def look(self, order: Order) -> View:
        stacks = stacks_of_threads(self._threads)
        sights = [
            Sight(_name(road), plan.shards, stack, "has ended")
            for road, plan, stack in zip(self._roads, self._plans, stacks, strict=False)
        ]
        return View(self._awaited(order), self.waiting(), first_for(order, sights))

    def _awaited(self, order: Order) -> str:
        return awaited(order)

    def close(self) -> None:
        for orders in self._orders:
            orders.close()
            orders.clear()
        for buffer in self._buffers:
            buffer.close()
            buffer.clear()

    def stop(self, timeout: float) -> None:
        self.close()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():  # the generator itself may call stop()
                thread.join(max(0.0, deadline - time.monotonic()))
        alive = [thread for thread in self._threads if thread.is_alive()]
        self._threads = []
        for thread in alive:
            if thread is not threading.current_thread():
                _warn_of(thread, timeout)


class Road:
    """A worker thread's Sender and Orders."""

    def __init__(
        self, index: int, buffer: Buffer[Message], orders: Buffer[Epoch], measured: bool
    ) -> None:
        self.index = index
        self._buffer = buffer
        self._orders = orders
        self._measured = measured
        self.meter = Meter()
        self._left = 1  # items until the next one is weighed
        self._step = 1  # between the last one and that
        self._weighed = 1  # all until then

    @property
    def sent(self) -> tuple[int, int]:
        """How many items it has sent, or is about to send, and about how many bytes."""
        sent, weighed = self._weighed - self._left, self._weighed - self._step
        return sent, self.meter.words[BYTES] * sent // max(1, weighed)

    def send_item(self, shard: int, number: int, value: object, state: Any = None) -> None:
        size_bytes = size_of(value) if self._measured else 0
        if state is not None:
            state = copy.deepcopy(state)  # it may be the iterator's own, which goes on
        self._left -= 1
        if not self._left:
            self._weigh(value)
        item = Item(shard, number, value, state)
        if not self._buffer.offer(item, size_bytes):
            self.meter.pause(WAITING)
            self._buffer.put(item, size_bytes=size_bytes)
            self.meter.resume()

    def _weigh(self, value: object) -> None:
        """Note the size of an item, which stands for those since the last one that was weighed."""
        self.meter.words[BYTES] += size_at_sight(value) * self._step
        self._step = self._left = min(self._weighed, _WEIGHED_EVERY)
        self._weighed += self._left

    def send(self, message: End | Failure | Empty) -> None:
        if isinstance(message, Failure):
            message = dataclasses.replace(message, worker=_name(self))
        self._buffer.put(message)

    def check(self) -> None:
        if self._buffer.closed:
            raise Closed("the enqueuer was stopped")

    def watch(self, waited: Callable[[int], None]) -> None:
        self.meter.waited = waited

    def next_epoch(self) -> Epoch | None:
        return self._get(self._orders, IDLE)

    def _get(self, buffer: Buffer[T], phase: int) -> T | None:
        """Wait for what comes next from the consumer; None means to go home."""
        meter = self.meter
        if not meter.words[BEGAN]:
            meter.begin()
        found = buffer.poll()
        if found is None:
            meter.pause(phase)
            try:
                found = buffer.get()
            except Closed:
                return None
            meter.resume()
        return found


def _name(road: Road) -> str:
    return f"worker {road.index} (thread)"


def _buffers(job: Job, workers: int) -> list[Buffer[Message]]:
    if not job.ordered:
        return [Buffer(job.max_queue_size, job.max_queue_bytes)]
    sizes = split_bound(job.max_queue_size, workers)
    if job.max_queue_bytes is None:
        return [Buffer(size) for size in sizes]
    share = max(1, job.max_queue_bytes // workers)
    return [Buffer(size, share) for size in sizes]


def _warn_of(thread: threading.Thread, timeout: float) -> None:
    frame = sys._current_frames().get(thread.ident or 0)
    where = "".join(traceback.format_stack(frame)) if frame is not None else "  (unknown)\n"
    warnings.warn(
        f"{thread.name} did not end within {timeout:g} s and cannot be killed, as a thread; "
        f"it goes home after its next batch. It is here:\n{where}",
        StopWarning,
        stacklevel=4,
    )
