"""What must come through: equal, of the same type, writable, and unharmed by the generator."""

import collections
import dataclasses
import functools
import gc
import itertools
import sys
import threading
import weakref

import numpy as np
import psutil
import pytest
from helpers import LIMIT, run_in_threads, wait_until

from enqueuer import GeneratorEnqueuer, OverwrittenDataWarning
from enqueuer.backends import thread_channel
from enqueuer.backends.thread_channel import ThreadInbox, WorkQueue, wait_for_any
from enqueuer.monitoring import duplicates

LARGE = 50_000


class Image(np.ndarray):
    """A subclass with an attribute of its own, and pickle told about it."""

    source = ""

    def __reduce__(self):
        function, arguments, state = super().__reduce__()
        return function, arguments, (state, self.source)

    def __setstate__(self, state):
        super().__setstate__(state[0])
        self.source = state[1]


Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Batch:
    """A batch as people write it."""

    x: np.ndarray
    names: list


def image():
    array = np.arange(LARGE).view(Image)
    array.source = "camera"
    return array


def masked(size):
    return np.ma.array(np.arange(size), mask=np.arange(size) % 3 == 0, fill_value=7)


def read_only():
    array = np.arange(LARGE)
    array.flags.writeable = False
    return array


def of(dtype):
    """Return a small and a large array of a dtype."""
    return [np.arange(size).astype(dtype) for size in (3, LARGE)]


STRUCTURED = np.dtype([("a", "i1"), ("b", "f8", (2,)), ("c", "S3")], align=True)
ITEMS = {
    **{dtype: of(dtype) for dtype in ("f2", "f4", "f8", "g", "c8", "c16", "G", "?", "u1", ">i8")},
    **{dtype: of(dtype) for dtype in ("M8[ns]", "m8[D]", "S6", "U6", "O")},
    "structured": [np.zeros(3, STRUCTURED), np.ones(LARGE, STRUCTURED)],
    "no bytes": [np.zeros((0, 3)), np.zeros(3, "S0"), np.zeros((LARGE, 0), "M8[s]")],
    "no dimension": [np.array(1.5), np.array("text"), np.float32(2), np.datetime64("2020-01-01")],
    "fortran": [np.asfortranarray(np.arange(size).reshape(2, -1)) for size in (6, LARGE)],
    "strided": [np.arange(size).reshape(2, -1)[:, ::-2] for size in (6, LARGE)],
    "strided times": [np.arange(LARGE).astype("M8[s]")[::2]],
    "transposed": [np.arange(LARGE).reshape(10, 50, -1).transpose(2, 0, 1)],
    "broadcast": [np.broadcast_to(1.5, (300, 300))],
    "read-only": [read_only()],
    "masked": [masked(5), masked(LARGE), np.ma.array([1, 2]), np.ma.array([(1, 2.0)], "i,f")],
    "records": [np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])],
    "subclass": [image()],
    "bytes": [b"small", bytes(LARGE), bytearray(LARGE), "x" * LARGE],
    "containers": [
        {"dict": {"list": [1, (2, {3}), None]}, 5: frozenset("ab"), None: collections.deque([1])},
        Pair(np.arange(LARGE), np.arange(3)),
        collections.OrderedDict(b=1, a=2),
        [np.arange(LARGE + n) for n in range(20)],
    ],
    "dataclass": [Batch(np.arange(LARGE), ["a", "b"])],
    "long byte strings": [
        {"jpeg": [bytes([n]) * (70_000 + n) for n in range(4)], "x": np.arange(LARGE)},
        [bytearray(b"12") * LARGE * 20, b"short", b"ab" * LARGE * 20],
    ],
    "plain": [0, -(10**30), 1.5, True, "ü", 1j, float("inf"), range(3), slice(1, 2), Ellipsis],
}


def everything(shard):
    for values in ITEMS.values():
        yield from values


def assert_same(got, sent):
    assert type(got) is type(sent)
    if isinstance(sent, np.ndarray):
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert got.flags.f_contiguous or not sent.flags.f_contiguous
        np.testing.assert_array_equal(np.ma.getdata(got), np.ma.getdata(sent))
        np.testing.assert_array_equal(np.ma.getmask(got), np.ma.getmask(sent))
    elif isinstance(sent, dict):
        assert list(got) == list(sent)
        for key in sent:
            assert_same(got[key], sent[key])
    elif isinstance(sent, (list, tuple)):
        for pair in zip(got, sent, strict=True):
            assert_same(*pair)
    elif isinstance(sent, Batch):
        assert_same(vars(got), vars(sent))
    else:
        assert got == sent


@pytest.mark.thorough("processes")
def test_everything_comes_through_equal(backend):
    with GeneratorEnqueuer(everything, **backend) as enqueuer:
        for got, sent in zip(enqueuer, everything(None), strict=True):
            assert_same(got, sent)
            if isinstance(sent, Image):
                assert got.source == "camera"
            if isinstance(sent, np.ma.MaskedArray):
                assert got.fill_value == sent.fill_value


@pytest.mark.writes
def test_arrays_arrive_writable_and_apart(process):
    with GeneratorEnqueuer(everything, **process) as enqueuer:
        for got, sent in zip(enqueuer, everything(None), strict=True):
            # numpy keeps a read-only array so; a broadcast one cannot be written to either
            if isinstance(got, np.ndarray) and sent.flags.writeable and got.size:
                got[...] = got.flat[0]


def mapped(path):
    array = np.load(path, mmap_mode="r")
    yield array[10 : LARGE // 10]
    yield array[:3]


def test_a_slice_of_a_mapped_file_comes_through(backend, tmp_path):
    source = functools.partial(mapped, str(tmp_path / "array.npy"))
    np.save(tmp_path / "array.npy", np.arange(LARGE).reshape(-1, 10))
    with GeneratorEnqueuer(source, **backend) as enqueuer:
        for got, sent in zip(enqueuer, source(), strict=True):
            assert isinstance(got, np.memmap)
            np.testing.assert_array_equal(got, sent)


def reuses_its_buffer(shard):
    large, small = np.empty(LARGE), np.empty(3)
    strided = np.empty((LARGE, 2))[:, 0]
    batch = {"large": large, "small": small, "strided": strided, "list": []}
    for number in range(30):
        large[:] = small[:] = strided[:] = number
        batch["list"].append(number)
        yield batch


def test_a_generator_may_use_its_buffers_again(process):
    with GeneratorEnqueuer(reuses_its_buffer, max_queue_size=64, **process) as enqueuer:
        batches = list(enqueuer)
    for number, batch in enumerate(batches):
        for key in ("large", "small", "strided"):
            assert (batch[key] == number).all()
        assert batch["list"] == list(range(number + 1))


def numbered(shard):
    for number in range(100):
        yield np.full(LARGE, number), np.full(LARGE, -number)


@pytest.mark.thorough
@pytest.mark.writes
def test_what_is_kept_stays_as_it_was_also_after_stop(process):
    with GeneratorEnqueuer(numbered, max_queue_size=3, **process) as enqueuer:
        kept = [(a, memoryview(b[LARGE // 2 :])) for a, b in enqueuer]
    gc.collect()
    for number, (a, b) in enumerate(kept):
        assert (a == number).all() and a.flags.writeable
        assert (np.asarray(b) == -number).all()


@pytest.mark.thorough
def test_batches_may_be_dropped_in_any_thread(process):
    """A lease ends where the last reference goes; that takes no lock, so it cannot hang."""
    with GeneratorEnqueuer(numbered, max_queue_size=3, **process) as enqueuer:
        for _ in range(5):
            hold = [list(enqueuer)]
            run_in_threads([hold.clear] * 4)


def huge(shard):
    yield {"array": np.full((9, 1 << 28), 7, np.uint8), "bytes": b"7" * (1 << 20)}
    yield b"7" * ((1 << 31) + 1000)


@pytest.mark.skipif(psutil.virtual_memory().available < 14e9, reason="needs 14 GB of memory")
@pytest.mark.timeout(600)  # 30 s alone, but several times that where others want memory, too
@pytest.mark.thorough
def test_more_than_2_gib_come_through():
    options = dict(max_queue_size=1, stall_timeout=None)  # fresh memory may take a minute
    with GeneratorEnqueuer(huge, backend="process", **options) as enqueuer:
        batches = iter(enqueuer)
        batch = next(batches)
        assert batch["array"].shape == (9, 1 << 28)
        assert (batch["array"][:, :: 1 << 16] == 7).all() and batch["array"][-1, -1] == 7
        assert batch["bytes"] == b"7" * (1 << 20)
        del batch
        batch = next(batches)
        assert len(batch) == (1 << 31) + 1000 and batch[-1:] == b"7"
        del batch
        enqueuer.stop(timeout=LIMIT)  # so much memory is not given back at once


def one_buffer():
    batch = np.zeros((3, 1000))
    for number in range(5):
        batch[:] = number
        yield {"x": batch[:2]}


def two_buffers():
    buffers = np.zeros(3), np.zeros(3)
    for number in range(6):
        buffers[number % 2][:] = number
        yield buffers[number % 2]


def one_list():
    batch = []
    for number in range(5):
        batch.append(number)
        yield batch


@pytest.mark.parametrize("source", [one_buffer, two_buffers, one_list])
def test_a_buffer_that_is_used_again_while_it_waits_is_told_of_once(source, no_warnings):
    def run():
        with GeneratorEnqueuer(source) as enqueuer:
            wait_until(lambda: enqueuer.queue.qsize() >= 5)
            return list(enqueuer)

    says = "shard 0 was changed .* yield a copy"
    with pytest.warns(OverwrittenDataWarning, match=says) as caught:
        assert len(run()) >= 5
    assert len(caught) == 1


def constants():
    constant = np.arange(1000), [1, 2], "text"
    yield from [constant] * 40


def ring():
    buffers = np.zeros((4, 100))
    for number in range(40):
        buffers[number % 4] = number
        yield buffers[number % 4]


@pytest.mark.parametrize(
    ("source", "size"), [(constants, 10), (ring, 2), (lambda: iter([1] * 40), 10)]
)
def test_what_stays_as_it_was_is_not_told_of(source, size, no_warnings):
    with GeneratorEnqueuer(source, max_queue_size=size) as enqueuer:
        wait_until(lambda: enqueuer.queue.qsize() == size)
        assert len(list(enqueuer)) == 40


def test_a_loop_may_change_what_it_has(no_warnings):
    with GeneratorEnqueuer(lambda: (np.zeros(3) for _ in range(40))) as enqueuer:
        for batch in enqueuer:
            batch += 1


def test_a_loop_may_take_and_change_a_batch_while_that_is_looked_at(no_warnings, monkeypatch):
    inbox = ThreadInbox(4)
    sender = thread_channel.ThreadSender(0, inbox, WorkQueue(), WorkQueue(), measured=False)

    def digest(batch):
        for _ in inbox.take(1):
            batch += 1
        return duplicates.digest(batch)

    monkeypatch.setattr(thread_channel, "digest", digest)
    for number in range(4):
        sender.send_item(0, number, np.zeros(3))


class Lazy:
    """A batch that loads its data when the loop asks for them."""

    @functools.cached_property
    def data(self):
        return object()


def test_batches_that_come_again_may_have_been_loaded_meanwhile(no_warnings):
    batches = [Lazy() for _ in range(3)]
    with GeneratorEnqueuer(lambda: iter(batches * 10)) as enqueuer:
        assert all(batch.data for batch in enqueuer)


def test_a_warning_of_reuse_that_is_made_an_error_comes_to_the_loop(no_warnings):
    closed = threading.Event()

    def source():
        try:
            yield from one_buffer()
        finally:
            closed.set()

    with GeneratorEnqueuer(source) as enqueuer:
        assert closed.wait(LIMIT)
        with pytest.raises(OverwrittenDataWarning):
            list(enqueuer)


def test_each_item_arrives_before_the_generator_makes_the_next(backend, tmp_path):
    def source():
        for number in range(4):
            yield number
            wait_until((tmp_path / str(number)).exists)

    with GeneratorEnqueuer(source, max_queue_size=200, **backend) as enqueuer:
        for number in enqueuer:
            (tmp_path / str(number)).touch()
    assert (tmp_path / "3").exists()


@pytest.mark.parametrize("line", range(6))
def test_a_loop_gets_an_item_that_comes_while_it_begins_to_wait(line):
    may_go_on, taken, lines = threading.Event(), threading.Event(), itertools.count()

    def source():
        yield 0
        assert may_go_on.wait(LIMIT)
        yield 1
        assert taken.wait(LIMIT)

    def trace(frame, event, _):
        if frame.f_code is not wait_for_any.__code__:
            return None
        if event == "line" and next(lines) == line:
            may_go_on.set()
            (inbox,) = frame.f_locals["inboxes"]
            wait_until(lambda: inbox.waiting)
        return trace

    with GeneratorEnqueuer(source) as enqueuer:
        batches = iter(enqueuer)
        assert next(batches) == 0
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            assert next(batches) == 1
        finally:
            sys.settrace(before)
        taken.set()
        assert list(batches) == []


def test_a_worker_keeps_no_item_that_the_loop_has_dropped():
    kept, may_go_on = [], threading.Event()

    def batches():
        for _ in range(40):
            batch = np.zeros(3)
            kept.append(weakref.ref(batch))
            yield batch
            del batch
        assert may_go_on.wait(LIMIT)

    with GeneratorEnqueuer(batches, max_queue_size=64) as enqueuer:
        wait_until(lambda: len(kept) == 40)
        for _ in itertools.islice(enqueuer, 40):
            pass
        del _
        assert [ref for ref in kept if ref() is not None] == []
        may_go_on.set()


def test_objects_of_local_classes_with_slots_arrive(backend):
    class Point:
        __slots__ = ("x", "y")

    class Place(Point):
        __slots__ = "z"

    @dataclasses.dataclass(slots=True)
    class Pair:
        one: int
        other: object = None

    def source(shard):
        place = Place()
        place.x, place.z = 1, 3
        yield place, Pair(1)

    with GeneratorEnqueuer(source, **backend) as enqueuer:
        ((place, pair),) = list(enqueuer)
    assert (type(place).__name__, place.x, place.z, hasattr(place, "y")) == ("Place", 1, 3, False)
    assert (pair.one, pair.other) == (1, None)
