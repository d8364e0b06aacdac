"""Train with PyTorch; batches from worker processes are copied to the device ahead of the loop."""

import sys

import numpy as np

try:
    import torch

    from enqueuer.adapters.cuda import CudaDataLoader
except ImportError as error:
    print(f"{error}. This needs PyTorch: pip install torch", file=sys.stderr)
    sys.exit(2)

from enqueuer import GeneratorEnqueuer


def batches(shard):
    for _ in shard.split(range(100)):
        x = shard.rng.standard_normal((64, 8), np.float32)
        yield x, x.sum(axis=1) > 0


device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(8, 1).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

enqueuer = GeneratorEnqueuer(batches, workers=2, backend="process", shards=4, random_seed=7)
with CudaDataLoader(enqueuer, device) as loader:
    for epoch in range(3):
        right = []
        for x, y in loader:
            logits = model(x)[:, 0]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, y.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right.append(((logits > 0) == y).float().mean())
        accuracy = float(torch.stack(right).mean())
        print(f"epoch {epoch}: {accuracy:.1%} right")

assert accuracy > 0.95
