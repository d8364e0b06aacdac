"""The garbage collector may strike anywhere, also inside our own locks."""

import gc
import threading

import pytest
from helpers import LIMIT, METHODS, counting

from enqueuer import GeneratorEnqueuer
from enqueuer.backends import launching


def forgotten(**options):
    """Make an enqueuer that runs and that only the garbage collector can find."""
    enqueuer = GeneratorEnqueuer(counting, workers=2, **options)
    enqueuer.myself = enqueuer
    next(iter(enqueuer))


@pytest.mark.skipif("forkserver" not in METHODS, reason="there is no fork server")
def test_an_enqueuer_is_collected_while_another_is_being_started(monkeypatch):
    options = {"backend": "process", "mp_context": "forkserver"}
    gc.disable()
    try:
        forgotten(**options)
        packets = launching._server._packets
        send = packets.send
        monkeypatch.setattr(packets, "send", lambda *args: (send(*args), gc.collect()))
        started = []

        def start():
            with GeneratorEnqueuer(counting, **options) as enqueuer:
                started.append(next(iter(enqueuer)))

        starter = threading.Thread(target=start, daemon=True)
        starter.start()
        starter.join(LIMIT)
        assert started == [(0, 0)]
    finally:
        gc.enable()
