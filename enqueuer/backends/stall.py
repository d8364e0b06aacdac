"""The report when the loop has waited too long for a batch: where each worker is.

    backend.wait() --DeadlineExpired--> Wait.cut() --> a StallWarning, and the wait goes on
                                            |     \\-> BatchTimeout
                                      backend.inspect() --> WaitSnapshot --> the report

No thread watches the clock: the wait itself is cut where it sleeps, and goes on afterwards. Called
by the thread that waits, which is one at a time.
"""

from __future__ import annotations

import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from enqueuer.backends.pool import Stack, WorkerSnapshot
from enqueuer.common.text import PACKAGE, pluralize, warn
from enqueuer.errors import BatchTimeout, StallWarning, StopWarning
from enqueuer.order.sequence import Order
from enqueuer.workers.threads import ThreadSnapshot

# Eleven days, which every way of waiting accepts.
_FOREVER_S = 1e6

# Folders and files that call the user's code in a worker.
_CALLERS = tuple(PACKAGE + name for name in ("workers", "mixing.py", "datasets", "adapters"))
_IDLE = {
    "next_epoch": "has done all of this epoch",
    "next_ticket": "waits for a task",
}
_WAITS = frozenset({"sleep", "_wait_for_room_locked"})

_HEAD = "Stack (most recent call first):"
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
# Faulthandler writes this line if there are more frames; Python 3.13 does not.
_CUT = "  ..."
# Faulthandler writes at most so many.
_MAX_FRAMES = 100
# Bytes that a pipe surely holds.
_MAX_BYTES = 1 << 15


class DeadlineExpired(TimeoutError):
    """Nothing came until the deadline of a wait; a type of its own, as the user's code has that."""


class WaitSnapshot(NamedTuple):
    """State of a backend while the loop waits.

    Attributes:
        awaited: Item or task that the loop waits for, in words.
        waiting: How many finished batches wait that are not next.
        workers: Snapshots of the workers, the awaited worker first.
    """

    awaited: str
    waiting: int
    workers: list[WorkerSnapshot]


class WaitLimits(NamedTuple):
    """How long the loop waits for a batch.

    Attributes:
        warn_s: Seconds until it warns; None: never.
        timeout_s: Seconds until it gives up; None: never.

    Example:
        >>> limits = [WaitLimits(60.0, None), WaitLimits(60.0, 5.0), WaitLimits(None, None)]
        >>> [limit.first_s for limit in limits]
        [60.0, 5.0, None]
    """

    warn_s: float | None
    timeout_s: float | None

    @property
    def first_s(self) -> float | None:
        """Seconds until one of the two."""
        return min((s for s in self if s is not None), default=None)


class Wait:
    """A wait for one batch that has become long.

    Args:
        limits: How long it may be.
        waited_s: How long it has been so far.

    Attributes:
        until: When it is to be cut next, by `time.monotonic()`; None: never.
    """

    def __init__(self, limits: WaitLimits, waited_s: float) -> None:
        self._limits = limits
        self._began = time.monotonic() - waited_s
        self._has_warned = False
        first = limits.first_s
        self.until = None if first is None else self._began + first

    def cut(self, inspect: Callable[[Order], WaitSnapshot], order: Order, epoch: int) -> None:
        """Warn or raise with what the loop waits for, and set the next time.

        Args:
            inspect: Method of the backend that sent nothing until now.
            order: Order of the items.
            epoch: Number of the epoch.

        Raises:
            BatchTimeout: The wait was as long as `timeout_s`.
        """
        warn_s, timeout = self._limits
        if timeout is not None and (self._has_warned or warn_s is None or warn_s >= timeout):
            raise BatchTimeout(
                f"{report(timeout, inspect(order), epoch)}\n"
                "Nothing is lost: iterating again goes on with the very next batch"
            )
        # Set before the warning, which may raise.
        has_warned, self._has_warned = self._has_warned, True
        self.until = time.monotonic() + _FOREVER_S if timeout is None else self._began + timeout
        if warn_s is not None and not has_warned:
            text = report(warn_s, inspect(order), epoch)
            warn(text, StallWarning)


def report(seconds: float, view: WaitSnapshot, epoch: int) -> str:
    """Return what the loop has waited for so long, and what each worker does meanwhile.

    Example:
        >>> worker = WorkerSnapshot("worker 1 (thread)", (1,), None, "is gone")
        >>> view = WaitSnapshot("shard 1, item 4", 3, [worker])
        >>> print(report(60.0, view, epoch=0))
        no batch came for 60 s: the loop waits for shard 1, item 4, of epoch 0
        (3 finished batches wait behind it)
        worker 1 (thread), shard 1, is gone
    """
    head = f"no batch came for {seconds:g} s: the loop waits for {view.awaited}, of epoch {epoch}"
    waiting = (
        f"({pluralize(view.waiting, 'finished batch')} wait{'s' * (view.waiting == 1)} behind it)"
    )
    return "\n".join([head, *([waiting] if view.waiting else []), *map(line_of, view.workers)])


def stacks_of_threads(idents: Iterable[int | None]) -> list[Stack | None]:
    """Return where each thread of this process is, by its identifier; None if it has ended."""
    frames = sys._current_frames()
    try:
        return [
            traceback.extract_stack(frames[ident]) if ident in frames else None for ident in idents
        ]
    finally:
        # Without this, the frame would refer to itself.
        del frames


def warn_of_hanging(text: str, ident: int | None) -> None:
    """Warn of a thread that did not end, and say where it is."""
    (stack,) = stacks_of_threads([ident])
    where = "  (unknown)\n" if stack is None else "".join(traceback.format_list(list(stack)))
    warn(f"{text}. It is here:\n{where}", StopWarning)


def parse(text: str) -> tuple[Stack, bool]:
    """Read what faulthandler wrote of one thread, or has written so far.

    Returns:
        The stack, and whether all of it is there that will be shown.

    Example:
        >>> stack, is_whole = parse(_HEAD + '\\n  File "train.py", line 7 in load\\n')
        >>> stack[0].name, is_whole
        ('load', False)
    """
    _, _, answer = text.rpartition(_HEAD)
    # The last line may be incomplete.
    lines = answer.split("\n")[:-1]
    found = [match for line in lines if (match := _FRAME.fullmatch(line))]
    frames = [
        traceback.FrameSummary(file, int(line) if line.isdigit() else 0, name)
        for file, line, name in (match.groups() for match in found)
    ]
    is_cut = _CUT in lines or len(frames) >= _MAX_FRAMES
    is_whole = is_cut or any(frame.filename.startswith(_CALLERS) for frame in frames)
    return frames[::-1], is_whole


def encode_threads(threads: Sequence[ThreadSnapshot]) -> bytes:
    """Return snapshots of threads as a line of text, of which a pipe holds all.

    Example:
        >>> thread = ThreadSnapshot((3,), [traceback.FrameSummary("train.py", 7, "load")])
        >>> (decoded,) = decode_threads(encode_threads([thread]).decode())
        >>> decoded.indices, decoded.stack[0].name
        ((3,), 'load')
        >>> decode_threads("[")
    """
    import json

    stacks: dict[tuple[tuple[str, int | None, str], ...], list[tuple[int | str, ...]]] = {}
    for thread in threads:
        frames = tuple((frame.filename, frame.lineno, frame.name) for frame in thread.stack)
        stacks.setdefault(frames, []).append(thread.indices)
    rows = [[elements, frames] for frames, elements in stacks.items()]
    while len(data := json.dumps(rows).encode()) >= _MAX_BYTES:
        rows.pop()
    return data + b"\n"


def decode_threads(text: str) -> list[ThreadSnapshot] | None:
    """Return the snapshots in the last line of a text; None if there are none, or not all."""
    _, _, line = text.removesuffix("\n").rpartition("\n")
    if not line.startswith("[") or not text.endswith("\n"):
        return None
    import json

    return [
        ThreadSnapshot(tuple(indices), [traceback.FrameSummary(*frame) for frame in frames])
        for elements, frames in json.loads(line)
        for indices in elements
    ]


def line_of(worker: WorkerSnapshot) -> str:
    """Return what a worker does, with its stack."""
    shards = ", ".join(map(str, worker.shards))
    of = f", shard{'' if len(worker.shards) == 1 else 's'} {shards}," if shards else ""
    if worker.threads:
        kind = "shard" if worker.shards else "thread"
        return "\n".join(
            [f"{worker.name}, {pluralize(len(worker.threads), kind)}", *_threads(worker)]
        )
    does = worker.why if worker.stack is None else _what_it_does(worker.stack)
    return f"{worker.name}{of} {does}"


def _threads(worker: WorkerSnapshot) -> Iterator[str]:
    """Yield what threads of a worker do, or its shards; those at the same place share a text."""
    places: dict[str, list[int | str]] = {}
    for thread in worker.threads:
        places.setdefault(_what_it_does(thread.stack), []).extend(thread.indices)
    for does, indices in places.items():
        numbers = ", ".join(sorted(map(str, indices), key=lambda text: (len(text), text)))
        kind = "shard" if worker.shards else "element"
        yield f"{kind}{'' if len(indices) == 1 else 's'} {numbers} {does}"


def _what_it_does(stack: Stack) -> str:
    start = _start_of_user(stack)
    if start is not None:
        return _shown("is here", stack[start:])
    loops = [at for at, frame in enumerate(stack) if frame.filename.startswith(_CALLERS[0])]
    inner = list(stack[loops[-1] + 1 :] if loops else stack)
    if not inner:
        return "is between two batches"
    ours = [frame.name for frame in inner if frame.filename.startswith(PACKAGE)]
    if not ours or inner[0].filename.startswith(_CALLERS):
        return _shown("is here", inner)
    if inner[0].name in _IDLE:
        return _IDLE[inner[0].name]
    if _WAITS.intersection(ours):
        return "has made a batch and waits for room"
    return _shown("is sending a batch", inner)


def _start_of_user(stack: Stack) -> int | None:
    """Return the place of the first frame of the user's code; None if there is none.

    It is called by a file of `_CALLERS`. What others call, such as pickle, belongs to them.
    """
    for at in range(1, len(stack)):
        is_called = stack[at - 1].filename.startswith(_CALLERS)
        if is_called and not stack[at].filename.startswith(PACKAGE):
            return at
    return None


def _shown(what: str, frames: Stack) -> str:
    return f"{what}:\n{''.join(traceback.format_list(list(frames))).rstrip()}"
