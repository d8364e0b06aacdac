"""Blocks are used again, but never while anything refers to them."""

import gc
import os
import sys
import tempfile
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from enqueuer import BlockMemoryError
from enqueuer.transport import blocks
from enqueuer.transport.blocks import BlockMap, BlockPool, mapping_at
from enqueuer.transport.memory import allocation_error


class Transfer:
    """A worker's pool and the consumer's map, with the channel between them left out."""

    def __init__(self, keep=3):
        self.pool = BlockPool(keep)
        self.map = BlockMap()

    def send(self, array):
        """Return `array` as it arrives: a view of a block."""
        self.release()
        block = self.pool.take(array.nbytes)
        block.memory[: array.nbytes] = array.tobytes()
        for number in self.pool.dropped():
            self.map.drop(number)
        if block.fd is not None:
            self.map.add(block.number, [os.dup(block.fd)])
        self.pool.sent(block)
        view = self.map.lease(block.number, block.use)[: array.nbytes]
        received = np.frombuffer(view, array.dtype)
        self.map.current.clear()  # the frame counts as read
        return block.number, received

    def release(self):
        released = self.map.released
        while released:
            self.pool.reclaim([released.popleft().key])


def test_a_block_is_used_again_when_its_last_view_has_died():
    transfer = Transfer()
    number, array = transfer.send(np.arange(1000))
    half = array[500:]
    view = memoryview(half)
    del array, half
    assert transfer.send(np.zeros(1000))[0] != number
    assert view[0] == 500
    del view
    gc.collect()
    assert transfer.send(np.zeros(1000))[0] in (number, number + 1)


def test_a_lease_may_end_in_another_thread():
    transfer = Transfer()
    number, array = transfer.send(np.arange(1000))
    kept = [array]
    del array
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    assert transfer.send(np.zeros(1000))[0] == number


def sent(pool, size):
    block = pool.take(size)
    pool.sent(block)
    return block


def key_of(block):
    return block.number, block.use


def test_the_release_of_an_earlier_use_is_passed_over():
    pool = BlockPool(keep=2)
    block = sent(pool, 5000)
    first = key_of(block)
    pool.reclaim([first, first])
    assert sent(pool, 5000) is block
    pool.reclaim([first])
    assert pool.take(5000) is not block
    pool.close()


def test_the_smallest_that_fits_is_taken():
    pool = BlockPool(keep=5)
    small, large = sent(pool, 5000), sent(pool, 50_000)
    pool.reclaim(map(key_of, [large, small]))
    assert pool.take(4000) is small
    assert pool.take(30_000) is large
    pool.close()


def test_a_far_too_large_block_is_not_wasted_on_a_small_item():
    pool = BlockPool(keep=5)
    large = sent(pool, 1_000_000)
    pool.reclaim([key_of(large)])
    assert pool.take(5000) is not large
    pool.close()


def test_no_more_free_blocks_are_kept_than_asked():
    pool = BlockPool(keep=2)
    taken = [sent(pool, 5000) for _ in range(5)]
    pool.reclaim(map(key_of, taken))
    assert pool.dropped() == [block.number for block in taken[:3]]
    assert pool.dropped() == []
    pool.close()


def test_a_block_that_nobody_needs_any_more_is_given_back(monkeypatch):
    pool = BlockPool(keep=5)
    many = [sent(pool, 5000) for _ in range(4)]
    pool.reclaim(map(key_of, many))
    for _ in range(3):
        block = sent(pool, 5000)
        assert block is many[-1]  # the one whose memory is still in the cache
        pool.reclaim([key_of(block)])
    assert pool.dropped() == []
    monkeypatch.setattr(blocks, "_IDLE_S", 0.0)
    assert sent(pool, 5000) is many[-1]
    assert sorted(pool.dropped()) == [block.number for block in many[:-1]]
    pool.close()


def test_a_block_is_found_while_other_threads_add_some():
    """Another thread may have its turn at any line of the search."""
    transfer, kept = Transfer(), []
    _, array = transfer.send(np.ones(5000))

    def trace(frame, event, _):
        if len(kept) < 50:
            kept.append(transfer.send(np.ones(5000)))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        block = mapping_at(array.__array_interface__["data"][0])
    finally:
        sys.settrace(before)
    assert block is not None
    assert len(kept) > 3
    transfer.pool.close()


def test_a_block_is_found_among_many():
    transfer = Transfer()
    arrays = [transfer.send(np.full(1000, n))[1] for n in range(60)]  # more would be copied
    addresses = [array.__array_interface__["data"][0] for array in arrays]
    found = [mapping_at(address + 100) for address in addresses]
    assert [block.address for block in found] == addresses
    transfer.pool.close()


def test_a_block_that_is_gone_is_not_found():
    transfer = Transfer()
    number, array = transfer.send(np.ones(1000))
    address = array.__array_interface__["data"][0]
    assert mapping_at(address) is not None
    assert mapping_at(address - 1) is None
    transfer.map.drop(number)
    del array
    gc.collect()
    assert mapping_at(address) is None
    transfer.pool.close()


def test_a_want_of_memory_has_a_name(monkeypatch):
    def full(size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blocks, "open_nameless", full)
    with pytest.raises(
        BlockMemoryError,
        match=r"could not allocate 1.0 MB of shared .* No space left",
    ):
        BlockPool(1).take(1_000_000)


def test_who_keeps_many_gets_copies(monkeypatch):
    monkeypatch.setattr(blocks, "_MAX_LEASED", 2)
    transfer = Transfer()
    arrays = [transfer.send(np.full(1000, n))[1] for n in range(6)]
    assert [int(array[0]) for array in arrays] == list(range(6))
    assert all((array == array[0]).all() for array in arrays)


def test_without_memfd_an_unlinked_file_serves(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    transfer = Transfer()
    _, array = transfer.send(np.arange(1000))
    assert (array == np.arange(1000)).all()
    assert list(tmp_path.iterdir()) == []


class Blocks(RuleBasedStateMachine):
    """Send arrays of any size, keep some, drop some: none that is kept ever changes."""

    def __init__(self):
        super().__init__()
        self.transfer = Transfer(keep=2)
        self.kept = {}
        self.count = 0

    @rule(size=st.integers(1, 40_000), keep=st.booleans())
    def send(self, size, keep):
        self.count += 1
        number, array = self.transfer.send(np.full(size, self.count % 256, np.uint8))
        assert number not in {kept for kept, _, _ in self.kept.values()}
        if keep:
            self.kept[self.count] = number, array, self.count % 256

    @rule(at=st.integers(0, 30))
    def drop(self, at):
        if self.kept:
            del self.kept[sorted(self.kept)[at % len(self.kept)]]

    @invariant()
    def what_is_kept_is_unchanged(self):
        assert all((array == value).all() for _, array, value in self.kept.values())

    def teardown(self):
        self.kept.clear()
        self.transfer.pool.close()


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=30, stateful_step_count=20)


def test_a_small_size_is_told_in_bytes():
    assert "allocate 4,096 bytes of" in str(allocation_error(4096, OSError("full")))
