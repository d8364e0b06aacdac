"""Text files -> packed rows -> a tiny transformer on two ranks, killed, and resumed on one.

Each row holds several documents, which do not see each other. The losses are those of a run that
was not killed.
"""

import functools
import os
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np

try:
    import torch
    import torch.distributed
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
except ImportError as error:
    print(f"{error}. This needs PyTorch: pip install torch", file=sys.stderr)
    sys.exit(2)

from enqueuer import GeneratorEnqueuer, merge_states, pack
from enqueuer.adapters.torch import TorchLoader

ROW, END = 128, 256


# [rows]
class Texts:
    """The tokens of text files: bytes here, where a real program has a tokenizer."""

    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return np.append(np.frombuffer(self.paths[index].read_bytes(), np.uint8), np.int32(END))


def rows(shard, texts):
    # All shards draw the same order, plan the same rows, and read only their own.
    rng = np.random.default_rng([shard.random_seed, shard.epoch])
    paths = rng.permutation(sorted(texts.glob("*.txt"))).tolist()
    lengths = [path.stat().st_size + 1 for path in paths]
    return pack(Texts(paths), ROW, lengths=lengths, rng=rng, shard=shard, drop_last=True)


def loader_of(texts, rank, world_size):
    enqueuer = GeneratorEnqueuer(
        functools.partial(rows, texts=texts),
        workers=1,
        backend="process",
        shards=4,
        batch_size=4,
        # With that of pack: all ranks make the same number of steps.
        drop_last=True,
        random_seed=7,
        rank=rank,
        world_size=world_size,
    )
    return TorchLoader(enqueuer)


# [model]
class Model(torch.nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.tokens = torch.nn.Embedding(END + 1, width)
        self.positions = torch.nn.Embedding(ROW, width)
        self.layer = torch.nn.TransformerEncoderLayer(width, 1, 64, dropout=0, batch_first=True)
        self.head = torch.nn.Linear(width, END + 1)

    def forward(self, batch):
        ids = batch["document_ids"]
        # A token sees the earlier ones of its own document.
        seen = (ids[:, :, None] == ids[:, None, :]).tril()
        x = self.tokens(batch["tokens"]) + self.positions(batch["positions"])
        return self.head(self.layer(x, src_mask=~seen))


def loss_of(model, batch):
    # Labels of -100, at the end of a document and in the padding, do not count.
    return torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), batch["labels"].flatten())


# [train]
def train(rank, world_size, texts, folder, killed_at):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/{world_size}", rank=rank, world_size=world_size
    )
    torch.manual_seed(7)
    model = torch.nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader, losses = loader_of(texts, rank, world_size), []
    path = folder / "checkpoint.pt"
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(merge_states(saved["data"]))
        losses = saved["losses"]
    with loader:
        # A step has two batches: one of each of two ranks, or both of one.
        for batches in zip(*[iter(loader)] * (2 // world_size), strict=False):
            optimizer.zero_grad()
            loss = torch.zeros(())
            for batch in batches:
                part = loss_of(model, batch) / len(batches)
                part.backward()
                loss += part.detach()
            optimizer.step()
            torch.distributed.all_reduce(loss)
            losses.append(loss.item() / world_size)
            if len(losses) == killed_at and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if len(losses) % 4 == 0:
                # The positions of all ranks.
                data = [None] * world_size
                torch.distributed.all_gather_object(data, loader.state_dict())
                saved = {"data": data, "losses": losses, "optimizer": optimizer.state_dict()}
                if rank == 0:
                    torch.save({**saved, "model": model.state_dict()}, path)
    if rank == 0:
        torch.save(losses, folder / "losses.pt")
    torch.distributed.destroy_process_group()


# [end]


def run(world_size, texts, folder, killed_at=None):
    folder.mkdir(exist_ok=True)
    args = (world_size, texts, folder, killed_at)
    # Forked, as torch would take seconds to import in each process.
    torch.multiprocessing.start_processes(train, args, world_size, start_method="fork")
    return torch.load(folder / "losses.pt")


def main(folder):
    texts = folder / "texts"
    texts.mkdir()
    rng = np.random.default_rng(7)
    words = ["the", "loader", "packs", "rows", "of", "tokens", "and", "never", "waits"]
    for number in range(150):
        text = " ".join(rng.choice(words, int(rng.lognormal(3, 0.8)) + 1))
        (texts / f"{number:03}.txt").write_text(text)
    whole = run(2, texts, folder / "whole")
    try:
        run(2, texts, folder / "killed", killed_at=10)
    except (ProcessExitedException, ProcessRaisedException):
        print("rank 1 was killed in step 10")
    resumed = run(1, texts, folder / "killed")
    print(f"{len(whole)} steps, the loss fell from {whole[0]:.2f} to {whole[-1]:.2f}")
    print("largest difference", np.abs(np.subtract(resumed, whole)).max())
    assert np.allclose(resumed, whole, rtol=1e-5)
    assert whole[-1] < whole[0] / 2
    print("resumed on one rank: the same losses")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
