"""Signal handlers are held back, called afterwards, and in their place again, come what may."""

import itertools
import os
import signal
import threading
import warnings

import pytest
from strikes import Alarm, Strike

from enqueuer.common import interrupts


class Interrupt(Exception):
    """What the handlers of these tests raise."""


@pytest.fixture
def seen():
    """Handle SIGUSR1 by raising, and SIGUSR2 by noting it; give what was handled."""
    seen = []

    def raises(number, frame):
        seen.append(number)
        raise Interrupt

    handlers = {signal.SIGUSR1: raises, signal.SIGUSR2: lambda number, frame: seen.append(number)}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield seen
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert not interrupts.is_held
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_block_is_not_interrupted(seen):
    done = []
    with pytest.raises(Interrupt), interrupts.held():
        os.kill(os.getpid(), signal.SIGUSR1)
        done.append(1)
    assert done == [1]
    assert seen == [signal.SIGUSR1]


@pytest.mark.skipif(interrupts.sigaction is None, reason="only Linux reports it")
@pytest.mark.parametrize("interrupts_calls", [True, False])
def test_what_siginterrupt_has_set_stays(seen, interrupts_calls):
    signal.siginterrupt(signal.SIGUSR2, interrupts_calls)
    assert interrupts.restarts(signal.SIGUSR2) is not interrupts_calls
    with interrupts.held():
        assert interrupts.restarts(signal.SIGUSR2) is not interrupts_calls
        interrupts.check()
    assert interrupts.restarts(signal.SIGUSR2) is not interrupts_calls
    assert not interrupts.restarts(signal.SIGUSR1)


def test_a_handler_that_is_set_in_a_block_has_its_own_siginterrupt(seen):
    signal.siginterrupt(signal.SIGUSR2, False)
    mine = signal.getsignal(signal.SIGUSR2)
    with interrupts.held():
        signal.signal(signal.SIGUSR2, lambda number, frame: None)
    assert not interrupts.restarts(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, mine)


def test_signals_that_another_thread_takes_are_held_back_as_well(seen):
    thread = threading.Thread(target=signal.raise_signal, args=(signal.SIGUSR1,))
    with pytest.raises(Interrupt), interrupts.held():
        thread.start()
        thread.join()
        assert seen == []
    assert seen == [signal.SIGUSR1]


def test_each_kind_of_signal_is_handled_once_after_the_block(seen):
    with interrupts.held():
        for _ in range(3):
            signal.raise_signal(signal.SIGUSR2)
        assert seen == []
    assert seen == [signal.SIGUSR2]


def test_all_that_came_is_handled_even_if_a_handler_raises(seen):
    with pytest.raises(Interrupt), interrupts.held():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
    assert seen == [signal.SIGUSR1, signal.SIGUSR2]


def test_the_outermost_block_counts(seen):
    with pytest.raises(Interrupt), interrupts.held():
        with interrupts.held():
            signal.raise_signal(signal.SIGUSR1)
        assert seen == []


def test_a_wait_inside_can_be_interrupted(seen):
    done = []
    with interrupts.held():
        with pytest.raises(Interrupt):
            interrupts.interruptible(signal.raise_signal, signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        done.append(list(seen))
    assert done == [[signal.SIGUSR1]]
    assert seen == [signal.SIGUSR1, signal.SIGUSR2]


def test_a_wait_that_comes_to_another_block_does_not_end_the_outer_one(seen):
    """As a handler does that uses an enqueuer, or the end of a forgotten one."""
    done = []

    def wait():
        with interrupts.held():
            pass

    with pytest.raises(Interrupt), interrupts.held():
        interrupts.interruptible(wait)
        signal.raise_signal(signal.SIGUSR1)
        done.append(1)
    assert done == [1]


def test_what_came_before_a_wait_is_handled_before_it(seen):
    waited = []
    with interrupts.held():
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(Interrupt):
            interrupts.interruptible(waited.append, 1)
    assert waited == []


def test_check_raises_what_came(seen):
    with pytest.raises(Interrupt), interrupts.held():
        interrupts.check()
        signal.raise_signal(signal.SIGUSR1)
        interrupts.check()
        raise AssertionError


def test_an_error_of_the_block_comes_out(seen):
    with pytest.raises(KeyError), interrupts.held():
        raise KeyError


def test_another_thread_holds_nothing_back(seen):
    """No handler runs there, and the main thread may be interrupted meanwhile."""
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with interrupts.held():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    with pytest.raises(Interrupt):
        signal.raise_signal(signal.SIGUSR1)
    leave.set()
    thread.join()


def test_a_handler_that_the_block_installs_stays(seen):
    mine = signal.getsignal(signal.SIGUSR1)
    with interrupts.held():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.signal(signal.SIGUSR1, mine) is signal.SIG_IGN


def test_a_forked_child_is_not_inside_the_block(seen):
    with interrupts.held(), warnings.catch_warnings():
        # Threads of other tests may still run.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(signal.SIGUSR1)
            except Interrupt:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_an_interrupt_anywhere_leaves_the_handlers_in_their_places(seen, monkeypatch):
    """Before the block, in it and after it."""
    # With fewer signals there are fewer places for an interrupt.
    few = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    monkeypatch.setattr(interrupts, "_SIGNALS", few)
    signal.siginterrupt(signal.SIGUSR2, False)
    # False if the system does not report it.
    restarts = interrupts.restarts(signal.SIGUSR2)
    inside = []

    def act():
        with interrupts.held():
            interrupts.check()
            inside.append(1)
            interrupts.interruptible(sorted, ())
            inside.append(2)

    for number in itertools.count():
        inside.clear()
        strike = Strike(number, Alarm)
        strike(act)
        if strike.where is None:
            break
        assert strike.raised
        assert inside in ([], [1], [1, 2])
        assert not interrupts.is_held
        assert not interrupts.noted
        handlers = map(signal.getsignal, signal.valid_signals())
        modules = {getattr(handler, "__module__", None) for handler in handlers}
        assert interrupts.__name__ not in modules, strike.where
        assert interrupts.restarts(signal.SIGUSR2) == restarts, strike.where
    assert number > 50
