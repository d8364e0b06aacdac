"""How much of the time the GIL is held, on loads of which that is known."""

import hashlib
import threading
import time

import pytest

from enqueuer.tools.bench import Probe

SECONDS = 0.4


def share_of(work):
    """Return how much of the time some work, done again and again in a thread, holds the GIL."""
    done = threading.Event()

    def run():
        while not done.is_set():
            work()

    thread = threading.Thread(target=run)
    thread.start()
    with Probe() as probe:
        time.sleep(SECONDS)
    done.set()
    thread.join()
    return probe.share


def compute():
    sum(number * number for number in range(20_000))


DATA = bytes(4_000_000)


@pytest.mark.parametrize(
    ("work", "least", "most"),
    [
        pytest.param(lambda: time.sleep(0.005), 0, 0.2, id="sleeping"),
        pytest.param(lambda: hashlib.sha256(DATA), 0, 0.3, id="C without the GIL"),
        pytest.param(compute, 0.8, 1, id="Python"),
        pytest.param(lambda: sorted(DATA[:2_000_000]), 0.8, 1, id="C with the GIL"),
    ],
)
def test_the_share_of_known_loads_is_met(work, least, most):
    # A thread that loses its CPU keeps the GIL: on a loaded machine one try may see that.
    assert any(least <= share_of(work) <= most for _ in range(5))


def test_half_is_about_half():
    def half():
        end = time.perf_counter() + 0.02
        while time.perf_counter() < end:
            pass
        time.sleep(0.02)

    assert any(0.25 <= share_of(half) <= 0.75 for _ in range(5))


def test_nothing_was_seen_before_it_was_asked():
    assert Probe().share is None
