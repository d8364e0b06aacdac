"""Run a signal handler, which may raise, at a chosen place of an operation.

CPython runs the Python functions of signal handlers between two bytecodes, and only at certain
ones: on entry to a function and when a generator goes on, after a call, and after a jump back (in
3.10 after any conditional jump). A call that waits in the system is interrupted in its middle.
A `Strike` counts these places while an operation runs in the main thread, and raises a signal at
one of them. The handler then runs exactly there, so that code which exchanges handlers or masks
signals is honoured.

Places in the tests' own frames do not count: they belong to the user's program.
"""

from __future__ import annotations

import dis
import functools
import os
import signal
import sys
import threading
from pathlib import Path

import enqueuer

# C functions that may wait, and which a signal interrupts.
_WAITING = {"acquire", "poll", "recv", "recvmsg", "send", "sendall", "sendmsg", "sleep", "waitpid"}
_WAITING |= {"_wait_for_tstate_lock", "fork_exec", "join", "read", "select", "wait", "waitid"}
_ENTERS = {"BEFORE_WITH", "SETUP_WITH", "LOAD_SPECIAL"}  # `with` calls __enter__, which may wait
_FOREIGN = (str(Path(__file__).parent), "<frozen importlib", "<string>")
_PACKAGE = str(Path(enqueuer.__file__).parent)
_FOREIGN_PARTS = tuple(f"{os.sep}{name}{os.sep}" for name in ("_pytest", "pluggy", "importlib"))
_HAS_RANGES = sys.version_info >= (3, 11)


class Alarm(Exception):
    """What a handler raises that a program has for an alarm."""


class Strike:
    """Run an operation and raise a signal at its `nth` place, from 0.

    Args:
        nth: Number of the place; None counts the places only.
        error: KeyboardInterrupt, by SIGINT and Python's own handler, or any other, by SIGUSR1.
        action: Called by the handler of SIGUSR1 instead of raising; None: it raises `error`.

    Attributes:
        places: Number of the places that the operation passed until the strike.
        where: The place that was struck, in words; None if the operation ended before it.
        raised: Whether the exception came out of the operation.
        is_swallowed: Whether Python itself swallowed it, as in a finalizer.
    """

    def __init__(self, nth, error=KeyboardInterrupt, action=None):
        self.nth = nth
        self.error = error if action is None else Alarm
        self.action = action
        self.process = os.getpid()
        self.places = 0
        self.where = None
        self.raised = self.is_swallowed = False
        self.returned = 0  # the id of the frame whose call to C has just returned

    def __call__(self, operation):
        """Run the operation; return its result, or None if it was struck."""
        assert threading.current_thread() is threading.main_thread()
        previous = None
        if self.error is not KeyboardInterrupt:
            previous = signal.signal(signal.SIGUSR1, self._handle)
        hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        traces = sys.gettrace(), sys.getprofile()
        sys.setprofile(self._profile)
        sys.settrace(self._trace)
        try:
            return operation()
        except self.error as error:
            # Errors of the package may be of the same kind: WorkerDied is an OSError.
            if self.where is None or type(error) is not self.error:
                raise
            self.raised = True
            return None
        finally:
            sys.settrace(traces[0])
            sys.setprofile(traces[1])
            sys.unraisablehook = hook
            if previous is not None:
                signal.signal(signal.SIGUSR1, previous)

    def _handle(self, number, frame):
        if self.action is None:
            raise self.error("from a signal handler")
        self.action()

    def _unraisable(self, args):
        """Python swallows what strikes in a finalizer, or in the callback of a weak reference."""
        if issubclass(args.exc_type, self.error):
            self.is_swallowed = True
        else:
            sys.__unraisablehook__(args)

    def place(self, frame, what):
        """Note a place, and strike if it is the one."""
        nth, self.places = self.places, self.places + 1
        if nth != self.nth or os.getpid() != self.process:  # a forked worker counts as well
            return
        sys.settrace(None)
        sys.setprofile(None)
        code = frame.f_code
        name = getattr(code, "co_qualname", code.co_name)
        path = Path(code.co_filename)
        self.where = f"{path.parent.name}/{path.name}:{frame.f_lineno} {name}, {what}"
        signal.raise_signal(signal.SIGINT if self.error is KeyboardInterrupt else signal.SIGUSR1)

    def _profile(self, frame, event, argument):
        if _is_foreign(frame):
            return
        if event == "call":
            self.place(frame, "on entry")
        elif event == "c_return":
            self.returned = id(frame)
            self.place(frame, f"after {argument.__name__}()")
        elif event == "c_call" and argument.__name__ in _WAITING:
            self.place(frame, f"within {argument.__name__}()")

    def _trace(self, frame, event, argument):
        if _is_foreign(frame):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return _Opcodes(self, frame.f_code)


class _Opcodes:
    """The places of one frame that only its opcodes show."""

    def __init__(self, strike, code):
        self.strike = strike
        self.code = _Code.of(code)
        self.last = None

    def __call__(self, frame, event, argument):
        if event != "opcode":
            return self
        at, last, self.last = frame.f_lasti, self.last, frame.f_lasti
        what = self.code.place(last, at)
        if what == "after a call" and self.strike.returned == id(frame):
            what = None  # the profiler has reported it
        self.strike.returned = 0
        if what is not None:
            self.strike.place(frame, what)
        if self.code.names[at] in _ENTERS:
            self.strike.place(frame, "within __enter__()")
        return self


class _Code:
    """The instructions of a code object by their offsets."""

    def __init__(self, code):
        instructions = list(dis.get_instructions(code))
        self.names = {i.offset: i.opname for i in instructions}
        self.targets = {i.offset: i.argval for i in instructions if "JUMP" in i.opname}
        following = instructions[1:]
        self.next = {i.offset: n.offset for i, n in zip(instructions, following, strict=False)}
        self.handlers = {}
        if _HAS_RANGES:
            for entry in dis._parse_exception_table(code):
                for offset in range(entry.start, entry.end, 2):
                    self.handlers[offset] = entry.target

    @staticmethod
    @functools.cache
    def of(code):
        return _Code(code)

    def place(self, last, at):
        """Return whether there is a place between two instructions that ran, in words."""
        name = self.names.get(last, "")
        if "CALL" in name and "INTRINSIC" not in name and self.next.get(last) == at:
            # An exception that is raised here has the handler of the next instruction, and
            # after the call it would have that of the call.
            is_exact = self.handlers.get(last) == self.handlers.get(at)
            return "after a call" if is_exact and name != "PRECALL" else None
        if self.targets.get(last) == at and "NO_INTERRUPT" not in name:
            if at < last:
                return "after a jump back"
            if not _HAS_RANGES and "IF" in name:
                return "after a jump"
        return None


def _is_foreign(frame):
    """Return whether a frame is the program's, or was called by it without the package."""
    while frame is not None:
        whose = _whose(frame.f_code)
        if whose:
            return whose == "program"
        frame = frame.f_back
    return True


@functools.cache
def _whose(code):
    name = code.co_filename
    if name.startswith(_FOREIGN) or any(part in name for part in _FOREIGN_PARTS):
        return "program"
    return "package" if name.startswith(_PACKAGE) else ""
