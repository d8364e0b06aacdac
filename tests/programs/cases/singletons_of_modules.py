"""loguru#160 (2019), abseil-py#107 (2019), persist-queue#175: the function of a script uses an object that it imported from
a module, or a threading.local: loguru's logger with a file, absl's FLAGS, a lock of a module, a per-thread cache. With
multiprocessing's spawn the script is imported again, so all of these work (flags: after parsing). Needs loguru, absl-py."""

# needs: loguru, absl
import os
import subprocess
import sys
import tempfile

SETTINGS = "import threading, sqlite3\nLOCK = threading.Lock()\nlocal = threading.local()\n"
MAIN = """
import concurrent.futures, multiprocessing, os, sys, threading, functools
from absl import flags
from loguru import logger
from settings import LOCK, local
flags.DEFINE_integer("size", 1, "", allow_override=True)
FLAGS = flags.FLAGS
logger.add(os.path.join(os.path.dirname(os.path.abspath(__file__)), "a.log"))
own = threading.local()
def with_loguru(i):
    logger.debug("x")
    return i
def with_lock(i):
    with LOCK:
        return i
def with_module_local(i):
    local.n = getattr(local, "n", 0) + 1
    return i
def with_local(i):
    own.n = getattr(own, "n", 0) + 1
    return i
def with_flags(i):
    if not FLAGS.is_parsed():
        FLAGS(sys.argv)
    return i * FLAGS.size
@functools.singledispatch
def dispatched(i):
    return i
def with_dispatch(i):
    return dispatched(i)
if __name__ == "__main__":
    FLAGS(sys.argv)
    from enqueuer import OrderedEnqueuer, Processes
    for f in (with_loguru, with_lock, with_module_local, with_local, with_flags, with_dispatch):
        for method in ("fork", "forkserver", "spawn"):
            try:
                with OrderedEnqueuer(range(4), f, workers=2, backend=Processes(start_method=method)) as e:
                    got = [int(x) for x in e]
            except Exception as error:
                got = f"{type(error).__name__}: {str(error)[:150]}"
            try:
                with concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(method)) as pool:
                    other = list(pool.map(f, range(4)))
            except Exception as error:
                other = f"{type(error).__name__}: {str(error)[:100]}"
            print(f.__name__, "|", method, "|", got == other, "|", got, "|", other, flush=True)
"""
with tempfile.TemporaryDirectory() as folder:
    for name, text in (("settings.py", SETTINGS), ("main.py", MAIN)):
        with open(os.path.join(folder, name), "w") as f:
            f.write(text)
    done = subprocess.run(
        [sys.executable, "main.py", "--size=10"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
lines = done.stdout.strip().splitlines()
wrong = [line for line in lines if "| False |" in line]
print(*lines, sep="\n")
if len(lines) != 18:
    print("FAIL:", done.stderr[-400:])
else:
    print("FAIL: " + "; ".join(wrong) if wrong else "ok")
