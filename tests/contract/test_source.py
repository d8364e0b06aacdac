"""Source: what may be handed over, and what is refused."""

import asyncio
import contextlib
import contextvars
import ctypes
import functools
import mmap
import multiprocessing
import os
import re
import signal
import socket
import threading
import warnings
import weakref

import numpy as np
import pytest
from helpers import LIMIT

from enqueuer import (
    DuplicateDataWarning,
    EnqueuerWarning,
    GeneratorEnqueuer,
    OrderedEnqueuer,
    Processes,
    SourceNotPicklable,
    prefetch,
)

LOCK = threading.Lock()


@pytest.mark.thorough("processes")
def test_a_function_may_be_a_lambda_a_partial_or_an_object(backend):
    def pairs(word, shard):
        yield word, shard.index

    class Words:
        def __call__(self, shard):
            yield "called", shard.index

    for function, word in [
        (lambda shard: iter([("made", shard.index)]), "made"),
        (functools.partial(pairs, "bound"), "bound"),
        (Words(), "called"),
    ]:
        with GeneratorEnqueuer(function, workers=2, **backend) as enqueuer:
            assert list(enqueuer) == [(word, 0), (word, 1)]


def test_a_function_may_use_cached_functions_that_no_worker_can_import(backend):
    @functools.cache
    def factorial(n):
        return n * factorial(n - 1) if n else 1

    class Table:
        @staticmethod
        @functools.lru_cache(maxsize=2)
        def row(n):
            return [n] * 2

    def numbers(shard):
        yield from [factorial(5), factorial.cache_info().misses, Table.row(3), Table.row(3)]
        yield Table.row.cache_parameters()["maxsize"]

    with GeneratorEnqueuer(numbers, **backend) as enqueuer:
        assert list(enqueuer) == [120, 6, [3, 3], [3, 3], 2]


def test_a_function_is_called_once_per_shard_and_epoch_in_the_worker():
    calls = []

    def source(shard):
        calls.append((shard.epoch, shard.index, threading.current_thread().name))
        yield shard.index

    with GeneratorEnqueuer(source, workers=2, shards=4) as enqueuer:
        list(enqueuer), list(enqueuer)
    names = ["enqueuer-worker-0", "enqueuer-worker-1"]
    assert sorted(calls) == [(e, s, names[s % 2]) for e in range(2) for s in range(4)]


def test_threads_read_a_live_iterator_in_its_own_order():
    with GeneratorEnqueuer(iter(range(500)), workers=4, max_queue_size=3) as enqueuer:
        assert list(enqueuer) == list(range(500))


# What draws from these may give other data in each process.
CONDITION = "unless it draws from `random` or `numpy.random`.*pass the generator function itself"


def test_copies_of_a_live_iterator_warn_of_duplicate_data():
    enqueuer = GeneratorEnqueuer(iter(range(3)), backend="process", workers=2)
    with pytest.warns(DuplicateDataWarning, match=CONDITION):
        enqueuer.start()
    assert list(enqueuer) == [0, 0, 1, 1, 2, 2]
    enqueuer.stop()


@pytest.mark.thorough("processes")
def test_none_is_skipped(backend):
    def source():
        yield from [None, 1, None, None, 0, None, False, None]

    with GeneratorEnqueuer(source, **backend) as enqueuer:
        assert list(enqueuer) == [1, 0, False]


@pytest.mark.thorough("processes")
def test_exceptions_and_the_like_are_data(backend):
    def source():
        yield ValueError("data")
        yield StopIteration
        yield "end"
        yield Ellipsis

    with GeneratorEnqueuer(source, **backend) as enqueuer:
        first, *rest = enqueuer
    assert isinstance(first, ValueError)
    assert rest == [StopIteration, "end", Ellipsis]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ([1, 2], "got a list; write a function"),
        ([iter("ab"), iter("cd")], r"a list of iterators; .*`GeneratorEnqueuer\(lambda shard"),
        ((list, tuple), r"a tuple of functions; .* `def batches\(shard\): return functions"),
        ("text", "got a str"),
        (np.zeros(3), "got a ndarray"),
        (3, "got an int"),
        (None, "got a NoneType"),
        (lambda a, b: iter([]), "must take no argument or one .* needs 2: a, b"),
    ],
)
def test_anything_else_is_refused(source, says):
    with pytest.raises(TypeError, match=says):
        GeneratorEnqueuer(source)
    if not isinstance(source, (list, tuple, np.ndarray)) or "iterators" in says:
        with pytest.raises(TypeError, match=says):
            prefetch(source)


def test_a_running_async_generator_is_refused():
    async def source():
        yield 1

    with pytest.raises(TypeError, match="pass the function itself"):
        GeneratorEnqueuer(source())


def test_a_live_iterator_has_no_shards():
    with pytest.raises(ValueError, match="cannot be split into 3 shards"):
        GeneratorEnqueuer(iter("abc"), shards=3)


def test_a_function_that_gives_nothing_to_iterate_is_an_error(backend):
    with GeneratorEnqueuer(lambda: 5, **backend) as enqueuer:
        with pytest.raises(TypeError, match="returned an int, which cannot be iterated"):
            next(iter(enqueuer))


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_the_culprit_of_a_source_that_cannot_be_pickled_is_named(method):
    lock = threading.Lock()
    options = {"backend": Processes(start_method=method)}

    def closure():
        with lock:
            yield 1

    with pytest.raises(SourceNotPicklable, match=r"variable 'lock' \(a _thread.lock\)"):
        GeneratorEnqueuer(closure, **options).start()
    with pytest.raises(SourceNotPicklable, match="a running generator cannot be sent"):
        GeneratorEnqueuer((x for x in "ab"), **options).start()
    with GeneratorEnqueuer(closure, backend=Processes(start_method="fork")) as enqueuer:
        assert list(enqueuer) == [1]


def nested_scope(lock):
    def batches():
        yield (lambda: [lock for _ in "ab"])()

    return batches


def global_of_a_nested_scope(lock):
    space = {"LOCK": lock, "__name__": "nowhere"}
    exec("def batches():\n yield (lambda: [LOCK for _ in 'ab'])()", space)
    return space["batches"]


def helper_of_a_helper(lock):
    def inner():
        return lock

    def outer():
        return inner()

    def batches():
        yield outer()

    return batches


def argument_of_a_partial(lock):
    return functools.partial(lambda lock, shard: iter([lock]), lock)


def named_argument_of_a_partial(lock):
    return functools.partial(lambda shard, lock=None: iter([lock]), lock={"a": lock})


def function_of_a_partial(lock):
    return functools.partial(lambda size: iter([lock, size]), 1)


def method_of_a_class(lock):
    class Source:
        def __call__(self):
            yield lock

    return Source()


def attribute_of_a_bound_object(lock):
    class Source:
        def __init__(self):
            self.options = {"lock": lock}

        def batches(self):
            yield 1

    return Source().batches


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (nested_scope, "the variable 'lock'"),
        (global_of_a_nested_scope, "the global 'LOCK'"),
        (helper_of_a_helper, "the variable 'outer': the variable 'inner': the variable 'lock'"),
        (argument_of_a_partial, "its argument 0"),
        (named_argument_of_a_partial, "its argument 'lock'['a']"),
        (function_of_a_partial, "the function of the partial: the variable 'lock'"),
        (method_of_a_class, "its class .*Source.__call__: the variable 'lock'"),
        (attribute_of_a_bound_object, "the object.options['lock']"),
    ],
)
def test_the_culprit_is_found_wherever_it_is(make, says):
    says = re.escape(says).replace(r"\.\*", ".*")
    with pytest.raises(SourceNotPicklable, match=rf": {says} \(a _thread.lock\) cannot be pickled"):
        GeneratorEnqueuer(make(threading.Lock()), backend=Processes(start_method="spawn")).start()


def test_a_global_that_a_function_does_not_use_is_no_culprit():
    lock = threading.Lock()

    def source(shard):
        yield shard.LOCK, lock

    assert "LOCK" in globals()
    with pytest.raises(SourceNotPicklable, match="the variable 'lock'") as caught:
        GeneratorEnqueuer(source, backend=Processes(start_method="spawn")).start()
    assert "LOCK" not in str(caught.value)


def test_the_culprit_of_a_map_is_found_in_its_helper():
    lock = threading.Lock()

    def helper(element):
        return lock, element

    enqueuer = OrderedEnqueuer([1, 2], lambda e: helper(e), backend=Processes(start_method="spawn"))
    with pytest.raises(SourceNotPicklable, match=r"'helper': the variable 'lock' \(a _thread.lock"):
        enqueuer.start()


@pytest.mark.parametrize(
    "collection", [[1, 2, 3], (1, 2, 3), range(1, 4), {1: "a", 2: "b", 3: "c"}]
)
def test_prefetch_takes_any_iterable(collection):
    assert list(prefetch(collection)) == [1, 2, 3]


# --- objects that the source shares with its workers ---


@pytest.fixture(scope="module")
def shared_memory():
    """Let multiprocessing allocate what stays as long as this process: memory, and a tracker."""
    context = multiprocessing.get_context("spawn")
    return context.Value("i"), context.Lock()


@pytest.fixture(params=multiprocessing.get_all_start_methods())
def method(request):
    return request.param


class Together:
    """A source that waits for the loop, and counts in shared memory."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.queue = context.SimpleQueue()
        self.begun, self.condition = context.Event(), context.Condition()
        self.barrier = context.Barrier(2)
        self.value, self.array = context.Value("i", 0), context.Array("d", 3)
        self.raw = context.RawValue("i", 0)
        self.lock = context.Lock()
        self.receiver, self.sender = context.Pipe(duplex=False)

    def __call__(self, shard):
        with self.lock:
            self.begun.set()
        self.barrier.wait(LIMIT)
        with self.condition:
            self.condition.notify()
        self.queue.put(os.getpid())
        for number in range(3):
            with self.value.get_lock():
                self.value.value += 1
            self.array[number] = number + 1
            self.raw.value = number
            yield number
        self.sender.send("all")

    def close(self):
        self.queue.close()
        self.receiver.close()
        self.sender.close()


@pytest.mark.thorough
def test_objects_of_multiprocessing_are_shared(method, shared_memory):
    source = Together()
    enqueuer = GeneratorEnqueuer(source, backend=Processes(start_method=method))
    with source.lock:
        enqueuer.start()
        assert not source.begun.is_set()
    with contextlib.ExitStack() as end:
        end.callback(enqueuer.stop)
        with source.condition:
            assert source.begun.wait(LIMIT)
            source.barrier.wait(LIMIT)
            assert source.condition.wait(LIMIT)
        assert list(enqueuer) == [0, 1, 2]
        assert source.receiver.poll(LIMIT)
        assert source.receiver.recv() == "all"
    assert source.queue.get() != os.getpid()
    assert (source.value.value, source.raw.value, source.array[:]) == (3, 2, [1.0, 2.0, 3.0])
    source.close()


@pytest.mark.thorough
def test_a_queue_of_multiprocessing_brings_what_workers_put(method, shared_memory):
    queue = multiprocessing.get_context("spawn").Queue()

    def source(shard):
        queue.put(shard.index)
        yield shard.index

    with GeneratorEnqueuer(source, workers=2, backend=Processes(start_method=method)) as enqueuer:
        assert list(enqueuer) == [0, 1]
        assert sorted(queue.get(timeout=LIMIT) for _ in range(2)) == [0, 1]
    queue.close()
    queue.join_thread()


@pytest.mark.thorough
def test_a_worker_that_replaces_a_dead_one_shares_the_same_objects(method, shared_memory):
    deaths = multiprocessing.get_context("spawn").Value("i", 0)

    def source(shard):
        with deaths.get_lock():
            deaths.value += 1
        if deaths.value < 3:
            os.kill(os.getpid(), signal.SIGKILL)
        yield deaths.value

    options = {"backend": Processes(start_method=method), "max_restarts": 2}
    with GeneratorEnqueuer(source, **options) as enqueuer:
        assert list(enqueuer) == [3]
    assert deaths.value == 3


@pytest.mark.thorough
def test_more_objects_are_shared_than_one_packet_has_descriptors(method):
    pairs = [socket.socketpair() for _ in range(9)]

    def source(shard):
        for number, (_, there) in enumerate(pairs):
            there.sendall(bytes([number]))
        yield len(pairs)

    with GeneratorEnqueuer(source, backend=Processes(start_method=method)) as enqueuer:
        assert list(enqueuer) == [9]
    assert [here.recv(9) for here, _ in pairs] == [bytes([number]) for number in range(9)]
    for here, there in pairs:
        here.close()
        there.close()


def test_a_ctypes_value_that_is_not_shared_is_copied(method, shared_memory):
    plain = ctypes.c_int(5)

    def source(shard):
        plain.value += 1
        yield plain.value

    with GeneratorEnqueuer(source, backend=Processes(start_method=method)) as enqueuer:
        assert list(enqueuer) == [6]
    assert plain.value == 5


def test_what_a_source_makes_for_its_pickle_is_dropped_at_the_start(method):
    made = []

    class Rows:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return [1.0] * 50_000

        def __reduce__(self):
            rows = np.ones((3, 50_000))
            made.append(weakref.ref(rows))
            return list, (rows,)

    with OrderedEnqueuer(Rows(), sum, backend=Processes(start_method=method)) as enqueuer:
        assert all(rows() is None for rows in made)
        assert list(enqueuer) == [50_000.0] * 3


def test_the_culprit_beside_a_shared_object_is_named(shared_memory):
    shared, lock = multiprocessing.get_context("spawn").Event(), threading.Lock()
    source = functools.partial(lambda shared, shard: iter([shared, lock]), shared)
    with pytest.raises(
        SourceNotPicklable, match=r": the variable 'lock' \(a _thread.lock\) cannot"
    ):
        GeneratorEnqueuer(source, backend=Processes(start_method="spawn")).start()


def test_an_object_that_only_forked_workers_share_is_named():
    event = multiprocessing.get_context("fork").Event()
    with pytest.raises(
        SourceNotPicklable,
        match=r"variable 'event' \(a multiprocessing.synchronize.Event\) .*get_context\('spawn'\)",
    ):
        GeneratorEnqueuer(lambda: iter([event]), backend=Processes(start_method="spawn")).start()


# --- changes between epochs ---


class Leveled:
    """A sequence, or a source of shards, that the program changes between epochs."""

    def __init__(self):
        self.level, self.rows, self.array = 0, [1, 2, 3], np.arange(4)
        self.parts = Parts()
        # May be caches, or are made when they are needed.
        self.known, self.seen, self.file = {}, set(), None

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index] * 10 + self._added()

    def __call__(self, shard):
        yield from [row + self._added() for row in shard.split(self.rows)]

    def _added(self):
        return self.level if self.array.any() and self.parts.rate else 0


class Parts:
    def __init__(self):
        self.rate = 0.5


CHANGES = {
    "number": (lambda rows: setattr(rows, "level", 5), r"\.level"),
    "order": (lambda rows: rows.rows.reverse(), r"\.rows"),
    "array": (lambda rows: rows.array.fill(7), r"\.array"),
    "part": (lambda rows: setattr(rows.parts, "rate", 0.1), r"\.parts\.rate"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("make", [OrderedEnqueuer, GeneratorEnqueuer])
def test_a_change_that_processes_do_not_see_is_told_of_once(process, make, name):
    change, where = CHANGES[name]
    rows = Leveled()
    with make(rows, workers=2, **process) as enqueuer:
        first = list(enqueuer)
        change(rows)
        with pytest.warns(EnqueuerWarning, match=rf"{where} was changed .* stop\(\) and start"):
            assert list(enqueuer) == first
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert list(enqueuer) == first


@pytest.mark.thorough
def test_another_length_is_told_of_before_an_index_is_out_of_range(process):
    rows = Leveled()
    with OrderedEnqueuer(rows, workers=2, **process) as enqueuer:
        assert list(enqueuer) == [10, 20, 30]
        rows.rows.append(4)
        with (
            pytest.warns(EnqueuerWarning, match="the length of the sequence was changed"),
            pytest.raises(IndexError),
        ):
            list(enqueuer)
    with OrderedEnqueuer(rows, workers=2, **process) as enqueuer:
        assert list(enqueuer) == [10, 20, 30, 40]


@pytest.mark.thorough
def test_what_may_be_a_cache_is_no_change(process, no_warnings):
    rows = Leveled()
    with OrderedEnqueuer(rows, workers=2, **process) as enqueuer:
        for number in range(3):
            assert list(enqueuer) == [10, 20, 30]
            rows.known[number], rows.file = rows, number or None
            rows.seen.add(number)


def test_memory_that_processes_share_may_change(no_warnings):
    held = np.frombuffer(mmap.mmap(-1, 80), "i8")
    rows = Leveled()
    rows.array = held[::2]
    with OrderedEnqueuer(rows, workers=2, backend=Processes(start_method="fork")) as enqueuer:
        for number in range(3):
            assert list(enqueuer) == [10, 20, 30]
            held.fill(number)


def test_threads_see_a_change(no_warnings):
    rows = Leveled()
    with OrderedEnqueuer(rows, backend="thread") as enqueuer:
        assert list(enqueuer) == [10, 20, 30]
        rows.level, rows.rows = 5, [1, 2, 3, 4]
        assert list(enqueuer) == [15, 25, 35, 45]


VARIABLE = contextvars.ContextVar("of the loop", default="none")


def of_context(*_):
    yield VARIABLE.get()


async def of_coroutine(_):
    return VARIABLE.get()


@pytest.mark.parametrize("workers", [0, 2])
def test_threads_have_the_context_variables_of_the_loop(workers):
    token = VARIABLE.set("some")
    try:
        assert list(prefetch(of_context, workers=workers, shards=1)) == ["some"]
        for options in ({}, {"concurrency": 2}, {"map": of_coroutine}):
            function = options.pop("map", lambda _: VARIABLE.get())
            enqueuer = OrderedEnqueuer(range(2), function, workers=workers, **options)
            with enqueuer:
                assert list(enqueuer) == ["some", "some"]
    finally:
        VARIABLE.reset(token)


def test_threads_have_the_context_variables_of_the_task_that_starts_them():
    async def main():
        VARIABLE.set("of the task")
        async with GeneratorEnqueuer(of_context) as enqueuer:
            return [value async for value in enqueuer]

    assert asyncio.run(main()) == ["of the task"]


class Trainer:
    """A program as many are: its method loads the data, and the others have values of their own."""

    def __init__(self):
        self.rows, self.step, self.losses = [1, 2, 3], 0, []
        self.order = np.random.default_rng(7)

    def load(self, row):
        return self.rows[row]

    def batches(self, shard):
        yield from shard.split(self.rows)

    def train(self, enqueuer):
        for batch in enqueuer:
            self.step += 1
            self.losses.append(batch * self.order.random())


@pytest.mark.thorough
@pytest.mark.parametrize("is_tasks", [True, False])
def test_what_the_method_that_loads_does_not_use_may_change(process, is_tasks, no_warnings):
    trainer = Trainer()
    given = (range(3), trainer.load) if is_tasks else (trainer.batches,)
    make = OrderedEnqueuer if is_tasks else GeneratorEnqueuer
    with make(*given, workers=2, **process) as enqueuer:
        trainer.train(enqueuer)
        trainer.train(enqueuer)
    assert trainer.step == 6
