"""Handling an exception in a worker: end with it, skip the item, or send a replacement.

Failure --skip_or_end()--> sent as it is, or sent as skipped, with a replacement to be sent
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from enqueuer.errors import Closed, StateMismatch
from enqueuer.workers.messages import Failure, Sender
from enqueuer.workers.plan import OnError


def may_skip(error: BaseException, on_error: OnError) -> bool:
    """Return whether an error of the user's code is skipped, and not raised."""
    is_usual = isinstance(error, Exception) and not isinstance(error, StateMismatch)
    return on_error != "raise" and is_usual


def skip_or_end(failure: Failure, sender: Sender, on_error: OnError) -> tuple[bool, Any]:
    """Send a failure, marked as skipped if `on_error` allows that.

    Returns:
        Whether it is skipped, and the replacement that the user gives, or None.
    """
    error, replacement = failure.error, None
    if not may_skip(error, on_error):
        sender.send(failure)
        return False, None
    assert isinstance(error, Exception)
    if callable(on_error):
        try:
            replacement = on_error(error)
        except BaseException as second:
            sender.send(dataclasses.replace(failure, error=second))
            return False, None
    sender.send(dataclasses.replace(failure, skipped=True))
    return True, replacement


def serve_failure(
    error: BaseException, shards: tuple[int, ...], orders: Any, sender: Sender
) -> None:
    """Send the error of a worker's start, and stay until the loop has read it.

    Args:
        error: Exception that loading the source raised, for example.
        shards: Indices of the worker's shards; empty for tasks.
        orders: Orders of the worker, or Tickets if it does tasks.
        sender: Sender of the worker.
    """
    with contextlib.suppress(Closed):
        if not shards:
            while (ticket := orders.next_ticket()) is not None:
                sender.send(Failure(0, ticket.number, error))
            return
        sender.send(Failure(shards[0], 0, error))
        while orders.next_epoch() is not None:
            pass
