"""`async for`: the event loop goes on, and a task that is cancelled loses nothing."""

import asyncio
import functools
import gc
import itertools
import threading
import time
import traceback
from types import SimpleNamespace

import pytest
from helpers import LIMIT, counting, hang, raise_value_error, twelve, wait_until

from enqueuer import BatchTimeout, GeneratorEnqueuer, OrderedEnqueuer
from enqueuer.enqueuers import async_iteration
from enqueuer.enqueuers.enqueuer import core_of


def slow_twenty():
    for number in range(20):
        time.sleep(0.01)  # the work; nobody relies on how long it takes
        yield number


def three_and_hang():
    yield from range(3)
    hang()


def one_and_fail():
    yield 1
    raise_value_error()


class Gate:
    """A source of 0, 1, 2 ... each of which it makes when it is let; to be left open."""

    def __init__(self):
        self._free = threading.Semaphore(0)

    def __call__(self):
        for number in range(1000):
            assert self._free.acquire(timeout=LIMIT)
            yield number

    def let(self, count):
        self._free.release(count)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.let(1000)  # a thread that waits could not be stopped


def waiting_threads():
    return [thread for thread in threading.enumerate() if thread.name == "enqueuer-await"]


def run(main):
    """Run a coroutine; one that hangs is a failure."""
    return asyncio.run(asyncio.wait_for(main, LIMIT))


async def is_waited_for():
    while not waiting_threads():
        await asyncio.sleep(0)


async def cancel(main):
    """Cancel a coroutine that waits for a batch."""
    task = asyncio.ensure_future(main)
    await asyncio.sleep(0.02)  # it has come to its wait, more likely than not
    await is_waited_for()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def take(enqueuer, count):
    got = []
    async for batch in enqueuer:
        got.append(batch)
        if len(got) == count:
            break
    return got


# --- as `for` does it --------------------------------------------------------------------------


def test_batches_come_in_order_and_each_loop_is_an_epoch(backend):
    async def main():
        enqueuer = GeneratorEnqueuer(twelve, shards=2, workers=2, **backend)
        async with enqueuer:
            for _ in range(3):
                assert [batch async for batch in enqueuer] == list(range(12))

    run(main())


def test_a_new_one_is_started_and_ends_with_its_last_reference(backend):
    async def main():
        return [batch async for batch in GeneratorEnqueuer(twelve, **backend)]

    assert run(main()) == list(range(12))


def test_an_error_comes_as_itself_after_what_came_before_it(backend):
    async def main():
        async with GeneratorEnqueuer(one_and_fail, **backend) as enqueuer:
            batches = aiter(enqueuer)
            assert await anext(batches) == 1
            for _ in range(2):
                with pytest.raises(ValueError, match="bad value") as caught:
                    await anext(batches)
                assert caught.value.args == ("bad value", 7)

    run(main())


def test_an_old_iterator_is_over_with_its_epoch():
    async def main():
        async with GeneratorEnqueuer(twelve) as enqueuer:
            old = aiter(enqueuer)
            assert await anext(old) == 0
            assert len([batch async for batch in enqueuer]) == 11
            assert await take(enqueuer, 1) == [0]
            return [batch async for batch in old]

    assert run(main()) == []


# --- the event loop goes on --------------------------------------------------------------------


def test_other_tasks_run_while_a_batch_is_waited_for():
    async def main():
        async with GeneratorEnqueuer(gate := Gate()) as enqueuer:
            with gate:
                task = asyncio.create_task(take(enqueuer, 3))
                for _ in range(3):
                    await is_waited_for()
                    gate.let(1)  # by the very thread that a wait would block
                return await task

    assert run(main()) == [0, 1, 2]


async def turn(turns, seconds):
    """Take turns as another task, and count them in a list."""
    while True:
        await asyncio.sleep(seconds)
        turns.append(len(turns))


def test_other_tasks_run_while_a_batch_is_always_ready(backend):
    async def main():
        turns = []
        task = asyncio.create_task(turn(turns, 0))
        async with GeneratorEnqueuer(counting, **backend) as enqueuer:
            before = len(turns)
            await take(enqueuer, 100)
            task.cancel()
            return len(turns) - before

    assert run(main()) >= 99


def test_other_tasks_run_while_an_iterable_is_read():
    free = threading.Event()

    def rows():
        yield 1
        assert free.wait(LIMIT)
        yield 2

    async def main():
        enqueuer = OrderedEnqueuer(rows(), str)
        task = asyncio.create_task(take(enqueuer, 9))
        await is_waited_for()
        free.set()
        return await task

    assert run(main()) == ["1", "2"]


def test_what_is_ready_needs_no_thread(monkeypatch):
    with GeneratorEnqueuer(twelve, max_queue_size=12) as enqueuer:
        wait_until(lambda: enqueuer.queue.qsize() == 12)
        # Otherwise a start of a thread would be a TypeError.
        monkeypatch.setattr(threading, "Thread", None)
        assert run(take(enqueuer, 12)) == list(range(12))


def test_one_thread_waits_for_all_tasks():
    async def main():
        async with GeneratorEnqueuer(gate := Gate()) as enqueuer:
            with gate:
                tasks = [asyncio.create_task(take(enqueuer, 1)) for _ in range(10)]
                for _ in range(20):
                    await asyncio.sleep(0)
                wait_until(lambda: len(waiting_threads()) == 1)  # one before it may still be ending
                gate.let(10)
                return sorted(itertools.chain(*await asyncio.gather(*tasks)))

    assert run(main()) == list(range(10))


class Ending:
    """A sequence of 0 and None; it notes the threads of `on_epoch_end`."""

    def __init__(self):
        self.ended_in = []
        self.is_waited_for = threading.Event()

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index == 0:
            return 0
        assert self.is_waited_for.wait(LIMIT)
        return None

    def on_epoch_end(self):
        self.ended_in.append(threading.current_thread())


def test_on_epoch_end_is_called_in_the_thread_of_the_event_loop():
    sequence = Ending()

    async def main():
        async with OrderedEnqueuer(sequence) as enqueuer:
            assert await take(enqueuer, 1) == [0]
            rest = asyncio.ensure_future(take(enqueuer, 1))
            await asyncio.sleep(0.02)  # it has come to its wait, more likely than not
            await is_waited_for()
            sequence.is_waited_for.set()
            return await rest

    assert run(main()) == []
    assert sequence.ended_in == [threading.current_thread()]


def test_each_task_that_waits_gets_a_timeout_with_its_own_traceback():
    async def main():
        with Gate() as gate:
            async with GeneratorEnqueuer(gate, timeout=0.05) as enqueuer:

                async def one():
                    return await take(enqueuer, 1)

                async def other():
                    return await take(enqueuer, 1)

                errors = await asyncio.gather(one(), other(), return_exceptions=True)
                gate.let(1000)
                return errors

    for name, error in zip(("one", "other"), run(main()), strict=True):
        assert isinstance(error, BatchTimeout)
        assert name in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_tasks_that_iterate_at_once_share_the_batches(backend):
    async def main():
        enqueuer = GeneratorEnqueuer(twelve, **backend)  # whichever is first starts it
        got = await asyncio.gather(*(take(enqueuer, 99) for _ in range(3)))
        return sorted(itertools.chain(*got))

    assert run(main()) == list(range(12))


def test_tasks_that_begin_at_once_share_an_epoch_however_short():
    async def main():
        enqueuer = GeneratorEnqueuer(lambda: iter([1]))
        got = await asyncio.gather(*(take(enqueuer, 99) for _ in range(5)))
        return list(itertools.chain(*got))

    for _ in range(20):
        assert run(main()) == [1]


def test_a_task_and_a_thread_share_the_batches(backend):
    async def main():
        async with GeneratorEnqueuer(slow_twenty, **backend) as enqueuer:
            taken = asyncio.to_thread(list, iter(enqueuer))
            return sorted(itertools.chain(*await asyncio.gather(taken, take(enqueuer, 99))))

    assert run(main()) == list(range(20))


# --- cancelling --------------------------------------------------------------------------------


def test_a_task_that_is_cancelled_loses_no_batch(backend):
    async def main():
        got, timeouts = [], 0

        async def collect(enqueuer):
            async for batch in enqueuer:
                got.append(batch)

        async with GeneratorEnqueuer(slow_twenty, max_queue_size=2, **backend) as enqueuer:
            while len(got) < 20:
                try:
                    await asyncio.wait_for(collect(enqueuer), 0.004)
                except asyncio.TimeoutError:
                    timeouts += 1
        assert timeouts > 5
        return got

    assert run(main()) == list(range(20))


def test_a_task_that_is_cancelled_just_when_a_batch_comes_does_not_lose_it():
    async def main():
        async with GeneratorEnqueuer(gate := Gate()) as enqueuer:
            with gate:
                for number in range(20):
                    task = asyncio.create_task(take(enqueuer, 1))
                    await is_waited_for()
                    gate.let(1)
                    wait_until(lambda: not waiting_threads())  # it has called, and nobody heard
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                    assert await take(enqueuer, 1) == [number]

    run(main())


def test_after_a_cancel_the_same_thread_waits_on():
    async def main():
        async with GeneratorEnqueuer(gate := Gate()) as enqueuer:
            with gate:
                for _ in range(5):
                    await cancel(take(enqueuer, 1))
                    wait_until(
                        lambda: len(waiting_threads()) == 1
                    )  # one before it may still be ending
                gate.let(1)
                return await take(enqueuer, 1)

    assert run(main()) == [0]


def test_the_next_event_loop_goes_on(backend):
    enqueuer = GeneratorEnqueuer(slow_twenty, max_queue_size=1, **backend)

    async def main(count):
        got = await take(enqueuer, count)
        task = asyncio.ensure_future(anext(aiter(enqueuer)))
        await asyncio.wait([task], timeout=0)
        # most often the loop is closed while that one still waits
        return [*got, task.result()] if task.done() else got

    with enqueuer:
        got = asyncio.run(main(3))
        assert [*got, *asyncio.run(take(enqueuer, 99))] == list(range(20))


@pytest.mark.thorough
def test_one_that_is_forgotten_while_it_is_waited_for_ends(process):
    async def main():
        enqueuer = GeneratorEnqueuer(three_and_hang, **process)
        batches = aiter(enqueuer)
        assert [await anext(batches) for _ in range(3)] == [0, 1, 2]
        await cancel(anext(batches))
        wait_until(lambda: len(waiting_threads()) == 1)  # one before it may still be ending

    run(main())
    gc.collect()
    wait_until(lambda: waiting_threads() == [])


# --- how it ends -------------------------------------------------------------------------------


def test_stop_wakes_a_task_that_waits(process):
    async def main():
        enqueuer = GeneratorEnqueuer(three_and_hang, **process)
        task = asyncio.create_task(take(enqueuer, 99))
        while core_of(enqueuer).is_idle or not waiting_threads():
            await asyncio.sleep(0)
        enqueuer.stop()
        return await task

    assert run(main()) in ([], [0], [0, 1], [0, 1, 2])


@pytest.mark.thorough
def test_other_tasks_run_while_a_block_is_entered_and_left(process):
    async def main():
        turns = []
        task = asyncio.create_task(turn(turns, 0.001))
        async with GeneratorEnqueuer(three_and_hang, **process) as enqueuer:
            assert await take(enqueuer, 3) == [0, 1, 2]
            before = len(turns)
        task.cancel()
        assert core_of(enqueuer).is_idle
        return len(turns) - before

    assert run(main()) > 5  # it hangs, and has to be killed


def test_a_start_that_fails_is_raised_in_the_task():
    async def main():
        with pytest.raises(TypeError, match="cannot be sent"):
            await take(GeneratorEnqueuer(Unpicklable(), backend="process"), 1)

    run(main())


class Unpicklable:
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self):
        yield 1


def test_an_exception_of_a_handler_before_a_wait_makes_no_later_one_endless(monkeypatch):
    """It strikes when a thread was started to wait, and before its end was to be told."""

    class Struck:
        is_struck = False

        def __call__(self, function, *args):
            if function.__name__ == "_end" and not self.is_struck:
                self.is_struck = True
                raise ValueError("of the handler")
            return functools.partial(function, *args)

    gate = Gate()
    with GeneratorEnqueuer(gate) as enqueuer, gate:
        with monkeypatch.context() as patch:
            patch.setattr(async_iteration, "functools", SimpleNamespace(partial=Struck()))
            with pytest.raises(ValueError, match="of the handler"):
                run(take(enqueuer, 1))
            gate.let(2)
            assert run(take(enqueuer, 2)) == [0, 1]
