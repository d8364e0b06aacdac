"""The worker's end of a channel: items go out as credit allows.

    ItemSender.send_item() -> pickle -> large parts into blocks -> Account.wait() -> a packet
    SenderControl, the socket: sleep() -> orders, credit; emit() -> items, blocks; log records

An item is in the socket, where the consumer can take it, before this worker turns to the next one.

Only the worker's own loop waits. Records may come from any thread, and even from a destructor
that the garbage collector runs in the middle of a send: so the lock is only ever tried for them,
and whichever thread holds it sends what has been queued.

With `concurrency=n` several threads use the sender, by a SharedSender:

    the worker's own thread: next_ticket() -> take and claim a ticket, or poll, without the lock
    threads of elements:     send_item(), send() -> with the lock; the end of a task drops its claim

A system call gives the GIL away, and threads that compute may take it first, one after the other.
So the lock, which each thread needs to send its result, is not held for those calls that are usual.

Any thread may read the orders that have come, while it sends. If there are some for the worker's
own thread, it is woken by a socket.
"""

from __future__ import annotations

import logging
import pickle
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from enqueuer.common.descriptors import close_in_children, owned_sockets
from enqueuer.errors import BlockMemoryError, Closed
from enqueuer.monitoring.meters import BYTES, IDLE, SENDING, WAITING, Meter, clock
from enqueuer.order.messages import Empty, End, Epoch, Failure, Ticket
from enqueuer.transport.blocks import BlockWriter, Segment
from enqueuer.transport.channel import (
    CREDIT,
    FRAME,
    INLINE_BYTES,
    NO_LIMIT,
    NUMBER,
    PACKET,
    RELEASED,
    TICKET,
    Credit,
    Kind,
    Packets,
    Status,
    take,
    unpack_ticket,
)
from enqueuer.transport.errors import with_encoded_error
from enqueuer.transport.item_codec import Buffer, Encoder, Layouts, Pieces
from enqueuer.transport.memory import read_whole
from enqueuer.workers.plan import Sender
from enqueuer.workers.task_loop import ElementThreads

# Records that are kept while the socket is full; more are counted and dropped.
_MAX_RECORDS = 10_000
# Nanoseconds until a worker that sends looks for orders again, and writes what it has sent.
_LOOK_NS = 1_000_000


def send_ready(packets: Packets) -> None:
    """Report that a worker lives, before it has received anything."""
    packets.send(PACKET.pack(Kind.READY, 0))


class SenderControl:
    """The worker's end of the socket, after `send_ready()`.

    Any thread may call `send_record`, `flush_records` and `emit`; the rest is for the worker's own
    loop.

    Args:
        packets: The worker's end of the socket.
        meter: Meter of the worker, which counts its waits.
        limit: Number of items that the worker may send, ever.

    Attributes:
        packets: The worker's end of the socket.
        meter: Meter that counts the waits.
        closed: Whether the consumer left, or has asked the worker to stop.
        epochs: Epochs that are still to be run.
        tasks: Tickets for this worker alone, each with the descriptors that came with it.
        records: Pickled log records that are still to be sent.
        limit: Number of items that may be sent, ever.
        taken: Number of items that the consumer has taken.
        wanted: 1 + the number of the item that the consumer waits for.
        reclaim: Function that gets the blocks that were released, with their uses.
    """

    reclaim: Callable[[Iterable[tuple[int, int]]], None]

    def __init__(self, packets: Packets, meter: Meter, limit: int) -> None:
        self.closed = False
        self.limit, self.taken, self.wanted = limit, 0, 0
        self.epochs: deque[Epoch] = deque()
        self.tasks: deque[tuple[bytes, list[int]]] = deque()
        self.records: deque[bytes] = deque()
        self.packets = packets
        self.meter = meter
        # Held while packets are sent, and while records leave their queue.
        self._lock = threading.Lock()
        self._sequence = 1
        self._lost_records, self._lost_lock = 0, threading.Lock()
        self._readable = select.poll()
        self._readable.register(packets.fileno(), select.POLLIN)
        self._looked = 0

    def check(self) -> None:
        """Raise Closed if the consumer left."""
        if self.is_due:
            self.read_orders()
        if self.closed:
            raise Closed("the consumer left")

    @property
    def is_due(self) -> bool:
        """Whether packets may have come since they were read last."""
        return not self.closed and clock() - self._looked >= _LOOK_NS

    def sleep(self, also: int | None = None, phase: int = WAITING) -> None:
        """Sleep until there are packets, or the consumer's end; send logs meanwhile.

        Args:
            also: Descriptor that ends the sleep, too, when there is something to read.
            phase: Word of the meter to which the time is added.
        """
        self.meter.pause(phase)
        mask = select.POLLIN | (select.POLLOUT if self.flush_records() else 0)
        self._readable.modify(self.packets.fileno(), mask)
        if also is not None:
            self._readable.register(also, select.POLLIN)
        self._readable.poll()
        if also is not None:
            self._readable.unregister(also)
        self.meter.resume()
        self.read_orders()

    def read_orders(self) -> None:
        """Read all packets that have come; wait for nothing."""
        self._looked = clock()
        self.packets.drain()
        received = self.packets.received
        while received:
            self._obey(*received.popleft())
        if self.packets.ended:
            self.closed = True

    def _obey(self, data: bytes, fds: list[int]) -> None:
        kind, body = data[0], data[1:]
        match kind:
            case Kind.EPOCH:
                self.epochs.append(pickle.loads(read_whole(body, fds)))
            case Kind.TASK:
                self.tasks.append((body, fds))
            case Kind.CREDIT:
                self.limit, self.taken, self.wanted = CREDIT.unpack_from(body)
                self.reclaim(RELEASED.iter_unpack(body[CREDIT.size :]))
            case Kind.STOP:
                self.closed = True

    def emit(self, kind: int, body: bytes = b"", fds: Sequence[int] = ()) -> None:
        """Send one packet, and before it what was logged before it.

        Raises:
            Closed: The consumer left.
        """
        try:
            with self._lock:
                if self.records or self._lost_records:
                    self._send_records_locked(wait=True)
                self._send_locked(kind, body, fds, wait=True)
        except OSError as error:
            self.closed = True
            raise Closed("the consumer left") from error

    def send_record(self, record: logging.LogRecord) -> None:
        """Send a log record without ever waiting; what does not fit now goes with the next packet.

        Called by any thread of the worker.
        """
        if len(self.records) >= _MAX_RECORDS:
            self._lose_record()
            return
        self.records.append(pickle.dumps(record.__dict__))
        if self._lock.acquire(blocking=False):
            try:
                self._send_records_locked(wait=False)
            except OSError:
                # The consumer left, so no process handles its logs any more.
                pass
            finally:
                self._lock.release()

    def flush_records(self, wait: bool = False) -> bool:
        """Send what was logged, or what there is room for; return whether there is more."""
        try:
            with self._lock:
                self._send_records_locked(wait)
        except OSError:
            self.closed = True
        return bool(self.records)

    def close(self) -> None:
        """Send what was logged last, then close the socket."""
        self.flush_records(wait=True)
        with self._lock:
            self.closed = True
            self.packets.close()

    def _send_locked(self, kind: int, data: bytes, fds: Sequence[int], wait: bool) -> bool:
        head = PACKET.pack(kind, self._sequence)
        # Only a record may be long: of all else, what is large lies in blocks.
        if kind == Kind.RECORD:
            is_sent = self.packets.send_whole(head, data, wait=wait)
        else:
            packet = head + data
            is_sent = self.packets.send(packet, fds, wait=False)
            if not is_sent:
                self.meter.pause(WAITING)
                try:
                    is_sent = self.packets.send(packet, fds)
                finally:
                    self.meter.resume()
        self._sequence += is_sent
        return is_sent

    def _send_records_locked(self, wait: bool) -> None:
        while True:
            if self._lost_records and not self.records:
                with self._lost_lock:
                    lost, self._lost_records = self._lost_records, 0
                self.records.append(pickle.dumps(_loss(lost).__dict__))
            try:
                if not self.records or not self._send_locked(
                    Kind.RECORD, self.records[0], (), wait
                ):
                    return
            except BlockMemoryError:
                # There is no descriptor left for a long text.
                self._lose_record()
            self.records.popleft()

    def _lose_record(self) -> None:
        with self._lost_lock:
            self._lost_records += 1


def _loss(count: int) -> logging.LogRecord:
    text = f"{count} log records of this worker were dropped: they came faster than they were read"
    return logging.LogRecord("enqueuer", logging.WARNING, __file__, 0, text, None, None)


class Account:
    """The credit of one worker, and what it has sent.

    Args:
        credit: Credit that the worker begins with.
        control: The worker's end of the socket.

    Attributes:
        sent: Number of items that were sent.
    """

    def __init__(self, credit: Credit, control: SenderControl) -> None:
        self.sent = 0
        self._credit, self._control = credit, control
        # Sizes of the items that were sent and are not known to be taken, and their sum; only
        # with a bound on bytes.
        self._waiting: deque[int] = deque()
        self._bytes = 0

    def wait(self, size: int) -> None:
        """Return when one more item, of that size, may be sent.

        Raises:
            Closed: The consumer left.
        """
        control = self._control
        if self._credit.waiting_bytes is not None:
            self._waiting.append(size)
            self._bytes += size
        if self._has_credit():
            return
        control.read_orders()
        # Nothing reads orders between the question and the sleep.
        while not control.closed and not self._has_credit():
            if self._credit.ask:
                control.emit(Kind.ASK, NUMBER.pack(self.sent + 1))
            control.sleep()
        control.check()

    def _has_credit(self) -> bool:
        control = self._control
        if self.sent >= control.limit:
            return False
        if self._credit.waiting_bytes is None:
            return True
        # With the current item.
        waiting = self.sent - control.taken + 1
        while len(self._waiting) > waiting:
            self._bytes -= self._waiting.popleft()
        return self._bytes <= self._credit.waiting_bytes or control.wanted > self.sent

    def close(self) -> None:
        """Allow nothing any more; called in a forked copy of the worker, whose code may run on."""
        self._control.closed = True


_ITEM, _STATED, _ARRAYS = int(Kind.ITEM), int(Kind.STATED), int(Kind.ARRAYS)


class ItemSender:
    """The Channel of a process worker. `send_record` may be called by any thread.

    Args:
        packets: The worker's end of the socket.
        status: Page on which it says what it does.
        credit: Credit that the worker begins with.
        task_socket: Socket from which it takes tickets; None for shards.

    Attributes:
        task_socket: The same.
        meter: Meter of the worker.
        control: The worker's end of the socket.
        check: Raises Closed if the consumer left.
        send_record: Sends a log record without ever waiting; called by any thread.
        blocks: The large parts of items, and the blocks of the worker.
        claim: Function that writes the claim of the ticket that was taken last.
        new_claim: Function that returns another such function.
    """

    def __init__(
        self,
        packets: Packets,
        status: Status,
        credit: Credit,
        task_socket: socket.socket | None = None,
    ) -> None:
        self.task_socket = task_socket
        self._write = status.meter.new()
        self._lock = threading.Lock()
        self.meter = Meter(self._publish)
        limit = credit.items if task_socket is None else NO_LIMIT
        self.control = SenderControl(packets, self.meter, limit)
        self.check, self.send_record = self.control.check, self.control.send_record
        self._account = Account(credit, self.control)
        encoder = Encoder()
        self._encode, self._pack = encoder.encode, Layouts().encode
        self.blocks = BlockWriter(self.control.emit, encoder.arrays, keep=credit.items + 4)
        self.control.reclaim = self.blocks.pool.reclaim
        self.new_claim = status.claims.new
        self.claim = self.new_claim()
        # Number of items that were sent before the epoch that it runs, and its number.
        self._epoch = 0, -1
        # When the record of the meter was written.
        self._published = 0
        close_in_children(self._account)

    def send_item(self, shard: int, number: int, value: object, state: Any = None) -> None:
        """Send an item, when there is credit for it.

        It is pickled and copied before this returns, so the generator may use its buffers again.

        Raises:
            Closed: The consumer left.
            ItemNotPicklable: The item cannot be sent.
            BlockMemoryError: There is no memory to send it through.
        """
        words, began = self.meter.words, clock()
        waited = words[WAITING]
        self.control.check()
        kind, table = _ITEM, b""
        segments: Sequence[Segment] = ()
        if state is None and (packed := self._pack(value)) is not None:
            kind, (table, data) = _ARRAYS, packed
            size = len(data)
        else:
            if state is not None:
                kind, value = _STATED, (value, state)
            pickled, buffers = self._encode(value)
            size = len(pickled) + (sum(buffer.nbytes for buffer in buffers) if buffers else 0)
            data, segments = self._lay_out(pickled, buffers)
        words[BYTES] += size
        self._account.wait(size)
        if segments:
            table = self.blocks.announce(segments)
        self._account.sent += 1
        self._put(kind, shard, number, table, data)
        now = clock()
        words[SENDING] += now - began - (words[WAITING] - waited)
        if now - self._published >= _LOOK_NS:
            self._publish()

    def send(self, message: End | Failure | Empty) -> None:
        """Send what is no item; needs no credit. Raises as `send_item`."""
        self.control.check()
        shard = 0 if isinstance(message, Empty) else message.shard
        data, segments = self._lay_out(*self._encode(with_encoded_error(message)))
        # Who has the end of an epoch knows all that was sent in it.
        self._publish()
        self._put(Kind.MESSAGE, shard, message.number, self.blocks.announce(segments), data)

    def next_epoch(self) -> Epoch | None:
        """Wait for the next epoch; None when there will be none."""
        control = self.control
        # The first one may have come with the job.
        control.read_orders()
        while not control.epochs and not control.closed:
            control.sleep(phase=IDLE)
        if control.closed:
            return None
        epoch = control.epochs.popleft()
        # An order may come twice.
        if epoch.number > self._epoch[1]:
            self._epoch = self._account.sent, epoch.number
            self._publish()
        return epoch

    def next_ticket(self) -> Ticket | None:
        """Wait for a task, for this worker or for any; None when there will be none."""
        control, task_socket = self.control, self.task_socket
        assert task_socket is not None
        while True:
            # A look for each ticket would take as long as many tasks do.
            if control.is_due:
                control.read_orders()
            if control.closed:
                return None
            found = control.tasks.popleft() if control.tasks else take(task_socket)
            if found is None:
                control.sleep(also=task_socket.fileno())
                continue
            token, number = TICKET.unpack_from(found[0])
            self.claim(token + 1)
            try:
                return unpack_ticket(*found)
            except Exception as error:
                # The user's class cannot be loaded here.
                self.send(Failure(0, number, error))

    def close(self) -> None:
        """Send what was logged last, then close the channel."""
        self.control.close()
        self.blocks.pool.close()

    # --- an item ---

    def _lay_out(
        self, data: bytes | Pieces, buffers: Sequence[Buffer]
    ) -> tuple[bytes, list[Segment]]:
        """Put large parts into blocks; return the pickle, if it is small, and these parts."""
        if isinstance(data, bytes) and not buffers and len(data) <= INLINE_BYTES:
            return data, []
        # Blocks may have been released.
        self.control.read_orders()
        return self.blocks.lay_out(data, buffers)

    def _put(self, kind: int, shard: int, number: int, table: bytes, body: bytes) -> None:
        self.control.emit(kind, FRAME.pack(len(table), shard, number) + table + body)

    def _publish(self) -> None:
        """Write the record of the meter. Called by any thread."""
        with self._lock:
            self._published = clock()
            self._write(*self.meter.words, self._account.sent, *self._epoch)


# --- for several threads --------------------------------------------------------------------------


class SharedSender:
    """The Channel of a process worker of tasks, for any of its threads.

    Args:
        sender: Sender of the worker.
    """

    def __init__(self, sender: ItemSender) -> None:
        assert sender.task_socket is not None
        self.meter = sender.meter
        self._sender = sender
        self._control = sender.control
        # The worker waits only when its threads do.
        self._control.meter = Meter()
        self._task_socket = sender.task_socket
        self._new_claim = sender.new_claim
        # Functions that write claims, by the number of the task.
        self._claims: dict[int, Callable[[int], None]] = {}
        self._free: list[Callable[[int], None]] = [sender.claim]
        self._lock, self._claims_lock = threading.Lock(), threading.Lock()
        # Whether a thread has failed, which ends the worker.
        self._has_failed = False
        self._wake, self._woken = owned_sockets(socket.socketpair())
        self._poller = select.poll()
        for end in (sender.control.packets, sender.task_socket, self._woken):
            self._poller.register(end, select.POLLIN)

    def share(self, threads: ElementThreads) -> Sender:
        """Return this object, which any thread may call."""
        threads.on_error = self._fail
        return self

    # --- any thread ---

    def send_item(self, shard: int, number: int, value: object, state: Any = None) -> None:
        self._send(number, self._sender.send_item, shard, number, value, state)

    def send(self, message: End | Failure | Empty) -> None:
        goes_on = isinstance(message, Failure) and message.skipped
        self._send(None if goes_on else message.number, self._sender.send, message)

    def _send(self, done: int | None, send: Callable[..., None], *args: Any) -> None:
        """Send a message by a method of the sender, and drop the claim of the task that is done."""
        try:
            with self._lock:
                send(*args)
                self._drop_claim(done)
        finally:
            self._pass_orders()

    def check(self) -> None:
        # Without the lock, as another thread may be sending.
        if not self._control.is_due and not self._control.closed:
            return
        try:
            with self._lock:
                self._sender.check()
        finally:
            self._pass_orders()

    def _pass_orders(self) -> None:
        """Wake the worker's own thread if there is a task for it, or if the loop left."""
        if self._control.closed or self._control.tasks:
            self._wake_self()

    def _fail(self, error: BaseException) -> None:
        self._has_failed = True
        self._wake_self()

    def _wake_self(self) -> None:
        try:
            self._wake.send(b"\0")
        except BlockingIOError:
            # It has been woken already.
            pass

    def _drop_claim(self, number: int | None) -> None:
        """Drop the claim of a task, if there is one."""
        if number is None:
            return
        with self._claims_lock:
            if (claim := self._claims.pop(number, None)) is not None:
                claim(0)
                self._free.append(claim)

    # --- the worker's own thread ---

    def next_ticket(self) -> Ticket | None:
        """Wait for a task; None when there will be none.

        A system call gives the GIL away, and this thread may wait long for it. So it makes none
        with the lock, which threads with results need, while there are tasks.
        """
        control = self._control
        while True:
            if control.is_due:
                with self._lock:
                    control.read_orders()
            if control.closed or self._has_failed:
                return None
            tasks = control.tasks
            found = tasks.popleft() if tasks else take(self._task_socket)
            if found is None:
                self._wait()
            elif (ticket := self._claimed(found)) is not None:
                return ticket

    def _claimed(self, found: tuple[bytes, list[int]]) -> Ticket | None:
        """Claim a ticket and return it; None if it cannot be loaded here."""
        token, number = TICKET.unpack_from(found[0])
        # It may have been offered again.
        self._drop_claim(number)
        with self._claims_lock:
            claim = self._claims[number] = self._free.pop() if self._free else self._new_claim()
            claim(token + 1)
        try:
            return unpack_ticket(*found)
        except Exception as error:
            # The user's class cannot be loaded here.
            self.send(Failure(0, number, error))
            return None

    def _wait(self) -> None:
        """Wait until there are tasks or orders; send logs meanwhile."""
        control = self._control
        is_writing = bool(control.records) and control.flush_records()
        if control.closed:
            return
        mask = select.POLLIN | (select.POLLOUT if is_writing else 0)
        self._poller.modify(control.packets, mask)
        ready = {fd for fd, _ in self._poller.poll()}
        if control.packets.fileno() in ready:
            with self._lock:
                control.read_orders()
        if self._woken.fileno() in ready:
            self._woken.recv(1024)
