"""Unit: taking from a queue until a time."""

import queue
import time
from queue import SimpleQueue

import pytest

from enqueuer.backends.thread_channel import get_until


@pytest.mark.parametrize("late_s", [0.0, 1.0, -0.001])
def test_a_new_queue_is_waited_for_until_the_time_and_no_longer(late_s):
    """CPython 3.10 waited forever if the thread was switched right then: once in a million."""
    for _ in range(20 if late_s < 0 else 20_000):
        with pytest.raises(queue.Empty):
            get_until(SimpleQueue(), time.monotonic() - late_s)
