"""How an item, or an error, crosses a process boundary."""

import os

PORTABLE = "ENQUEUER_PORTABLE"
"""Set in the environment: do without memfds, packets and pidfds, as where there are none."""


def is_portable() -> bool:
    """Return whether only what every POSIX system has is to be used."""
    return bool(os.environ.get(PORTABLE))
