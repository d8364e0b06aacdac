"""Enqueuers for parts of the batches: for ranks, and for workers of a DataLoader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enqueuer.enqueuers.core import Core
from enqueuer.enqueuers.position import SavedPosition
from enqueuer.enqueuers.workload import Portion
from enqueuer.errors import InvalidState
from enqueuer.workers.messages import Epoch


def complete(core: Core, made: Core, part: Portion) -> None:
    """Complete an enqueuer for a part of the batches by what its constructor does not take.

    Args:
        core: The enqueuer of all batches.
        made: The new enqueuer.
        part: Which batches the new one makes.

    Raises:
        InvalidState: A position within an epoch was loaded.
    """
    seed, saved = core.workload.seed, core.saved
    made.workload.seed.is_given = seed.is_given
    made.workload.seed.is_shared = seed.is_given or part.world_size == 1
    if saved.is_loaded:
        if any(start.number for start in (saved.epoch.starts or {}).values()):
            raise InvalidState(
                f"a position within epoch {saved.epoch.number} was loaded, which cannot be "
                "divided among ranks or workers of a DataLoader; load it after the division: into "
                "the loader or dataset of a rank, or into torchdata's StatefulDataLoader for the "
                "workers of a DataLoader"
            )
        made.saved = SavedPosition(saved.epoch, is_loaded=True)
    if made.workload.take_part(part):
        made.record_as(part.rank + part.world_size * part.index, part.world_size * part.count)


def begin_at(core: Core, epoch: int | Epoch) -> None:
    """Let the next start begin with an epoch, as if those before it had been read."""
    at = epoch if isinstance(epoch, Epoch) else Epoch(epoch)
    core.saved = SavedPosition(at, is_loaded=True)


def comes_next(core: Core, epoch: int) -> bool:
    """Return whether the next iteration is this epoch, or what is left of it in a state."""
    reader = core.reader
    if reader is None or core.is_idle:
        return core.saved.is_loaded and core.saved.epoch.number == epoch
    with core.deferred.locked():
        return reader.is_over and reader.number + 1 == epoch


def epoch_after(core: Core, state: Mapping[str, Any]) -> int | None:
    """Return the epoch that comes next after a position; None if it is within an epoch.

    Args:
        core: Enqueuer of the position.
        state: Position; one behind the last batch of an epoch is not within it.
    """
    epoch: int = state["epoch"]
    if state["positions"] is None:
        return epoch
    steps = core.workload.steps()
    # Tasks have one position; shards have no known end.
    is_all = steps is not None and [list(at) for at in state["positions"]] == [[0, steps]]
    return epoch + 1 if is_all else None


def has_kept_order(core: Core) -> bool:
    """Return whether the epoch that a part reads has kept the order of the whole."""
    return core.workload.has_kept_order(core.started_reader().work.order)
