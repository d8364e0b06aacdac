"""The Ray that the enqueuers of this process use: connecting, starting, shutting down.

They use the Ray to which the process is connected. If there is none, the first enqueuer starts
one, and the last one that uses it shuts it down.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from enqueuer.backends.job import RayOptions
from enqueuer.common import interrupts
from enqueuer.common.extras import framework
from enqueuer.errors import StartError

# Seconds until a server must have accepted a connection.
_CONNECT_S = 10.0
# Seconds; Ray takes less to disconnect.
_SHUTDOWN_S = 5.0

# Reentrant, as the garbage collector may run here and stop another enqueuer.
_lock = threading.RLock()


class _Started:
    """A Ray that was started here, and the number of enqueuers that use it."""

    def __init__(self, address: str | None) -> None:
        self.address = address
        self.users = 1
        self.identity: tuple[str, str] | None = None
        # Ray's handler of SIGTERM, if it replaced the system's default.
        self.on_term: Any = None


started_here: _Started | None = None


class Session:
    """One enqueuer's use of Ray, from `join()` to `leave()`, called within `interrupts.held()`.

    Attributes:
        ray: Module of Ray; None before `join()`.
    """

    def __init__(self, cluster: RayOptions) -> None:
        self._cluster = cluster
        self._started: _Started | None = None
        self._identity: tuple[str, str] | None = None
        self._is_gone = False
        self.ray: Any = None

    def join(self) -> Any:
        """Return the module of Ray, after connecting to it; start it if there is none.

        Raises:
            FrameworkUnavailable: Ray is not installed.
            StartError: Ray cannot be reached, has another address than was given, or belongs to
                the process from which this one was forked.
        """
        global started_here
        with interrupts.taken(_lock), _preserved_settings():
            ray = self.ray = framework("ray", "ray", "2.10", user="backend='ray'")
            # Counted first, so that an enqueuer that is collected meanwhile does not shut it down.
            if started_here is not None and started_here.identity == _identity(ray):
                started_here.users += 1
                self._started = started_here
            try:
                if not ray.is_initialized():
                    # This may take many seconds.
                    address = self._cluster.address
                    self._started = interrupts.interruptible(_initialise, ray, address)
                    started_here = self._started
                else:
                    check_process()
                    self._check_address()
                self._identity = _identity(ray)
            except BaseException:
                self.leave()
                raise
        return ray

    def _check_address(self) -> None:
        wanted = self._cluster.address
        here = self.ray.get_runtime_context().gcs_address
        if wanted in (None, "auto", here):
            return
        if self._started is None or wanted != self._started.address:
            raise StartError(
                f"address={wanted!r} was given, but this process is connected to Ray at {here}; "
                "leave address out to use that, or call ray.shutdown() first"
            )

    def check(self) -> None:
        """Raise Gone if the user has shut Ray down, since most calls would start another one.

        If the user has started another Ray already, actors and references of the first one are
        not valid there. While another thread shuts Ray down, dropping a reference ends the
        process, so this method waits until the shutdown is over.
        """
        if not self._is_gone:
            # Suppressed, as another thread may be shutting Ray down.
            with contextlib.suppress(Exception):
                if _identity(self.ray) == self._identity:
                    return
            over = time.monotonic() + _SHUTDOWN_S
            while _is_being_shut_down(self.ray) and time.monotonic() < over:
                time.sleep(0.01)
            self._is_gone = True
        raise Gone("Ray was shut down in this process")

    def call(
        self, handle: Any, name: str, *args: Any, group: str = "orders", returns: int | str = 0
    ) -> Any:
        """Call a method of an actor, in one of its concurrency groups.

        Args:
            handle: Ray's handle of the actor.
            name: Name of the method.
            args: Its arguments.
            group: Name of the concurrency group.
            returns: Number of its results, or "streaming".
        """
        self.check()
        options = {"concurrency_group": group, "num_returns": returns}
        return getattr(handle, name).options(**options).remote(*args)

    def reason_of(self, error: BaseException) -> str:
        """Return the cause of an actor's death, in Ray's words, without its general advice."""
        try:
            self.check()
        except Gone as gone:
            error = gone
        if isinstance(error, Gone):
            return f"{error}."
        text = str(error)
        _, _, after = text.partition("The actor is dead because ")
        text, _, _ = (after or text).partition(" Some common causes include")
        return f"Ray says: {' '.join(text.split())}"

    def missing(self) -> str:
        """Name the resources that the options of the actors ask for and no node has."""
        if not _resources_of(self._cluster.options):
            return ""
        # Suppressed, as Ray may have been shut down.
        with contextlib.suppress(Exception):
            self.check()
            return missing(self._cluster.options, self.ray.nodes())
        return ""

    def leave(self) -> None:
        """Shut Ray down if it was started here and no other enqueuer uses it."""
        with interrupts.taken(_lock):
            started, self._started = self._started, None
            if started is None:
                return
            started.users -= 1
            # The user may have shut it down, and started another one.
            if started.users == 0 and started.identity == _identity(self.ray):
                with _preserved_settings():
                    self.ray.shutdown()
                is_theirs = interrupts.handler_of(signal.SIGTERM) is started.on_term
                if is_theirs and threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def missing(options: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> str:
    """Name the resources that an actor asks for and no single node has.

    Args:
        options: Options of the actor.
        nodes: Result of `ray.nodes()`.

    Returns:
        The resources and amounts. Empty if one node has them all, in use or not.

    Example:
        >>> missing({"num_gpus": 2}, [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}}])
        'GPU 2 (at most 1 on a node)'
    """
    asked = _resources_of(options)
    have = [node["Resources"] for node in nodes if node["Alive"]]
    if any(all(of.get(name, 0) >= amount for name, amount in asked.items()) for of in have):
        return ""
    largest = {name: max((of.get(name, 0) for of in have), default=0) for name in asked}
    short = [name for name in asked if largest[name] < asked[name]]
    if not short:
        return " and ".join(_amount(name, asked[name]) for name in asked) + " on one node"
    return ", ".join(
        _amount(name, asked[name])
        + (f" (at most {_amount(name, largest[name], '')} on a node)" if largest[name] else "")
        for name in short
    )


def _resources_of(options: Mapping[str, Any]) -> dict[str, float]:
    names = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    asked = {names[key]: options[key] for key in names if options.get(key)}
    asked |= {name: amount for name, amount in (options.get("resources") or {}).items() if amount}
    kind = options.get("accelerator_type")
    # Ray asks for this amount of an accelerator of a type.
    return asked if kind is None else {**asked, f"accelerator_type:{kind}": 0.001}


def _amount(name: str, amount: float, label: str | None = None) -> str:
    number = f"{amount / 1e9:.1f} GB" if name == "memory" else f"{amount:g}"
    return f"{name if label is None else label} {number}".lstrip()


def unwrapped(function: Any) -> Any:
    """Return a function of Ray without its wrapper, which starts Ray if it was shut down."""
    return getattr(function, "__wrapped__", function)


def is_of_its_node(error: BaseException) -> bool:
    """Return whether an actor is lost because its node died.

    Ray notices a dead process within a second. It notices a dead node later, by missing
    heartbeats, and reports its actors as unavailable until then.
    """
    return "its node has died" in str(error) or type(error).__name__ == "ActorUnavailableError"


class Gone(StartError):
    """Ray was shut down, or the loop of an actor has ended; the message is the reason."""


def _initialise(ray: Any, address: str | None) -> _Started:
    started = _Started(address)
    on_term = interrupts.handler_of(signal.SIGTERM)
    try:
        check_reachable(address)
        ray.init(address=address)
    except Exception as error:
        if interrupts.is_of_handler(error):
            raise
        where = "could not be started" if address is None else f"at {address!r} cannot be reached"
        raise StartError(f"Ray {where}: {error}") from error
    started.identity = _identity(ray)
    if on_term is signal.SIG_DFL:
        started.on_term = interrupts.handler_of(signal.SIGTERM)
    return started


@contextlib.contextmanager
def _preserved_settings() -> Iterator[None]:
    """Restore the random state, and the user's handler of SIGTERM, which Ray changes.

    Without such a handler, Ray's own stays: it ends the processes that Ray has started.
    """
    numbers, on_term = random.getstate(), interrupts.handler_of(signal.SIGTERM)
    try:
        yield
    finally:
        random.setstate(numbers)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and on_term not in (None, signal.SIG_DFL):
            signal.signal(signal.SIGTERM, on_term)


def check_process() -> None:
    """Raise StartError in a process that was forked from Ray's driver: a call to Ray would hang.

    The threads of Ray, which Python does not know, do not exist there.
    """
    # Only Linux has this folder; there, DataLoader and others fork.
    tasks = "/proc/self/task"
    if os.path.isdir(tasks) and len(os.listdir(tasks)) <= threading.active_count():
        raise StartError(
            "this process was forked from one that is connected to Ray, whose connection cannot "
            "be used here; spawn it instead (start_method='spawn', or multiprocessing_context of "
            "a DataLoader), or fork before Ray is started"
        )


def _identity(ray: Any) -> tuple[str, str] | None:
    """Return the node and the job of the connection to Ray; None if there is no connection."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


def _is_being_shut_down(ray: Any) -> bool:
    """Return whether Ray has begun to shut down and has not finished.

    Only a private attribute of Ray shows this. Without that attribute, the result is False.
    """
    worker = getattr(getattr(ray, "_private", None), "worker", None)
    is_there = hasattr(getattr(worker, "global_worker", None), "core_worker")
    return is_there and not ray.is_initialized()


def check_reachable(address: str | None) -> None:
    """Raise OSError if no server listens at an address; Ray would try for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
