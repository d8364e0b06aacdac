"""An async function as `map`: its coroutines run at once on one event loop of each worker."""

import asyncio
import functools
import logging
import re
import threading
import time

import pytest
from helpers import LIMIT, timeout_of, wait_until

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, imap, replay


def drawn(element, task):
    return None if element % 5 == 4 else (element, task.epoch, int(task.rng.integers(1000)))


async def awaited(element, task):
    # The earlier ones take longer.
    await asyncio.sleep(0.001 * (10 - element % 10))
    return drawn(element, task)


@pytest.mark.thorough
@pytest.mark.parametrize("batch_size", [None, 4])
def test_results_are_those_of_a_plain_function_in_order(backend, batch_size):
    given = dict(random_seed=7, shuffle=True, batch_size=batch_size)
    given |= {} if batch_size is None else {"collate": list}
    with OrderedEnqueuer(range(40), drawn, **given) as plain:
        whole = [list(plain) for _ in range(2)]
    with OrderedEnqueuer(range(40), awaited, **{"workers": 2, **backend}, **given) as enqueuer:
        assert [list(enqueuer) for _ in range(2)] == whole


@pytest.mark.thorough("processes")
def test_one_coroutine_at_a_time_does_quick_tasks(options):
    """In a process, quick tasks share packets, unless several run at once."""

    async def double(element):
        return 2 * element

    with OrderedEnqueuer(range(300), double, concurrency=1, **options) as enqueuer:
        for _ in range(3):
            assert list(enqueuer) == list(range(0, 600, 2))


class Meeting:
    """Coroutines that wait until so many of them run at once."""

    def __init__(self, count):
        self.count, self.met = count, 0

    async def __call__(self, element):
        self.met += 1
        end = time.monotonic() + LIMIT
        while self.met < self.count and time.monotonic() < end:
            await asyncio.sleep(0.001)
        return self.met >= self.count


@pytest.mark.thorough("processes")
@pytest.mark.parametrize(
    ("given", "count"), [({}, 16), ({"concurrency": 40}, 40), ({"batch_size": 16}, 16)]
)
def test_sixteen_run_at_once_or_as_many_as_are_given(options, given, count):
    with OrderedEnqueuer(range(count), Meeting(count), **given, **options) as enqueuer:
        for results in enqueuer:
            assert results if isinstance(results, bool) else results.all()


def test_all_coroutines_of_a_worker_run_on_one_loop(options):
    async def loop_of(element):
        await asyncio.sleep(0.001)
        return id(asyncio.get_running_loop())

    assert len(set(imap(loop_of, range(30), **options))) == 1


async def awaited_sum(a, b):
    return a + b


async def fails(element):
    await asyncio.sleep(0)
    return await inner(element)


async def inner(element):
    if element == 7:
        raise ValueError("of element 7")
    return element


def test_an_error_comes_in_its_place_with_its_traceback(backend):
    with OrderedEnqueuer(range(20), fails, **backend) as enqueuer:
        seen = []
        with pytest.raises(ValueError, match="of element 7") as caught:
            for result in enqueuer:
                seen.append(result)
    assert seen == list(range(7))
    assert [frame.name for frame in caught.traceback][-2:] == ["fails", "inner"]
    assert "element 7" in "".join(caught.value.__notes__)
    with pytest.raises(ValueError, match="of element 7"):
        replay(caught.value)


def test_errors_are_skipped(backend, caplog):
    caplog.set_level(logging.CRITICAL)
    with OrderedEnqueuer(range(20), fails, on_error="skip", **backend) as enqueuer:
        assert list(enqueuer) == [n for n in range(20) if n != 7]
        assert enqueuer.error_count == 1


async def is_slow_within(folder, element):
    (folder / f"begun-{element}").touch()
    await deep_wait()


async def deep_wait():
    await asyncio.sleep(LIMIT)


@pytest.mark.thorough("processes")
def test_a_stall_report_has_the_stack_of_the_coroutine(options, tmp_path):
    is_slow = functools.partial(is_slow_within, tmp_path)
    with OrderedEnqueuer(range(3), is_slow, timeout=0.3, **options) as enqueuer:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 3)
        assert "deep_wait" in timeout_of(enqueuer)


def test_automatic_workers_begin_with_sixteen_at_once():
    with OrderedEnqueuer(range(200), awaited, workers="auto") as enqueuer:
        assert len(list(enqueuer)) == 160
        assert enqueuer.stats().workers[0].concurrency >= 16


def test_threads_for_blocking_calls_end_with_the_worker():
    async def blocks(element):
        return await asyncio.to_thread(abs, -element)

    assert list(imap(blocks, range(20))) == list(range(20))
    assert not any("asyncio" in thread.name for thread in threading.enumerate())


async def never_ends(folder, element):
    (folder / f"begun-{element}").touch()
    try:
        await asyncio.sleep(LIMIT)
    finally:
        (folder / f"ended-{element}").touch()


def test_stop_cancels_where_all_slots_are_taken(options, tmp_path):
    enqueuer = OrderedEnqueuer(
        range(40), functools.partial(never_ends, tmp_path), concurrency=3, **options
    )
    with enqueuer:
        wait_until(lambda: len(list(tmp_path.glob("begun-*"))) == 3)
    assert len(list(tmp_path.glob("ended-*"))) == 3


async def nested(element):
    return next(imap(awaited_sum_of, [element], workers=0))


async def awaited_sum_of(element):
    return await awaited_sum(1, element)


def test_a_coroutine_may_read_another_enqueuer(options):
    assert list(imap(nested, range(5), **options)) == [1, 2, 3, 4, 5]


async def computes(element):
    end = time.thread_time() + 0.005
    while time.thread_time() < end:
        pass
    return element


async def computing(shard):
    for number in range(60):
        yield await computes(number)


@pytest.mark.thorough
def test_the_cpu_time_of_the_event_loop_is_that_of_the_worker():
    for enqueuer in (OrderedEnqueuer(range(60), computes), GeneratorEnqueuer(computing)):
        with enqueuer:
            list(enqueuer)
            assert enqueuer.stats().workers[0].cpu_s > 0.2


def test_as_many_threads_run_elements_as_the_system_has_room_for(monkeypatch, caplog):
    start, started = threading.Thread.start, []

    def limited(thread):
        if thread.name.count(".") and len(started) >= 8:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with OrderedEnqueuer(range(40), lambda x: -x, concurrency=16) as enqueuer:
        assert list(enqueuer) == [-n for n in range(40)]
    assert any(re.search(r"runs \d elements at once, not 16", text) for text in caplog.messages)


async def several(element):
    yield element


async def joined(results):
    return results


def test_collate_is_not_async():
    with pytest.raises(TypeError, match="collate must not be async"):
        OrderedEnqueuer(range(3), batch_size=2, collate=joined)


def test_an_async_generator_is_no_map():
    with pytest.raises(TypeError, match="map must return the result of one element"):
        OrderedEnqueuer(range(3), several)
