"""The worker's end of a channel that several threads use, by `concurrency=n`.

    the worker's own thread: next_ticket() -> take and claim a ticket, or poll without the lock
    threads of elements:     send_item(), send() -> with the lock; the end of a task drops its claim

Any thread may read the orders that have come, while it sends. If there are some for the worker's
own thread, it is woken by a socket.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from typing import Any

from enqueuer.common.descriptors import close_in_children
from enqueuer.monitoring.meters import Meter
from enqueuer.transport import task_queue
from enqueuer.transport.item_sender import ItemSender
from enqueuer.workers.element_threads import ElementThreads
from enqueuer.workers.messages import Empty, End, Failure, Sender, Ticket


class SharedSender:
    """A process worker's Sender and Tickets, for any of its threads.

    Args:
        sender: Sender of the worker.
        task_socket: Socket from which it takes tickets.
        on_share: Function that is called with the threads.
    """

    def __init__(
        self,
        sender: ItemSender,
        task_socket: socket.socket,
        on_share: Callable[[ElementThreads], None],
    ) -> None:
        self.meter = sender.meter
        self._sender = sender
        self._control = sender.control
        # The worker waits only when its threads do.
        self._control.meter = Meter()
        self._task_socket = task_socket
        self._on_share = on_share
        self._claims = sender.claims
        # Places of claims, by the number of the task.
        self._places: dict[int, int] = {}
        self._free = list(range(len(self._claims)))
        self._lock = threading.Lock()
        # Whether a thread has failed, which ends the worker.
        self._has_failed = False
        self._wake, self._woken = socket.socketpair()
        self._poller = select.poll()
        for end in (self._wake, self._woken):
            end.setblocking(False)
            close_in_children(end)
        for one in (sender, task_socket, self._woken):
            self._poller.register(one, select.POLLIN)

    def share(self, threads: ElementThreads) -> Sender:
        """Return this object, which any thread may call."""
        self._on_share(threads)
        threads.on_error = self._fail
        return self

    # --- any thread ---

    def send_item(self, shard: int, number: int, value: object, state: Any = None) -> None:
        with self._lock:
            try:
                self._sender.send_item(shard, number, value, state)
                self._drop_claim_locked(number)
            finally:
                self._pass_orders_locked()

    def send(self, message: End | Failure | Empty) -> None:
        with self._lock:
            try:
                self._sender.send(message)
                if not isinstance(message, Failure) or not message.skipped:
                    self._drop_claim_locked(message.number)
            finally:
                self._pass_orders_locked()

    def check(self) -> None:
        # Without the lock, as another thread may be sending.
        if not self._control.has_orders and not self._control.closed:
            return
        with self._lock:
            try:
                self._sender.check()
            finally:
                self._pass_orders_locked()

    def watch(self, waited: Callable[[int], None]) -> None:
        self._sender.watch(waited)

    def _pass_orders_locked(self) -> None:
        """Wake the worker's own thread if there is something for it."""
        if self._control.closed or self._control.tasks:
            self._wake_own()

    def _fail(self, error: BaseException) -> None:
        self._has_failed = True
        self._wake_own()

    def _wake_own(self) -> None:
        try:
            self._wake.send(b"\0")
        except BlockingIOError:
            # It has been woken already.
            pass

    def _drop_claim_locked(self, number: int) -> None:
        place = self._places.pop(number, None)
        if place is not None:
            self._claims[place] = 0
            self._free.append(place)

    # --- the worker's own thread ---

    def next_ticket(self) -> Ticket | None:
        """Wait for a task; None when there will be none."""
        control = self._control
        while True:
            with self._lock:
                control.read_orders()
                if control.closed or self._has_failed:
                    return None
                ticket = self._take_locked()
                is_writing = ticket is None and control.try_flush()
            if ticket is not None:
                return ticket
            mask = select.POLLIN | (select.POLLOUT if is_writing else 0)
            self._poller.modify(self._sender, mask)
            self._poller.poll()
            try:
                self._woken.recv(1024)
            except BlockingIOError:
                pass

    def _take_locked(self) -> Ticket | None:
        """Take a ticket and claim it; return None if there is none."""
        tasks = self._control.tasks
        while (
            found := tasks.popleft() if tasks else task_queue.take(self._task_socket)
        ) is not None:
            token, number = task_queue.HEAD.unpack_from(found[0])
            place = self._places[number] = self._free.pop()
            self._claims[place] = token + 1
            try:
                # Only one, as another worker may have a thread for the next one.
                (ticket,) = task_queue.unpack(*found)
            except Exception as error:
                # The user's class cannot be loaded here.
                self._sender.send(Failure(0, number, error))
                self._drop_claim_locked(number)
            else:
                return ticket
        return None
