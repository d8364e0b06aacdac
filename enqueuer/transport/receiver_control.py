"""The consumer's end of the socket beside the ring: orders go, blocks and log records come.

    begin(), assign(), ask_to_stop(), wake() -> packets
    pump() -> new blocks into the block map, records, whether the worker is ready

An exception out of a signal handler may strike anywhere. A packet that was sorted twice does no
harm: packets are numbered, and one that was seen is passed over.
"""

from __future__ import annotations

import logging
import os
import pickle
import struct
from collections import deque
from collections.abc import Callable, Sequence

from enqueuer.errors import TransportError
from enqueuer.transport import task_queue
from enqueuer.transport.block_map import BlockMap
from enqueuer.transport.memory import nameless_file, read_whole
from enqueuer.transport.packets import Packets
from enqueuer.transport.protocol import INLINE_BYTES, NUMBER, PACKET, Kind
from enqueuer.transport.ring import AWAITED, CONSUMER_ASLEEP, ORDERS, PACKETS, Ring
from enqueuer.workers.messages import Epoch


class ReceiverControl:
    """The consumer's end of the socket to one worker. Called by one thread at a time.

    Args:
        packets: The consumer's end of the socket.
        ring: Ring between the worker and the consumer.
        blocks: Blocks of the worker, to which new ones are added.
        name: Name of the worker, for messages.

    Attributes:
        records: Log records of the worker that are still to be handled.
        is_ready: Whether the packet READY has come.
        woken: The sleep of the worker that was ended last.
    """

    def __init__(self, packets: Packets, ring: Ring, blocks: BlockMap, name: str) -> None:
        self.records: deque[logging.LogRecord] = deque()
        self.is_ready = False
        self.woken = 0
        self._packets = packets
        self._words, self._fence = ring.words, ring.fence
        self._blocks = blocks
        self._name = name
        # Packets that were read, and packets that were sent.
        self._sequence = 0
        self._orders = 0
        self._sleeps = 0
        self._was_asked = False

    @property
    def ended(self) -> bool:
        """Whether the worker closed its end and all that it sent has been read."""
        return self._packets.ended

    @property
    def has_packets(self) -> bool:
        """Whether there is something to `pump`."""
        return bool(self._words[PACKETS] > self._sequence)

    def fileno(self) -> int:
        return self._packets.fileno()

    # --- what is sent ---

    def begin(self, epoch: Epoch) -> None:
        """Order the worker to run its shards for `epoch`."""
        dumps: Callable[..., bytes] = pickle.dumps
        if epoch.starts is not None:
            # States of iterators may be of any class. Most epochs have none, and the import takes
            # some milliseconds of the first start.
            import cloudpickle

            dumps = cloudpickle.dumps
        self._send_whole(Kind.EPOCH, b"", dumps(epoch, protocol=5))

    def assign(self, token: int, number: int, ticket: bytes) -> None:
        """Send the worker a ticket, packed, that no other worker may take."""
        self._send_whole(Kind.TASK, task_queue.HEAD.pack(token, number), ticket)

    def ask_to_stop(self) -> None:
        """Order the worker to exit; again does nothing."""
        if self._was_asked:
            return
        self._send(Kind.STOP)
        # If the socket was full, this alone is the order.
        self._packets.shutdown()
        # Only now, as an exception may have struck before.
        self._was_asked = True

    def wake(self, asleep: int) -> None:
        """Wake the worker from a sleep, by its number; 0 if it does not sleep."""
        if asleep and asleep != self.woken:
            self._send(Kind.WAKE)
            # Only now, as an exception may have struck before it was sent.
            self.woken = asleep

    def arm_wake_up(self, awaited: int) -> None:
        """Ask to be woken by a packet when something comes; check once more before sleeping.

        Args:
            awaited: What must come, as in the word AWAITED; 0: anything.
        """
        self._sleeps += 1
        self._words[AWAITED] = awaited
        self._words[CONSUMER_ASLEEP] = self._sleeps
        self._fence()

    def disarm_wake_up(self) -> None:
        """Ask no more to be woken."""
        self._words[CONSUMER_ASLEEP] = 0

    def _send_whole(self, kind: Kind, head: bytes, data: bytes) -> None:
        """Send data of any size: what is large goes beside the packet."""
        if len(data) <= INLINE_BYTES:
            self._send(kind, head + data, wait=True)
            return
        fd = nameless_file(data)
        try:
            self._send(kind, head, wait=True, fds=(fd,))
        finally:
            os.close(fd)

    def _send(
        self, kind: Kind, body: bytes = b"", wait: bool = False, fds: Sequence[int] = ()
    ) -> None:
        packet = PACKET.pack(kind, self._orders + 1) + body
        try:
            if not self._packets.send(packet, fds, wait=wait):
                # The socket is full of packets that the worker has not read; these wake it, too.
                return
        except OSError:
            # The worker is dead; the end of its channel shows that in its turn.
            return
        self._orders += 1
        self._words[ORDERS] = self._orders

    # --- what comes ---

    def pump(self) -> None:
        """Read all packets that have come; wait for nothing.

        Raises:
            TransportError: They make no sense.
        """
        self._packets.drain()
        received = self._packets.received
        while received:
            self._sort(*received[0])
            received.popleft()

    def _sort(self, data: bytes, fds: list[int]) -> None:
        """Handle a packet. Repeats, after an interrupt, do no harm."""
        try:
            kind, sequence = PACKET.unpack_from(data)
        except struct.error:
            raise TransportError(f"{self._name} sent a malformed packet") from None
        if sequence < self._sequence:
            # An exception struck between handling this packet and forgetting it.
            return
        if sequence > self._sequence:
            raise TransportError(
                f"{self._name} sent packet {sequence}, but {self._sequence} was due"
            )
        body = data[PACKET.size :]
        match kind:
            case Kind.READY:
                self.is_ready = True
            case Kind.BLOCK:
                self._blocks.add(NUMBER.unpack(body)[0], fds)
            case Kind.DROP:
                for (number,) in NUMBER.iter_unpack(body):
                    self._blocks.drop(number)
            case Kind.RECORD:
                self.records.append(self._record(body, fds))
            case _:  # Kind.WAKE
                pass
        self._sequence += 1

    def _record(self, data: bytes, fds: list[int]) -> logging.LogRecord:
        try:
            return logging.makeLogRecord(pickle.loads(read_whole(data, fds)))
        except Exception as error:
            # A log record must not stop the data.
            text = f"a log record of {self._name} could not be loaded: {error!r}"
            return logging.LogRecord("enqueuer", logging.WARNING, __file__, 0, text, None, None)

    def close(self) -> None:
        """Close the socket."""
        self._packets.close()
