"""The warning of shards that begin with the same batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from enqueuer.backends.stall import level_of_user
from enqueuer.errors import DuplicateDataWarning
from enqueuer.monitoring.duplicates import FirstItems
from enqueuer.workers.messages import ItemTuple


def compare(first: FirstItems, items: Iterable[ItemTuple]) -> None:
    """Compare new items with the first ones of other shards, and warn if two shards are alike."""
    for shard, _, value, _ in items:
        twins = first.saw(shard, value)
        if twins is not None:
            _warn_of_twins(*twins, first.takes_shard)


def _warn_of_twins(one: int, other: int, takes_shard: bool) -> None:
    if takes_shard:
        cause = (
            "Are random numbers drawn from a generator that was made outside (a captured "
            "numpy.random.default_rng, say)? Draw them from shard.rng. Does each shard read the "
            "same? Use shard.split for its share of the work"
        )
    else:
        cause = (
            "The generator function takes no shard, so that each shard runs all of it: let it "
            "take the shard (`def batches(shard): ...`), use shard.split for its share of the "
            "work, and draw random numbers from shard.rng"
        )
    warnings.warn(
        f"shards {one} and {other} began with the same batches, so the data seem to come "
        f"several times. {cause}",
        DuplicateDataWarning,
        stacklevel=level_of_user(),
    )
