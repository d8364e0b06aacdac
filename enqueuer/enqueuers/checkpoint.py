"""The position of an enqueuer, as `state_dict()` returns it and `load_state_dict()` takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enqueuer.enqueuers import position
from enqueuer.enqueuers.core import Core
from enqueuer.enqueuers.position import SavedPosition
from enqueuer.errors import InvalidState


def save(core: Core) -> dict[str, Any]:
    """Return the position; see `BaseEnqueuer.state_dict`."""
    with core.deferred.locked():
        workload, saved = core.workload, core.saved
        reader = core.reader
        if reader is not None and not core.is_idle:
            ready: Any = reader.ready.copy()
            identity, epoch = workload.identity(), reader.position(ready)
            count = reader.run.failures.count
        else:
            identity, epoch = saved.identity or workload.identity(), saved.epoch
            count = saved.error_count
        return position.save(identity, epoch, count, position.shards_in(identity))


def load(core: Core, state_dict: Mapping[str, Any]) -> None:
    """Go on at a position at the next start; see `BaseEnqueuer.load_state_dict`."""
    with core.state_lock:
        if not core.is_idle:
            raise InvalidState(
                "load_state_dict() was called, but the enqueuer is running; load a state "
                "before start(), or call stop() first"
            )
        workload = core.workload
        fixed = workload.identity()
        for name, is_given in workload.given().items():
            if not is_given:
                del fixed[name]
        epoch, error_count = position.load(state_dict, fixed)
        workload.adopt(state_dict, epoch, was_run=core.was_run)
        core.saved = SavedPosition(epoch, is_loaded=True, error_count=error_count)
        workload.seed.is_shared = True
