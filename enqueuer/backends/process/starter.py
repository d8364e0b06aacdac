"""Starting the worker processes of a job, with one payload for all of them.

start(): channel, ring, lifeline, stack pipe -> Forked, Spawned or Served -> the ends that the
         worker has are closed here -> ProcessWorker
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
from collections.abc import Callable

from enqueuer.backends.job import Job, split_bound
from enqueuer.backends.process.child import (
    Ends,
    ParentEnvironment,
    ProcessConfig,
    ProcessStart,
    main_forked,
)
from enqueuer.backends.process.fork_server import fresh_interpreter, program, server
from enqueuer.backends.process.handle import (
    Forked,
    Launched,
    ProcessWorker,
    Spawned,
    open_pidfd,
    stack_pipe,
)
from enqueuer.common.descriptors import Closable, Descriptor, close_in_children
from enqueuer.monitoring import usage
from enqueuer.transport.memory import write_payload
from enqueuer.transport.packets import Packets, pair, send_descriptors
from enqueuer.transport.protocol import Credit
from enqueuer.transport.receiver import ItemReceiver
from enqueuer.transport.ring import LIMIT, Ring, open_ring
from enqueuer.transport.task_queue import TaskQueue
from enqueuer.workers import logs, native
from enqueuer.workers.remote import WorkerConfig
from enqueuer.workers.sources import FunctionSource, Source
from enqueuer.workers.tasks import TaskSource


def _is_local(source: Source | TaskSource) -> bool:
    """Return whether the user's code, or its class, was defined within a function."""
    if isinstance(source, TaskSource):
        parts: list[object] = [source.map, source.items]
    else:
        parts = [source.function if isinstance(source, FunctionSource) else source.iterable]
    names = (getattr(part, "__qualname__", type(part).__qualname__) for part in parts)
    return any("<locals>" in str(name) for name in names)


class Starter:
    """Starts worker processes.

    Args:
        job: Description of what they run.

    Attributes:
        spins: Whether this process and each of the workers has a CPU of its own.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._plans = job.plans()
        self.spins = usage.cpus() > len(self._plans)
        self._queue: TaskQueue | None = None
        self._payload: Descriptor | None = None
        # Of objects that the source shares with the workers.
        self._shared: list[Descriptor] = []
        # The source of forked workers, which inherit it.
        self._source = job.source

    def open(self, resources: contextlib.ExitStack, queue: TaskQueue | None) -> None:
        """Pickle the source if the workers are not forked, else pack its list if that is long.

        Args:
            resources: What is closed after the last worker has ended.
            queue: Queue from which the workers take tickets; None for shards.

        Raises:
            SourceNotPicklable: The source cannot be sent.
        """
        job, self._queue = self._job, queue
        if job.start_method == "fork":
            if isinstance(job.source, TaskSource):
                self._source = job.source.packed()
            if _is_local(job.source):
                # Its errors may be local as well, and a worker that has run out of descriptors or
                # memory could not import what sends them.
                importlib.import_module("cloudpickle")
        else:
            # Forked workers do not need it, and its import takes some milliseconds.
            from enqueuer.backends.payload import pickled_payload

            pickled, buffers, shared = pickled_payload(
                self._config, job.source, job.on_error, job.start_method
            )
            resources.callback(shared.close)
            self._shared = shared.descriptors
            self._payload = Descriptor(write_payload(pickled, buffers))
            resources.callback(self._payload.close)

    @functools.cached_property
    def _config(self) -> ProcessConfig:
        """The configuration of all workers; made once, as it reads the levels of all loggers."""
        job = self._job
        levels = logs.Levels.of_this_process() if job.forward_logs is True else None
        fork = job.start_method == "fork"
        around = None if fork else ParentEnvironment.of_this_process()
        worker = WorkerConfig(job.shards, job.random_seed, levels, job.trace)
        return ProcessConfig(worker, around, self._thread_limits, job.keep_freed_memory)

    @functools.cached_property
    def _thread_limits(self) -> dict[str, str]:
        given = self._job.threads_per_worker
        threads = given or self._job.share_of(usage.cpus())
        return native.limits(threads, given is not None, os.environ)

    @functools.cached_property
    def _loaded(self) -> native.Loaded:
        """The native libraries that forked workers inherit."""
        return native.Loaded(self._thread_limits)

    def start(self, index: int, room: Callable[[], int] | None) -> ProcessWorker:
        """Start a worker.

        Args:
            index: Index of the worker.
            room: Function that returns how many more items may wait, over all workers; None: any
                number, as tickets are the bound.

        Raises:
            OSError: The system has no room for it.
            StartError: It cannot be started.
        """
        # With tasks, all plans are alike.
        plan, is_asked = self._plans[index % len(self._plans)], self._job.longest_wait_s is not None
        start = ProcessStart(index, plan.shards, self._credit(index), is_asked, len(self._shared))
        # What only the worker needs is closed here once it has started; the rest, if it does not.
        with contextlib.ExitStack() as passed, contextlib.ExitStack() as undo:

            def connect(ours: Closable, its: Closable) -> None:
                undo.callback(ours.close)
                passed.callback(its.close)
                close_in_children(ours)

            sock, its_sock = pair()
            connect(sock, its_sock)
            its_lifeline, lifeline = map(Descriptor, os.pipe())
            connect(lifeline, its_lifeline)
            stacks = its_stack = None
            if is_asked:
                stacks, its_stack = stack_pipe()
                connect(stacks, its_stack)
            memory = passed.enter_context(contextlib.closing(Descriptor(open_ring())))
            ring = Ring.of(memory.fileno())
            # The worker may send as soon as it starts.
            ring.words[LIMIT] = start.credit.items
            tasks = None
            if self._queue is not None:
                tasks = passed.enter_context(self._queue.worker_socket())
            process = self.launch(Ends(its_sock, its_lifeline, ring, its_stack, tasks), start)
            undo.callback(process.close)
            packets = Packets(sock)
            if self._payload is not None:
                its = [self._payload, memory, its_stack, tasks]
                packets.send(pickle.dumps(start), [end.fileno() for end in its if end is not None])
                send_descriptors(packets, [shared.fileno() for shared in self._shared])
            undo.pop_all()
        self._close_payload_after(index)
        name = f"worker {index} (process {process.pid}, {self._job.start_method})"
        inbox = ItemReceiver(packets, ring, start.credit, name, room)
        pidfd = open_pidfd(process)
        return ProcessWorker(index, name, process, inbox, lifeline, pidfd, plan.shards, stacks)

    def launch(self, ends: Ends, start: ProcessStart) -> Launched:
        """Start the process of a worker."""
        job = self._job
        if job.start_method == "fork":
            given = ends, self._config, start, self._loaded, self._source, job.on_error
            return Forked(functools.partial(main_forked, *given))
        if job.start_method == "spawn":
            fds = ends.sock.fileno(), ends.lifeline.fileno()
            return Spawned(fresh_interpreter(program("main", *fds), fds, self._thread_limits))
        return server.fork(ends.sock, ends.lifeline)

    def _close_payload_after(self, index: int) -> None:
        """Give the memory of the payload back once no other worker can need it."""
        job = self._job
        is_last = index + 1 == len(self._plans)
        if self._payload is not None and is_last and not (job.max_restarts or job.may_grow):
            self._payload.close()
            for shared in self._shared:
                shared.close()

    def _credit(self, index: int) -> Credit:
        job, count = self._job, len(self._plans)
        # The tickets are the bound, and one worker may run all of them.
        if self._queue is not None:
            tickets = job.max_queue_size + job.workers * job.source.tickets_at_once
            return Credit(tickets, None, ask=False)
        quota = split_bound(job.max_queue_size, count)[index]
        share = None if job.max_queue_bytes is None else job.max_queue_bytes // count
        return Credit(quota, share, ask=job.ordered is not True, spins=self.spins)
