"""Workers as threads: start, watch and end them; the messages of each come over its buffer.

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

from enqueuer import interrupts, usage
from enqueuer.backends import (
    Job,
    WorkerThread,
    owners_of,
    split_bound,
    until,
)
from enqueuer.buffer import UNBOUNDED, Buffer
from enqueuer.duplicates import checksum
from enqueuer.errors import Closed, OverwrittenDataWarning, StartError, StopWarning
from enqueuer.merging import Order, ShardOrder
from enqueuer.messages import Empty, End, Epoch, Failure, Item, Message
from enqueuer.meters import BEGAN, BYTES, IDLE, WAITING, LoopMeter, Meter, clock
from enqueuer.sizes import SAMPLED, size_of
from enqueuer.sources import LiveSource
from enqueuer.stalls import (
    DeadlineExpired,
    WaitSnapshot,
    WorkerSnapshot,
    awaited,
    first_for,
    level_of_user,
    stacks_of_threads,
)
from enqueuer.stats import WorkerStats, worker_stats
from enqueuer.tracing import traced
from enqueuer.worker import Plan, serve

_WATCHED = 16  # first items of a worker, each of which is weighed and may turn out to be reused
_WEIGHED_EVERY = 64  # of so many items; to look at each would take longer than to send it

T = TypeVar("T")


class ThreadBackend:
    """See `enqueuer.backends.Backend`."""

    def __init__(self, job: Job, loop_meter: LoopMeter) -> None:
        if isinstance(job.source, LiveSource) and job.shards > 1:
            raise AssertionError("a live iterator is one shard: threads cannot share it in order")
        self._plans = job.plans()
        self._owners = owners_of(self._plans)
        self._loop_meter = loop_meter
        self._longest_wait_s = job.longest_wait_s
        self._began = clock()
        self._measured = job.max_queue_bytes is not None
        self._trace = job.trace
        self._buffers = _buffers(job, len(self._plans))
        # Unbounded, as an order that is given again after an interrupt must not wait for room.
        self._orders: list[Buffer[Epoch]] = [Buffer(UNBOUNDED) for _ in self._plans]
        self._senders: list[ThreadSender] = []
        self._threads: list[threading.Thread] = []
        self._ending: tuple[Buffer[Message], End, Order] | None = None  # see _note_end
        self._next = self._buffers[0]  # whose message `wait` has returned

    @property
    def restarts(self) -> int:
        return 0  # a thread does not die alone

    def start(self) -> None:
        with interrupts.held():
            try:
                for index, plan in enumerate(self._plans):
                    self._threads.append(self._start_one(index, plan))
                interrupts.check()
            except BaseException as error:
                self.stop(1.0)
                if isinstance(error, RuntimeError):
                    raise StartError(
                        f"thread {index} of {len(self._plans)} could not be started: {error}; "
                        "try fewer workers"
                    ) from error
                raise

    def _start_one(self, index: int, plan: Plan) -> threading.Thread:
        buffer = self._buffers[index % len(self._buffers)]
        sender = ThreadSender(index, buffer, self._orders[index], self._measured)
        self._senders.append(sender)
        thread = WorkerThread(
            target=traced(serve, self._trace, index),
            args=(plan, sender, sender),
            name=f"enqueuer-worker-{index}",
            daemon=True,
        )
        thread.start()
        return thread

    def begin(self, epoch: Epoch) -> None:
        for plan, orders in zip(self._plans, self._orders, strict=True):
            orders.put(epoch.part(plan.shards))

    def wait(self, order: Order, deadline: float | None) -> Failure | None:
        self._note_end()
        while not order.done:
            shard = order.turn()
            worker = None if shard is None else self._owners[shard]
            buffer = self._buffers[0 if worker is None else worker % len(self._buffers)]
            message = buffer.look()
            if message is None:
                self._loop_meter.pause(worker)
                deadline = until(deadline, self._longest_wait_s)
                timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
                try:
                    message = buffer.peek(timeout)
                except NothingYet:
                    raise DeadlineExpired("no batch in time") from None
            self._next = buffer
            match message:
                case Item():
                    return None
                case End():
                    self._ending = buffer, message, order
                    self._note_end()
                case Failure():
                    return message
        return None

    def _note_end(self) -> None:
        """Note the end of a shard that is next, and drop it; or finish that after an interrupt.

        It must not stay behind: in the next epoch it would end the shard at once.
        """
        if self._ending is not None:
            buffer, end, order = self._ending
            if buffer.look() is end:
                order.ended(end.shard, end.state, end.number)
                buffer.drop()
            self._ending = None

    def pass_over(self) -> None:
        self._next.drop()

    def take(self, order: Order) -> Iterator[Item]:
        assert isinstance(order, ShardOrder)
        buffer, numbers = self._next, order.numbers
        with buffer._lock:
            items = buffer._items
            item, size_bytes = items[0] if items else (None, 0)
            if not isinstance(item, Item):  # it was closed meanwhile
                return
            shard, number = item.shard, item.number
            if item.state is not None:
                order.remember(shard, number, item.state)
            # From here to the yield is no call and no jump, and so no signal handler runs.
            numbers[shard] = number + 1
            order.last = shard
            del items[0]
            buffer._bytes -= size_bytes
            yield item
            buffer._wake_putters_locked()

    def acknowledge(self) -> None:
        pass  # what is taken from a buffer makes room in it at once

    def cpus(self) -> float:
        return usage.cpus()

    def worker_bytes(self) -> int | None:
        return None  # the memory is that of the process

    def measures(self) -> list[WorkerStats]:
        return [
            worker_stats(
                sender.index,
                _name(sender),
                plan.shards,
                sender.meter.words,
                sender.sent,
                usage.of_thread(thread),
                self._began,
            )
            for plan, sender, thread in zip(
                self._plans,
                self._senders,
                self._threads,
                strict=False,  # it may be stopping
            )
        ]

    def waiting(self) -> int:
        messages = (message for buffer in self._buffers for message in buffer.snapshot())
        return sum(isinstance(message, Item) for message in messages)

    def has_news(self, order: Order) -> bool:
        messages = (message for buffer in self._buffers for message in buffer.snapshot())
        return any(not isinstance(message, Item) for message in messages)

    def look(self, order: Order) -> WaitSnapshot:
        stacks = stacks_of_threads(self._threads)
        workers = [
            WorkerSnapshot(_name(sender), plan.shards, stack, "has ended")
            for sender, plan, stack in zip(self._senders, self._plans, stacks, strict=False)
        ]
        return WaitSnapshot(self._awaited(order), self.waiting(), first_for(order, workers))

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
                interrupts.interruptible(thread.join, max(0.0, deadline - time.monotonic()))
        alive = [thread for thread in self._threads if thread.is_alive()]
        self._threads = []
        for thread in alive:
            if thread is not threading.current_thread():
                _warn_of(thread, timeout)


class ThreadSender:
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
        # of the first items, by shard and number; None once nobody looks at them any more
        self._checksums: dict[tuple[int, int], int] | None = {}

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
        item = Item(shard, number, value, state)
        if not self._left:
            self._weigh(value)
            if self._checksums is not None:
                self._look_for_reuse(item, self._checksums)
        if not self._buffer.offer(item, size_bytes):
            self.meter.pause(WAITING)
            self._buffer.put(item, size_bytes=size_bytes)
            self.meter.resume()

    def _weigh(self, value: object) -> None:
        """Note the size of an item, which stands for those since the last one that was weighed."""
        self.meter.words[BYTES] += size_of(value, SAMPLED) * self._step
        few = self._weighed < _WATCHED
        self._step = self._left = 1 if few else min(self._weighed, _WEIGHED_EVERY)
        self._weighed += self._left

    def _look_for_reuse(self, item: Item, checksums: dict[tuple[int, int], int]) -> None:
        """Warn if an item that waits is no longer what it was when it was yielded.

        The oldest and the newest of this worker are looked at, which is enough for a generator
        with one buffer or a few. What the loop has taken it may have changed itself.
        """
        own = [
            waiting
            for waiting in self._buffer.snapshot()
            if isinstance(waiting, Item) and (waiting.shard, waiting.number) in checksums
        ]
        for waiting in own[:1] + own[1:][-1:]:
            now = checksum(waiting.value)
            if now is None or now == checksums[waiting.shard, waiting.number]:
                continue
            # The loop may have taken it since, and changed it itself.
            if any(item is waiting for item in self._buffer.snapshot()):
                self._checksums = None
                _warn_of_reuse(self, waiting)
                return
        if self._weighed > _WATCHED:
            self._checksums = None
            return
        found = checksum(item.value)
        if found is not None:
            checksums[item.shard, item.number] = found

    def send(self, message: End | Failure | Empty) -> None:
        match message:
            case Failure():
                message = dataclasses.replace(message, worker=_name(self))
            case End(state=state) if state is not None:
                message = dataclasses.replace(message, state=copy.deepcopy(state))
        self._buffer.put(message)

    def check(self) -> None:
        if self._buffer.closed:
            raise Closed("the enqueuer was stopped")

    def watch(self, waited: Callable[[int], None]) -> None:
        self.meter.waited = waited

    def next_epoch(self) -> Epoch | None:
        return self._get(self._orders, IDLE)

    def _get(self, buffer: Buffer[T], phase: int) -> T | None:
        """Wait for what comes next from the consumer; None means to exit."""
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


def _name(sender: ThreadSender) -> str:
    return f"worker {sender.index} (thread)"


def _buffers(job: Job, workers: int) -> list[Buffer[Message]]:
    if not job.ordered:
        return [Buffer(job.max_queue_size, job.max_queue_bytes)]
    sizes = split_bound(job.max_queue_size, workers)
    if job.max_queue_bytes is None:
        return [Buffer(size) for size in sizes]
    share = max(1, job.max_queue_bytes // workers)
    return [Buffer(size, share) for size in sizes]


def _warn_of_reuse(sender: ThreadSender, item: Item) -> None:
    warnings.warn(
        f"{_name(sender)}: item {item.number} of shard {item.shard} was changed after it was "
        "yielded, while it waited for the loop. The generator seems to use one buffer again and "
        "again, and threads hand over the very object: yield a copy (batch.copy()), or use "
        "backend='process', which copies",
        OverwrittenDataWarning,
        stacklevel=level_of_user(),
    )


def _warn_of(thread: threading.Thread, timeout: float) -> None:
    frame = sys._current_frames().get(thread.ident or 0)
    where = "".join(traceback.format_stack(frame)) if frame is not None else "  (unknown)\n"
    warnings.warn(
        f"{thread.name} did not end within {timeout:g} s and cannot be killed, as a thread; "
        f"it exits after its next batch. It is here:\n{where}",
        StopWarning,
        stacklevel=4,
    )
