"""Lightning: a run resumes with the next batch; several devices get a loader of the same class."""

import os
import signal

import pytest
from helpers import Program, kill_self, needs

lightning = needs("lightning")
torch = needs("torch")

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer  # noqa: E402
from enqueuer.adapters.cuda import CudaDataLoader  # noqa: E402
from enqueuer.adapters.torch import DataLoader, TorchLoader  # noqa: E402

pytestmark = pytest.mark.timeout(120)

STEPS = 6


def fail():
    raise KeyError("the run ends here")


class Linear(lightning.LightningModule):
    def __init__(self, ends_after, end):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.ends_after, self.end = ends_after, end

    def training_step(self, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def on_train_batch_end(self, *_):
        if self.global_step == self.ends_after:
            self.end()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


def rows():
    x = torch.randn(4 * STEPS, 8, generator=torch.Generator().manual_seed(7))
    return torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))


def generated(shard):
    for _ in shard.split(range(STEPS)):
        x = shard.rng.standard_normal((4, 8), "float32")
        yield x, x.sum(axis=1, keepdims=True)


def data_loader():
    generator = torch.Generator().manual_seed(7)
    return DataLoader(rows(), 4, shuffle=True, num_workers=1, generator=generator)


def torch_loader():
    return TorchLoader(OrderedEnqueuer(rows(), batch_size=4, shuffle=True, random_seed=7))


def torch_loader_of_a_generator():
    return TorchLoader(GeneratorEnqueuer(generated, random_seed=7), steps_per_epoch=STEPS)


def cuda_loader():
    enqueuer = OrderedEnqueuer(rows(), batch_size=4, shuffle=True, random_seed=7)
    return CudaDataLoader(enqueuer, "cpu")


def cuda_loader_of_a_data_loader():
    return CudaDataLoader(data_loader(), "cpu")


def train(make, folder, ends_after=None, end=fail, resumes=False):
    """Train for three epochs, and return the weights."""
    torch.manual_seed(7)
    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        folder, every_n_train_steps=2, save_last=True
    )
    trainer = lightning.Trainer(
        max_epochs=3,
        callbacks=[saving],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, loader = Linear(ends_after, end), make()
    try:
        trainer.fit(model, loader, ckpt_path="last" if resumes else None)
    finally:
        if not isinstance(loader, DataLoader):
            loader.stop()
    assert trainer.global_step == 3 * STEPS
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "fails_after"),
    [
        (data_loader, STEPS + 3),
        (torch_loader, STEPS + 3),
        # The checkpoint is that of a whole epoch.
        (torch_loader, STEPS + 1),
        (torch_loader_of_a_generator, STEPS + 3),
        (torch_loader_of_a_generator, STEPS + 1),
        (cuda_loader, STEPS + 3),
        (cuda_loader, STEPS + 1),
        (cuda_loader_of_a_data_loader, STEPS + 3),
    ],
)
def test_a_run_that_resumes_has_the_weights_of_an_undisturbed_one(make, fails_after, tmp_path):
    expected = train(make, tmp_path / "undisturbed")
    with pytest.raises(KeyError, match="ends here"):
        train(make, tmp_path / "ended", fails_after)
    assert torch.equal(train(make, tmp_path / "ended", resumes=True), expected)


def train_until_killed(make, folder):
    train(globals()[make], folder, STEPS + 3, kill_self)


KILLED = """
    import sys, warnings

    warnings.simplefilter("ignore")
    sys.path.insert(0, {tests!r})
    import test_lightning

    test_lightning.train_until_killed({make!r}, {folder!r})
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "make",
    [data_loader, torch_loader, cuda_loader, cuda_loader_of_a_data_loader],
)
def test_a_run_that_was_killed_resumes_to_the_weights_of_an_undisturbed_one(make, tmp_path):
    expected = train(make, tmp_path / "undisturbed")
    folder = tmp_path / "killed"
    text = KILLED.format(make=make.__name__, folder=str(folder), tests=os.path.dirname(__file__))
    with Program(tmp_path, text) as program:
        code, _, err = program.wait(200)
        assert code == -signal.SIGKILL, err
        program.check_nothing_left(limit=60)
    assert torch.equal(train(make, folder, resumes=True), expected)


@pytest.mark.filterwarnings("ignore:max_restarts has no effect with threads")
def test_a_loader_for_several_devices_keeps_its_class_and_its_options():
    from lightning.pytorch.utilities.data import _update_dataloader

    dataset = torch.utils.data.TensorDataset(torch.arange(20))
    loader = DataLoader(dataset, 4, num_workers=1, backend="thread", max_restarts=3, concurrency=2)
    sampler = torch.utils.data.DistributedSampler(dataset, 2, 1, shuffle=False)
    own = _update_dataloader(loader, sampler)
    assert type(own) is DataLoader
    assert (own.backend, own.max_restarts, own.concurrency, own.num_workers) == ("thread", 3, 2, 1)
    assert torch.cat([batch[0] for batch in own]).tolist() == list(range(1, 20, 2))
