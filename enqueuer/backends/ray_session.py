"""The Ray that the enqueuers of this process use: the one that is there, or one of their own."""

from __future__ import annotations

import socket
import threading
from typing import Any

from enqueuer.backends import Cluster
from enqueuer.errors import StartError
from enqueuer.frameworks import framework

_KNOCK_S = 10.0

_lock = threading.Lock()
_users = 0  # of a Ray that was started here
_is_ours = False


class Session:
    """One enqueuer's use of Ray, from `join()` to `leave()`.

    Attributes:
        ray: The module, once it was joined.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._counts = False
        self.ray: Any = None

    def join(self) -> Any:
        """Return the module of a Ray that is initialised; start one if there is none.

        Raises:
            FrameworkUnavailable: It is not installed.
            StartError: It cannot be reached, or is another one than was asked for.
        """
        global _users, _is_ours
        ray = self.ray = framework("ray", "ray", "2.10", user="backend='ray'")
        with _lock:
            if not ray.is_initialized():
                _initialise(ray, self._cluster.address)
                _is_ours, _users = True, 0
            else:
                self._check_address()
            if _is_ours:
                _users += 1
                self._counts = True
        return ray

    def _check_address(self) -> None:
        wanted = self._cluster.address
        if wanted == "local" and _is_ours:
            return
        here = self.ray.get_runtime_context().gcs_address
        if wanted not in (None, "auto", here):
            raise StartError(
                f"address={wanted!r} was given, but this process is connected to Ray at {here}; "
                "leave address out to use that, or call ray.shutdown() first"
            )

    def leave(self) -> None:
        """Shut Ray down if it was started here and nobody else uses it."""
        global _users, _is_ours
        with _lock:
            if self._counts:
                self._counts = False
                _users -= 1
                if _is_ours and _users == 0:
                    _is_ours = False
                    self.ray.shutdown()


def _initialise(ray: Any, address: str | None) -> None:
    try:
        _knock(address)
        ray.init(address=address)
    except Exception as error:
        where = "could not be started" if address is None else f"at {address!r} cannot be reached"
        raise StartError(f"Ray {where}: {error}") from error


def _knock(address: str | None) -> None:
    """Raise OSError if nobody listens at an address; Ray would take minutes to find that out."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_S).close()
