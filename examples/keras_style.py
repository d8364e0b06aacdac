"""Code in the style of Keras 2: start, next(get()), stop."""

import numpy as np

from enqueuer import GeneratorEnqueuer


def generator(batch_size):
    while True:
        x = np.random.random((batch_size, 8))
        yield x, x.sum(axis=1)


enqueuer = GeneratorEnqueuer(generator(batch_size=32), random_seed=7)
enqueuer.start(workers=2, max_queue_size=10)
try:
    output_generator = enqueuer.get()
    weights = np.zeros(8)
    for step in range(300):
        x, y = next(output_generator)
        error = x @ weights - y
        weights -= 0.1 * x.T @ error / len(x)
        if step % 100 == 0:
            print(f"step {step:3}: mean squared error {np.mean(error**2):.4f}")
finally:
    enqueuer.stop(timeout=5)
print(f"learnt weights: {weights.round(1)}")
assert np.allclose(weights, 1, atol=0.3)
