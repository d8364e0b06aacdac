"""Starting the worker processes of a job, with one payload for all of them.

start(): channel, ring, lifeline, stack pipe -> launch() -> the ends that the worker has are
         closed here -> ProcessWorker
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
from collections.abc import Callable

from enqueuer.backends.job import Job, split_bound
from enqueuer.backends.process import stack_dump
from enqueuer.backends.process.child import (
    ParentEnvironment,
    ProcessConfig,
    ProcessStart,
    main_forked,
)
from enqueuer.backends.process.handle import Launched, ProcessWorker, launch, open_pidfd
from enqueuer.common.descriptors import Descriptor, close_in_children
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
    def _loaded(self) -> native.Loaded | None:
        """The native libraries that forked workers inherit."""
        if self._job.start_method != "fork":
            return None
        return native.Loaded(self._thread_limits)

    def start(self, index: int, room: Callable[[], int]) -> ProcessWorker:
        """Start a worker.

        Args:
            index: Index of the worker.
            room: Function that returns how many more items may wait, over all workers.

        Raises:
            OSError: The system has no room for it.
            StartError: It cannot be started.
        """
        # With tasks, all plans are alike.
        plan, is_asked = self._plans[index % len(self._plans)], self._job.longest_wait_s is not None
        start = ProcessStart(index, plan.shards, self._credit(index), is_asked, len(self._shared))
        with contextlib.ExitStack() as passed, contextlib.ExitStack() as undo:
            ends = _Ends(is_asked, self._queue, passed, undo)
            ring = Ring.of(ends.memory.fileno())
            # The worker may send as soon as it starts.
            ring.words[LIMIT] = start.credit.items
            process = self._launch(ends, ring, start)
            undo.pop_all()
        name = f"worker {index} (process {process.pid}, {self._job.start_method})"
        bound = room if self._queue is None else None
        inbox = ItemReceiver(ends.packets, ring, start.credit, name, bound)
        self._close_payload_after(index)
        return ProcessWorker(
            index,
            self._job.start_method,
            process,
            inbox,
            ends.lifeline,
            open_pidfd(process),
            plan.shards,
            ends.stacks,
        )

    def _launch(self, ends: _Ends, ring: Ring, start: ProcessStart) -> Launched:
        """Start the process of a worker, and send what it does not inherit."""
        job = self._job
        forked = functools.partial(
            main_forked,
            ends.its,
            ends.its_lifeline,
            ring,
            self._config,
            self._loaded,
            start,
            self._source,
            job.on_error,
            ends.task_socket,
            ends.its_stack,
        )
        process = launch(job.start_method, ends.its, ends.its_lifeline, forked, self._thread_limits)
        if self._payload is not None:
            passed = [self._payload, ends.memory, ends.its_stack, ends.task_socket]
            fds = [thing.fileno() for thing in passed if thing is not None]
            ends.packets.send(pickle.dumps(start), fds)
            send_descriptors(ends.packets, [shared.fileno() for shared in self._shared])
        return process

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


class _Ends:
    """The ends of what connects this process and a worker; the worker's are called `its`.

    Args:
        is_asked: Whether the worker is asked for its stack if the loop waits long.
        queue: Queue from which the worker takes tickets; None for shards.
        passed: Closes what the worker alone needs, once it has started.
        undo: Closes the rest, if the worker does not start.

    Attributes:
        packets: This process's end of the socket.
        its: The worker's end of the socket.
        lifeline: Pipe whose closing ends the worker.
        its_lifeline: The worker's end of that pipe.
        memory: Memory of the ring.
        stacks: The stacks that the worker sends; None if it is never asked.
        its_stack: The worker's end of the pipe for its stack.
        task_socket: Socket from which the worker takes tickets; None for shards.
    """

    def __init__(
        self,
        is_asked: bool,
        queue: TaskQueue | None,
        passed: contextlib.ExitStack,
        undo: contextlib.ExitStack,
    ) -> None:
        ours, self.its = pair()
        passed.callback(self.its.close)
        undo.callback(ours.close)
        self.its_lifeline, self.lifeline = map(Descriptor, os.pipe())
        passed.callback(self.its_lifeline.close)
        undo.callback(self.lifeline.close)
        self.memory = Descriptor(open_ring())
        passed.callback(self.memory.close)
        self.stacks: stack_dump.Stacks | None = None
        self.its_stack: Descriptor | None = None
        if is_asked:
            self.stacks, self.its_stack = stack_dump.pipe()
            passed.callback(self.its_stack.close)
            undo.callback(self.stacks.close)
        self.task_socket = None if queue is None else queue.worker_socket()
        if self.task_socket is not None:
            passed.callback(self.task_socket.close)
        for end in (ours, self.lifeline):
            close_in_children(end)
        self.packets = Packets(ours)
