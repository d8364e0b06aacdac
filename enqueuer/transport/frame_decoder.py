"""A frame of the ring -> the item, end or failure in it, with its arrays in leased blocks.

    load(body, table)  -> the value of an item
    message(head, body) -> what is no item

Decoding a frame twice does no harm, as after an exception out of a signal handler: the leases
are the same until the frame counts as read.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from enqueuer.errors import BlockMemoryError, ItemNotLoadable, TransportError
from enqueuer.transport import item_codec, small_arrays
from enqueuer.transport.block_map import BlockMap
from enqueuer.transport.error_codec import decode_error
from enqueuer.transport.protocol import REPORT, SEGMENT, Kind
from enqueuer.workers.messages import Empty, End, Failure, Reported

_ARRAYS = int(Kind.ARRAYS)
_loads = pickle.loads


class FrameDecoder:
    """Decode the frames of one worker.

    Args:
        blocks: Blocks of the worker.
        pump: Function that reads the packets which have come, new blocks among them.
        name: Name of the worker, for messages.
    """

    def __init__(self, blocks: BlockMap, pump: Callable[[], None], name: str) -> None:
        self._blocks = blocks
        self._pump = pump
        self._name = name

    def load(self, kind: int, body: memoryview, table: int) -> Any:
        """Return the value in the body of a frame, which begins with a table of that size.

        Raises:
            BlockMemoryError: A block could not be mapped.
        """
        if kind == _ARRAYS:
            return small_arrays.decode(bytes(body[:table]), body[table:])
        if not table:
            return _loads(body)
        return item_codec.decode(*self._open(body, table))

    def why_not_loaded(self, kind: int, body: memoryview, table: int) -> BaseException | None:
        """Return why an item cannot be loaded; None if it can."""
        try:
            self.load(kind, body, table)
        except BlockMemoryError as error:
            return error
        except Exception as error:
            failure = ItemNotLoadable(f"an item arrived, but could not be loaded here: {error!r}")
            failure.__cause__ = error
            return failure
        return None

    def message(
        self, kind: int, shard: int, number: int, body: memoryview, table: int
    ) -> End | Failure | Empty:
        """Return the message of a frame that is no item.

        Raises:
            TransportError: The frame makes no sense.
        """
        match kind:
            case Kind.END:
                return self._end(body, table, shard, number)
            case Kind.EMPTY:
                return Empty(number)
            case Kind.FAILURE | Kind.SKIPPED:
                error = self._error(body, table)
                return Failure(shard, number, error, skipped=kind == Kind.SKIPPED)
            case Kind.REPORTED:
                return self._reported(body, table, shard, number)
        raise TransportError(f"{self._name} sent a malformed frame")

    def _end(self, body: memoryview, table: int, shard: int, number: int) -> End | Failure:
        if not body:
            return End(shard, None, number)
        try:
            return End(shard, self.load(Kind.END, body, table), number)
        except BlockMemoryError as error:
            return Failure(shard, number, error)

    def _error(self, body: memoryview, table: int) -> BaseException:
        try:
            data, _ = self._open(body, table)
        except BlockMemoryError as error:
            return error
        return decode_error(bytes(data))

    def _reported(self, body: memoryview, table: int, shard: int, number: int) -> Failure:
        try:
            data, _ = self._open(body, table)
        except BlockMemoryError as error:
            return Failure(shard, number, error, skipped=True)
        nth, log = REPORT.unpack_from(data)
        caught = decode_error(bytes(data[REPORT.size :]))
        return Reported(shard, number, caught, nth=nth, log=log)

    def _open(self, body: memoryview, table: int) -> tuple[memoryview, list[memoryview]]:
        """Return the pickle of a frame and the buffers beside it."""
        data = body[table:]
        leases: dict[int, memoryview] = {}
        views = []
        for number, begin, size in SEGMENT.iter_unpack(body[:table]):
            if number not in leases:
                leases[number] = self._lease(number)
            views.append(leases[number][begin : begin + size])
        if data or not views:
            return data, views
        return views[0], views[1:]

    def _lease(self, number: int) -> memoryview:
        if number not in self._blocks:
            # It was announced before the frame that names it.
            self._pump()
        return self._blocks.lease(number)
