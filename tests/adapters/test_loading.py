"""What all adapters have in common: stopping, epochs, positions, working ahead."""

import functools
import itertools
import operator
import re
import threading
import warnings
import weakref
from typing import Protocol, runtime_checkable

import pytest
from helpers import LIMIT, collect_until, counting, run_script, twelve, wait_until

from enqueuer import (
    EmptyEpochWarning,
    EnqueuerWarning,
    FrameworkUnavailable,
    GeneratorEnqueuer,
    InvalidState,
    OrderedEnqueuer,
    StateMismatch,
)
from enqueuer.adapters.loading import Loader, PrefetchReader
from enqueuer.common.extras import framework, install_command
from enqueuer.enqueuers.enqueuer import core_of


class Later(Loader):
    """A loader that works ahead and changes nothing."""

    def __init__(self, loader, queue_size=2, steps_per_epoch=None, change=lambda batch: batch):
        reader = functools.partial(PrefetchReader, change=change, queue_size=queue_size)
        super().__init__(loader, steps_per_epoch, reader=reader)


@pytest.fixture(params=[Loader, Later])
def kind(request):
    return request.param


def runs(enqueuer):
    return not core_of(enqueuer).is_idle


def failing():
    yield 1
    raise KeyError("no such thing")


# --- stopping ----------------------------------------------------------------------------------


def test_an_enqueuer_that_was_not_started_ends_with_its_loader(kind, backend):
    enqueuer = GeneratorEnqueuer(twelve, **backend)
    loader = kind(enqueuer)
    assert list(loader) == list(range(12))
    assert runs(enqueuer)
    del loader
    assert not runs(enqueuer)


def test_one_that_runs_already_is_left_running(kind):
    with GeneratorEnqueuer(twelve) as enqueuer:
        loader = kind(enqueuer)
        assert list(loader) == list(range(12))
        loader.stop()
        del loader
        assert runs(enqueuer)


def test_a_break_and_nothing_else_ends_it(kind, backend):
    enqueuer = GeneratorEnqueuer(counting, **backend)
    for _ in kind(enqueuer):
        break
    assert not runs(enqueuer)


def test_an_exception_in_the_loop_ends_it(kind, backend):
    enqueuer = GeneratorEnqueuer(counting, **backend)

    def train():
        for _ in kind(enqueuer):
            raise RuntimeError("diverged")

    with pytest.raises(RuntimeError, match="diverged"):
        train()
    assert not runs(enqueuer)


def test_a_with_block_ends_it(kind):
    enqueuer = GeneratorEnqueuer(counting)
    with kind(enqueuer) as loader:
        assert next(iter(loader)) == (0, 0)
    assert not runs(enqueuer)


def test_a_loader_of_a_loader_stops_it():
    enqueuer = GeneratorEnqueuer(counting)
    outer = Later(Loader(enqueuer))
    assert next(iter(outer)) == (0, 0)
    del outer
    assert not runs(enqueuer)


def test_stop_ends_a_thread_that_waits_for_a_batch():
    asked, go = threading.Event(), threading.Event()

    def slow():
        yield 1
        asked.set()
        go.wait(LIMIT)
        yield 2

    loader = Later(GeneratorEnqueuer(slow))
    assert next(iter(loader)) == 1
    assert asked.wait(LIMIT)
    threading.Timer(0.1, go.set).start()  # a generator on a thread cannot be interrupted
    loader.stop()
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "Timer"])


# --- epochs and positions ----------------------------------------------------------------------


def test_each_iteration_is_an_epoch(kind):
    loader = kind(GeneratorEnqueuer(lambda shard: iter([shard.epoch])))
    assert [list(loader) for _ in range(3)] == [[0], [1], [2]]


def test_after_a_break_an_enqueuer_goes_on(kind, backend):
    loader = kind(GeneratorEnqueuer(twelve, **backend))
    first = list(itertools.islice(loader, 5))
    assert first + list(loader) == list(range(12))


def test_after_a_break_a_list_begins_anew(kind):
    for loader in (kind([1, 2, 3, 4]), Later(kind([1, 2, 3, 4]))):
        assert list(itertools.islice(loader, 2)) == [1, 2]
        assert list(loader) == [1, 2, 3, 4]


def test_an_iterable_is_iterated_once_an_epoch(kind):
    class Counted:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(range(3))

    source = Counted()
    loader = kind(source)
    assert [list(loader) for _ in range(2)] == [[0, 1, 2]] * 2
    assert source.passes == 2


def test_steps_per_epoch_cuts_what_has_no_end(kind):
    loader = kind(GeneratorEnqueuer(counting), steps_per_epoch=3)
    assert len(loader) == 3
    assert [[number for _, number in loader] for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("epochs", [None, 5])
def test_steps_per_epoch_goes_on_where_the_generator_ends(kind, epochs):
    loader = kind(GeneratorEnqueuer(lambda: iter(range(4)), epochs=epochs), steps_per_epoch=6)
    assert list(loader) == [0, 1, 2, 3, 0, 1]
    assert list(loader) == [2, 3, 0, 1, 2, 3]
    assert list(loader) == [0, 1, 2, 3, 0, 1]


def test_a_loop_that_leaves_with_the_last_batch_begins_an_epoch_afterwards(kind):
    loader = kind(GeneratorEnqueuer(counting), steps_per_epoch=3)
    for first in (0, 3, 6):
        assert [number for _, number in itertools.islice(loader, 3)] == [
            first,
            first + 1,
            first + 2,
        ]


def test_after_stop_the_position_is_still_that_of_the_loop(kind):
    loader = kind(GeneratorEnqueuer(twelve, random_seed=7), steps_per_epoch=5)
    assert list(itertools.islice(loader, 3)) == [0, 1, 2]
    state = loader.state_dict()
    loader.stop()
    assert loader.state_dict() == state
    assert list(loader) == [0, 1, 2, 3, 4]
    loader.stop()
    loader.load_state_dict(state)
    assert (list(loader), list(loader)) == ([3, 4], [5, 6, 7, 8, 9])


def test_a_state_of_another_source_is_taken_if_that_is_asked_for(kind):
    def others():
        yield from range(100, 112)

    loader = kind(GeneratorEnqueuer(twelve, random_seed=7))
    assert list(itertools.islice(loader, 3)) == [0, 1, 2]
    state = loader.state_dict()
    loader.stop()
    other = kind(GeneratorEnqueuer(others, random_seed=7))
    with pytest.raises(StateMismatch, match="name is 'twelve' in the state and 'others' here"):
        other.load_state_dict(state)
    with pytest.warns(EnqueuerWarning, match="'twelve' in the state"):
        other.load_state_dict(state, strict=False)
    assert list(other) == list(range(103, 112))


def test_a_loop_with_steps_ends_when_it_is_stopped_within(kind):
    enqueuer = GeneratorEnqueuer(twelve)
    loader = kind(enqueuer, steps_per_epoch=8)
    had = []
    for number in loader:
        had.append(number)
        if number == 1:
            loader.stop()
    assert had == [0, 1]
    assert not runs(enqueuer)


def test_a_thread_that_is_stopped_does_not_start_the_loader_anew():
    """It sees the end that the stop makes, and begins the next of several passes."""

    class Source(GeneratorEnqueuer):
        passes = 0

        def __iter__(self):
            self.passes += 1
            if self.passes == 2:
                began_again.set()
            return super().__iter__()

    class Within(Loader):
        def stop(self, timeout=None):
            super().stop(timeout)
            stopped.set()
            began_again.wait(LIMIT)

    def change(number):
        assert number == 0 or stopped.wait(LIMIT)
        return number

    stopped, began_again = threading.Event(), threading.Event()
    enqueuer = Source(twelve)
    loader = Later(Within(enqueuer), steps_per_epoch=1000, change=change)
    assert next(iter(loader)) == 0
    loader.stop()
    assert not runs(enqueuer)


def test_a_loader_within_that_was_stopped_is_started_again(kind):
    enqueuer = GeneratorEnqueuer(twelve)
    inner = Loader(enqueuer)
    loader = kind(inner)
    for _ in range(2):
        assert list(loader) == list(range(12))
        inner.stop()
    loader.stop()
    assert not runs(enqueuer)


def test_steps_of_an_empty_source_do_not_hang(kind):
    loader = kind(GeneratorEnqueuer(lambda: iter(())), steps_per_epoch=2)
    with pytest.warns(EmptyEpochWarning, match="the generator yielded nothing") as caught:
        assert list(loader) == []
    assert len(caught) == 1


def test_the_length_is_that_of_the_enqueuer(kind):
    assert len(kind(OrderedEnqueuer(range(10), batch_size=4))) == 3
    with pytest.raises(TypeError, match="give steps_per_epoch"):
        len(kind(GeneratorEnqueuer(twelve)))
    assert kind(GeneratorEnqueuer(twelve))


@pytest.mark.thorough("processes")
@pytest.mark.parametrize("taken", [0, 5, 12])
@pytest.mark.parametrize("steps", [None, 8])
def test_a_position_is_what_the_loop_was_given(kind, taken, steps):
    def loader():
        return kind(GeneratorEnqueuer(twelve, random_seed=7), steps_per_epoch=steps)

    one = loader()
    had = []
    while len(had) < taken:
        had += itertools.islice(one, taken - len(had))
    state = one.state_dict()
    rest = [list(one), list(one)]
    other = loader()
    other.load_state_dict(state)
    assert [list(other), list(other)] == rest


def test_a_running_loader_refuses_a_state(kind):
    loader = kind(GeneratorEnqueuer(twelve))
    next(iter(loader))
    with pytest.raises(InvalidState, match="stop"):
        loader.load_state_dict(loader.state_dict())


@pytest.mark.parametrize("steps", [None, 8])
def test_a_state_is_loaded_before_the_first_batch_of_an_iteration(kind, steps):
    """As Lightning does, which begins an iteration to see whether it can."""

    def make():
        return kind(GeneratorEnqueuer(twelve, random_seed=7), steps_per_epoch=steps)

    one = make()
    assert list(itertools.islice(one, 5)) == [0, 1, 2, 3, 4]
    state = one.state_dict()
    rest = [list(one), list(one)]
    other = make()
    dropped = iter(other)
    del dropped
    begun = iter(other)
    other.load_state_dict(state)
    assert [list(begun), list(other)] == rest
    # Within a later epoch, too.
    assert len(list(itertools.islice(other, 3))) == 3
    iter(other)
    other.load_state_dict(state)
    assert [list(other), list(other)] == rest


def test_a_state_that_does_not_fit_leaves_a_begun_loader_stopped(kind):
    enqueuer = GeneratorEnqueuer(twelve, random_seed=7)
    loader = kind(enqueuer)
    state = GeneratorEnqueuer(twelve, random_seed=8).state_dict()
    iter(loader)
    with pytest.raises(StateMismatch, match="random_seed"):
        loader.load_state_dict(state)
    assert not runs(enqueuer)
    assert list(loader) == list(range(12))


def test_a_state_is_not_loaded_into_what_the_caller_has_started(kind):
    with GeneratorEnqueuer(twelve) as enqueuer:
        loader = kind(enqueuer)
        iter(loader)
        with pytest.raises(InvalidState, match="stop"):
            loader.load_state_dict(loader.state_dict())


def test_a_loop_that_takes_the_whole_length_ends_the_epoch(kind):
    """As Lightning's does, which never asks for one more."""
    loader = kind(OrderedEnqueuer(range(4), random_seed=7, shuffle=True))
    whole = [list(loader) for _ in range(3)]
    loader.stop()
    found = [list(itertools.islice(loader, len(loader))) for _ in range(3)]
    assert found == whole


@pytest.mark.parametrize("begins", [False, True])
def test_a_position_behind_the_last_batch_begins_the_next_epoch_if_one_was_begun(kind, begins):
    def make():
        return kind(OrderedEnqueuer(range(4), random_seed=7, shuffle=True))

    one = make()
    list(itertools.islice(one, len(one)))
    state = one.state_dict()
    other = make()
    if begins:
        iter(other)
    other.load_state_dict(state)
    if not begins:
        assert list(other) == []
    assert [list(other), list(other)] == [list(one), list(one)]


def test_the_rest_of_an_epoch_without_a_length_may_be_empty(kind):
    loader = kind(GeneratorEnqueuer(twelve))
    assert len(list(itertools.islice(loader, 12))) == 12
    assert [len(list(loader)) for _ in range(2)] == [0, 12]


@runtime_checkable
class Stateful(Protocol):
    """How Lightning finds out that a loader has a position."""

    def state_dict(self): ...
    def load_state_dict(self, state_dict): ...


def test_messages_have_the_article_of_the_class(kind):
    class Odd(list):
        __len__ = None

    with pytest.raises(TypeError, match=r"^the number of batches of an Odd is unknown"):
        len(kind(Odd([1])))
    with pytest.raises(AttributeError, match=r"^an Odd has no position"):
        kind(Odd([1])).state_dict()


def test_an_enqueuer_has_a_position_and_a_list_has_none(kind):
    loader = kind([1])
    for name in ("state_dict", "load_state_dict"):
        assert not hasattr(loader, name)
        with pytest.raises(AttributeError, match=f"a list has no position: it has no {name}"):
            getattr(loader, name)
    assert not isinstance(loader, Stateful)
    assert not isinstance(Later(loader), Stateful)
    assert list(Later(loader)) == [1]
    with pytest.raises(AttributeError, match="no attribute 'position'"):
        _ = loader.position
    for loader in (kind(GeneratorEnqueuer(twelve)), Later(kind(GeneratorEnqueuer(twelve)))):
        assert isinstance(loader, Stateful)


# --- several iterators --------------------------------------------------------------------------


def test_an_iterator_that_is_replaced_in_the_middle_says_so():
    loader = Later([1, 2, 3])
    first = iter(loader)
    assert next(first) == 1
    second = iter(loader)
    with pytest.raises(InvalidState, match=r"another iteration .* has begun"):
        next(first)
    assert list(second) == [1, 2, 3]
    assert list(second) == list(first) == []


def test_two_iterators_over_an_enqueuer_share_the_epoch(kind):
    loader = kind(GeneratorEnqueuer(twelve))
    first, second = iter(loader), iter(loader)
    # A loader whose thread reads ahead is one loop.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "two loops of this thread", EnqueuerWarning)
        had = [next(first), next(second), next(first), *second, *first]
    assert had == list(range(12))


def test_an_iteration_that_did_not_begin_in_its_epoch_takes_nothing_of_the_next():
    loader = Later(GeneratorEnqueuer(twelve))
    first, second = iter(loader), iter(loader)
    assert list(first) == list(range(12))
    third = iter(loader)
    assert list(second) == []
    assert list(third) == list(range(12))


def test_the_thread_of_the_loop_makes_the_batches_after_a_change_to_no_workers():
    enqueuer = OrderedEnqueuer(range(3), lambda _: threading.current_thread(), workers=1)
    loader = Later(enqueuer, change=lambda batch: (batch, threading.current_thread()))
    enqueuer.reconfigure(workers=0)
    assert list(loader) == [(threading.main_thread(),) * 2] * 3


def test_after_a_break_nothing_of_a_list_is_kept():
    class Batch:
        """An object that a weak reference can watch."""

    made, threads = weakref.WeakSet(), []

    def change(number):
        threads.append(threading.current_thread())
        batch = Batch()
        made.add(batch)
        return batch

    loader = Later([0] * 10, change=change)
    for _ in loader:
        break
    del _
    threads[0].join(LIMIT)
    assert not threads[0].is_alive()
    collect_until(lambda: not made)
    assert len(list(loader)) == 10


# --- working ahead -----------------------------------------------------------------------------


def test_errors_of_the_loader_arrive_as_themselves(kind, backend):
    loader = kind(GeneratorEnqueuer(failing, **backend))
    batches = iter(loader)
    assert next(batches) == 1
    with pytest.raises(KeyError, match="no such thing") as caught:
        next(batches)
    assert caught.value.enqueuer_origin.item == 1
    with pytest.raises(KeyError):  # until it is stopped
        list(loader)


def test_an_enqueuer_does_not_keep_a_loader_that_it_failed(kind):
    enqueuer = GeneratorEnqueuer(failing)
    with pytest.raises(KeyError) as caught:
        list(kind(enqueuer))
    del caught
    collect_until(lambda: not runs(enqueuer))


class CopiedWithFrames(Exception):
    """An error as `tblib.pickling_support.install()` makes all of them, which TensorFlow calls."""

    def __copy__(self):
        return CopiedWithFrames().with_traceback(self.__traceback__)


def fail_with_frames(number):
    raise CopiedWithFrames


@pytest.mark.parametrize("map", [functools.partial(operator.floordiv, 1), fail_with_frames])
def test_an_enqueuer_of_tasks_does_not_either(kind, backend, map):
    enqueuer = OrderedEnqueuer([1, 0], map, **backend)
    with pytest.raises((ZeroDivisionError, CopiedWithFrames)):
        list(kind(enqueuer))
    forgotten = weakref.ref(enqueuer)
    del enqueuer
    collect_until(lambda: forgotten() is None)


def test_the_thread_keeps_queue_size_batches_and_one_in_hand():
    made, full = [], threading.Event()

    def change(batch):
        made.append(batch)
        if len(made) == 4:
            full.set()
        return batch

    loader = Later(itertools.count(), queue_size=3, change=change)
    assert not made
    batches = iter(loader)
    assert full.wait(LIMIT)
    assert made == [0, 1, 2, 3]
    assert next(batches) == 0
    loader.stop()


def test_an_iteration_that_no_loop_enters_draws_nothing():
    begun = []

    class Shuffling:
        def __iter__(self):
            begun.append(len(begun))
            return iter([begun[-1]] * 3)

    loader = Later(Shuffling())
    for _ in range(3):
        iter(loader)
    assert list(loader) == [0, 0, 0]
    assert list(loader) == [1, 1, 1]
    loader.stop()


def test_errors_of_the_change_arrive_as_themselves():
    loader = Later([1, 0], change=lambda batch: 1 // batch)
    batches = iter(loader)
    assert next(batches) == 1
    with pytest.raises(ZeroDivisionError):
        next(batches)


@pytest.mark.parametrize("wrong", [0, -1, "2", None])
def test_a_wrong_queue_size_is_refused(wrong):
    with pytest.raises((TypeError, ValueError), match="queue_size"):
        Later([1], queue_size=wrong)


def test_what_is_no_loader_is_refused(kind):
    with pytest.raises(TypeError, match="must be an enqueuer or an iterable, got 5"):
        kind(5)


# --- frameworks --------------------------------------------------------------------------------


def test_a_missing_framework_says_what_to_install():
    with pytest.raises(
        FrameworkUnavailable, match=r"pip install 'no_such_framework>=2.1', or "
    ) as caught:
        framework("no_such_framework", "torch", "2.1")
    assert isinstance(caught.value, ImportError)
    assert caught.value.name == "no_such_framework"


WITHOUT_FRAMEWORKS = """
import importlib, sys, traceback
for adapter, name in ADAPTERS:
    sys.modules[name] = None
    try:
        importlib.import_module(f"enqueuer.adapters.{adapter}")
    except ImportError:
        traceback.print_exc()
"""


@pytest.mark.thorough
def test_an_adapter_without_its_framework_says_what_to_install(tmp_path):
    adapters = [(name, name) for name in ("torch", "tensorflow", "keras", "jax")]
    adapters.append(("cuda", "torch"))
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_FRAMEWORKS.replace("ADAPTERS", repr(adapters)))
    _, _, err = run_script(script, tmp_path, LIMIT)
    said = re.findall("enqueuer.FrameworkUnavailable: this adapter needs .*", err)
    for (_, name), line in zip(adapters, said, strict=True):
        assert f"needs {name} >= " in line
        assert install_command(name) in line


@pytest.mark.parametrize("version", ["0.4.26", "0.4.30.dev2+g1", "0.5.0", "0.10.2", "1.0"])
def test_the_third_number_of_a_version_counts(version, monkeypatch):
    monkeypatch.setattr("numpy.__version__", version)
    assert framework("numpy", "jax", "0.4.26")
    monkeypatch.setattr("numpy.__version__", "0.4.25")
    with pytest.raises(FrameworkUnavailable, match=r"0.4.25 is installed: pip install -U numpy"):
        framework("numpy", "jax", "0.4.26")


def test_a_loader_of_a_list_has_no_statistics(kind):
    with pytest.raises(TypeError, match=r"stats\(\) needs an enqueuer in the loader"):
        kind([1, 2]).stats()
