"""The worker's end of a channel that several threads use, by `concurrency=n`.

    the worker's own thread: next_ticket() -> take and claim a ticket, or poll, without the lock
    threads of elements:     send_item(), send() -> with the lock; the end of a task drops its claim

A system call gives the GIL away, and threads that compute may take it first, one after the other.
So the lock, which each thread needs to send its result, is not held for those calls that are usual.

Any thread may read the orders that have come, while it sends. If there are some for the worker's
own thread, it is woken by a socket.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from typing import Any

from enqueuer.common.descriptors import own_sockets
from enqueuer.monitoring.meters import Meter
from enqueuer.order.messages import Empty, End, Failure, Ticket
from enqueuer.transport.channel import TICKET, take, unpack_ticket
from enqueuer.transport.sender import ItemSender
from enqueuer.workers.plan import Sender
from enqueuer.workers.task_loop import ElementThreads


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
        self._wake, self._woken = own_sockets(socket.socketpair())
        self._poller = select.poll()
        for one in (sender.control.packets, sender.task_socket, self._woken):
            self._poller.register(one, select.POLLIN)

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
