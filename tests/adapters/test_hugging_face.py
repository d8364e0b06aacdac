"""The Trainer of transformers: a run over an enqueuer resumes with the next batch."""

import functools

import pytest
from helpers import needs

transformers = needs("transformers")
needs("accelerate")
torch = needs("torch")

from enqueuer import OrderedEnqueuer  # noqa: E402
from enqueuer.adapters.cuda import CudaDataLoader  # noqa: E402
from enqueuer.adapters.torch import TorchLoader  # noqa: E402

pytestmark = pytest.mark.timeout(120)

STEPS = 6


class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}


class Trainer(transformers.Trainer):
    make = None

    def get_train_dataloader(self):
        self.loader = self.make(
            OrderedEnqueuer(self.train_dataset, batch_size=4, shuffle=True, random_seed=7)
        )
        return self.loader


class SavedPosition(transformers.TrainerCallback):
    """As in the how-to."""

    def on_save(self, args, state, control, train_dataloader=None, **_):
        torch.save(train_dataloader.state_dict(), self.path(args, state))

    def on_train_begin(self, args, state, control, train_dataloader=None, **_):
        if state.global_step > 0:
            train_dataloader.load_state_dict(torch.load(self.path(args, state), weights_only=False))

    def path(self, args, state):
        return f"{args.output_dir}/checkpoint-{state.global_step}/loader.pt"


class Fails(transformers.TrainerCallback):
    def __init__(self, after):
        self.after = after

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.after:
            raise KeyError("the run ends here")


def train(make, folder, fails_after=None, resumes=False):
    """Train for three epochs, and return the weights."""
    transformers.set_seed(7)
    x = torch.randn(4 * STEPS, 8)
    dataset = [{"x": row, "labels": row.sum(dim=0, keepdim=True)} for row in x]
    arguments = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=3,
        per_device_train_batch_size=4,
        save_steps=2,
        ignore_data_skip=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    model = Linear()
    callbacks = [SavedPosition(), Fails(fails_after)]
    trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=callbacks)
    trainer.make = make
    try:
        trainer.train(resume_from_checkpoint=resumes)
    finally:
        trainer.loader.stop()
    assert trainer.state.global_step == 3 * STEPS
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "fails_after"),
    [
        (TorchLoader, STEPS + 3),
        # The checkpoint is that of a whole epoch.
        (TorchLoader, STEPS + 1),
        (functools.partial(CudaDataLoader, device="cpu"), STEPS + 3),
        (functools.partial(CudaDataLoader, device="cpu"), STEPS + 1),
    ],
    ids=["torch", "torch, whole epoch", "cuda", "cuda, whole epoch"],
)
def test_a_run_that_resumes_has_the_weights_of_an_undisturbed_one(make, fails_after, tmp_path):
    expected = train(make, tmp_path / "undisturbed")
    with pytest.raises(KeyError, match="ends here"):
        train(make, tmp_path / "ended", fails_after)
    assert torch.equal(train(make, tmp_path / "ended", resumes=True), expected)
