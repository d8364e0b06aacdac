"""Stop: bounded, idempotent, from anywhere; nothing is left (the census sees to that)."""

import copy
import threading
import time
import warnings
from functools import partial

import pytest
from helpers import (
    LIMIT,
    backend_of,
    check_prompt,
    collect_until,
    counting,
    retry_if_disturbed,
    wait_until,
)

from enqueuer import (
    Closed,
    GeneratorEnqueuer,
    InvalidState,
    OrderedEnqueuer,
    StartError,
    StopWarning,
)
from enqueuer.enqueuers.enqueuer import core_of


@pytest.mark.thorough("processes")
@retry_if_disturbed
def test_stop_is_prompt_when_workers_are_cooperative(backend):
    with GeneratorEnqueuer(counting, workers=4, **backend) as enqueuer:
        next(iter(enqueuer))
        before = time.monotonic()
        enqueuer.stop()
        check_prompt(time.monotonic() - before, 1)  # 0.2 s, on a machine with nothing else to do


@pytest.mark.thorough("processes")
def test_stop_is_idempotent_and_harmless_before_start(backend):
    enqueuer = GeneratorEnqueuer(counting, workers=2, **backend)
    enqueuer.stop()
    enqueuer.start()
    enqueuer.stop()
    enqueuer.stop()
    assert not enqueuer.is_running()


def test_stop_ends_a_consumer_that_waits(backend):
    def source():
        yield 1
        time.sleep(2)

    enqueuer = GeneratorEnqueuer(source, **backend)
    seen = []
    with enqueuer:
        consumer = threading.Thread(target=lambda: seen.extend(enqueuer))
        consumer.start()
        wait_until(
            lambda: (
                not core_of(enqueuer).locks.lock.acquire(blocking=False)
                or core_of(enqueuer).locks.lock.release()
            )
        )
        enqueuer.stop(timeout=0.1) if backend_of(backend) == "process" else _stop_quietly(enqueuer)
        consumer.join(LIMIT)
        assert not consumer.is_alive()
    assert seen in ([], [1])


def _stop_quietly(enqueuer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StopWarning)
        enqueuer.stop(timeout=0.1)


@pytest.mark.thorough("processes")
def test_stop_may_be_called_inside_the_loop(backend):
    enqueuer = GeneratorEnqueuer(counting, workers=2, **backend)
    seen = []
    with enqueuer:
        for batch in enqueuer:
            seen.append(batch)
            if len(seen) == 3:
                enqueuer.stop()
    assert seen == [(0, 0), (1, 0), (0, 1)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_generator_may_stop_its_own_enqueuer(workers):
    ends = []

    def source():
        try:
            yield 1
            enqueuer.stop()
            yield 2
        finally:
            ends.append(threading.current_thread())

    enqueuer = GeneratorEnqueuer(source, workers=workers)
    with enqueuer:
        assert list(enqueuer) in ([1], [])
    assert len(ends) == 1


@pytest.mark.thorough("processes")
@pytest.mark.parametrize("how", ["stop", "break", "end"])
def test_finally_runs_in_the_worker(backend, how, tmp_path):
    def source(shard):
        try:
            yield from range(5 * shard.index, 5 * shard.index + 5)
            while how != "end":
                yield 5
        finally:
            (tmp_path / f"{shard.index}").touch()

    enqueuer = GeneratorEnqueuer(source, workers=2, **backend)
    for number, _ in enumerate(enqueuer):
        if number == 1 and how == "break":  # both generators are under way
            break
        if number == 1 and how == "stop":
            enqueuer.stop()
    del enqueuer
    collect_until(lambda: sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"])


@pytest.mark.thorough("processes")
def test_with_stops_and_lets_the_loops_own_error_through(backend):
    with pytest.raises(ZeroDivisionError):
        with GeneratorEnqueuer(counting, workers=2, **backend) as enqueuer:
            for _ in enqueuer:
                1 / 0  # noqa: B018  # the point of it
    assert not enqueuer.is_running()


def test_get_before_start_is_an_error():
    enqueuer = GeneratorEnqueuer(counting)
    with pytest.raises(InvalidState, match=r"cannot get\(\) from it before start\(\)"):
        enqueuer.get()
    with pytest.raises(InvalidState, match=r"cannot get\(\) from its queue before start\(\)"):
        enqueuer.queue.get()
    assert enqueuer.queue.empty()
    assert enqueuer.queue.qsize() == 0


@pytest.mark.thorough("processes")
def test_use_after_stop_is_an_error(backend):
    enqueuer = GeneratorEnqueuer(counting, **backend)
    with enqueuer:
        batches = iter(enqueuer)
    assert list(batches) == []
    uses = [enqueuer.get, enqueuer.queue.get, *(partial(use, enqueuer) for use in (iter, aiter))]
    for use in uses:
        with pytest.raises((InvalidState, Closed), match=r"after stop\(\)"):
            use()


@pytest.mark.parametrize(
    ("timeout", "error"), [(-1, ValueError), (float("nan"), ValueError), ("1", TypeError)]
)
def test_a_bad_timeout_is_refused(timeout, error):
    with GeneratorEnqueuer(counting) as enqueuer:
        with pytest.raises(error, match="timeout must be"):
            enqueuer.stop(timeout=timeout)
        with pytest.raises(error, match="timeout must be"):
            enqueuer.queue.get(timeout=timeout)


@pytest.mark.local
def test_an_enqueuer_that_starts_anew_is_no_new_one():
    """Code of the source, which runs in start(), cannot copy it, or start it once more."""
    seen = []

    class Elements:
        def __iter__(self):
            if seen:
                assert "STOPPED" in repr(enqueuer)
                with pytest.raises(TypeError, match="cannot be pickled"):
                    copy.copy(enqueuer)
                with pytest.raises(InvalidState, match="after stop"):
                    iter(enqueuer)
            seen.append(self)
            yield from range(5)

    enqueuer = OrderedEnqueuer(Elements(), str)
    for _ in range(2):
        with enqueuer:
            assert list(enqueuer) == list("01234")
    assert len(seen) == 2


@pytest.mark.thorough("processes")
@pytest.mark.local
@pytest.mark.ahead
def test_a_start_that_fails_changes_nothing(monkeypatch, backend):
    def source(shard):
        yield shard.count

    def refused(worker_pool, index):
        if index == 3:
            raise StartError("no more of them")
        return start_worker(worker_pool, index)

    with GeneratorEnqueuer(source, workers=2, random_seed=1, **backend) as enqueuer:
        assert list(enqueuer) == [2, 2]
        pool = type(core_of(enqueuer).run.backend.pool)
    start_worker = pool.start_worker
    with monkeypatch.context() as patched:
        patched.setattr(pool, "start_worker", refused)
        with pytest.raises(StartError):
            enqueuer.start(workers=9)
    enqueuer.start()
    assert list(enqueuer) == [2, 2]
    enqueuer.stop()
