"""What a worker process does before and after its loop; runs in the child only.

    signals -> lifeline -> READY -> the job -> logs -> the source -> serve() -> last logs -> exit

Everything that can fail because of the user's code (importing it, unpickling the source) comes
after READY, so that it reaches the consumer as an error with a traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import importlib
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from enqueuer import allocator, arrays, logs, native_threads, usage, worker
from enqueuer.backends import stacks
from enqueuer.backends.launching import serve_forks
from enqueuer.import_hook import after_import
from enqueuer.messages import Failure, Ticket
from enqueuer.shards import FRAMEWORKS, GlobalStreams, TaskSeeds
from enqueuer.sources import Source
from enqueuer.tasks import TaskSource
from enqueuer.trace import Place
from enqueuer.tracing import traced
from enqueuer.transport.blocks import read_whole
from enqueuer.transport.channel import Credit
from enqueuer.transport.item_sender import ItemSender, send_ready
from enqueuer.transport.packets import Descriptor, Packets, close_in_children
from enqueuer.transport.ring import Ring
from enqueuer.worker import OnError

_GRANDCHILD = 70  # exit code of a copy that the user's code forked and let run on


@dataclass(frozen=True)
class ParentEnvironment:
    """What a process that was not forked must be told of its parent."""

    path: list[str]
    argv: list[str]
    directory: str
    environment: dict[str, str]

    @classmethod
    def of_this_process(cls) -> ParentEnvironment:
        """Read them."""
        return cls(list(sys.path), list(sys.argv), os.getcwd(), dict(os.environ))

    def apply(self) -> None:
        """Make them this process's."""
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        os.environ.clear()
        os.environ.update(self.environment)
        with contextlib.suppress(OSError):  # the directory is gone; the code may not need it
            os.chdir(self.directory)


@dataclass(frozen=True)
class WorkerConfig:
    """What all workers of an enqueuer are told, beside the source."""

    count: int
    random_seed: int
    levels: logs.Levels | None
    parent_environment: ParentEnvironment | None
    trace: Place | None
    thread_limits: dict[str, str]  # environment variables


@dataclass(frozen=True)
class Part:
    """What one worker alone is told."""

    index: int
    shards: tuple[int, ...]
    credit: Credit
    is_asked: bool  # where it is, if the loop waits long


def main(sock_fd: int, lifeline_fd: int) -> None:
    """Be a worker that was spawned: the job comes over the channel."""
    packets = _begin(socket.socket(fileno=sock_fd), Descriptor(lifeline_fd))
    part, payload, ring, task_socket, stack = _receive_job(packets)
    config, pickled = pickle.loads(payload)
    if config.parent_environment is not None:
        config.parent_environment.apply()
    os.environ.update(config.thread_limits)
    native_threads.limit_loaded()
    channel = ItemSender(packets, ring, part.credit)
    _work(channel, config, part, lambda: pickle.loads(pickled), task_socket, stack)
    _leave()


def main_forked(
    sock: socket.socket,
    lifeline: Descriptor,
    ring: Ring,
    config: WorkerConfig,
    loaded: native_threads.Loaded | None,
    part: Part,
    source: Source | TaskSource,
    on_error: OnError,
    task_socket: socket.socket | None,
    stack: Descriptor | None,
) -> None:
    """Be a worker that was forked: everything is here."""
    packets = _begin(sock, lifeline)
    os.environ.update(config.thread_limits)
    if loaded is not None:
        loaded.limit()
    channel = ItemSender(packets, ring, part.credit)
    _work(channel, config, part, lambda: (source, on_error), task_socket, stack)


def serve(fd: int, preload: Sequence[str] = ()) -> None:
    """Be a fork server; in a child of it, a worker.

    Args:
        fd: Descriptor of the socket to the parent.
        preload: Names of modules to import now, once for all workers. One that fails is passed
            over: a worker that needs it imports it again, and reports the error.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in preload:
        with contextlib.suppress(BaseException):  # sys.exit(), too
            importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would take the exit codes away
    mine = serve_forks(fd)
    if mine is not None:
        main(*mine)


def _leave() -> None:
    """End the process as multiprocessing does: what was registered runs, nothing is taken apart.

    Taking modules and threads apart would take longer than all the rest of a stop.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, full or closed
            stream.flush()
    os._exit(0)


def _begin(sock: socket.socket, lifeline: Descriptor) -> Packets:
    _reset_signals()
    _arm(lifeline)
    close_in_children(sock)
    close_in_children(lifeline)
    sock.setblocking(True)
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):  # no stderr
        faulthandler.enable()  # a crash in C then shows the Python stack on stderr
    packets = Packets(sock)
    send_ready(packets)
    return packets


def _reset_signals() -> None:
    """Forget the parent's handlers: its checkpointing must not run here, nor outlive SIGTERM."""
    signal.set_wakeup_fd(-1)
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to answer
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _arm(lifeline: Descriptor) -> None:
    """Have the kernel kill this process when the parent's end of the pipe closes.

    That works even if `next()` hangs in C. Who lives without F_SETSIG (macOS) learns of the
    parent's death from the channel, between two items.
    """
    fd = lifeline.fileno()
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    poller = select.poll()  # select() knows no descriptor beyond 1023
    poller.register(fd, select.POLLIN)
    if poller.poll(0):
        os._exit(1)  # the parent died before the lifeline was armed


def _receive_job(
    packets: Packets,
) -> tuple[Part, bytes, Ring, socket.socket | None, Descriptor | None]:
    poller = select.poll()
    poller.register(packets.fileno(), select.POLLIN)
    while not packets.received:
        if packets.ended:
            os._exit(1)  # the parent changed its mind
        poller.poll()
        packets.drain()
    data, (payload_fd, ring_fd, *others) = packets.received.popleft()
    part: Part = pickle.loads(data)
    stack = Descriptor(others.pop(0)) if part.is_asked else None
    payload = read_whole(b"", [payload_fd])
    ring = Ring.of(ring_fd)
    os.close(ring_fd)
    task_socket = socket.socket(fileno=others[0]) if others else None
    return part, payload, ring, task_socket, stack


def _work(
    channel: ItemSender,
    config: WorkerConfig,
    part: Part,
    load: Callable[[], tuple[Source | TaskSource, OnError]],
    task_socket: socket.socket | None,
    stack: Descriptor | None,
) -> None:
    pid = os.getpid()
    multiprocessing.current_process().name = f"enqueuer-worker-{part.index}"  # log records have it
    if stack is not None:
        stacks.answer(stack.fileno())
    allocator.keep_freed_memory()
    arrays.make_in(channel.pool.make)
    if task_socket is not None:
        close_in_children(task_socket)
    if config.levels is not None:
        logs.forward(channel.send_record, config.levels)
    try:
        source, on_error = load()
    except BaseException as error:
        _fail(channel, part, task_socket, error)
    else:
        used = usage.of_process(os.getpid())
        channel.meter.begin(used.cpu_s or 0.0, used.starved_s or 0.0)
        plan = worker.Plan(source, part.shards, config.count, config.random_seed, on_error)
        if task_socket is None:
            serve = traced(worker.serve, config.trace, part.index)
            streams = GlobalStreams()
            after_import(FRAMEWORKS, streams.seed_imported)
            serve(plan, channel, channel, streams.enter)
        else:
            serve = traced(worker.serve_tasks, config.trace, part.index)
            seeds = TaskSeeds()
            after_import(FRAMEWORKS, seeds.seed_imported)
            serve(plan, _TaskSocket(channel, task_socket), channel, seeds.enter)
    if os.getpid() != pid:
        # the generator forked, and the copy came out of its loop as if it were the worker
        os._exit(_GRANDCHILD)
    channel.close()


def _fail(
    channel: ItemSender, part: Part, task_socket: socket.socket | None, error: BaseException
) -> None:
    """Tell that there is no source, and stay until the consumer has heard it."""
    if task_socket is None:
        channel.send(Failure(part.shards[0], 0, error))
        while channel.next_epoch() is not None:
            pass
    else:
        while (ticket := channel.next_ticket(task_socket)) is not None:
            channel.send(Failure(0, ticket.number, error))


@dataclass
class _TaskSocket:
    """Where this worker takes its tickets."""

    channel: ItemSender
    task_socket: socket.socket

    def next_ticket(self) -> Ticket | None:
        return self.channel.next_ticket(self.task_socket)
