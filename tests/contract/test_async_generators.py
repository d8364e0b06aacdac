"""An async generator function: the shards of one worker run side by side on its event loop."""

import asyncio
import functools
import itertools
import logging
import random
import sys
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest
from helpers import LIMIT, kill_once, rest_of, taken, timeout_of, wait_until

from enqueuer import (
    GeneratorEnqueuer,
    OrderedEnqueuer,
    WorkerError,
    imap,
    mix,
    prefetch,
    replay,
)


def drawn(shard, number):
    return None if number % 5 == 4 else (number, shard.epoch, int(shard.rng.integers(1000)))


def plain(shard):
    for number in shard.split(range(40)):
        yield drawn(shard, number)


async def awaited(shard):
    for number in shard.split(range(40)):
        # The earlier ones take longer.
        await asyncio.sleep(0.001 * (10 - number % 10))
        yield drawn(shard, number)


SAMPLES = [{}, {"batch_size": 3, "collate": list}, {"shuffle_buffer": 4}]
SAMPLES.append({**SAMPLES[1], **SAMPLES[2]})


@pytest.mark.thorough
@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("workers", [1, 2])
def test_items_are_those_of_a_plain_generator_in_order(backend, workers, samples):
    given = dict(random_seed=7, shards=5, **samples)
    with GeneratorEnqueuer(plain, **given) as enqueuer:
        whole = [list(enqueuer) for _ in range(2)]
    with GeneratorEnqueuer(awaited, workers=workers, **backend, **given) as enqueuer:
        assert [list(enqueuer) for _ in range(2)] == whole


class Meeting:
    """Async generators of which each waits, before some items, until all have come there.

    Args:
        count: Number of shards.
        items: Numbers of these items.
    """

    def __init__(self, count, items=(0,)):
        self.count, self.items = count, items
        self.met = dict.fromkeys(items, 0)

    async def __call__(self, shard):
        for item in range(3):
            has_met = True
            if item in self.items:
                self.met[item] += 1
                end = time.monotonic() + LIMIT
                while self.met[item] < self.count and time.monotonic() < end:
                    await asyncio.sleep(0.001)
                has_met = self.met[item] >= self.count
            yield has_met and (shard.index, item)


def test_shards_of_a_worker_run_side_by_side(options):
    with GeneratorEnqueuer(Meeting(12), shards=12, **options) as enqueuer:
        assert list(enqueuer) == [(shard, item) for item in range(3) for shard in range(12)]


@pytest.mark.parametrize("samples", [{"batch_size": 3}, {"shuffle_buffer": 3}])
def test_the_samples_of_their_first_batches_are_made_side_by_side(options, samples):
    source = Meeting(4, items=(0, 1, 2))
    with GeneratorEnqueuer(source, shards=4, collate=None, **samples, **options) as enqueuer:
        for batch in enqueuer:
            assert np.asarray(batch).ndim


def test_items_before_a_position_are_made_side_by_side(options):
    _, state = taken(GeneratorEnqueuer(Meeting(4, ()), shards=4, **options), 8)
    enqueuer = GeneratorEnqueuer(Meeting(4, (0, 1, 2)), shards=4, **options)
    assert rest_of(enqueuer, state) == [(shard, 2) for shard in range(4)]


def test_each_shard_makes_at_most_one_item_ahead():
    made = []

    async def counted(shard):
        for number in shard.split(range(80)):
            made.append(shard.index)
            yield number

    with GeneratorEnqueuer(counted, shards=4, max_queue_size=2) as enqueuer:
        for count, _ in enumerate(enqueuer):
            # Those that wait, and the one that the worker holds.
            assert len(made) <= count + 1 + 2 + 1 + 4
    assert len(made) == 80


def test_a_generator_may_change_what_it_has_yielded(process):
    async def reused(shard):
        array = np.zeros(1000)
        for number in shard.split(range(60)):
            array[:] = number
            yield array

    with GeneratorEnqueuer(reused, shards=3, max_queue_size=1, **process) as enqueuer:
        for number, array in enumerate(enqueuer):
            assert (array == number).all()


def test_a_generator_is_one_task(backend):
    async def in_tasks(shard):
        first = asyncio.current_task()
        try:
            for _ in range(3):
                await asyncio.sleep(0)
                yield asyncio.current_task() is first
        finally:
            assert asyncio.current_task() is first

    with GeneratorEnqueuer(in_tasks, shards=2, **backend) as enqueuer:
        assert list(enqueuer) == [True] * 6


def test_all_shards_of_a_worker_run_on_one_loop_in_all_epochs(options):
    async def loops(shard):
        await asyncio.sleep(0)
        yield id(asyncio.get_running_loop())

    with GeneratorEnqueuer(loops, shards=4, **options) as enqueuer:
        assert len({*enqueuer, *enqueuer}) == 1


def test_partials_methods_and_objects_may_be_async():
    class Client:
        async def get(self, shard):
            yield -1

    async def given(number, shard):
        yield number

    assert list(prefetch(functools.partial(given, 5))) == [5]
    assert list(prefetch(Client().get)) == [-1]
    assert list(prefetch(Meeting(1))) == [(0, 0), (0, 1), (0, 2)]


async def fails(shard):
    for number in shard.split(range(20)):
        await asyncio.sleep(0)
        yield await inner(number)


async def inner(number):
    if number == 7:
        raise ValueError("of number 7")
    return number


def test_an_error_comes_in_its_place_with_its_traceback(backend):
    with GeneratorEnqueuer(fails, shards=4, **backend) as enqueuer:
        seen = []
        with pytest.raises(ValueError, match="of number 7") as caught:
            for number in enqueuer:
                seen.append(number)
    assert seen == list(range(7))
    assert [frame.name for frame in caught.traceback][-2:] == ["fails", "inner"]
    assert "shard 3, item 1" in "".join(caught.value.__notes__)
    with pytest.raises(ValueError, match="of number 7"):
        replay(caught.value)


def test_errors_are_skipped_and_end_their_shard(backend, caplog):
    caplog.set_level(logging.CRITICAL)
    with GeneratorEnqueuer(fails, shards=4, on_error="skip", **backend) as enqueuer:
        assert sorted(enqueuer) == [n for n in range(20) if n % 4 != 3 or n < 7]
        assert enqueuer.error_count == 1


def test_an_error_is_replaced(backend):
    with GeneratorEnqueuer(fails, shards=4, on_error=str, **backend) as enqueuer:
        assert "of number 7" in list(enqueuer)


class Left(BaseException):
    """Neither an Exception nor one that asyncio knows."""


async def leaves(error, shard):
    await asyncio.sleep(0)
    yield shard.index
    if shard.index == 3:
        raise error


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), Left()])
def test_exceptions_that_end_event_loops_are_those_of_their_shard(backend, error):
    seen = []
    with GeneratorEnqueuer(functools.partial(leaves, error), shards=5, **backend) as enqueuer:
        with pytest.raises((WorkerError, CancelledError)):
            for number in enqueuer:
                seen.append(number)
    assert seen == [0, 1, 2, 3, 4]


async def reports(shard):
    for number in range(4):
        shard.report(ValueError(f"before {number} of {shard.index}"), log=False)
        yield shard.index, number


def test_reports_are_counted_before_the_item_that_follows_them(backend):
    with GeneratorEnqueuer(reports, shards=3, **backend) as enqueuer:
        counts = [enqueuer.state_dict()["error_count"] for _ in enqueuer]
        assert enqueuer.error_count == 12
    assert counts == list(range(1, 13))


async def from_any_item(shard, first_item=0):
    for number in range(first_item, 5):
        await asyncio.sleep(0)
        yield number, first_item


def test_a_generator_may_begin_with_any_item(backend):
    had, state = taken(GeneratorEnqueuer(from_any_item, shards=2, **backend), 5)
    assert had[-1] == (2, 0)
    rest = rest_of(GeneratorEnqueuer(from_any_item, shards=2, **backend), state)
    assert rest == [(2, 2), (3, 3), (3, 2), (4, 3), (4, 2)]


async def dies_once(mark, shard):
    for number in shard.split(range(40)):
        await asyncio.sleep(0.001)
        if number == 9:
            kill_once(mark)
        yield number


def test_a_worker_that_is_killed_is_replaced(process, tmp_path):
    source = functools.partial(dies_once, tmp_path / "died")
    given = dict(shards=4, workers=2, max_restarts=1, **process)
    with GeneratorEnqueuer(source, **given) as enqueuer:
        assert list(enqueuer) == list(range(40))
        assert enqueuer.restart_count == 1


async def waits_for_long(folder, shard):
    folder.joinpath(f"begun-{shard.index}").touch()
    try:
        if shard.index == 0:
            yield 0
        await asyncio.sleep(LIMIT)
    finally:
        await asyncio.sleep(0)
        folder.joinpath(f"ended-{shard.index}").touch()


def test_stop_cancels_what_waits_and_each_finally_runs(options, tmp_path):
    source = functools.partial(waits_for_long, tmp_path)
    with GeneratorEnqueuer(source, shards=5, **options) as enqueuer:
        began = time.monotonic()
        assert next(iter(enqueuer)) == 0
        wait_until(lambda: len(list(tmp_path.glob("begun-*"))) == 5)
    assert time.monotonic() - began < LIMIT / 2
    assert len(list(tmp_path.glob("ended-*"))) == 5


async def endless(folder, shard):
    try:
        for number in itertools.count():
            yield number
    finally:
        folder.joinpath(f"ended-{shard.index}").touch()


def test_stop_closes_generators_that_wait_for_their_turn(backend, tmp_path):
    source = functools.partial(endless, tmp_path)
    with GeneratorEnqueuer(source, shards=3, **backend) as enqueuer:
        assert [next(enqueuer.get()) for _ in range(4)] == [0, 0, 0, 1]
    assert len(list(tmp_path.glob("ended-*"))) == 3


async def is_slow_within(folder, shard):
    (folder / f"begun-{shard.index}").touch()
    async for number in slow_inner():
        yield number


async def slow_inner():
    await deep_wait()
    yield 1


async def deep_wait():
    await asyncio.sleep(LIMIT)


def test_a_stall_report_has_the_stack_of_the_coroutine(options, tmp_path):
    source = functools.partial(is_slow_within, tmp_path)
    with GeneratorEnqueuer(source, shards=3, timeout=0.3, **options) as enqueuer:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 3)
        text = timeout_of(enqueuer)
        assert "shards 0, 1, 2 is here" in text
        assert "is_slow_within" in text
        assert "deep_wait" in text


async def holds_the_loop(shard):
    await asyncio.sleep(0)
    time.sleep(0.5)
    yield shard.index


async def holds_it_for(element):
    time.sleep(0.5)
    return element


@pytest.mark.thorough
@pytest.mark.parametrize("of", ["a generator", "map"])
def test_a_coroutine_that_holds_the_loop_is_named_once(options, caplog, of):
    if of == "map":
        assert list(imap(holds_it_for, range(3), **options)) == [0, 1, 2]
    else:
        assert list(prefetch(holds_the_loop, shards=3, **options)) == [0, 1, 2]
    (text,) = [text for text in caplog.messages if "has held its event loop" in text]
    assert "time.sleep(0.5)" in text


@pytest.mark.thorough("processes")
def test_coroutines_that_wait_are_not_named(options, caplog):
    async def waits(shard):
        await asyncio.sleep(0.5)
        yield shard.index

    assert list(prefetch(waits, shards=3, **options)) == [0, 1, 2]
    assert caplog.messages == []


def test_without_workers_it_runs_in_the_thread_of_the_loop_and_nothing_ahead():
    made = []

    async def here(shard):
        for number in range(3):
            await asyncio.sleep(0)
            made.append(number)
            yield threading.current_thread()

    with GeneratorEnqueuer(here, workers=0, shards=2) as enqueuer:
        for count, thread in enumerate(enqueuer, 1):
            assert thread is threading.current_thread()
            assert len(made) == count


def test_all_shards_share_one_event_loop_without_workers():
    async def drawing(shard):
        loop = asyncio.get_running_loop()
        for _ in range(3):
            await asyncio.sleep(0)
            yield loop, random.random()

    def plain(shard):
        for _ in range(3):
            yield None, random.random()

    options = dict(workers=0, shards=4, random_seed=7, backend="process")
    loops, drawn = zip(*GeneratorEnqueuer(drawing, **options), strict=True)
    assert len(set(loops)) == 1
    assert drawn == tuple(number for _, number in GeneratorEnqueuer(plain, **options))


def test_within_a_running_event_loop_too():
    async def main():
        with GeneratorEnqueuer(awaited, random_seed=7, workers=0) as enqueuer:
            return [item async for item in enqueuer]

    assert asyncio.run(main()) == list(GeneratorEnqueuer(plain, random_seed=7))


def test_items_of_several_async_generators_are_mixed(backend):
    async def letters(shard):
        for letter in "ab":
            await asyncio.sleep(0)
            yield letter

    mixed = mix({"letters": letters, "numbers": lambda: iter(range(4))}, at_end="continue")
    assert list(prefetch(mixed, **backend)) == ["a", 0, "b", 1, 2, 3]


async def get(element):
    return element


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_function_that_only_returns_coroutines_is_an_error(backend, batch_size):
    with pytest.raises(TypeError, match="a coroutine, which no code awaits"):
        list(imap(lambda element: get(element), range(4), batch_size=batch_size, **backend))


# --- exceptions of signal handlers ---


class Strike:
    """Raise KeyboardInterrupt where asyncio has just taken a step of a task off its list."""

    def __init__(self, nth):
        self.left = nth

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if (
            event == "call"
            and code.co_name == "_run"
            and code.co_filename == asyncio.events.__file__
        ):
            self.left -= 1
            if not self.left:
                sys.setprofile(None)
                raise KeyboardInterrupt


async def squared(number):
    await asyncio.sleep(0)
    return number * number


def numbered(count):
    yield from range(count)


def read_another(error):
    return list(GeneratorEnqueuer(functools.partial(numbered, 3), workers=0))


@pytest.mark.timeout(60)
def test_another_enqueuer_in_the_thread_of_the_worker_has_nothing_to_do_with_its_loop():
    async def batches(shard):
        for number in range(4):
            await asyncio.sleep(0.001)
            if (shard.index, number) == (0, 1):
                raise ValueError("to be replaced")
            yield shard.index, number

    options = dict(workers=1, shards=2, on_error=read_another, timeout=LIMIT)
    with GeneratorEnqueuer(batches, **options) as enqueuer:
        seen = list(enqueuer)
    assert seen == [(0, 0), (1, 0), [0, 1, 2], *((1, number) for number in range(1, 4))]


@pytest.mark.thorough
@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
@pytest.mark.parametrize("nth", [1, 12])
@pytest.mark.parametrize("is_map", [False, True])
def test_a_step_that_asyncio_lost_is_not_waited_for(is_map, nth):
    async def batches(shard):
        for number in range(20):
            await asyncio.sleep(0)
            yield number

    enqueuer = (
        OrderedEnqueuer(range(20), squared, workers=0)
        if is_map
        else GeneratorEnqueuer(batches, workers=0)
    )
    before = sys.getprofile()
    try:
        with pytest.raises(KeyboardInterrupt), enqueuer:
            sys.setprofile(Strike(nth))
            list(enqueuer)
    finally:
        sys.setprofile(before)


@pytest.mark.thorough
def test_statistics_say_that_shards_run_side_by_side(backend):
    for source in (awaited, plain):
        with GeneratorEnqueuer(source, shards=2, **backend) as enqueuer:
            assert list(enqueuer)
            assert enqueuer.stats().side_by_side is (source is awaited)
