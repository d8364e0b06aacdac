"""Train with two processes (DDP): each rank gets its part of the same order, and they agree."""

import sys
import tempfile

import numpy as np

try:
    import torch
    import torch.distributed
    import torch.multiprocessing
except ImportError as error:
    print(f"{error}. This needs PyTorch: pip install torch", file=sys.stderr)
    sys.exit(2)

from enqueuer import GeneratorEnqueuer
from enqueuer.adapters.torch import TorchLoader


# [recipe]
def batches(shard):
    for _ in shard.split(range(64)):
        x = shard.rng.standard_normal((32, 8), np.float32)
        yield x, x.sum(axis=1, keepdims=True)


def train(rank, world_size, meeting):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size
    )
    torch.manual_seed(7)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    enqueuer = GeneratorEnqueuer(
        batches,
        workers=2,
        backend="process",
        # All ranks need the same seed and shards; drop_last gives each the same number of steps.
        shards=4,
        random_seed=7,
        rank=rank,
        world_size=world_size,
        drop_last=True,
    )
    with TorchLoader(enqueuer) as loader:
        for epoch in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
            print(f"rank {rank}, epoch {epoch}: loss {loss.item():.4f}", flush=True)
    assert loss.item() < 0.05
    torch.distributed.destroy_process_group()


# [end]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (2, f"{folder}/meeting"), nprocs=2)
