"""The backends of an enqueuer whose workers have not all ended, and their end with it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Container
from typing import cast

from enqueuer.backends.lifecycle import ESCALATION_S, Inherited, forget
from enqueuer.backends.load import Backend
from enqueuer.common import interrupts
from enqueuer.common.finalizers import Finalizer

# Seconds from the request to exit until the last worker is killed. A generator's `finally` should
# fit into the first two.
STOP_S = 2.0 + ESCALATION_S


class OwnedBackends:
    """Backends that are to be stopped when their enqueuer stops, or is garbage.

    Args:
        owner: The object at whose end the backends are stopped.
    """

    def __init__(self, owner: object) -> None:
        # The finalizers must not know the owner, or it could never be collected.
        self._owner = weakref.ref(owner)
        self._backends: list[tuple[Backend, Finalizer]] = []
        self._pid = 0

    def add(self, backend: Backend) -> None:
        """Stop a backend together with the owner."""
        finalizer = Finalizer(self._owner(), forget, backend, STOP_S)
        self._backends.append((backend, finalizer))
        self._pid = os.getpid()

    @property
    def are_running(self) -> bool:
        """Whether there are any; not after the end of the interpreter has stopped them."""
        return any(finalizer.alive for _, finalizer in self._backends)

    def stop(self, timeout: float, but: Container[Backend | None] = ()) -> None:
        """Stop all backends but some; may be called again if that is interrupted."""
        with interrupts.held():
            for one in self._backends.copy():
                backend, finalizer = one
                if backend not in but:
                    backend.stop(timeout)
                    finalizer.detach()
                    # A signal handler may have stopped it as well, meanwhile.
                    if one in self._backends:
                        self._backends.remove(one)

    def leave_to_parent(self, in_use: Backend | None) -> Backend | None:
        """Replace the backends in a child forked from the process that has their workers.

        Args:
            in_use: The backend that the enqueuer reads from.

        Returns:
            The object that replaces `in_use`; its methods raise InvalidState.
        """
        parents, self._backends = self._backends, []
        pid = self._pid
        for backend, finalizer in parents:
            finalizer.detach()
            inherited = cast(Backend, Inherited(pid, backend))
            self.add(inherited)
            if backend is in_use:
                in_use = inherited
        return in_use
