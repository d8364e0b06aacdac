"""The DataLoader's processes: a killed parent leaves none; start methods and timeouts."""

import multiprocessing
import os
import signal
import sys
import threading

import pytest
from helpers import LIMIT, METHODS, Program, needs

from enqueuer import BatchTimeout

torch = needs("torch")
torch.set_num_threads(1)  # its thread pool does not survive a fork

from enqueuer.adapters.torch import DataLoader  # noqa: E402  (torch may be missing)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    # A spawned worker imports torch.
    pytest.mark.timeout(300),
]

# What the two workers do when their parent is killed, and what the parent has done before.
STATES = {
    "work ahead": ("pass", "next(batches)"),
    "hang in a sample": ("index >= 2 and hang()", "next(batches)"),
    "wait for an epoch": ("pass", "list(batches)"),
}

KILLED = """
    import os, threading
    import torch
    from enqueuer.adapters.torch import DataLoader

    def hang():
        os.write(1, b"hangs\\n")
        threading.Event().wait()

    class Rows:
        def __len__(self):
            return 100

        def __getitem__(self, index):
            {act}
            return torch.full((20_000,), index)  # crosses in shared memory

    loader = DataLoader(
        Rows(), num_workers=2, multiprocessing_context={method!r}, persistent_workers={persistent}
    )
    batches = iter(loader)
    pids = [worker.pid for worker in batches._workers]
    {before}
    os.write(1, " ".join(map(str, ["pids", *pids])).encode() + b"\\n")
    threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("state", "persistent"),
    [
        ("work ahead", False),
        ("work ahead", True),
        ("hang in a sample", False),
        ("wait for an epoch", True),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_no_worker_outlives_a_killed_parent(method, state, persistent, tmp_path):
    act, before = STATES[state]
    text = KILLED.format(method=method, persistent=persistent, act=act, before=before)
    with Program(tmp_path, text) as program:
        # Each worker comes to a sample that hangs, whichever is first.
        lines = sorted(program.line() for _ in range(3 if "hang" in state else 1))
        assert lines[:-1] == ["hangs"] * (len(lines) - 1)
        pids = {int(pid) for pid in lines[-1].split()[1:]}
        assert len(pids) == 2
        assert pids < program.members()
        program.process.kill()
        # Each process has the pipe of standard output. So its end comes after that of all.
        assert program.wait(120) == (-signal.SIGKILL, "", "")
        program.check_nothing_left(limit=120)


class Draws:
    """Samples of random numbers, and how the process that drew them was started."""

    def __init__(self):
        self.pid, self.arguments = os.getpid(), sys.orig_argv

    def __len__(self):
        return 7

    def __getitem__(self, index):
        started = os.getppid() == self.pid, sys.orig_argv == self.arguments
        return index, torch.rand(()), *started


# Whether workers are children of this process, and whether they have its arguments.
STARTED = {"fork": (True, True), "spawn": (True, False), "forkserver": (False, False)}


@pytest.fixture
def default_method():
    """Give the function that sets the start method of `multiprocessing`, for this test."""
    before = multiprocessing.get_start_method(allow_none=True)
    yield lambda method: multiprocessing.set_start_method(method, force=True)
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize("method", METHODS)
def test_a_context_may_be_a_name_an_object_or_the_default(method, default_method):
    def batches(context):
        generator = torch.Generator().manual_seed(7)
        options = {"shuffle": True, "num_workers": 1, "generator": generator}
        loader = DataLoader(Draws(), 3, multiprocessing_context=context, **options)
        return [[column.tolist() for column in batch] for batch in loader]

    by_name = batches(method)
    assert batches(multiprocessing.get_context(method)) == by_name
    default_method(method)
    assert batches(None) == by_name
    for *_, children, arguments in by_name:
        assert set(zip(children, arguments, strict=True)) == {STARTED[method]}


class Late:
    """Samples of which one waits for the end of a pipe with a name."""

    def __init__(self, gate):
        self.gate = str(gate)
        os.mkfifo(self.gate)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == 1:
            with open(self.gate):
                pass
        return index


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_a_late_batch_comes_after_its_timeout(backend, tmp_path):
    dataset = Late(tmp_path / "gate")
    batches = iter(DataLoader(dataset, num_workers=1, backend=backend, timeout=0.2))

    def let_on():
        with open(dataset.gate, "w"):
            pass

    letting_on = threading.Thread(target=let_on)
    found, errors = [], []
    # On a busy machine any batch may be late, and more than once.
    while len(found) < 3:
        try:
            found.append(next(batches).tolist())
        except RuntimeError as error:
            errors.append((len(found), type(error), str(error)))
            if len(found) == 1 and letting_on.ident is None:
                letting_on.start()
    letting_on.join(LIMIT)
    assert found == [[0], [1], [2]]
    assert 1 in {place for place, _, _ in errors}
    for _, kind, text in errors:
        assert issubclass(kind, BatchTimeout)
        assert "DataLoader timed out after 0.2 seconds" in text


def test_a_timeout_does_not_touch_batches_that_are_in_time():
    loader = DataLoader(range(9), 4, num_workers=2, timeout=LIMIT)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
