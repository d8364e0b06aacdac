"""What a worker process does before and after its loop; runs in the child only.

    signals -> lifeline -> READY -> the job -> logs -> the source -> serve() -> last logs -> exit

For a stall report, the parent asks for the Python stack, whatever the worker does:

    ask_stacks() --a signal--> worker: faulthandler, in C --the stack as text--> parent's pipe

The signal's handler needs no GIL and runs no Python, unless the worker's own thread waits for
others. So a worker answers from the middle of a sleep, a loop in C or a deadlock. Only one that is
stopped, or hangs in the system, does not. A worker that has its pipe says so by one byte; no worker
is signalled before, since the signal would end it.

Everything that can fail because of the user's code (importing it, unpickling the source) comes
after READY, so that it reaches the consumer as an error with a traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import importlib
import locale
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

try:
    import fcntl
except ImportError:
    # Windows has none.
    fcntl = None  # type: ignore[assignment]

from enqueuer.backends.process.fork_server import (
    pass_over_job_signals,
    readable,
    serve_forks,
)
from enqueuer.backends.stall import encode_threads
from enqueuer.common.descriptors import Descriptor, close_in_children
from enqueuer.monitoring import usage
from enqueuer.transport.channel import Credit, Packets, Status, packets_of
from enqueuer.transport.memory import read_payload
from enqueuer.transport.sender import ItemSender, SharedSender, send_ready
from enqueuer.workers import arrays, logs, native
from enqueuer.workers.plan import OnError, Watch, serve_failure
from enqueuer.workers.running import WorkerConfig
from enqueuer.workers.settings import Initializer, Settings, be_worker, load_source, on_import
from enqueuer.workers.sources import Source
from enqueuer.workers.tasks import TaskSource
from enqueuer.workers.threads import on_change, snapshots_of

# Most sources are loaded with it, so a fork server imports it once for all workers. A worker that
# has run out of descriptors or memory could not import it.
_OFTEN_LOADED = "enqueuer.transport.definitions"
# A signal that no program uses; macOS has no others.
ASK: int = signal.SIGRTMAX - 5 if hasattr(signal, "SIGRTMAX") else getattr(signal, "SIGEMT", 0)
# Eleven days, which every way of waiting accepts.
_FOREVER_S = 1e6
# Attribute of the resource tracker, which multiprocessing sets in its own children.
_TRACKER_FD = "_fd"
# Exit code of a copy that the user's code has forked and let run on.
_GRANDCHILD = 70


class ParentEnvironment(NamedTuple):
    """State of the parent that a process which was not forked lacks.

    A fork server has the state of the time at which it was started, so all of it travels.

    Attributes:
        authkey: Key of multiprocessing, for the managers of the program.
        start_method: Start method that the program has given to multiprocessing.
        umask: None where it cannot be read.
        affinity: CPUs on which the process may run; None where there is no such set.
        limits: Soft and hard limit of each resource, by its number.
    """

    path: list[str]
    argv: list[str]
    directory: str
    environment: dict[str, str]
    authkey: bytes
    start_method: str | None
    locale: str
    umask: int | None
    affinity: set[int] | None
    nice: int
    limits: dict[int, tuple[int, int]]

    @classmethod
    def of_this_process(cls) -> ParentEnvironment:
        """Read them."""
        names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
        return cls(
            list(sys.path),
            list(sys.argv),
            os.getcwd(),
            dict(os.environ),
            bytes(multiprocessing.current_process().authkey),
            # Without this argument, multiprocessing would choose one for good.
            multiprocessing.get_start_method(allow_none=True),
            locale.setlocale(locale.LC_ALL),
            _umask(),
            os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
            os.getpriority(os.PRIO_PROCESS, 0),
            {getattr(resource, n): resource.getrlimit(getattr(resource, n)) for n in names},
        )

    def apply(self) -> None:
        """Make them this process's, as far as the system allows that."""
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        os.environ.clear()
        os.environ.update(self.environment)
        # The C library reads the variable TZ when it is told to.
        time.tzset()
        multiprocessing.current_process().authkey = self.authkey
        multiprocessing.set_start_method(self.start_method, force=True)
        if self.umask is not None:
            os.umask(self.umask)
        # The directory may be gone, and the code may not need it. A value is set only if it
        # differs, as the system may refuse to raise one, or to lower one again.
        with contextlib.suppress(OSError):
            os.chdir(self.directory)
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_ALL, self.locale)
        with contextlib.suppress(OSError):
            if self.affinity is not None and self.affinity != os.sched_getaffinity(0):
                os.sched_setaffinity(0, self.affinity)
        with contextlib.suppress(OSError):
            if os.getpriority(os.PRIO_PROCESS, 0) != self.nice:
                os.setpriority(os.PRIO_PROCESS, 0, self.nice)
        for number, limit in self.limits.items():
            with contextlib.suppress(OSError, ValueError):
                if resource.getrlimit(number) != limit:
                    resource.setrlimit(number, limit)


def _umask() -> int | None:
    """Return the mask of new files. The system call would set another one for a moment."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("Umask:")).split()[1], 8)
    return None


class ProcessConfig(NamedTuple):
    """Configuration of all worker processes of an enqueuer.

    Attributes:
        worker: Configuration that is not special to processes.
        parent_environment: Environment of the parent; None if the workers are forked.
        thread_limits: Environment variables that limit the threads of native libraries.
        keep_freed_memory: Whether the C library keeps the memory that is freed.
        is_watched: Whether the worker records what it runs, for `element_timeout`.
    """

    worker: WorkerConfig
    parent_environment: ParentEnvironment | None
    thread_limits: dict[str, str]
    keep_freed_memory: bool
    is_watched: bool


class ProcessStart(NamedTuple):
    """Configuration of one worker process.

    Attributes:
        worker: Index of the worker.
        shards: Indices of its shards; empty for tasks.
        credit: Credit that it begins with.
        is_asked: Whether it is asked for its stack if the loop waits long.
        shared: Number of descriptors of shared objects that follow.
        has_tracker: Whether the descriptor of the program's resource tracker comes with it.
    """

    worker: int
    shards: tuple[int, ...]
    credit: Credit
    is_asked: bool
    shared: int
    has_tracker: bool = False


class Ends(NamedTuple):
    """A worker's ends of what connects it with its parent.

    Attributes:
        sock: Its end of the channel.
        lifeline: Reading end of a pipe whose other end only the parent has.
        status: Page on which it says what it does.
        stack: Pipe for its stack; None: it is never asked.
        tasks: Socket from which it takes tickets; None for shards.
    """

    sock: socket.socket
    lifeline: Descriptor
    status: Status
    stack: Descriptor | None
    tasks: socket.socket | None


def main(sock_fd: int, lifeline_fd: int) -> None:
    """Be a worker that was spawned: the job comes over the channel."""
    sock, lifeline = socket.socket(fileno=sock_fd), Descriptor(lifeline_fd)
    packets = _begin(sock, lifeline)
    data, (payload_fd, status_fd, *optional) = _next_packet(packets)
    start: ProcessStart = pickle.loads(data)
    if start.has_tracker:
        _use_tracker(optional.pop())
    stack = Descriptor(optional.pop(0)) if start.is_asked else None
    tasks = socket.socket(fileno=optional[0]) if optional else None
    ends = Ends(sock, lifeline, Status.of(status_fd), stack, tasks)
    os.close(status_fd)
    # Fewer come if there is no room for them.
    shared = [fd for _ in range(packets_of(start.shared)) for fd in _next_packet(packets)[1]]
    head, buffers = read_payload(payload_fd)
    config, settings, program, *pickled = pickle.loads(head)
    del head
    _become(config, program, settings)

    def load() -> tuple[Source | TaskSource, OnError]:
        handover: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if len(shared) < start.shared:
            text = f"{os.strerror(errno.EMFILE)} for {start.shared} shared objects (`ulimit -n`)"
            raise OSError(errno.EMFILE, text)
        if shared:
            # Most sources share nothing.
            from enqueuer.backends.payload import handed

            handover = handed(shared)
        with handover:
            # The pickle is of no use after that, and may be large.
            return load_source(pickled.pop(), start.worker, buffers)  # type: ignore[no-any-return]

    _work(packets, ends, config, start, load)
    _leave()


def _become(config: ProcessConfig, program: bytes, settings: Settings) -> None:
    """Make this process like the program."""
    if config.parent_environment is not None:
        config.parent_environment.apply()
    os.environ.update(config.thread_limits)
    native.limit_loaded()
    importlib.import_module(_OFTEN_LOADED)
    # Categories of warnings may be classes of the program.
    pickle.loads(program).install()
    settings.apply()


def main_forked(
    ends: Ends,
    config: ProcessConfig,
    start: ProcessStart,
    loaded: native.Loaded,
    source: Source | TaskSource,
    on_error: OnError,
    initializer: Initializer | None,
) -> None:
    """Be a worker that was forked: everything is here."""
    packets = _begin(ends.sock, ends.lifeline)
    os.environ.update(config.thread_limits)
    loaded.limit()
    be_worker(is_fork=True)

    def load() -> tuple[Source | TaskSource, OnError]:
        if initializer is not None:
            initializer()
        return source, on_error

    _work(packets, ends, config, start, load)


def serve(fd: int, preload: Sequence[str] = ()) -> None:
    """Be a fork server; in a child of it, a worker.

    `silent_children` has blocked the signals of the job, which stay so: the server outlives them.

    Args:
        fd: Descriptor of the socket to the parent.
        preload: Names of modules to import now, once for all workers. One that fails is passed
            over: a worker that needs it imports it again, and reports the error.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    be_worker()
    for name in (_OFTEN_LOADED, *preload):
        # A module may even call `sys.exit()`.
        with contextlib.suppress(BaseException):
            importlib.import_module(name)
    # If the signal were ignored, the system would drop the exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    mine = serve_forks(fd)
    if mine is not None:
        main(*mine)


def _leave() -> None:
    """End the process as multiprocessing does: what was registered runs, nothing is taken apart.

    Taking modules and threads apart would take longer than all the rest of a stop.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # A stream may be None, full or closed.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(0)


def _begin(sock: socket.socket, lifeline: Descriptor) -> Packets:
    be_worker()
    _reset_signals()
    _arm(lifeline)
    close_in_children(sock)
    close_in_children(lifeline)
    sock.setblocking(True)
    # There may be no stderr.
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        # A crash in C then shows the Python stack on stderr.
        faulthandler.enable()
    packets = Packets(sock)
    send_ready(packets)
    return packets


def _reset_signals() -> None:
    """Forget the parent's handlers: its checkpointing must not run here."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    pass_over_job_signals()
    # The parent reacts to a Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _arm(lifeline: Descriptor) -> None:
    """Have the kernel kill this process when the parent's end of the pipe closes.

    That works even if `next()` hangs in C. Without F_SETSIG (macOS) the worker learns of the
    parent's death from the channel, between two items.
    """
    fd = lifeline.fileno()
    if fcntl is not None and hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    if readable(lifeline, 0):
        # The parent died before the lifeline was armed.
        os._exit(1)


def _use_tracker(fd: int) -> None:
    """Have multiprocessing use the program's resource tracker, as in its own children."""

    def use(name: str) -> None:
        setattr(sys.modules[name]._resource_tracker, _TRACKER_FD, fd)

    on_import("multiprocessing.resource_tracker", use)


def _next_packet(packets: Packets) -> tuple[bytes, list[int]]:
    """Wait for a packet of the parent, and take it."""
    while not packets.received:
        if packets.ended:
            # The parent has closed the channel.
            os._exit(1)
        readable(packets, _FOREVER_S)
        packets.drain()
    return packets.received.popleft()


def _work(
    packets: Packets,
    ends: Ends,
    config: ProcessConfig,
    start: ProcessStart,
    load: Callable[[], tuple[Source | TaskSource, OnError]],
) -> None:
    pid = os.getpid()
    channel = ItemSender(packets, ends.status, start.credit, ends.tasks)
    sender: ItemSender | SharedSender = channel
    _answer_by(ends.stack)
    if ends.tasks is not None:
        close_in_children(ends.tasks)
    # Log records contain this name.
    multiprocessing.current_process().name = f"enqueuer-worker-{start.worker}"
    if config.keep_freed_memory:
        native.keep_freed_memory()
    arrays.set_maker(channel.blocks.pool.make)
    if config.worker.levels is not None:
        logs.forward(channel.send_record, config.worker.levels)
    try:
        source, on_error = load()
    except BaseException as error:
        serve_failure(error, start.shards, channel)
    else:
        used = usage.of_process(os.getpid())
        channel.meter.begin(used.cpu_s or 0.0, used.cpu_wait_s or 0.0)
        if source.has_threads:
            sender = SharedSender(channel)
        # Of files, so that the one at which it dies can be named.
        is_watched = config.is_watched or (isinstance(source, TaskSource) and source.is_of_files)
        watch = Watch(ends.status.watches.new, config.is_watched) if is_watched else None
        config.worker.serve(start.worker, start.shards, source, on_error, sender, watch)
    if os.getpid() != pid:
        # the generator forked, and the copy came out of its loop as if it were the worker
        os._exit(_GRANDCHILD)
    channel.close()


def _answer_by(pipe: Descriptor | None) -> None:
    """Answer questions for the stack. Called by the thread that runs the user's code.

    Faulthandler writes only that thread's stack: those of others could change meanwhile. While it
    waits for others, Python's handler writes where these are, in this thread. So there is no answer
    then if C code holds the GIL.

    Args:
        pipe: The worker's end of its pipe; None: it is never asked.
    """
    if not ASK or pipe is None:
        return
    fd = pipe.fileno()

    def write(number: int, frame: object) -> None:
        data = encode_threads(snapshots_of(threading.get_ident()))
        # The pipe may be full of answers that were not read.
        with contextlib.suppress(OSError):
            os.write(fd, data)

    def choose(has_others: bool) -> None:
        faulthandler.unregister(ASK)
        # One of Python's would come above that of faulthandler when `held()` puts it back. It
        # interrupts system calls: the kernel would go on with a wait for a lock, without Python.
        signal.signal(ASK, write if has_others else signal.SIG_IGN)
        if not has_others:
            faulthandler.register(ASK, file=fd, all_threads=False, chain=False)

    choose(False)
    on_change(choose)
    os.write(fd, b"\n")
