"""A worker dies while the fork server is slow, as on a busy machine, and a handler raises often.

The program catches the exception and calls `next()` again. The replacement must come.
"""

import collections
import itertools
import os
import signal
import threading
import time

from enqueuer import GeneratorEnqueuer, Processes
from enqueuer.backends.process.fork_server import server

# Seconds for which the server is stopped.
SLOW_S = 3


class Alarm(Exception):
    pass


def source():
    yield os.getpid()
    yield from range(200)


def handler(*_):
    raise Alarm


if __name__ == "__main__":
    with GeneratorEnqueuer(
        source,
        backend=Processes(start_method="forkserver"),
        max_queue_size=2,
        stall_timeout=None,
        max_restarts=5,
    ) as enqueuer:
        batches = iter(enqueuer)
        pid = next(batches)
        got = collections.deque(itertools.islice(batches, 20))
        signal.signal(signal.SIGALRM, handler)
        os.kill(server.popen.pid, signal.SIGSTOP)
        threading.Timer(SLOW_S, os.kill, (server.popen.pid, signal.SIGCONT)).start()
        os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.005)
                    got.extend(batches)
                    break
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Alarm:
                pass
    print("ok" if list(got) == list(range(200)) else f"FAIL: {len(got)} items")
