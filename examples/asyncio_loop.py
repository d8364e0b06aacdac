"""Take batches in an asyncio program: a server that trains and answers at the same time.

While the loop waits for a batch, the event loop is not blocked. A step that takes too long can be
cancelled without losing a batch.
"""

import asyncio

import numpy as np

from enqueuer import GeneratorEnqueuer


def batches(shard):
    for _ in shard.split(range(200)):
        x = shard.rng.normal(size=(64, 3))
        yield x, x @ [1.0, -2.0, 3.0]


async def train(enqueuer, weights):
    async for x, y in enqueuer:
        weights -= 0.05 * x.T @ (x @ weights - y) / len(x)


async def answer(weights, answers):
    """Stand for the other work of the program."""
    while True:
        answers.append(weights.round(2).tolist())
        await asyncio.sleep(0.001)


async def main():
    weights, answers, breaks = np.zeros(3), [], 0
    server = asyncio.create_task(answer(weights, answers))
    async with GeneratorEnqueuer(batches, workers=2, backend="process", random_seed=7) as enqueuer:
        while enqueuer.is_running():
            # Train in slices: a task that is cancelled loses no batch.
            try:
                await asyncio.wait_for(train(enqueuer, weights), 0.01)
            except asyncio.TimeoutError:
                breaks += 1
    server.cancel()
    return weights, answers, breaks


weights, answers, breaks = asyncio.run(main())
print(f"answered {len(answers)} times, cancelled {breaks} times, learnt {weights.round(2)}")
assert len(answers) > 1

expected = np.zeros(3)
with GeneratorEnqueuer(batches, shards=2, random_seed=7) as enqueuer:
    for x, y in enqueuer:
        expected -= 0.05 * x.T @ (x @ expected - y) / len(x)
assert (weights == expected).all()
print("the same as a plain loop, to the last bit")
