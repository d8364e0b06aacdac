"""The Keras form: code pasted from Keras 2 or EAST runs with only its import changed."""

import copy
import pickle
import queue
import threading
import time

import pytest
from helpers import LIMIT, counting, twelve, wait_until

from enqueuer import DuplicateDataWarning, GeneratorEnqueuer, InvalidState

pytestmark = pytest.mark.filterwarnings("ignore::enqueuer.DuplicateDataWarning")


def generator(batch_size):
    for number in range(100):
        yield [number] * batch_size


@pytest.mark.parametrize("use_multiprocessing", [False, True])
def test_start_next_get_stop(use_multiprocessing):
    enqueuer = GeneratorEnqueuer(
        generator(batch_size=32),
        use_multiprocessing=use_multiprocessing,
        wait_time=0.05,
        random_seed=7,
    )
    enqueuer.start(workers=4, max_queue_size=10)
    batches = [next(enqueuer.get()) for _ in range(8)]
    enqueuer.stop(timeout=5)
    if use_multiprocessing:  # four copies, as ever
        assert [batch[0] for batch in batches] == [0, 0, 0, 0, 1, 1, 1, 1]
    else:
        assert [batch[0] for batch in batches] == list(range(8))
    assert enqueuer.random_seed == 7


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("max_queue_size", [1, 10])
@pytest.mark.parametrize("use_multiprocessing", [False, True])
def test_the_loop_of_east(use_multiprocessing, workers, max_queue_size):
    def get_batch(num_workers):
        enqueuer = None
        try:
            enqueuer = GeneratorEnqueuer(
                generator(batch_size=2), use_multiprocessing=use_multiprocessing
            )
            enqueuer.start(max_queue_size=max_queue_size, workers=num_workers)
            generator_output = None
            while True:
                while enqueuer.is_running():
                    if not enqueuer.queue.empty():
                        generator_output = enqueuer.queue.get()
                        break
                    else:
                        time.sleep(0.01)
                yield generator_output
                generator_output = None
        finally:
            if enqueuer is not None:
                enqueuer.stop()

    batches = get_batch(workers)
    copies = workers if use_multiprocessing else 1
    expected = [number for number in range(100) for _ in range(copies)]
    assert [next(batches)[0] for _ in range(100)] == expected[:100]
    for _ in range(100 * copies - 100):
        next(batches)
    assert next(batches) is None  # a finite generator has ended, and nothing hangs
    batches.close()


def test_the_loop_of_east_gets_the_error(backend):
    def broken():
        yield 1
        raise KeyError("image")

    enqueuer = GeneratorEnqueuer(broken, **backend)
    enqueuer.start()
    outputs = []
    with pytest.raises(KeyError, match="image"):
        while enqueuer.is_running():
            if not enqueuer.queue.empty():
                outputs.append(enqueuer.queue.get())
            else:
                time.sleep(0.01)
    enqueuer.stop()
    assert outputs == [1]


def test_the_queue_tells_what_waits(backend):
    with GeneratorEnqueuer(counting, workers=2, max_queue_size=6, **backend) as enqueuer:
        wait_until(lambda: enqueuer.queue.qsize() == 6)
        assert not enqueuer.queue.empty()
        assert enqueuer.queue.get() == (0, 0)
        assert enqueuer.queue.get_nowait() == (1, 0)


def test_a_timeout_of_get_loses_nothing(backend, tmp_path):
    def source():
        while not (tmp_path / "gate").exists():
            time.sleep(0.01)
        yield "late"

    with GeneratorEnqueuer(source, **backend) as enqueuer:
        assert enqueuer.queue.empty()
        with pytest.raises(queue.Empty):
            enqueuer.queue.get(timeout=0.05)
        with pytest.raises(queue.Empty):
            enqueuer.queue.get_nowait()
        (tmp_path / "gate").touch()
        assert enqueuer.queue.get(timeout=LIMIT) == "late"


def test_many_consumers_get_each_batch_once(backend):
    taken = [[] for _ in range(4)]

    with GeneratorEnqueuer(lambda s: iter(s.split(range(2000))), workers=2, **backend) as enqueuer:
        batches = iter(enqueuer)
        threads = [
            threading.Thread(target=lambda mine=mine: mine.extend(batches)) for mine in taken
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
    assert sorted(number for mine in taken for number in mine) == list(range(2000))
    assert all(mine == sorted(mine) for mine in taken)


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="backend must be 'thread', 'process' or 'ray', got"):
        GeneratorEnqueuer(twelve, backend="ray2")
    with pytest.raises(ValueError, match="contradict each other"):
        GeneratorEnqueuer(twelve, use_multiprocessing=True, backend="thread")
    with pytest.raises(TypeError, match="options such as workers go by name"):
        GeneratorEnqueuer(twelve, 4)
    with pytest.raises(ValueError, match="mp_context must be one of 'fork'"):
        GeneratorEnqueuer(twelve, backend="process", mp_context="thread")
    with pytest.raises(ValueError, match="mp_context is about processes"):
        GeneratorEnqueuer(twelve, mp_context="fork")
    with pytest.raises(ValueError, match="address is about Ray; give backend='ray'"):
        GeneratorEnqueuer(twelve, address="auto")
    with pytest.raises(ValueError, match="is that of Ray Client, which cannot stream"):
        GeneratorEnqueuer(twelve, backend="ray", address="ray://head:10001")
    with pytest.raises(ValueError, match="ray_options cannot set name"):
        GeneratorEnqueuer(twelve, backend="ray", ray_options={"name": "mine"})
    with pytest.raises(ValueError, match="forward_logs must be True, False or"):
        GeneratorEnqueuer(twelve, forward_logs="all")
    with pytest.raises(ValueError, match="works with forked processes only"):
        GeneratorEnqueuer(twelve, forward_logs="multiprocessing-logging")


def test_repr_is_a_status_line(backend):
    enqueuer = GeneratorEnqueuer(counting, workers=2, max_queue_size=6, **backend)
    assert repr(enqueuer) == "<GeneratorEnqueuer NEW 2 workers>"
    with enqueuer:
        wait_until(lambda: repr(enqueuer) == "<GeneratorEnqueuer RUNNING 2 workers, 6/6 waiting>")
    assert repr(enqueuer) == "<GeneratorEnqueuer STOPPED 2 workers>"


def test_only_a_new_enqueuer_can_be_pickled_or_copied(backend):
    enqueuer = GeneratorEnqueuer(twelve, workers=2, random_seed=3, **backend)
    for twin in (pickle.loads(pickle.dumps(enqueuer)), copy.copy(enqueuer)):
        assert twin.random_seed == 3
        with twin:
            assert list(twin) == list(range(12))
    with enqueuer, pytest.raises(TypeError, match="as it owns workers"):
        pickle.dumps(enqueuer)


def test_a_context_of_multiprocessing_is_taken():
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    with GeneratorEnqueuer(twelve, backend="process", mp_context=context) as enqueuer:
        assert list(enqueuer) == list(range(12))


def test_a_queue_does_not_keep_its_enqueuer_alive():
    waiting = GeneratorEnqueuer(twelve).queue
    with pytest.raises(InvalidState, match="is gone"):
        waiting.empty()


def test_the_warning_class_is_public():
    assert issubclass(DuplicateDataWarning, UserWarning)
