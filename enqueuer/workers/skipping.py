"""Handling an exception in a worker: end with it, skip the item, or send a replacement.

Failure --skip_or_end()--> sent as it is, or sent as skipped --> send_replacement()
"""

from __future__ import annotations

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


def send_replacement(failure: Failure, value: Any, sender: Sender) -> bool:
    """Send the replacement of a failed item; return whether it could be sent."""
    try:
        sender.send_item(failure.shard, failure.number, value)
    except Closed:
        raise
    except BaseException as error:
        sender.send(dataclasses.replace(failure, error=error))
        return False
    return True
