"""accelerate: ranks share the batches of a DataLoader as accelerate shares those of torch's."""

import functools
import itertools
import json
import os
import subprocess
import sys

import pytest
from helpers import needs

accelerate = needs("accelerate")
torch = needs("torch")

from enqueuer.adapters.accelerate import prepare_data_loader  # noqa: E402
from enqueuer.adapters.torch import DataLoader  # noqa: E402

pytestmark = pytest.mark.timeout(180)

ROWS = 50


def loader_of(kind, **options):
    dataset = torch.utils.data.TensorDataset(torch.arange(ROWS))
    return kind(dataset, batch_size=4, num_workers=1, **options)


def numbers(loader):
    """Return the numbers of each batch of an epoch."""
    return [batch[0].tolist() for batch in loader]


def ours(accelerator, **options):
    return prepare_data_loader(accelerator, loader_of(DataLoader, **options))


def run_rank(folder, rank):
    """Write what both kinds of loaders give to a rank."""
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
    # accelerate wants it; the ranks meet in a file.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=int(rank), world_size=2
    )
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    found = {}
    for shuffle in (False, True):
        generator = torch.Generator().manual_seed(7)
        mine = ours(accelerator, shuffle=shuffle, generator=generator)
        generator = torch.Generator().manual_seed(7)
        theirs = accelerator.prepare(
            loader_of(torch.utils.data.DataLoader, shuffle=shuffle, generator=generator)
        )
        found[str(shuffle)] = [[numbers(one) for _ in range(2)] for one in (mine, theirs)]
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found, file)
    torch.distributed.destroy_process_group()


def test_ranks_share_the_batches_as_with_torch(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen([sys.executable, __file__, tmp_path, rank], env=environment)
        for rank in ("0", "1")
    ]
    assert [one.wait(150) for one in ranks] == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for found in (first, second):
        for mine, theirs in found.values():
            assert mine == theirs
    for shuffle in ("False", "True"):
        for a, b in zip(first[shuffle][0], second[shuffle][0], strict=True):
            # accelerate gives the last ranks some batches again, so that all have as many.
            assert set(itertools.chain(*a, *b)) == set(range(ROWS))


@pytest.fixture
def accelerator():
    return accelerate.Accelerator(cpu=True)


def test_the_workers_are_those_of_the_enqueuer(accelerator):
    loader = ours(accelerator)
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, torch.utils.data.DataLoader)
    iterator = iter(loader)
    next(iterator)
    assert len(loader.stats().workers) == 1
    iterator.close()
    assert len(loader) == 13


def test_a_prepared_loader_continues_with_the_next_batch(accelerator, tmp_path):
    make = functools.partial(ours, accelerator, shuffle=True)
    loader = make(generator=torch.Generator().manual_seed(7))
    whole = [numbers(loader), numbers(loader)]
    loader = make(generator=torch.Generator().manual_seed(7))
    assert numbers(loader) == whole[0]
    iterator = iter(loader)
    taken = [next(iterator)[0].tolist() for _ in range(5)]
    state = loader.state_dict()
    iterator.close()
    loader = make(generator=torch.Generator())
    loader.load_state_dict(state)
    assert taken + numbers(loader) == whole[1]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(ROWS))


def batches_of_indices():
    sampler = torch.utils.data.SequentialSampler(range(ROWS))
    return torch.utils.data.BatchSampler(sampler, 4, drop_last=False)


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Stream(), {"batch_size": 4}),
        (Stream(), {"batch_size": None}),
        (torch.arange(ROWS), {"batch_sampler": batches_of_indices()}),
        (torch.arange(ROWS), {"batch_size": 4, "drop_last": True}),
    ],
    ids=["stream", "stream of batches", "batch sampler", "drop last"],
)
def test_batches_are_those_of_a_prepared_torch_loader(dataset, options):
    # By default accelerate dispatches the batches of an iterable dataset.
    configuration = accelerate.DataLoaderConfiguration(dispatch_batches=False)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=configuration)
    mine = prepare_data_loader(accelerator, DataLoader(dataset, num_workers=1, **options))
    theirs = torch.utils.data.DataLoader(dataset, num_workers=1, **options)
    theirs = accelerator.prepare(theirs)
    found, expected = ([torch.as_tensor(b).tolist() for b in one] for one in (mine, theirs))
    assert found == expected
    assert len(found) >= 12


def test_what_cannot_be_prepared_is_refused(accelerator):
    with pytest.raises(TypeError, match=r"takes a DataLoader of enqueuer\.adapters\.torch"):
        prepare_data_loader(accelerator, loader_of(torch.utils.data.DataLoader))
    configuration = accelerate.DataLoaderConfiguration(dispatch_batches=True)
    dispatching = accelerate.Accelerator(cpu=True, dataloader_config=configuration)
    with pytest.raises(ValueError, match="dispatches the batches"):
        prepare_data_loader(dispatching, loader_of(DataLoader))


if __name__ == "__main__":
    run_rank(*sys.argv[1:])
