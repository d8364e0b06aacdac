"""A scheduler signals all processes of a job; the program saves a checkpoint, and ends then.

With its default action, the signal ends the program, and its workers end with it.
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

from enqueuer import OrderedEnqueuer, Processes

SIGNALS = [getattr(signal, "SIG" + name) for name in ("TERM", "HUP", "USR1", "USR2", "XCPU")]


def element(i):
    time.sleep(0.002)
    return i


def loop(method, path):
    """Read until the signal has come, three batches more, and save; signals come all the time."""
    asked, batches = [], 0
    for number in SIGNALS:
        signal.signal(number, lambda number, _: asked.append(number))
    is_over = threading.Event()

    def send():
        # From before the first worker starts.
        while not is_over.wait(0.01):
            for number in SIGNALS:
                os.killpg(0, number)

    sender = threading.Thread(target=send)
    sender.start()
    with OrderedEnqueuer(
        range(2000), element, workers=2, batch_size=4, backend=Processes(start_method=method)
    ) as enqueuer:
        for _ in enqueuer:
            batches += 1
            if batches > 200 and set(asked) == set(SIGNALS):
                pathlib.Path(path).write_text(str(enqueuer.state_dict()["epoch"]))
                break
    is_over.set()
    sender.join()


def default(method, path):
    """Print a line when the workers run, and read on."""
    with OrderedEnqueuer(
        range(10**6), element, workers=2, backend=Processes(start_method=method)
    ) as enqueuer:
        for batch in enqueuer:
            if batch == 10:
                print("READY", flush=True)


def members(group):
    """Return the processes of a process group that run."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            state, _, its_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(its_group) == group and state not in "ZX":
            found.append(folder.name)
    return found


def check(method, folder):
    path = os.path.join(folder, method)
    given = dict(start_new_session=True, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, __file__, "loop", method, path], **given) as child:
        code = child.wait(100)
    if code or not os.path.exists(path):
        return [f"{method}: exit code {code}, saved: {os.path.exists(path)}"]
    with subprocess.Popen([sys.executable, __file__, "default", method, path], **given) as child:
        child.stdout.readline()
        os.killpg(child.pid, signal.SIGTERM)
        code, end = child.wait(100), time.monotonic() + 20
        while (left := members(child.pid)) and time.monotonic() < end:
            time.sleep(0.01)
    return [] if code == -signal.SIGTERM and not left else [f"{method}: code {code}, left: {left}"]


if __name__ == "__main__":
    if sys.argv[1:]:
        {"loop": loop, "default": default}[sys.argv[1]](*sys.argv[2:])
    else:
        with tempfile.TemporaryDirectory() as folder:
            wrong = sum((check(m, folder) for m in ("fork", "forkserver", "spawn")), [])
        print(f"FAIL: {'; '.join(wrong)}" if wrong else "ok")
