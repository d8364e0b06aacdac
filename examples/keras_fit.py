"""Keras trains with fit, and batches come from worker processes."""

import sys

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer


def batches(shard):
    while True:
        x = shard.rng.random((32, 8), "float32")
        yield x, x.sum(axis=1, keepdims=True)


def inputs(element, task):
    return task.rng.random((32, 8), "float32")


if __name__ == "__main__":
    # Worker processes import this file, and need no Keras, so it is imported here.
    try:
        import keras

        from enqueuer.adapters.keras import EnqueuerDataset
    except ImportError as error:
        print(f"{error}. This needs Keras 3: pip install keras torch", file=sys.stderr)
        print("then set KERAS_BACKEND=torch (or tensorflow, or jax)", file=sys.stderr)
        sys.exit(2)

    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    train = GeneratorEnqueuer(batches, workers=2, backend="process", random_seed=1)
    check = GeneratorEnqueuer(batches, random_seed=2)
    with EnqueuerDataset(train, 50) as training, EnqueuerDataset(check, 5) as checking:
        history = model.fit(training, epochs=4, validation_data=checking, verbose=0).history
    for name, values in history.items():
        print(name, [round(value, 4) for value in values])
    with EnqueuerDataset(OrderedEnqueuer(range(4), inputs, workers=2)) as unknown:
        print(f"predicted, in order: {model.predict(unknown, verbose=0).shape}")
    assert history["val_loss"][-1] < 0.05
