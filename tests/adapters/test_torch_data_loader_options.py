"""Options and processes of the DataLoader, where torch's own lacks them or leaves them open."""

import itertools
import multiprocessing
import operator
import os
import signal
import sys
import threading
import time

import pytest
from helpers import LIMIT, METHODS, Disturbed, Program, hang, needs, retry_if_disturbed

from enqueuer import BatchTimeout, ElementTimeout, InvalidState
from enqueuer.exports import line

torch = needs("torch")
torch.set_num_threads(1)  # its thread pool does not survive a fork

from enqueuer.adapters.torch import DataLoader  # noqa: E402  (torch may be missing)

data = torch.utils.data
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
# A spawned worker imports torch.
SPAWNS = pytest.mark.timeout(300)


class Rows(data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


def lists(loader):
    return [batch.tolist() for batch in loader]


# --- without workers ---


def test_concurrency_works_without_workers():
    barrier = threading.Barrier(4)

    class Together(Rows):
        def __getitem__(self, index):
            barrier.wait(LIMIT)
            return index

    loader = DataLoader(Together(), 4, concurrency=4)
    assert lists(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    batches = iter(loader)
    next(batches)
    later = DataLoader(Together(), 4, concurrency=4)
    later.load_state_dict(loader.state_dict())
    assert lists(later) == [[4, 5, 6, 7]]


class HangsAtFive(Rows):
    def __getitem__(self, index):
        if index == 5:
            hang()
        return index


@pytest.mark.parametrize(
    ("on_error", "between"),
    [("skip", []), (lambda error: [type(error).__name__], "ElementTimeout")],
)
def test_a_batch_that_hangs_is_left_out_or_replaced(on_error, between):
    loader = DataLoader(HangsAtFive(), 2, num_workers=2, on_error=on_error, element_timeout=1)
    first, second, *others = list(loader)
    assert (first.tolist(), second.tolist(), others[-1].tolist()) == ([0, 1], [2, 3], [6, 7])
    assert [*map(list, others[:-1])] == ([[between]] if between else [])


def test_a_batch_that_hangs_raises_and_the_loop_may_go_on():
    batches = iter(DataLoader(HangsAtFive(), 2, num_workers=2, element_timeout=1))
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(ElementTimeout, match="in hang"):
        next(batches)
    assert [batch.tolist() for batch in batches] == [[6, 7]]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "backend": "thread"}], ids=str)
def test_only_worker_processes_limit_the_time_of_a_batch(options):
    with pytest.raises(ValueError, match="element_timeout=3 needs backend='process'"):
        DataLoader(Rows(), element_timeout=3, **options)


def test_options_of_workers_are_refused_without_them(tmp_path):
    with pytest.raises(ValueError, match="trace needs num_workers >= 1"):
        DataLoader(Rows(), trace=tmp_path / "trace.json")
    loader = DataLoader(Rows())
    list(loader)
    with pytest.raises(InvalidState, match="num_workers=0 there are no workers"):
        loader.stats()


# --- the bottleneck ---


class Slow(Rows):
    """Rows that wait as for a file; each eighth batch of two takes longer."""

    def __init__(self, seconds, longer=0.0):
        self.seconds, self.longer = seconds, longer

    def __len__(self):
        return 160

    def __getitem__(self, index):
        time.sleep(self.seconds + (0 if index % 16 else self.longer))
        return index


# Beside other programs, something else may be the bottleneck for a while.
@retry_if_disturbed
@pytest.mark.parametrize(
    ("dataset", "use_s", "workers", "argument"),
    [
        (Slow(0.005), 0, 1, "concurrency"),
        (Slow(0), 0.01, 2, "num_workers"),
        (Slow(0.0001, longer=0.06), 0.008, 1, "prefetch_factor"),
    ],
)
def test_the_change_that_helps_is_an_argument_of_the_loader(dataset, use_s, workers, argument):
    """So that it can be pasted; the enqueuer's names are others."""
    loader = DataLoader(dataset, 2, num_workers=workers, backend="thread")
    for _ in loader:
        time.sleep(use_s)
    stats = loader.stats()
    found = stats.bottleneck()
    change = eval(f"dict({found.change})")
    if list(change) != [argument]:
        raise Disturbed(str(stats))
    assert found.change in found.advice
    assert f"({found.short})" in line(stats)
    with_change = {"num_workers": workers, "backend": "thread", **change}
    assert len(list(DataLoader(dataset, 2, **with_change))) == 80


@retry_if_disturbed
def test_a_stream_is_to_divide_its_samples_before_it_gets_more_workers():
    class Stream(data.IterableDataset):
        def __iter__(self):
            for index in range(80):
                time.sleep(0.002)
                yield index

    loader = DataLoader(Stream(), 2, num_workers=1, backend="thread")
    list(loader)
    stats = loader.stats()
    found = stats.bottleneck()
    if found.change:
        raise Disturbed(str(stats))
    assert found.advice.startswith("More num_workers help, with backend='process', if the dataset")


def test_samples_that_are_fetched_at_once_are_known():
    loader = DataLoader(Slow(0.005), 8, num_workers=1, backend="thread", concurrency=4)
    list(loader)
    found = loader.stats().bottleneck()
    assert "ms to make, 4 at once, and a batch of 8 takes" in found.reason
    assert "(now 4)" in found.advice


@pytest.mark.parametrize(
    ("now", "change"), [(1, "concurrency=4"), (4, "num_workers=2"), (64, "num_workers=2")]
)
@retry_if_disturbed
def test_no_more_samples_are_advised_at_once_than_a_batch_has(now, change):
    """A worker fetches one batch at once."""
    loader = DataLoader(Slow(0.02), 4, num_workers=1, backend="thread", concurrency=now)
    list(loader)
    found = loader.stats().bottleneck()
    if found.change != change:
        raise Disturbed(str(loader.stats()))
    assert change in found.advice
    assert f"{min(now, 4)} at once" in found.reason


# --- set_epoch ---


class WithEpoch:
    """A sampler, and perhaps another one inside it, that notes each epoch."""

    def __init__(self, sampler=None):
        self.sampler = sampler
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        return iter([[1], [0]] if self.sampler is not None else [1, 0])


class Around:
    """A batch sampler without an epoch, around another one."""

    def __init__(self, batch_sampler):
        self.batch_sampler = batch_sampler

    def __iter__(self):
        return iter(self.batch_sampler)


@pytest.mark.parametrize("wrap", [lambda one: one, Around, lambda one: Around(Around(one))])
def test_set_epoch_reaches_samplers_inside_others_once(wrap):
    inner = WithEpoch()
    outer = WithEpoch(inner)
    loader = DataLoader(Rows(), batch_sampler=wrap(outer))
    loader.set_epoch(3)
    assert (inner.epochs, outer.epochs) == ([3], [3])
    loader = DataLoader(Rows(), sampler=inner, batch_size=2)
    loader.set_epoch(4)
    assert inner.epochs == [3, 4]


class Epochs(data.Dataset):
    """Rows with the epoch, and the process that makes them."""

    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.epoch, os.getpid()


class EpochsOfStream(Epochs, data.IterableDataset):
    def __iter__(self):
        return iter([self[0]] * 2)


# The attribute of torch's iterators that libraries read.
workers_of = operator.attrgetter("_workers")


def epochs_of(loader):
    """Return the epochs of an iteration, and the processes."""
    batches = [batch.tolist() for batch in loader]
    return {epoch for epoch, _ in batches}, {pid for _, pid in batches}


@pytest.mark.parametrize("dataset", [Epochs, EpochsOfStream])
@pytest.mark.parametrize("method", METHODS)
def test_set_epoch_reaches_the_dataset_of_persistent_workers(dataset, method):
    options = {"num_workers": 1, "persistent_workers": True, "collate_fn": torch.tensor}
    options["multiprocessing_context"] = method
    loader = DataLoader(dataset(), batch_size=None, **options)
    found = []
    # The workers count on from 5; 5 again, and no epoch, are sent with new workers.
    for epoch in (5, 6, 7, 5, None, None):
        if epoch is not None:
            loader.set_epoch(epoch)
        found.append(epochs_of(loader))
    assert [epochs for epochs, _ in found] == [{5}, {6}, {7}, {5}, {5}, {5}]
    processes = [pids for _, pids in found]
    assert processes[0] == processes[1] == processes[2] != processes[3]
    assert processes[4] == processes[5]


@pytest.mark.parametrize("dataset", [Epochs, EpochsOfStream])
def test_set_epoch_reaches_the_dataset_after_a_break_and_a_resume(dataset):
    def make():
        options = {"persistent_workers": True, "collate_fn": torch.tensor}
        return DataLoader(dataset(), batch_size=None, num_workers=1, **options)

    loader = make()
    for epoch in range(3):
        loader.set_epoch(epoch)
        batches = iter(loader)
        assert next(batches)[0] == epoch
    state = loader.state_dict()
    later = make()
    later.load_state_dict(state)
    later.set_epoch(2)
    assert epochs_of(later)[0] == {2}
    later.set_epoch(3)
    assert epochs_of(later)[0] == {3}


# --- close() ---


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("dataset", [Epochs, EpochsOfStream])
def test_a_closed_loader_has_no_workers_and_may_be_used_again(dataset, persistent):
    options = {"persistent_workers": persistent, "collate_fn": torch.tensor}
    with DataLoader(dataset(), batch_size=None, num_workers=2, **options) as loader:
        whole = len(list(loader))
        # Two at once, unless workers stay.
        iterators = [iter(loader), iter(loader)]
        for batches in iterators:
            next(batches)
        workers = [worker for batches in iterators for worker in workers_of(batches)]
        assert any(worker.is_alive() for worker in workers)
        for _ in range(2):
            loader.close()
            assert not any(worker.is_alive() for worker in workers)
        for batches in iterators:
            with pytest.raises(InvalidState, match="was closed"):
                next(batches)
        assert len(list(loader)) == whole
        workers = workers_of(iter(loader))
    assert not any(worker.is_alive() for worker in workers)


def test_a_loader_without_workers_can_be_closed():
    loader = DataLoader(range(4))
    loader.close()
    for batches in [iter(loader)]:
        next(batches)
        state = loader.state_dict()
        loader.close()
        with pytest.raises(InvalidState, match="was closed"):
            next(batches)
    assert lists(loader) == [[0], [1], [2], [3]]
    loader.load_state_dict(state)
    assert lists(loader) == [[1], [2], [3]]


# --- on_error with iterable datasets ---


class Stream(data.IterableDataset):
    """Numbers, of which some fail; the iterator goes on behind them."""

    def __init__(self, count, failing):
        self.count = count
        self.failing = failing

    def __iter__(self):
        return map(self.check, range(self.count))

    def check(self, number):
        if number in self.failing:
            raise LookupError(f"no {number}")
        return number


class Generated(Stream):
    """The same as a generator, which ends with its error."""

    def __iter__(self):
        for number in range(self.count):
            yield self.check(number)


CASES = [
    (Stream(6, {3}), 2, "skip", [[0, 1], [2], [4, 5]]),
    (Stream(6, {3}), 2, lambda error: -1, [[0, 1], [2, -1], [4, 5]]),
    (Stream(6, {3}), 2, lambda error: None, [[0, 1], [2], [4, 5]]),
    (Stream(5, {0}), 3, "skip", [[1, 2], [3, 4]]),
    (Generated(6, {3}), 2, "skip", [[0, 1], [2]]),
    (Generated(6, {3}), 2, lambda error: -1, [[0, 1], [2, -1]]),
    (Generated(6, {2}), 3, lambda error: -1, [[0, 1, -1]]),
]


@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize(("dataset", "size", "on_error", "expected"), CASES)
def test_a_sample_of_a_stream_is_skipped_or_replaced(dataset, size, on_error, expected, backend):
    loader = DataLoader(dataset, size, num_workers=1, on_error=on_error, backend=backend)
    assert lists(loader) == expected


def test_drop_last_leaves_out_only_the_batch_at_the_end():
    loader = DataLoader(Stream(7, {1}), 2, num_workers=1, on_error="skip", drop_last=True)
    assert lists(loader) == [[0], [2, 3], [4, 5]]


def test_a_stream_whose_samples_all_fail_ends():
    loader = DataLoader(Stream(10**9, range(4, 10**9)), 2, num_workers=1, on_error="skip")
    assert lists(loader) == [[0, 1], [2, 3]]


# --- two loaders of one dataset ---


@pytest.mark.parametrize("dataset", [Rows(), Stream(8, ())], ids=["map-style", "iterable"])
def test_two_persistent_loaders_share_a_dataset(dataset):
    loaders = [DataLoader(dataset, 2, num_workers=1, persistent_workers=True) for _ in range(2)]
    whole = [[0, 1], [2, 3], [4, 5], [6, 7]]
    for _ in range(2):
        pairs = zip(*loaders, strict=True)
        assert [(a.tolist(), b.tolist()) for a, b in pairs] == [(one, one) for one in whole]
    states = []
    for loader, steps in zip(loaders, (1, 3), strict=True):
        list(itertools.islice(loader, steps))
        states.append(loader.state_dict()["step"])
    assert states == [1, 3]


# --- processes: a killed parent, start methods, timeouts ---

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
@SPAWNS
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


@SPAWNS
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
    assert lists(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
