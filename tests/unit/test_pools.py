"""Each backend has all that the engine and the schedules ask of it.

Backends are loaded by their names, so no type checker compares them with the protocols.
"""

import importlib

import pytest

from enqueuer.backends import load, pool

POOLS = {**load._POOLS, "inline": load._INLINE}
DISPATCHES = {
    "inline": ("inline", "InlineDispatch"),
    "process": ("process.pool", "QueueDispatch"),
    "ray": ("ray.pool", "ActorDispatch"),
    "thread": ("thread_pool", "ThreadDispatch"),
}


def members(protocol):
    """Return the names of the methods and properties of a protocol."""
    return {name for name in vars(protocol) if not name.startswith("_")}


@pytest.mark.parametrize("name", POOLS)
def test_a_pool_has_all_members(name):
    module, kind = POOLS[name]
    kind = getattr(importlib.import_module(module), kind)
    # These are attributes of its instances.
    assert members(pool.WorkerPool) - {"dispatch", "workers"} <= {*dir(kind)}


@pytest.mark.parametrize("name", POOLS)
def test_a_dispatch_has_all_members(name):
    module, kind = DISPATCHES[name]
    kind = getattr(importlib.import_module(f"enqueuer.backends.{module}"), kind)
    assert members(pool.Dispatch) <= {*dir(kind)}
