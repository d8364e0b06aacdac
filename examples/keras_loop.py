"""The loop of fit_generator, for a model that has train_on_batch and no fit."""

import sys

import numpy as np

from enqueuer import GeneratorEnqueuer


def batches(shard):
    while True:
        x = shard.rng.random((32, 8), "float32")
        yield x, x.sum(axis=1, keepdims=True)


def fit_enqueuer(model, train, steps_per_epoch, epochs, check, validation_steps, initial_epoch=0):
    """Train with an enqueuer, test with another one; return the mean logs of each epoch."""
    history = []
    # The block starts the workers, and stops them also after an error.
    with train, check:
        output, checks = train.get(), check.get()
        for epoch in range(initial_epoch, epochs):
            logs = []
            for step in range(steps_per_epoch):
                x, y = next(output)
                logs.append(model.train_on_batch(x, y, return_dict=True))
                loss = float(logs[-1]["loss"])
                print(f"\repoch {epoch} {step + 1}/{steps_per_epoch} loss {loss:.4f}", end="")
            tests = [
                model.test_on_batch(*next(checks), return_dict=True)
                for _ in range(validation_steps)
            ]
            history.append({**mean(logs), **mean(tests, "val_")})
            print("".join(f" {name} {value:.4f}" for name, value in history[-1].items()))
    return history


def mean(logs, prefix=""):
    return {prefix + key: np.mean([float(log[key]) for log in logs]) for key in logs[0]}


if __name__ == "__main__":
    # Worker processes import this file, and need no Keras, so it is imported here.
    try:
        import keras
    except ImportError as error:
        print(f"{error}. This needs Keras 3: pip install keras torch", file=sys.stderr)
        print("then set KERAS_BACKEND=torch (or tensorflow, or jax)", file=sys.stderr)
        sys.exit(2)

    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    history = fit_enqueuer(
        model,
        GeneratorEnqueuer(batches, workers=2, backend="process", random_seed=1),
        steps_per_epoch=50,
        epochs=4,
        check=GeneratorEnqueuer(batches, random_seed=2),
        validation_steps=5,
    )
    assert history[-1]["val_loss"] < 0.05
