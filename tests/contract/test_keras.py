"""The Keras form: code pasted from Keras 2 or EAST runs with only its import changed."""

import copy
import itertools
import pickle
import signal
import threading
import time
from functools import partial

import pytest
from helpers import LIMIT, Gated, counting, handling, run_in_threads, twelve, wait_until

from enqueuer import (
    GeneratorEnqueuer,
    InvalidState,
    OrderedEnqueuer,
    Processes,
)
from enqueuer.enqueuers.enqueuer import core_of

pytestmark = pytest.mark.filterwarnings("ignore::enqueuer.DuplicateDataWarning")


def generator(batch_size):
    for number in range(100):
        yield [number] * batch_size


@pytest.mark.parametrize("use_multiprocessing", [False, True])
def test_start_next_get_stop(use_multiprocessing):
    enqueuer = GeneratorEnqueuer(
        generator(batch_size=32),
        use_multiprocessing=use_multiprocessing,
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


@pytest.mark.thorough
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


def wait_for_a_batch(queue):
    """Wait as published loops do: `while not enqueuer.queue.qsize(): sleep`."""
    wait_until(queue.qsize)


def test_a_failure_counts_in_the_queue(backend):
    def broken():
        yield 1
        raise KeyError("image")

    with GeneratorEnqueuer(broken, **backend) as enqueuer:
        wait_for_a_batch(enqueuer.queue)
        assert enqueuer.queue.get() == 1
        wait_for_a_batch(enqueuer.queue)
        assert enqueuer.is_running()
        assert not enqueuer.queue.empty()
        with pytest.raises(KeyError, match="image"):
            enqueuer.queue.get()
        assert not enqueuer.is_running()
        assert (enqueuer.queue.qsize(), enqueuer.queue.empty()) == (0, True)


def test_a_signal_handler_may_ask_the_queue_while_the_loop_waits(backend, tmp_path):
    gate, answers = tmp_path / "gate", []

    def one():
        wait_until(gate.exists)
        yield 1

    enqueuer = GeneratorEnqueuer(one, **backend)

    def ask(number, frame):
        answers.append((enqueuer.queue.qsize(), enqueuer.queue.empty()))
        if len(answers) == 3:
            gate.touch()

    with handling(signal.SIGALRM, ask), enqueuer:
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        try:
            assert list(enqueuer) == [1]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    assert set(answers[:3]) == {(0, True)}


def test_a_loop_that_asks_for_the_size_sees_the_end(backend):
    with GeneratorEnqueuer(lambda: iter("ab"), **backend) as enqueuer:
        batches = []
        end = time.monotonic() + LIMIT
        while enqueuer.is_running() and time.monotonic() < end:
            if enqueuer.queue.qsize():
                batches.append(enqueuer.queue.get())
            else:
                time.sleep(0.01)
        assert batches == ["a", "b"]
        assert not enqueuer.is_running()
        assert (enqueuer.queue.qsize(), enqueuer.queue.empty()) == (0, True)


def test_the_size_is_told_while_another_thread_waits(tmp_path):
    source = Gated(tmp_path, stops=((0, 1),))
    with GeneratorEnqueuer(source) as enqueuer:
        assert enqueuer.queue.get() == (0, 0)
        waiting = threading.Thread(target=enqueuer.queue.get)
        waiting.start()
        wait_until(lambda: core_of(enqueuer).run.meter.since)
        assert enqueuer.queue.qsize() == 0
        source.let_on()
        waiting.join(LIMIT)


@pytest.mark.ahead
def test_the_queue_tells_what_waits(backend):
    with GeneratorEnqueuer(counting, workers=2, max_queue_size=6, **backend) as enqueuer:
        wait_until(lambda: enqueuer.queue.qsize() == 6)
        assert repr(enqueuer) == "<GeneratorEnqueuer RUNNING 2 workers, 6/6 waiting>"
        assert not enqueuer.queue.empty()
        assert enqueuer.queue.get() == (0, 0)
        assert enqueuer.queue.get_nowait() == (1, 0)


def test_many_consumers_get_each_batch_once(backend):
    taken = [[] for _ in range(4)]

    with GeneratorEnqueuer(lambda s: iter(s.split(range(2000))), workers=2, **backend) as enqueuer:
        batches = iter(enqueuer)
        run_in_threads([partial(mine.extend, batches) for mine in taken])
    assert sorted(number for mine in taken for number in mine) == list(range(2000))
    assert all(mine == sorted(mine) for mine in taken)


def test_options_go_by_name():
    with pytest.raises(TypeError, match="options such as workers go by name"):
        GeneratorEnqueuer(twelve, 4)


def test_only_a_new_enqueuer_can_be_pickled_or_copied(backend):
    enqueuer = GeneratorEnqueuer(twelve, workers=2, random_seed=3, **backend)
    for twin in (pickle.loads(pickle.dumps(enqueuer)), copy.copy(enqueuer)):
        assert twin.random_seed == 3
        with twin:
            assert list(twin) == list(range(12))
    with enqueuer, pytest.raises(TypeError, match="as it owns workers"):
        pickle.dumps(enqueuer)


@pytest.mark.thorough
def test_a_context_of_multiprocessing_is_taken():
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    with GeneratorEnqueuer(twelve, backend=Processes(start_method=context)) as enqueuer:
        assert list(enqueuer) == list(range(12))


def test_a_queue_does_not_keep_its_enqueuer_alive():
    waiting = GeneratorEnqueuer(twelve).queue
    with pytest.raises(InvalidState, match="is gone"):
        waiting.empty()


@pytest.mark.parametrize(
    ("name", "way"),
    [("pickle_safe", "use_multiprocessing=True"), ("wait_time", "nothing to replace it")],
)
def test_names_of_early_versions_of_keras_are_answered(name, way):
    with pytest.raises(TypeError, match=f"no option '{name}'; give {way}"):
        GeneratorEnqueuer(twelve, **{name: True})


class Stepper:
    """What has `__next__` alone."""

    def __init__(self):
        self.number = 0

    def __next__(self):
        if self.number == 3:
            raise StopIteration
        self.number += 1
        return self.number


def test_an_iterator_with_nothing_but_next():
    with GeneratorEnqueuer(Stepper()) as enqueuer:
        assert list(enqueuer) == [1, 2, 3]


class Halving:
    """A sequence that is half as long in each epoch, of the tests of Keras."""

    def __init__(self):
        self.length = 8

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.length + index

    def on_epoch_end(self):
        self.length //= 2


def test_join_end_of_epoch(backend):
    enqueuer = OrderedEnqueuer(Halving(), **backend)
    enqueuer.start(3, 10)
    batches = enqueuer.get()
    assert [next(batches) for _ in range(8)] == list(range(8, 16))
    enqueuer.join_end_of_epoch()
    assert len(enqueuer.sequence) == len(enqueuer) == 4
    assert [next(batches) for _ in range(4)] == list(range(4, 8))
    enqueuer.stop()


class Unsized:
    """A dataset without a length."""

    def __getitem__(self, index):
        return 2 * index


class Counted(Unsized):
    """A `PyDataset` of Keras 3 with `num_batches` in the place of `__len__`."""

    def __init__(self, num_batches=None):
        self._num_batches = num_batches

    @property
    def num_batches(self):
        if self._num_batches == "not told":
            raise NotImplementedError("You need to implement the `num_batches` property")
        return self._num_batches

    def __iter__(self):
        return map(self.__getitem__, itertools.count())


def test_a_sequence_without_a_length_says_what_to_write():
    with pytest.raises(TypeError, match="no __len__; give it one, or num_batches"):
        OrderedEnqueuer(Unsized())
    with OrderedEnqueuer(itertools.count(), Unsized().__getitem__) as enqueuer:
        assert list(itertools.islice(enqueuer, 3)) == [0, 2, 4]


def test_num_batches_stands_for_the_length(backend):
    with OrderedEnqueuer(Counted(7), shuffle=True, workers=2, **backend) as enqueuer:
        assert len(enqueuer) == 7
        assert sorted(enqueuer) == list(range(0, 14, 2))
    with pytest.raises(ValueError, match="num_batches of the sequence must be >= 0, got -1"):
        OrderedEnqueuer(Counted(-1))
    with pytest.raises(TypeError, match=r"num_batches of the sequence must be an int, got 1\.5"):
        OrderedEnqueuer(Counted(1.5))


def test_a_sequence_may_be_endless(backend):
    options = dict(batch_size=2, collate=list, rank=1, world_size=3, workers=2, **backend)
    with OrderedEnqueuer(Counted(), **options) as enqueuer:
        assert list(itertools.islice(enqueuer, 3)) == [[2, 8], [14, 20], [26, 32]]
        assert list(itertools.islice(enqueuer.get(), 2)) == [[38, 44], [50, 56]]
        state = enqueuer.state_dict()
    later = OrderedEnqueuer(Counted(), random_seed=enqueuer.random_seed, **options)
    later.load_state_dict(state)
    with later:
        assert list(itertools.islice(later, 2)) == [[62, 68], [74, 80]]


def test_a_dataset_that_does_not_tell_its_length_is_an_iterable():
    with OrderedEnqueuer(Counted("not told"), lambda x: -x) as enqueuer:
        assert list(itertools.islice(enqueuer, 3)) == [0, -2, -4]
    with pytest.raises(ValueError, match=r"an iterable without __len__ .* needs map"):
        OrderedEnqueuer(Counted("not told"))


def test_an_endless_sequence_has_no_length_and_no_shuffle():
    with pytest.raises(TypeError, match="the sequence is endless"):
        len(OrderedEnqueuer(Counted()))
    with pytest.raises(ValueError, match="shuffle needs the number of elements"):
        OrderedEnqueuer(Counted(), shuffle=True)


def three_of_a_kind(number):
    for batch in range(3):
        yield number, batch


functions = [partial(three_of_a_kind, number) for number in range(3)]


def of_its_shard(shard):
    return functions[shard.index]()


ROUNDS = [(number, batch) for batch in range(3) for number in range(3)]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(
    "options", [{"backend": "thread"}, {"backend": Processes(start_method="fork")}]
)
def test_several_iterators_as_the_error_says(options, workers):
    """One generator for each process, as code of Keras' time has it; each is read once."""
    iterators = [three_of_a_kind(number) for number in range(3)]
    with pytest.raises(TypeError, match="lambda shard: iterators") as caught:
        GeneratorEnqueuer(iterators)
    call = str(caught.value).split("`")[1].removesuffix(")")
    options = {"workers": workers, **options}
    scope = {"GeneratorEnqueuer": GeneratorEnqueuer, "iterators": iterators, "options": options}
    with eval(f"{call}, **options)", scope) as enqueuer:
        assert list(enqueuer) == ROUNDS


def test_several_functions_as_the_error_says(backend):
    with GeneratorEnqueuer(of_its_shard, shards=len(functions), workers=2, **backend) as enqueuer:
        assert list(enqueuer) == list(enqueuer) == ROUNDS
