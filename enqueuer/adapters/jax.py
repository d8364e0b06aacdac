"""JAX: batches as arrays on its devices, copied there ahead of the loop.

loader -> [a thread: jax.device_put, up to queue_size batches] -> the training loop
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from enqueuer.adapters.loading import Loader, PrefetchReader
from enqueuer.common import checks
from enqueuer.common.extras import framework
from enqueuer.common.objects import tree_map

__all__ = ["JaxLoader"]

jax: Any = framework("jax", "jax", "0.4.26")


@checks.suggests_options
class JaxLoader(Loader[Any]):
    """Batches as JAX arrays on a device, or distributed over several, `queue_size` ahead.

    Numpy arrays and numpy scalars become JAX arrays. As usual in JAX, 64-bit types become 32-bit
    types unless `jax_enable_x64` is set. Values without a type in JAX (strings, arrays of objects
    or dates) and Python's own numbers are left as they are. Batches can be any pytree of these;
    dataclasses need not be registered.

    On a CPU no large array is copied: it stays in its block of shared memory as long as the JAX
    array lives.

    Args:
        loader: An enqueuer, or any object that can be iterated once an epoch: a list, another
            loader.
        sharding: Target of the batches, as in `jax.device_put`: a device, a
            `jax.sharding.Sharding` such as a `NamedSharding` over the batch's first axis, or a
            pytree of these and None that is a prefix of the batch. None, the default: the
            default device, uncommitted. With a sharding over several processes, each process
            gives the rows of its own devices.
        queue_size: Number of batches that are kept ready on the device; 2 by default, which is
            enough to overlap steady work. The thread holds one more, and the loop its own.
        steps_per_epoch: Number of batches in an epoch. None, the default: as many as `loader`
            gives. Give a number for a generator without an end.

    Raises:
        TypeError: `loader` cannot be iterated, or a number has the wrong type.
        ValueError: `queue_size` or `steps_per_epoch` is less than 1.

    .. code-block:: python

        loader = JaxLoader(GeneratorEnqueuer(batches, workers=2), sharding=jax.devices()[0])
        for batch in loader:
            weights, loss = step(weights, batch)
    """

    def __init__(
        self,
        loader: Iterable[Any],
        sharding: Any = None,
        queue_size: int = 2,
        steps_per_epoch: int | None = None,
    ) -> None:
        put = functools.partial(_put, sharding)
        reader = functools.partial(PrefetchReader, change=put, queue_size=queue_size)
        super().__init__(loader, steps_per_epoch, reader=reader)


def _put(sharding: Any, batch: Any) -> Any:
    """Return a batch with its arrays on the devices of `sharding`, which is a prefix of it."""

    def put(where: Any, part: Any) -> Any:
        # A leaf of JAX may still be a nest, such as a dataclass that is not registered.
        put_leaf = functools.partial(tree_map, functools.partial(_put_one, where))
        return jax.tree_util.tree_map(put_leaf, part)

    return jax.tree_util.tree_map(put, sharding, batch, is_leaf=lambda where: where is None)


def _put_one(where: Any, leaf: Any) -> Any:
    is_local = isinstance(leaf, (np.ndarray, np.generic))
    if not isinstance(leaf, jax.Array) and not (is_local and _is_known(leaf.dtype)):
        return leaf
    if is_local and not getattr(where, "is_fully_addressable", True):
        return jax.make_array_from_process_local_data(where, leaf)
    return jax.device_put(leaf, where)


@functools.lru_cache
def _is_known(dtype: np.dtype[Any]) -> bool:
    """Return whether JAX has arrays of a dtype, or of the same with 32 bits."""
    try:
        jax.eval_shape(lambda array: array, np.zeros((), dtype))
    except TypeError:
        return False
    return True
