"""A function is called once its owner is garbage, whatever a signal handler raises meanwhile."""

import itertools
import os
import threading
import warnings

import pytest
from helpers import LIMIT, collect_until, run_program
from strikes import Alarm, Strike

from enqueuer.common import interrupts
from enqueuer.common.interrupts import Finalizer


class Owner:
    """What has a finalizer."""


@pytest.fixture(autouse=True)
def none_left():
    before = set(interrupts.pending)
    yield
    assert set(interrupts.pending) == before


def test_the_function_is_called_when_its_owner_is_garbage():
    owner, called = Owner(), []
    finalizer = Finalizer(owner, called.append, 1)
    assert finalizer.alive
    assert called == []
    del owner
    assert called == [1]
    assert not finalizer.alive


def test_the_function_is_called_when_its_owner_was_part_of_a_circle():
    owner, called = Owner(), []
    owner.myself = owner
    Finalizer(owner, called.append, 1)
    del owner
    assert called == []
    collect_until(lambda: called == [1])


def test_the_function_of_a_finalizer_that_was_detached_is_not_called():
    owner, called = Owner(), []
    Finalizer(owner, called.append, 1).detach()
    del owner
    assert called == []


def test_an_interrupt_at_any_place_does_not_keep_the_function_from_being_called():
    for nth in itertools.count():
        owner, called = Owner(), []
        Finalizer(owner, called.append, nth)
        holder = [owner]
        del owner
        strike = Strike(nth, Alarm)
        strike(holder.clear)
        if strike.where is None:
            break
        assert not strike.raised
        assert set(called) == {nth}, strike.where
        assert interrupts.pending == {}, strike.where
    assert nth > 5


def interrupted(times):
    """Return a function that an exception ends so many times, and the list that it fills then."""
    done = []

    def function():
        nonlocal times
        times -= 1
        if times >= 0:
            raise KeyboardInterrupt
        done.append(1)

    return function, done


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_two_interrupts_have_kept_from_being_called_is_called_at_the_next_collection():
    first, second = Owner(), Owner()
    function, done = interrupted(2)
    finalizer = Finalizer(first, function)
    Finalizer(second, int)
    del first
    assert done == []
    assert finalizer.alive
    del second
    assert done == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_function_that_raises_by_itself_is_not_called_for_ever():
    function, _ = interrupted(100)
    owners = [Owner() for _ in range(3)]
    finalizer = Finalizer(owners[0], function)
    for owner in owners[1:]:
        Finalizer(owner, int)
    del owner
    while owners:
        del owners[0]
    assert not finalizer.alive


def test_a_function_is_not_called_by_two_threads_at_once():
    owner, inside, leave, calls = Owner(), threading.Event(), threading.Event(), []

    def function():
        calls.append(1)
        if len(calls) == 1:
            inside.set()
            leave.wait(LIMIT)

    finalizer = Finalizer(owner, function)
    thread = threading.Thread(target=finalizer.call)
    thread.start()
    assert inside.wait(LIMIT)
    del owner
    leave.set()
    thread.join(LIMIT)
    assert calls == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_forked_child_leaves_to_its_parent_what_was_missed():
    first, second = Owner(), Owner()
    function, done = interrupted(2)
    Finalizer(first, function)
    Finalizer(second, int)
    del first
    with warnings.catch_warnings():
        # Threads of other tests may still run.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            del second
        finally:
            os._exit(len(done))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del second
    assert done == [1]


def test_functions_are_called_at_exit_the_newest_first(tmp_path):
    text = """
        from enqueuer.common.interrupts import Finalizer

        class Owner:
            pass

        def fails():
            raise OSError("what it prints")

        owner = Owner()
        for function, *args in ((print, 1), (fails,), (print, 2)):
            Finalizer(owner, function, *args)
    """
    code, output, errors = run_program(tmp_path, text)
    assert (code, output) == (0, "2\n1\n")
    assert errors.endswith("OSError: what it prints\n")
