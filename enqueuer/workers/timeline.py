"""Recording what a worker does, if a trace is wanted.

    serve(plan, orders, sender) -> the same with a _Worker as both: next, send, wait

A worker's time is its sender's, its orders', or else the user's. So nothing is asked while an
item is made, and a worker without a trace pays nothing.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from enqueuer.common.sizes import SAMPLED, size_of
from enqueuer.monitoring.trace_file import Lines, Place, Track, text_of
from enqueuer.workers.messages import Empty, End, Epoch, Failure, Sender, Ticket
from enqueuer.workers.plan import Plan

_log = logging.getLogger("enqueuer")

_now = time.monotonic_ns

Serve = Callable[..., None]
"""`worker.serve` or `worker.serve_tasks`."""


def traced(serve: Serve, place: Place | None, index: int) -> Serve:
    """Return the loop of a worker that also records, if there is a place for that."""
    return serve if place is None else functools.partial(_serve, serve, place, index)


def _serve(
    serve: Serve,
    place: Place,
    index: int,
    plan: Plan,
    orders: Any,
    sender: Sender,
    enter: Callable[[Any], None] | None = None,
) -> None:
    worker = _Worker(place, index, orders, sender)
    sender.watch(worker.waited)
    try:
        serve(plan, worker, worker, enter)
    finally:
        worker.close()


class _Worker:
    """A worker's Sender, and its Orders or Tickets, for one that records."""

    def __init__(self, place: Place, index: int, orders: Any, sender: Sender) -> None:
        self._orders = orders
        self._sender = sender
        self._run = place.run
        pid = os.getpid()
        self._lines = Lines(place)
        if self._lines.trouble is not None:  # what cannot be written later is the loop's to tell
            _log.warning("worker %d records nothing in a trace: %s", index, self._lines.trouble)
        self._track = Track(self._lines, pid, threading.get_native_id())
        if pid == place.pid:
            self._track.name(None, f"worker {index} (thread)", index)
        else:
            self._track.name(f"worker {index} (process {pid})", f"worker {index}", index)
        self._lines.flush()  # a worker that is killed soon has a name at least
        self._epoch = 0
        self._ticket: Ticket | None = None
        self._since = _now()  # when the user's code began to run
        self._is_sending = False
        self._loop_meter: list[tuple[int, int]] = []  # while it sends

    def send_item(self, shard: int, number: int, value: object, state: Any = None) -> None:
        at, size = _now(), size_of(value, SAMPLED)
        args = self._what(shard, number)
        self._track.span("next", self._since, at, args)
        self._is_sending, was_sent = True, False
        try:
            self._sender.send_item(shard, number, value, state)
            was_sent = True
        finally:
            self._since = _now()
            self._track.span("send", at, self._since, args | {"bytes": size} if size else args)
            if was_sent:
                self._track.arrow(True, at, self._run, self._epoch, shard, number)
            self._tell_waits()

    def send(self, message: End | Failure | Empty) -> None:
        at = _now()
        match message:
            case End(shard=shard):
                args: dict[str, Any] = {"shard": shard, "end": True}
            case Empty(number=number):
                args = {**self._what(0, number), "empty": True}
            case Failure(shard=shard, number=number, error=error):
                args = {**self._what(shard, number), "error": text_of(error)}
        self._track.span("next", self._since, at, args)
        self._is_sending = True
        try:
            self._sender.send(message)
        finally:
            self._since = _now()
            self._tell_waits()

    def check(self) -> None:
        self._sender.check()  # an item that is None: its time counts to the next one

    def watch(self, waited: Callable[[int], None]) -> None:
        self._sender.watch(waited)

    def next_epoch(self) -> Epoch | None:
        at = _now()
        self._lines.flush()  # it may be long
        epoch: Epoch | None = self._orders.next_epoch()
        if epoch is not None:
            self._epoch = epoch.number
        self._waited_for("epoch", at)
        return epoch

    def next_ticket(self) -> Ticket | None:
        at = _now()
        ticket: Ticket | None = self._orders.next_ticket()
        if ticket is not None:
            self._epoch, self._ticket = ticket.epoch, ticket
        self._waited_for("task", at)
        return ticket

    def waited(self, since: int) -> None:
        """Take note of a wait that is over. Called by the sender."""
        if self._is_sending:
            self._loop_meter.append((since, _now()))

    def close(self) -> None:
        """Write what is left."""
        self._lines.close()

    def _what(self, shard: int, number: int) -> dict[str, Any]:
        if self._ticket is None:
            return {"shard": shard, "item": number, "epoch": self._epoch}
        return {"task": number, "element": self._ticket.indices[0], "epoch": self._epoch}

    def _waited_for(self, what: str, since: int) -> None:
        self._since = _now()
        if self._since // 1000 > since // 1000:
            self._track.span("wait", since, self._since, {"for": what})

    def _tell_waits(self) -> None:
        """Tell of the waits within what was sent; after that, as its span is the outer one."""
        for wait in self._loop_meter:
            self._track.span("wait", *wait, {"for": "room"})
        self._loop_meter.clear()
        self._is_sending = False
