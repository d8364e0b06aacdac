"""Lightning: several devices get a loader of the same class, with the same options."""

import pytest
from helpers import needs

lightning = needs("lightning")
torch = needs("torch")

from enqueuer.adapters.torch import DataLoader  # noqa: E402

pytestmark = pytest.mark.timeout(120)


def test_a_loader_for_several_devices_keeps_its_class_and_its_options():
    from lightning.pytorch.utilities.data import _update_dataloader

    dataset = torch.utils.data.TensorDataset(torch.arange(20))
    loader = DataLoader(dataset, 4, num_workers=1, backend="thread", max_restarts=3, concurrency=2)
    sampler = torch.utils.data.DistributedSampler(dataset, 2, 1, shuffle=False)
    own = _update_dataloader(loader, sampler)
    assert type(own) is DataLoader
    assert (own.backend, own.max_restarts, own.concurrency, own.num_workers) == ("thread", 3, 2, 1)
    assert torch.cat([batch[0] for batch in own]).tolist() == list(range(1, 20, 2))
