"""The interpreter ends while a daemonic thread starts workers: that thread printed a traceback."""

import subprocess
import sys
import threading

from enqueuer import GeneratorEnqueuer


def numbers():
    yield 1


def start_one_after_the_other(has_begun):
    started = []
    while True:
        started.append(GeneratorEnqueuer(numbers, workers=4, backend="process"))
        started[-1].start()
        has_begun.set()


if len(sys.argv) > 1:
    has_begun = threading.Event()
    threading.Thread(target=start_one_after_the_other, args=(has_begun,), daemon=True).start()
    has_begun.wait()
else:
    told = ""
    for _ in range(3):
        done = subprocess.run([sys.executable, __file__, "inner"], capture_output=True, text=True)
        told += done.stderr
    print(f"FAIL: {told}" if told else "ok")
