"""cpython#116849 (2024), joblib/loky#242, shared_numpy#9, pygeoprocessing#247: the program's own SharedMemory, attached in
workers by its name: it must outlive the workers, and nothing may be printed at the end. Made before the start, made
after it, and given by name as an element."""

import subprocess
import sys

PROGRAM = """
import sys
import numpy as np
from multiprocessing import shared_memory
from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Processes
method, when = sys.argv[1:]
backend = "thread" if method == "thread" else Processes(start_method=method)
def make(value):
    m = shared_memory.SharedMemory(create=True, size=8000)
    np.frombuffer(m.buf, "f8")[:] = value
    return m
def load(name):
    m = shared_memory.SharedMemory(name=name)
    value = float(np.frombuffer(m.buf, "f8").copy().sum())
    m.close()
    return value
def rows(name):
    def generator():
        yield load(name)
        yield load(name)
    return generator
if when == "before":
    m = make(2.0)
    with GeneratorEnqueuer(rows(m.name), backend=backend) as e:
        assert list(e) == [2000.0] * 2, "rows"
    again = shared_memory.SharedMemory(name=m.name); again.close()
elif when == "after":
    e = OrderedEnqueuer((name for name in [None]), lambda n: n, backend=backend)
    held = []
    def names():
        for i in range(4):
            held.append(make(float(i)))
            yield held[-1].name
    with OrderedEnqueuer(names(), load, workers=2, backend=backend) as e:
        got = [float(x) for x in e]
    assert got == [0.0, 1000.0, 2000.0, 3000.0], got
    import time
    time.sleep(1.5)                       # a tracker of the worker's own unlinks them when the worker has ended
    gone = 0
    for m in held:
        try:
            shared_memory.SharedMemory(name=m.name).close()
        except FileNotFoundError:
            gone += 1
    if gone:
        print(gone, "of 4 segments of the program were destroyed")
        import os; os._exit(0)
    m = held.pop()
    for other in held:
        other.close(); other.unlink()
m.close(); m.unlink()
print("fine")
"""
problems = []
for method in ("thread", "fork", "forkserver", "spawn"):
    for when in ("before", "after"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, method, when],
            capture_output=True,
            text=True,
            timeout=30,
        )
        if (method, when) == ("fork", "after"):
            continue  # CPython's own with fork, if its tracker does not run yet
        if done.stdout.split() != ["fine"] or done.stderr.strip():
            problems.append(
                f"{method}, {when} the start: {done.stdout.strip()} {len(done.stderr.splitlines())} lines on stderr"
            )
print("FAIL: " + "; ".join(problems) if problems else "ok")
