"""The Ray that the enqueuers of this process use: the one that is there, or one of their own."""

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
from enqueuer.common.extras import framework
from enqueuer.errors import StartError

_KNOCK_S = 10.0
_SHUTDOWN_S = 5.0  # more than Ray takes to disconnect

_lock = threading.RLock()  # the collector may strike here, and end another enqueuer


class _Started:
    """A Ray that was started here, and how many use it."""

    def __init__(self, address: str | None) -> None:
        self.address = address
        self.users = 1
        self.identity: tuple[str, str] | None = None
        self.on_term: Any = None  # what Ray does at SIGTERM, in place of the system's default


_started: _Started | None = None


class Session:
    """One enqueuer's use of Ray, from `join()` to `leave()`.

    Attributes:
        ray: The module, once it was joined.
    """

    def __init__(self, cluster: RayOptions) -> None:
        self._cluster = cluster
        self._started: _Started | None = None
        self._identity: tuple[str, str] | None = None
        self._is_gone = False
        self.ray: Any = None

    def join(self) -> Any:
        """Return the module of a Ray that is initialised; start one if there is none.

        Raises:
            FrameworkUnavailable: It is not installed.
            StartError: It cannot be reached, is another one than was asked for, or is that of
                the process that this one was forked from.
        """
        global _started
        with _lock, _untouched():
            ray = self.ray = framework("ray", "ray", "2.10", user="backend='ray'")
            # counted first: whatever is collected from here on does not shut it down
            if _started is not None and _started.identity == _identity(ray):
                _started.users += 1
                self._started = _started
            try:
                if not ray.is_initialized():
                    self._started = _initialise(ray, self._cluster.address)
                    _started = self._started
                else:
                    _check_process()
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

        If there is another one already, what belongs to the first means nothing there. While
        another thread is still at it, Ray ends the process if a reference to an object is
        dropped; so that a thread that asks waits here until it is over.
        """
        if not self._is_gone:
            with contextlib.suppress(Exception):  # it is being shut down right now
                if _identity(self.ray) == self._identity:
                    return
            over = time.monotonic() + _SHUTDOWN_S
            while _is_being_shut_down(self.ray) and time.monotonic() < over:
                time.sleep(0.01)
            self._is_gone = True
        raise Gone("Ray was shut down in this process")

    def reason_of(self, error: BaseException) -> str:
        """Return how an actor died, in Ray's words, without those that do not concern it."""
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
        """Name what the options of the actors ask for and no node has; see `missing`."""
        if not _resources_of(self._cluster.options):
            return ""
        with contextlib.suppress(Exception):  # Ray is gone
            self.check()
            return missing(self._cluster.options, self.ray.nodes())
        return ""

    def leave(self) -> None:
        """Shut Ray down if it was started here and no other enqueuer uses it."""
        with _lock:
            started, self._started = self._started, None
            if started is None:
                return
            started.users -= 1
            # the user may have shut it down, and started another one
            if started.users == 0 and started.identity == _identity(self.ray):
                with _untouched():
                    self.ray.shutdown()
                is_theirs = signal.getsignal(signal.SIGTERM) is started.on_term
                if is_theirs and threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def missing(options: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> str:
    """Name the resources that an actor asks for and no single node has.

    Args:
        options: Those of the actor.
        nodes: What `ray.nodes()` tells.

    Returns:
        The resources and amounts; empty if there is a node that has them all, be they free or not.

    Example:
        >>> missing({"num_gpus": 2}, [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}}])
        'GPU 2 (at most 1 on a node)'
    """
    asked = _resources_of(options)
    have = [node["Resources"] for node in nodes if node["Alive"]]
    if any(all(of.get(name, 0) >= amount for name, amount in asked.items()) for of in have):
        return ""
    most = {name: max((of.get(name, 0) for of in have), default=0) for name in asked}
    short = [name for name in asked if most[name] < asked[name]]
    if not short:
        return " and ".join(_amount(name, asked[name]) for name in asked) + " on one node"
    return ", ".join(
        _amount(name, asked[name])
        + (f" (at most {_amount(name, most[name], '')} on a node)" if most[name] else "")
        for name in short
    )


def _resources_of(options: Mapping[str, Any]) -> dict[str, float]:
    names = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    asked = {names[key]: options[key] for key in names if options.get(key)}
    asked |= {name: amount for name, amount in (options.get("resources") or {}).items() if amount}
    kind = options.get("accelerator_type")
    return asked if kind is None else {**asked, f"accelerator_type:{kind}": 0.001}  # as Ray does


def _amount(name: str, amount: float, label: str | None = None) -> str:
    number = f"{amount / 1e9:.1f} GB" if name == "memory" else f"{amount:g}"
    return f"{name if label is None else label} {number}".lstrip()


def unwrapped(function: Any) -> Any:
    """Return a function of Ray's that does not start a Ray where there is none any more."""
    return getattr(function, "__wrapped__", function)


def is_of_its_node(error: BaseException) -> bool:
    """Return whether an actor is lost because its node is.

    Of a process that has died Ray is told within a second. A dead node is noticed later, by the
    heartbeats that it misses; until then its actors are said to be unavailable.
    """
    return "its node has died" in str(error) or type(error).__name__ == "ActorUnavailableError"


class Gone(StartError):
    """What was there is not there any more; the message says what."""


def _initialise(ray: Any, address: str | None) -> _Started:
    started = _Started(address)
    on_term = signal.getsignal(signal.SIGTERM)
    try:
        _knock(address)
        ray.init(address=address)
    except Exception as error:
        where = "could not be started" if address is None else f"at {address!r} cannot be reached"
        raise StartError(f"Ray {where}: {error}") from error
    started.identity = _identity(ray)
    if on_term is signal.SIG_DFL:
        started.on_term = signal.getsignal(signal.SIGTERM)
    return started


@contextlib.contextmanager
def _untouched() -> Iterator[None]:
    """Leave random numbers, and what the user does at SIGTERM, as they are; Ray changes both.

    What Ray does in place of the system's default may stay: it ends in order what was started.
    """
    numbers, on_term = random.getstate(), signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        random.setstate(numbers)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and on_term not in (None, signal.SIG_DFL):
            signal.signal(signal.SIGTERM, on_term)


def _check_process() -> None:
    """Raise StartError where Ray's threads are not: what was forked from its driver would hang."""
    tasks = "/proc/self/task"  # Linux's, where DataLoader and others fork
    if os.path.isdir(tasks) and len(os.listdir(tasks)) <= threading.active_count():
        raise StartError(
            "this process was forked from one that is connected to Ray, whose connection cannot "
            "be used here; have it spawned (start_method='spawn', or multiprocessing_context of a "
            "DataLoader), or fork before Ray is started"
        )


def _identity(ray: Any) -> tuple[str, str] | None:
    """Return what only this connection to this Ray has; None if there is none."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


def _is_being_shut_down(ray: Any) -> bool:
    """Whether Ray has begun to shut down, and has not got over with it.

    There is no public way to ask; where the private one has moved, there is no wait.
    """
    worker = getattr(getattr(ray, "_private", None), "worker", None)
    is_there = hasattr(getattr(worker, "global_worker", None), "core_worker")
    return is_there and not ray.is_initialized()


def _knock(address: str | None) -> None:
    """Raise OSError if no server listens at an address; Ray would take minutes to find that out."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_S).close()
