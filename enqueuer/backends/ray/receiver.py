"""Receiving what actors send: a thread for each actor reads its stream and unpacks the packets.

actor ==packets==> Ray's object store ==> the thread of the actor -> RayPool.take_in()
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from enqueuer.backends.pool import WorkerState
from enqueuer.backends.ray.handle import Actor
from enqueuer.backends.ray.outbox import Frame, Sent, Told
from enqueuer.backends.ray.session import Session, unwrapped
from enqueuer.errors import ItemNotLoadable
from enqueuer.transport.error_codec import decode_error
from enqueuer.transport.item_codec import decode
from enqueuer.workers.messages import Failure, Item, Message

_PULSE_S = 0.5  # between two checks whether Ray is still there, which nothing reports
_SOON_S = 0.005  # for which a packet may be waited for within Ray
_STREAMS = 2  # asked for at once, so that the next begins when one has ended


class Receiver:
    """Receives packets from one actor. It runs in a thread of its own.

    Args:
        session: The use of Ray.
        actor: The actor.
        take_in: Function that is called with each packet.
        lose: Function that is called if the stream breaks.
    """

    def __init__(
        self,
        session: Session,
        actor: Actor,
        take_in: Callable[[Actor, list[Frame]], None],
        lose: Callable[[Actor, BaseException], None],
    ) -> None:
        self._session = session
        self._actor = actor
        self._take_in = take_in
        self._lose = lose

    def run(self) -> None:
        """Unpack what the actor sends, until it has sent its last frame or is dead."""
        try:
            # asyncio.run is another one in some notebooks
            with contextlib.closing(asyncio.SelectorEventLoop()) as loop:
                loop.run_until_complete(self._listen_while_ray_is_there())
        except BaseException as error:
            self._lose(self._actor, error)
            traceback.clear_frames(error.__traceback__)  # they have the streams of a dead actor

    async def _listen_while_ray_is_there(self) -> None:
        """Listen to the actor.

        No thread may wait long within Ray for something to happen, as that is never woken, and uses
        freed memory, once the user has shut Ray down. So this waits in Python, with a check now
        and then. Only a packet that is on its way from another node is waited for within Ray.
        """
        listening = asyncio.ensure_future(self._listen())
        try:
            while not listening.done():
                self._session.check()
                await asyncio.wait((listening,), timeout=_PULSE_S)
            listening.result()
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _listen(self) -> None:
        get, wait = unwrapped(self._session.ray.get), unwrapped(self._session.ray.wait)
        streams = deque(self._stream() for _ in range(_STREAMS))
        while True:
            stream = streams[0]
            self._session.check()
            # what is there soon is had for less within Ray: in Python it is fetched twice
            if wait([stream], timeout=_SOON_S, fetch_local=False)[0]:
                self._session.check()  # to ask an ended stream would start another Ray
                ref = next(stream, None)
            else:
                ref = await anext(stream, None)
                await asyncio.sleep(0)  # or the loop would keep what Ray has fetched
                self._session.check()
            if ref is None:
                streams.popleft()
                streams.append(self._stream())
                continue
            self._take_in(self._actor, get(ref))
            del ref  # or Ray would keep the packet until the next one comes
            if self._actor.state is WorkerState.ENDED:  # threads of the user's may still log
                return

    def _stream(self) -> Any:
        self._session.check()
        method = self._actor.handle.packets.options(
            concurrency_group="packets", num_returns="streaming"
        )
        return method.remote()


def unpack(frames: list[Frame], worker: str, writable: bool) -> tuple[list[Message], list[int]]:
    """Return the messages of a packet, and the sizes of the items among them.

    Args:
        frames: The packet.
        worker: Name of the worker.
        writable: Whether to copy arrays.
    """
    messages: list[Message] = []
    sizes = []
    for frame in frames:
        match frame:
            case Sent():
                item = _item_of(frame, worker, writable)
                messages.append(item)
                if isinstance(item, Item):
                    sizes.append(_size_of(frame))
            case Told(message=message, error=pickled):
                if isinstance(message, Failure):
                    assert pickled is not None
                    error = decode_error(pickled)
                    message = dataclasses.replace(message, error=error, worker=worker)
                messages.append(message)
    return messages, sizes


def _item_of(sent: Sent, worker: str, writable: bool) -> Item | Failure:
    buffers = [memoryview(buffer) for buffer in sent.buffers]
    if writable:
        buffers = [memoryview(bytearray(buffer)) for buffer in buffers]
    try:
        value = decode(sent.data, buffers)
    except Exception as error:
        failure = ItemNotLoadable(f"an item came, but it cannot be loaded here: {error!r}")
        failure.__cause__ = error
        return Failure(sent.shard, sent.number, failure, worker=worker)
    value, state = value if sent.has_state else (value, None)
    return Item(sent.shard, sent.number, value, state)


def _size_of(sent: Sent) -> int:
    return len(sent.data) + sum(memoryview(buffer).nbytes for buffer in sent.buffers)
