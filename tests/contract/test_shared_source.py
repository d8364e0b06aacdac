"""Workers share the memory of what they read: one copy of it serves all processes."""

import itertools
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Processes

METHODS = ["forkserver", "spawn"]
MEGABYTE = 1 << 20
LARGE = 128 * MEGABYTE


def private_bytes():
    """Return the memory of this process that is no other process's, and its part of the rest."""
    with open("/proc/self/smaps_rollup") as file:
        (kilobytes,) = (line.split()[1] for line in file if line.startswith("Pss_Anon:"))
    return 1024 * int(kilobytes)


class Rows:
    """A dataset in one large array."""

    def __init__(self):
        self.rows = np.arange(LARGE // 8).reshape(64, -1)

    def __call__(self, shard):
        self.rows.sum()
        yield private_bytes(), self.rows.flags.writeable


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_a_large_array_of_the_source_is_shared(method):
    with GeneratorEnqueuer(Rows(), workers=2, backend=Processes(start_method=method)) as enqueuer:
        for private, is_writeable in enqueuer:
            assert private < LARGE / 2
            assert is_writeable


@pytest.mark.parametrize("method", METHODS)
def test_what_a_worker_writes_to_an_array_no_other_one_sees(method):
    rows = np.zeros((64, 1024))

    def writing(shard):
        for _ in range(5):
            rows[:] += 1 + shard.index
            yield rows.max()

    with GeneratorEnqueuer(writing, workers=2, backend=Processes(start_method=method)) as enqueuer:
        assert list(enqueuer) == [1, 2, 2, 4, 3, 6, 4, 8, 5, 10]
    assert not rows.any()


def test_a_read_only_array_stays_read_only(process):
    rows = np.zeros((64, 1024))
    rows.flags.writeable = False

    def reading(shard):
        yield rows.flags.writeable

    with GeneratorEnqueuer(reading, **process) as enqueuer:
        assert list(enqueuer) == [False]


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fork", *METHODS])
def test_a_long_list_is_shared(method):
    """A forked worker copies a page of the list as soon as it counts a reference there."""
    paths = [f"/a/folder/of/a/dataset/{number:08}.jpg" for number in range(400_000)]

    def measured(some):
        return some[0], private_bytes()

    options = dict(batch_size=20_000, collate=measured, shuffle=True, workers=2)
    with OrderedEnqueuer(paths, backend=Processes(start_method=method), **options) as enqueuer:
        first, *_, last = enqueuer
    assert first[0] in paths
    assert last[1] - first[1] < 16 * MEGABYTE
    if method != "fork":
        # Such a worker has its own modules, and no more.
        assert last[1] < 40 * MEGABYTE


def test_a_long_list_gives_what_the_sequence_gives(backend):
    pairs = [(f"{number}.jpg", number) for number in range(10_050)]

    def joined(pair):
        return f"{pair[1]} {pair[0]}"

    with OrderedEnqueuer(pairs, joined, workers=2, batch_size=50, **backend) as enqueuer:
        batches = [list(batch) for batch in enqueuer]
    assert list(itertools.chain(*batches)) == [joined(pair) for pair in pairs]


@pytest.fixture(scope="module")
def tracker():
    """multiprocessing's resource tracker, which a program keeps until its end."""
    resource_tracker.ensure_running()


class InSharedMemory:
    """A sequence in a block of `SharedMemory`, which is pickled, or opened by its name."""

    def __init__(self, block, by_name):
        self.block = None if by_name else block
        self.name = block.name

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if self.block is None:
            self.block = SharedMemory(self.name)
        return self.block.buf[index]


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("method", ["fork", *METHODS])
def test_shared_memory_outlives_the_workers(tracker, method, by_name, capfd):
    block = SharedMemory(create=True, size=6)
    try:
        block.buf[:6] = bytes(range(6))
        rows = InSharedMemory(block, by_name)
        for _ in range(2):
            with OrderedEnqueuer(rows, workers=2, backend=Processes(method)) as enqueuer:
                assert list(enqueuer) == [0, 1, 2, 3, 4, 5]
    finally:
        block.close()
        block.unlink()
    assert capfd.readouterr().err == ""
