"""A worker logs a record and dies in the same task, while the loop is busy with the batch before."""

import logging
import os
import signal
import tempfile
import time

from enqueuer import OrderedEnqueuer, Processes


def main(method):
    folder = tempfile.mkdtemp()

    def work(x):
        if x == 3:
            # Until the loop has taken batch 2.
            while not os.path.exists(folder + "/busy"):
                time.sleep(0.01)
            if not os.path.exists(folder + "/died"):
                open(folder + "/died", "w").close()
                logging.getLogger("mine").warning("this one is large")
                # As the system does for lack of memory.
                os.kill(os.getpid(), signal.SIGKILL)
        return x

    options = dict(workers=1, max_restarts=3, backend=Processes(start_method=method), timeout=20)
    with OrderedEnqueuer(range(8), work, **options) as enqueuer:
        for batch in enqueuer:
            if batch == 2:
                open(folder + "/busy", "w").close()
                # A training step.
                time.sleep(0.5)
        return enqueuer.restart_count


if __name__ == "__main__":
    found = {method: main(method) for method in ("fork", "forkserver", "spawn")}
    print("ok" if set(found.values()) == {1} else f"FAIL: restarts: {found}")
