"""`empty` gives arrays that need no copy, and are never shared in silence."""

import multiprocessing
import os

import numpy as np
import pytest

from enqueuer import GeneratorEnqueuer, empty, empty_like
from enqueuer.transport import blocks
from enqueuer.workers import arrays

SHAPE = (100, 1000)


def blocks_made():
    """Return how many blocks this worker has made so far."""
    return arrays.allocate.__self__.count


def made(shard):
    for number in range(50):
        batch = empty(SHAPE, "f4")
        batch[:] = number
        yield batch


def nested(shard):
    for number in range(20):
        images, labels = empty(SHAPE, np.uint8), empty(SHAPE[0], int)
        other = empty_like(images, "f8")
        images[:], labels[:], other[:] = number, number, number
        yield {"x": (images[:50], images[50:]), "y": labels, "more": [other.T, np.arange(5000)]}


def is_full_of(number, nest):
    if isinstance(nest, dict):
        return all(is_full_of(number, part) for part in nest.values())
    if isinstance(nest, (list, tuple)):
        return all(is_full_of(number, part) for part in nest)
    return (nest == number).all() or (nest == np.arange(5000)).all()


@pytest.mark.thorough("processes")
@pytest.mark.writes
@pytest.mark.parametrize("source", [made, nested])
def test_the_same_batches_arrive_on_every_backend(backend, source):
    with GeneratorEnqueuer(source, max_queue_size=3, **backend) as enqueuer:
        for _ in range(2):
            kept = list(enqueuer)
            assert all(is_full_of(number, batch) for number, batch in enumerate(kept))
    assert all(is_full_of(number, batch) for number, batch in enumerate(kept))
    for batch in kept:
        if isinstance(batch, np.ndarray):
            # The array belongs to the consumer.
            batch += 1


def counts_copies(shard):
    copies = []
    copy = blocks.copy_part
    blocks.copy_part = lambda part, *place: (copies.append(part.nbytes), copy(part, *place))
    yield from SOURCES[os.environ["SOURCE"]]()
    yield copies


def plain():
    for _ in range(5):
        yield empty(SHAPE)


def a_view_and_a_nest():
    for _ in range(5):
        array = empty(SHAPE)
        yield {"x": array[:60], "y": (array[60:].reshape(-1),), "z": 1}


def transposed():
    for _ in range(5):
        yield empty(SHAPE).T


def keeps_a_view():
    for number in range(5):
        array = empty(SHAPE)
        flat = array.reshape(-1)
        flat[:] = number
        yield array
        flat[:] = -1


def small():
    for _ in range(5):
        yield empty(10)


SOURCES = {f.__name__: f for f in (plain, a_view_and_a_nest, transposed, keeps_a_view, small)}


@pytest.mark.local
@pytest.mark.parametrize(
    ("source", "copies"),
    [
        ("plain", 0),
        ("a_view_and_a_nest", 0),
        ("transposed", 0),
        ("keeps_a_view", 5),
        ("small", 0),
    ],
)
def test_only_what_could_be_written_to_unnoticed_is_copied(
    process, source, copies, monkeypatch, caplog
):
    monkeypatch.setenv("SOURCE", source)
    with GeneratorEnqueuer(counts_copies, **process) as enqueuer:
        *batches, copied = enqueuer
    assert len(batches) == 5
    assert len(copied) == copies
    assert caplog.text.count("`del` that view before the yield") == bool(copies)
    if source == "keeps_a_view":
        assert all((batch == number).all() for number, batch in enumerate(batches))


def writes_too_late(shard):
    array = empty(SHAPE)
    array[:] = 1
    yield array
    array[:] = 2


@pytest.mark.local
def test_writing_after_the_yield_is_an_error(process):
    with GeneratorEnqueuer(writes_too_late, **process) as enqueuer:
        batches = iter(enqueuer)
        assert (next(batches) == 1).all()
        with pytest.raises(ValueError, match="read-only"):
            next(batches)


def yields_it_again(shard):
    array = empty(SHAPE)
    array[:] = 3
    yield array
    yield array
    yield {"again": array}


def test_the_same_array_yielded_again_comes_as_a_copy(process):
    with GeneratorEnqueuer(yields_it_again, **process) as enqueuer:
        one, two, three = enqueuer
    assert not np.shares_memory(one, two)
    assert (one == 3).all() and (two == 3).all() and (three["again"] == 3).all()


def keeps_all(shard):
    kept = []
    for number in range(30):
        array = empty(SHAPE)
        array[:] = number
        kept.append(array)
        yield array
    yield [bool((array == number).all()) for number, array in enumerate(kept)]


def test_what_the_generator_keeps_is_never_overwritten(process):
    with GeneratorEnqueuer(keeps_all, max_queue_size=2, **process) as enqueuer:
        for batch in enqueuer:
            if isinstance(batch, list):
                assert all(batch)


def never_yields_it(shard):
    for _ in range(200):
        array = empty(SHAPE)
        array[:] = 1
    yield blocks_made()


@pytest.mark.local
def test_an_array_that_was_never_yielded_is_used_again(process):
    with GeneratorEnqueuer(never_yields_it, **process) as enqueuer:
        (blocks,) = enqueuer
    assert blocks <= 3


def makes_them_in_a_child(shard):
    queue = multiprocessing.get_context("fork").SimpleQueue()
    pid = os.fork()
    if not pid:
        array = empty(SHAPE)
        queue.put(array.flags.owndata)
        os._exit(0)
    os.waitpid(pid, 0)
    yield queue.get()


def test_a_process_that_the_generator_forks_gets_ordinary_arrays(process):
    with GeneratorEnqueuer(makes_them_in_a_child, **process) as enqueuer:
        assert list(enqueuer) == [True]


def test_elsewhere_it_is_numpys():
    assert empty(100_000).flags.owndata
    assert empty((2, 3), "i4").dtype == np.int32
    assert empty_like(np.zeros((2, 3), bool)).dtype == bool
    with pytest.raises(ValueError, match="negative"):
        empty(-1)


def odd_shapes(shard):
    shapes = [(0, 5), 10**5, np.int64(70_000), [300, 300]]
    for shape, dtype in zip(shapes, ["f4", "O", ">f8", "?"], strict=True):
        array = empty(shape, dtype)
        array[...] = 1
        yield array


def test_odd_shapes_and_dtypes(backend):
    with GeneratorEnqueuer(odd_shapes, **backend) as enqueuer:
        got = [(batch.shape, batch.dtype, bool((batch == 1).all())) for batch in enqueuer]
    assert got == [
        ((0, 5), np.dtype("f4"), True),
        ((100_000,), np.dtype("O"), True),
        ((70_000,), np.dtype(">f8"), True),
        ((300, 300), np.dtype("?"), True),
    ]
