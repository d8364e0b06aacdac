"""Train with accelerate; a run that is killed in mid-epoch resumes with the very next batch."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    import accelerate
    import torch
except ImportError as error:
    print(f"{error}. This needs accelerate: pip install accelerate", file=sys.stderr)
    sys.exit(2)

from enqueuer.adapters.accelerate import prepare_data_loader
from enqueuer.adapters.torch import DataLoader

STEPS, EPOCHS = 40, 3


class Progress:
    """The number of steps so far, which accelerate saves."""

    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def train(folder, killed_after=None):
    """Train, from the checkpoint in the folder if there is one; return the weights."""
    accelerate.utils.set_seed(7)
    x = torch.randn(16 * STEPS, 8)
    dataset = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    progress = Progress()
    accelerator = accelerate.Accelerator(cpu=True)
    loader = DataLoader(
        dataset,
        batch_size=16,
        shuffle=True,
        num_workers=2,
        generator=torch.Generator().manual_seed(7),
    )
    loader = prepare_data_loader(accelerator, loader)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(progress)
    if any(Path(folder).iterdir()):
        accelerator.load_state(folder)

    while progress.step < EPOCHS * STEPS:
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            progress.step += 1
            if progress.step % 10 == 0:
                # With the position of the loader.
                accelerator.save_state(folder)
            if progress.step == killed_after:
                os.kill(os.getpid(), signal.SIGKILL)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1], killed_after=STEPS + 25)
    with tempfile.TemporaryDirectory() as undisturbed, tempfile.TemporaryDirectory() as killed:
        expected = train(undisturbed)
        done = subprocess.run([sys.executable, __file__, killed], capture_output=True)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        print("killed after step", STEPS + 25)
        assert torch.equal(train(killed), expected)
        print("resumed: the same weights as without the kill")
