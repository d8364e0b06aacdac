"""Train with Lightning; a run that is killed in mid-epoch resumes with the very next batch."""

import os
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

try:
    import lightning
    import torch
except ImportError as error:
    print(f"{error}. This needs Lightning: pip install lightning", file=sys.stderr)
    sys.exit(2)

from enqueuer.adapters.torch import DataLoader

STEPS = 40


class Linear(lightning.LightningModule):
    def __init__(self, killed_after):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.killed_after = killed_after

    def training_step(self, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def on_train_batch_end(self, *_):
        if self.global_step == self.killed_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


def train(folder, killed_after=None):
    """Train, from the last checkpoint in the folder if there is one; return the weights."""
    lightning.seed_everything(7, verbose=False)
    x = torch.randn(16 * STEPS, 8)
    dataset = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
    loader = DataLoader(
        dataset,
        batch_size=16,
        shuffle=True,
        num_workers=2,
        # With a generator of its own, the order does not depend on other random numbers.
        generator=torch.Generator().manual_seed(7),
    )
    # Lightning saves and loads the position of the loader with each checkpoint.
    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        folder, every_n_train_steps=10, save_last=True
    )
    trainer = lightning.Trainer(max_epochs=3, callbacks=[saving], **QUIET)
    model = Linear(killed_after)
    trainer.fit(model, loader, ckpt_path="last" if any(Path(folder).iterdir()) else None)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if len(sys.argv) > 1:
        train(sys.argv[1], killed_after=STEPS + 25)
    with tempfile.TemporaryDirectory() as undisturbed, tempfile.TemporaryDirectory() as killed:
        expected = train(undisturbed)
        done = subprocess.run([sys.executable, __file__, killed], capture_output=True)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        print("killed after step", STEPS + 25, "with", sorted(os.listdir(killed)))
        assert torch.equal(train(killed), expected)
        print("resumed: the same weights as without the kill")
