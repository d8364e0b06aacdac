"""`workers=0`: the same batches, made in the loop's own thread when the loop asks for them."""

import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback

import numpy as np
import psutil
import pytest
from helpers import LIMIT, needs

from enqueuer import (
    GeneratorEnqueuer,
    InvalidState,
    OrderedEnqueuer,
    StopWarning,
    WorkerDied,
    imap,
    prefetch,
)


def drawing(shard):
    """Yield draws from the generator of the shard, and from the global ones."""
    for number in shard.split(range(10)):
        yield number, shard.rng.random(), random.random(), np.random.random()


def drawn(number, task):
    return number, task.rng.random(), random.random(), np.random.random()


def here():
    """Return whether this is the main thread of a process without other threads of ours."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("enqueuer")]
    children = psutil.Process().children()
    return threading.current_thread() is threading.main_thread() and not ours, len(children)


def of_shards(backend, workers):
    options = dict(shards=3, random_seed=7, backend=backend, workers=workers)
    with GeneratorEnqueuer(drawing, **options) as enqueuer:
        return [*enqueuer, *enqueuer]


def of_tasks(backend, workers):
    options = dict(random_seed=7, backend=backend, workers=workers)
    with OrderedEnqueuer(range(10), drawn, True, **options) as enqueuer:
        return [*enqueuer, *enqueuer]


@pytest.mark.parametrize("read", [of_shards, of_tasks])
def test_the_batches_are_those_of_processes(read):
    random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    assert read("process", 0) == read("process", 2)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_all_code_runs_in_the_thread_of_the_loop(backend):
    places = []

    def batches(shard):
        try:
            yield from (places.append(here()) for _ in range(2))
            yield "batch"
            raise KeyError("skipped")
        finally:
            places.append(here())

    def elements():
        places.append(here())
        yield from range(3)

    def skip(error):
        places.append(here())

    before = here()
    with GeneratorEnqueuer(batches, workers=0, backend=backend, on_error=skip) as enqueuer:
        assert list(enqueuer) == ["batch"]
    mapped = list(imap(lambda n: (n, here()), elements(), workers=0, backend=backend))
    assert mapped == [(n, before) for n in range(3)]
    assert set(places) == {before}
    assert len(places) == 5


def test_a_batch_is_made_when_the_loop_asks_for_it():
    events = []

    def batches(shard):
        for number in shard.split(range(3)):
            events.append(f"made {number}")
            yield number

    with GeneratorEnqueuer(batches, workers=0, shards=2) as enqueuer:
        assert events == []
        for number in enqueuer:
            events.append(f"used {number}")
            assert enqueuer.stats().queue_size == 0
    assert events == [f"{act} {number}" for number in range(3) for act in ("made", "used")]


def test_an_iterable_is_read_one_element_at_a_time():
    read = []

    def elements():
        for number in range(5):
            read.append(number)
            yield number

    for number in imap(abs, elements(), workers=0, max_queue_bytes=1):
        assert read == list(range(number + 1))
    assert read == list(range(5))


PROGRAM = """
from enqueuer import GeneratorEnqueuer

def batches(shard):
    for number in shard.split(range(2)):
        secret = 40 + number
        breakpoint()
        yield secret

with GeneratorEnqueuer(batches, workers=0, backend="process") as enqueuer:
    print(sum(enqueuer))
"""


@pytest.mark.thorough
def test_a_debugger_stops_in_the_generator(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, path],
        input="p secret\nup\np type(sender).__name__\ncontinue\np secret\ncontinue\n",
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.stderr == ""
    assert "(Pdb) 40\n" in done.stdout
    assert "(Pdb) 41\n" in done.stdout
    assert "InlineWorker" in done.stdout
    assert done.stdout.endswith("81\n")


def test_an_error_has_the_frames_of_the_loop_and_of_the_generator():
    def batches():
        secret = 5
        yield secret
        raise KeyError(secret)

    with pytest.raises(KeyError) as caught:
        list(prefetch(batches, workers=0, backend="process"))
    frames = list(traceback.walk_tb(caught.value.__traceback__))
    assert (
        frames[0][0].f_code.co_name
        == "test_an_error_has_the_frames_of_the_loop_and_of_the_generator"
    )
    assert frames[-1][0].f_code.co_name == "batches"
    assert frames[-1][0].f_locals["secret"] == 5
    assert caught.value.__notes__ == ["in worker 0 (the loop's own thread), shard 0, item 1"]


class Interrupted:
    """Presses Ctrl-C in the middle of one item, the first time that it is made."""

    def __init__(self, at):
        self.at, self.is_done = at, False

    def __call__(self, number):
        if number == self.at and not self.is_done:
            self.is_done = True
            signal.raise_signal(signal.SIGINT)
        return number

    def shards(self, shard):
        yield from map(self, shard.split(range(8)))


@pytest.mark.parametrize("at", [0, 5])
@pytest.mark.parametrize("of", ["shards", "tasks", "elements"])
def test_after_an_interrupt_the_loop_goes_on_with_the_next_batch(of, at, caplog):
    source = Interrupted(at)
    if of == "shards":
        enqueuer = GeneratorEnqueuer(source.shards, workers=0, shards=3, on_error="skip")
    else:
        elements = range(8) if of == "tasks" else iter(range(8))
        enqueuer = OrderedEnqueuer(elements, source, workers=0, on_error="skip")
    with enqueuer:
        seen = []
        with pytest.raises(KeyboardInterrupt):
            seen.extend(enqueuer)
        assert seen == list(range(at))
        assert list(enqueuer) == list(range(at, 8))
        assert enqueuer.restart_count == enqueuer.error_count == 0
    assert "was interrupted; worker 0 (the loop's own thread) goes on" in caplog.text


def test_a_late_item_that_is_a_coroutine_is_refused():
    async def late():
        raise AssertionError("nobody awaits it")

    coroutine = late()
    with (
        GeneratorEnqueuer(lambda: iter([*range(25), coroutine]), workers=0) as enqueuer,
        pytest.raises(TypeError, match="is a coroutine"),
    ):
        list(enqueuer)
    coroutine.close()


def test_a_running_iterator_that_was_interrupted_cannot_go_on():
    with GeneratorEnqueuer(map(Interrupted(1), range(4)), workers=0) as enqueuer:
        assert next(enqueuer.get()) == 0
        with pytest.raises(KeyboardInterrupt):
            list(enqueuer)
        with pytest.raises(
            WorkerDied, match=r"was interrupted.*pass the generator function itself"
        ):
            list(enqueuer)


def test_another_thread_waits_for_the_turn_to_end_or_warns():
    entered, gate, ends = threading.Event(), threading.Event(), []

    def batches():
        try:
            entered.set()
            assert gate.wait(LIMIT)
            yield 1
        finally:
            ends.append(threading.current_thread())

    def stop():
        assert entered.wait(LIMIT)
        with pytest.warns(StopWarning, match=r"loop's own thread(.|\n)*in batches"):
            enqueuer.stop(timeout=0.05)
        gate.set()

    enqueuer = GeneratorEnqueuer(batches, workers=0)
    stopping = threading.Thread(target=stop)
    stopping.start()
    assert list(enqueuer) == []
    stopping.join(LIMIT)
    assert ends == [threading.main_thread()]


@pytest.mark.filterwarnings("ignore:all threads draw")
def test_the_number_of_workers_changes_from_none_and_to_none():
    def make():
        return GeneratorEnqueuer(drawing, workers=2, shards=4, random_seed=7)

    with make() as enqueuer:
        batches = iter(enqueuer)
        seen = [next(batches)[:2] for _ in range(3)]
        enqueuer.reconfigure(0)
        assert repr(enqueuer).startswith("<GeneratorEnqueuer RUNNING 0 workers, ")
        seen += [next(batches)[:2] for _ in range(3)]
        enqueuer.reconfigure(3)
        seen += [batch[:2] for batch in batches]
    assert seen == [batch[:2] for batch in make()]


def test_start_takes_zero_too():
    enqueuer = GeneratorEnqueuer(lambda: (here()[0] for _ in range(2)), workers=2, shards=1)
    enqueuer.start(workers=0)
    assert list(enqueuer) == [True, True]
    enqueuer.stop()


def test_a_running_iterator_stays_where_it_is_read():
    with GeneratorEnqueuer(iter(range(9)), workers=0) as enqueuer:
        assert next(enqueuer.get()) == 0
        with pytest.raises(InvalidState, match="cannot pass between"):
            enqueuer.reconfigure(1)
        assert list(enqueuer) == list(range(1, 9))
    with GeneratorEnqueuer(iter(range(9))) as enqueuer:
        with pytest.raises(InvalidState, match="cannot pass between"):
            enqueuer.reconfigure(0)
        assert list(enqueuer) == list(range(9))


@pytest.mark.parametrize("make", [GeneratorEnqueuer, lambda f, **o: OrderedEnqueuer(f(), abs, **o)])
def test_async_for_starts_no_thread(make):
    places = []

    def batches():
        for number in range(3):
            places.append(here()[0])
            yield number

    async def read():
        async with make(batches, workers=0) as enqueuer:
            return [batch async for batch in enqueuer]

    assert asyncio.run(read()) == [0, 1, 2]
    assert places == [True, True, True]


def test_an_error_that_is_skipped_does_not_end_async_for():
    async def read():
        options = dict(workers=0, on_error=lambda error: None)
        async with OrderedEnqueuer([1, 0, 2], lambda n: 2 / n, **options) as enqueuer:
            return [batch async for batch in enqueuer], enqueuer.error_count

    assert asyncio.run(read()) == ([2.0, 1.0], 1)


def test_the_queue_makes_a_batch_when_it_is_asked():
    with GeneratorEnqueuer(lambda: iter("abc"), workers=0) as enqueuer:
        queue = enqueuer.queue
        assert queue.qsize() == 1
        assert queue.get_nowait() == "a"
        assert not queue.empty()
        assert [queue.get(timeout=LIMIT), queue.get()] == ["b", "c"]
        assert queue.empty()


def test_statistics_say_that_the_loop_made_the_batches():
    def batches(shard):
        for number in shard.split(range(40)):
            time.sleep(0.001)  # the work; it takes most of the loop's time
            yield np.full(1000, number, "uint8")

    with GeneratorEnqueuer(batches, workers=0, shards=2) as enqueuer:
        assert len(list(enqueuer)) == 40
        stats = enqueuer.stats()
    (worker,) = stats.workers
    assert (stats.backend, worker.items, worker.shards) == ("inline", 40, (0, 1))
    assert 40_000 <= worker.bytes < 50_000
    assert worker.making_s >= 0.03
    bottleneck = stats.bottleneck()
    assert bottleneck.kind == "source"
    assert "give workers=1 or more" in bottleneck.advice
    assert "worker 0 (the loop's own thread)" in str(stats)


def test_the_trace_has_a_row_for_the_worker(tmp_path):
    path = tmp_path / "run.json"
    with GeneratorEnqueuer(drawing, workers=0, shards=2, trace=path) as enqueuer:
        for _ in enqueuer:
            time.sleep(0.002)  # not the work of the worker
    events = json.loads(path.read_text())
    rows = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert list(rows) == ["the loop", "worker 0"]
    made = [e for e in events if e["name"] == "next" and e["tid"] == rows[list(rows)[1]]]
    assert len(made) == 12  # the items and the ends of two shards
    # Of most: another program may hold one of them up.
    assert statistics.median(e["dur"] for e in made) < 2000


def test_adapters_start_no_thread():
    needs("torch")
    from enqueuer.adapters.cuda import CudaDataLoader
    from enqueuer.adapters.torch import TorchLoader

    def batches(shard):
        for number in shard.split(range(4)):
            yield np.full(2, number), here()[0]

    for kind in (TorchLoader, lambda loader: CudaDataLoader(loader, "cpu")):
        loader = kind(GeneratorEnqueuer(batches, workers=0))
        seen = [(array.tolist(), place, here()[0]) for array, place in loader]
        assert seen == [([number] * 2, True, True) for number in range(4)]
        loader.stop()
