"""Train with the Trainer of transformers; a run that is killed resumes with the very next batch."""

import os
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

try:
    import torch
    import transformers
except ImportError as error:
    print(f"{error}. This needs: pip install transformers accelerate", file=sys.stderr)
    sys.exit(2)

from enqueuer.adapters.accelerate import prepare_data_loader
from enqueuer.adapters.torch import DataLoader

STEPS = 40


class Trainer(transformers.Trainer):
    def get_train_dataloader(self):
        loader = DataLoader(
            self.train_dataset,
            batch_size=self._train_batch_size,
            sampler=self._get_train_sampler(),
            collate_fn=self.data_collator,
            num_workers=2,
        )
        return prepare_data_loader(self.accelerator, loader)


class SavedPosition(transformers.TrainerCallback):
    """Keeps the position of the loader with each checkpoint."""

    def on_save(self, args, state, control, train_dataloader=None, **_):
        torch.save(train_dataloader.state_dict(), self.path(args, state))

    def on_train_begin(self, args, state, control, train_dataloader=None, **_):
        if state.global_step > 0:
            train_dataloader.load_state_dict(torch.load(self.path(args, state), weights_only=False))

    def path(self, args, state):
        return f"{args.output_dir}/checkpoint-{state.global_step}/loader.pt"


class KilledAfter(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}


def train(folder, killed_after=None):
    """Train, from the last checkpoint in the folder if there is one; return the weights."""
    transformers.set_seed(7)
    x = torch.randn(16 * STEPS, 8)
    dataset = [{"x": row, "labels": row.sum(dim=0, keepdim=True)} for row in x]
    arguments = transformers.TrainingArguments(
        folder,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        learning_rate=0.05,
        save_steps=10,
        save_total_limit=1,
        # The loader resumes by itself; the Trainer would skip batches.
        ignore_data_skip=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    model = Linear()
    trainer = Trainer(
        model,
        arguments,
        train_dataset=dataset,
        callbacks=[SavedPosition(), KilledAfter(killed_after)],
    )
    trainer.train(resume_from_checkpoint=any(Path(folder).iterdir()))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if len(sys.argv) > 1:
        train(sys.argv[1], killed_after=STEPS + 25)
    with tempfile.TemporaryDirectory() as undisturbed, tempfile.TemporaryDirectory() as killed:
        expected = train(undisturbed)
        done = subprocess.run([sys.executable, __file__, killed], capture_output=True)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        print("killed after step", STEPS + 25, "with", os.listdir(killed))
        assert torch.equal(train(killed), expected)
        print("resumed: the same weights as without the kill")
