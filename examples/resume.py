"""Save the position with the model, crash, and continue with the very next batch.

The first run has two threads, the second three processes; the result is the same, bit for bit, as
that of an uninterrupted run.
"""

import json
import tempfile
from pathlib import Path

import numpy as np

from enqueuer import GeneratorEnqueuer

EPOCHS = 3


def batches(shard):
    for _ in shard.split(range(40)):
        x = shard.rng.random((16, 4))
        yield x, x.sum(axis=1)


class Crash(Exception):
    pass


def train(path, crash_at=None, **options):
    """Learn weights; continue from a checkpoint, if one exists; save one every ten steps."""
    enqueuer = GeneratorEnqueuer(batches, shards=4, random_seed=7, **options)
    weights, step, first_epoch = np.zeros(4), 0, 0
    if path.exists():
        checkpoint = json.loads(path.read_text())
        weights, step = np.array(checkpoint["weights"]), checkpoint["step"]
        enqueuer.load_state_dict(checkpoint["data"])
        first_epoch = checkpoint["data"]["epoch"]
        print(f"going on after step {step}, in epoch {first_epoch}")
    with enqueuer:
        for _epoch in range(first_epoch, EPOCHS):
            for x, y in enqueuer:
                weights -= 0.1 * x.T @ (x @ weights - y) / len(x)
                step += 1
                if step % 10 == 0:
                    data = enqueuer.state_dict()
                    state = {"weights": weights.tolist(), "step": step, "data": data}
                    path.write_text(json.dumps(state))
                if step == crash_at:
                    raise Crash
    return step, weights


with tempfile.TemporaryDirectory() as directory:
    wanted = train(Path(directory, "uninterrupted.json"))
    path = Path(directory, "checkpoint.json")
    try:
        train(path, crash_at=57, workers=2)
    except Crash:
        print("crashed at step 57")
    step, weights = train(path, workers=3, backend="process")

print(f"learnt weights after {step} steps: {weights.round(2)}")
assert step == wanted[0] == 40 * EPOCHS
assert (weights == wanted[1]).all()
print("the same as without the crash")
