"""Train with JAX: processes make the batches, a thread puts them on the device ahead of the loop.

A small network learns to classify points inside and outside of a circle. The result depends only
on `random_seed` and `shards`, not on the workers.
"""

import sys

import numpy as np

try:
    import jax
    import jax.numpy as jnp

    from enqueuer.adapters.jax import JaxLoader
except ImportError as error:
    print(f"{error}. This needs JAX: pip install jax", file=sys.stderr)
    sys.exit(2)

from enqueuer import GeneratorEnqueuer


def batches(shard):
    for _ in shard.split(range(100)):
        x = shard.rng.uniform(-1, 1, (64, 2)).astype("float32")
        yield {"x": x, "y": (x**2).sum(axis=1) < 0.5}


def predict(weights, x):
    (w1, b1), (w2, b2) = weights
    return (jnp.tanh(x @ w1 + b1) @ w2 + b2)[:, 0]


@jax.jit
def step(weights, batch):
    def loss_of(weights):
        margin = jnp.where(batch["y"], 1.0, -1.0) * predict(weights, batch["x"])
        return jnp.logaddexp(0.0, -margin).mean()

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    return jax.tree_util.tree_map(lambda w, g: w - 0.5 * g, weights, gradient), loss


def train(**options):
    rng = np.random.default_rng(1)
    weights = [(rng.normal(size=(2, 32)), np.zeros(32)), (0.1 * rng.normal(size=(32, 1)), 0.0)]
    enqueuer = GeneratorEnqueuer(batches, shards=4, random_seed=7, **options)
    loader = JaxLoader(enqueuer, sharding=jax.devices()[0])
    for epoch in range(5):
        losses = []
        for batch in loader:
            weights, loss = step(weights, batch)
            # It is a device array, for which the loop does not wait.
            losses.append(loss)
        print(f"epoch {epoch}: loss {np.mean(losses):.3f}")
    return weights


weights = train(workers=2, backend="process")
x = np.random.default_rng(2).uniform(-1, 1, (1000, 2))
accuracy = float(np.mean((predict(weights, x) > 0) == ((x**2).sum(axis=1) < 0.5)))
print(f"accuracy {accuracy:.1%}")
assert accuracy > 0.9

again = jax.tree_util.tree_leaves(train(workers=1))
same = zip(jax.tree_util.tree_leaves(weights), again, strict=True)
assert all((one == other).all() for one, other in same)
print("the same with one thread")
