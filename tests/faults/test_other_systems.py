"""On systems that lack what Linux has, threads work, and processes work or say what is missing."""

import sys

import pytest
from helpers import LIMIT, needs, run_script

# By what is missing: how a program hides it before it imports anything.
HIDDEN = {
    # Modules of Python itself use it.
    "register_at_fork": "import logging, random, threading; del os.register_at_fork",
    "fork": "del os.fork, os.forkpty",
    "fcntl": "sys.modules['fcntl'] = None",
    "pidfd_open": "del os.pidfd_open",
    "memfd_create": "del os.memfd_create",
    "posix_fallocate": "del os.posix_fallocate",
    "SIGRTMAX": "del signal.SIGRTMAX",
    "RUSAGE_THREAD": "import resource; del resource.RUSAGE_THREAD",
    "sched_getaffinity": "del os.sched_getaffinity",
    "proc": """
import builtins, io
def without_proc(function):
    def hides(path=".", *args, **kwargs):
        if isinstance(path, str) and path.startswith("/proc"):
            raise FileNotFoundError(path)
        return function(path, *args, **kwargs)
    return hides
builtins.open, os.listdir, os.stat = map(without_proc, (builtins.open, os.listdir, os.stat))
io.open = builtins.open
""",
}
HIDDEN["all"] = "\n".join(HIDDEN.values())

PRELUDE = "import os, signal, sys\n"

THREADS = """
import pickle
from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, StartError

def numbers(shard):
    yield from shard.split(range(40))

def check():
    with GeneratorEnqueuer(numbers, workers=3) as enqueuer:
        assert sorted(enqueuer) == list(range(40))
        print(enqueuer.stats().bottleneck().kind != "")
    with OrderedEnqueuer(range(40), abs, workers="auto", shuffle=True) as enqueuer:
        assert sorted(enqueuer) == list(range(40))
    with GeneratorEnqueuer(numbers, workers=0) as enqueuer:
        assert len(list(enqueuer)) == 40
    try:
        with GeneratorEnqueuer(numbers, workers=2, backend="process") as enqueuer:
            enqueuer.stats()
            assert sorted(enqueuer) == list(range(40))
    except StartError as error:
        print("StartError:", error)
    print("all is well")

if __name__ == "__main__":
    check()
"""

TORCH = """
import torch
from enqueuer import GeneratorEnqueuer
from enqueuer.adapters.torch import DataLoader, TorchLoader

dataset = torch.utils.data.TensorDataset(torch.arange(12))
loader = DataLoader(dataset, 2, shuffle=True, num_workers=2, backend="thread")
assert sorted(row for (rows,) in loader for row in rows.tolist()) == list(range(12))
assert [batch for batch in TorchLoader(GeneratorEnqueuer(lambda: iter(range(3))))] == [0, 1, 2]
if hasattr(os, "fork"):
    iterator = iter(DataLoader(dataset, 2, num_workers=1, prefetch_factor=2))
    next(iterator)
    (worker,) = iterator._workers
    assert worker.is_alive()
    worker.kill()
    worker.join()
    assert not worker.is_alive() and worker.exitcode == -9
print("all is well")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it hides what Linux has")
@pytest.mark.parametrize(
    "missing",
    [pytest.param(name, marks=[] if name == "all" else pytest.mark.thorough) for name in HIDDEN],
)
def test_threads_work_without_what_only_linux_has(missing, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PRELUDE + HIDDEN[missing] + THREADS)
    code, out, err = run_script(script, tmp_path, LIMIT)
    assert code == 0, err
    *said, last = out.splitlines()
    assert last == "all is well"
    refused = [line for line in said if line.startswith("StartError")]
    if missing in ("fork", "all"):
        assert refused == [
            "StartError: backend='process' needs a POSIX system; use backend='thread' here"
        ]
    else:
        assert refused == []


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="it hides what Linux has")
@pytest.mark.parametrize("missing", HIDDEN)
def test_loaders_of_torch_work_with_threads_there(missing, tmp_path):
    needs("torch")
    script = tmp_path / "script.py"
    # torch itself needs some of it while it is imported.
    script.write_text(PRELUDE + "import torch\n" + HIDDEN[missing] + TORCH)
    code, out, err = run_script(script, tmp_path, LIMIT)
    assert code == 0, err
    assert out.splitlines() == ["all is well"]
