"""accelerate: ranks share the batches of a DataLoader as accelerate shares those of torch's."""

import functools
import itertools
import json
import os
import subprocess
import sys
import warnings

import pytest
from helpers import needs

accelerate = needs("accelerate")
torch = needs("torch")

from enqueuer import EnqueuerWarning, OrderedEnqueuer  # noqa: E402
from enqueuer.adapters.accelerate import prepare_data_loader  # noqa: E402
from enqueuer.adapters.cuda import CudaDataLoader  # noqa: E402
from enqueuer.adapters.torch import DataLoader, TorchLoader  # noqa: E402

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


class TwoRanks:
    """Knows as much of an accelerator as the check of a loader asks for."""

    num_processes = 2

    def prepare_data_loader(self, loader):
        raise LookupError("the loader was checked")


@pytest.mark.parametrize("is_divided", [False, True])
def test_a_loader_that_is_divided_already_is_a_warning(is_divided):
    sampler = torch.utils.data.DistributedSampler(range(ROWS), num_replicas=2, rank=1)
    loader = loader_of(DataLoader, sampler=sampler if is_divided else None)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", EnqueuerWarning)
        with pytest.raises(LookupError):
            prepare_data_loader(TwoRanks(), loader)
    assert [("rank 1 of 2" in str(one.message)) for one in found] == [True] * is_divided


def of_enqueuer(kind, **options):
    enqueuer = OrderedEnqueuer(
        range(ROWS), batch_size=4, shuffle=True, random_seed=7, drop_last=True
    )
    return (
        TorchLoader(enqueuer, **options)
        if kind == "torch"
        else CudaDataLoader(enqueuer, "cpu", **options)
    )


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
    found |= {kind: prepared_loader_of_enqueuer(accelerator, kind) for kind in ("torch", "cuda")}
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found, file)
    torch.distributed.destroy_process_group()


def prepared_loader_of_enqueuer(accelerator, kind):
    """Return what a rank gets, in two epochs, of a loader made after the Accelerator."""
    loader = accelerator.prepare(of_enqueuer(kind))
    epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
    loader.stop()
    return epochs


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    """What each of two ranks found."""
    tmp_path = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen([sys.executable, __file__, tmp_path, rank], env=environment)
        for rank in ("0", "1")
    ]
    assert [one.wait(150) for one in ranks] == [0, 0]
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_ranks_share_the_batches_as_with_torch(of_ranks):
    first, second = of_ranks
    for found in of_ranks:
        for shuffle in ("False", "True"):
            mine, theirs = found[shuffle]
            assert mine == theirs
    for shuffle in ("False", "True"):
        for a, b in zip(first[shuffle][0], second[shuffle][0], strict=True):
            # accelerate gives the last ranks some batches again, so that all have as many.
            assert set(itertools.chain(*a, *b)) == set(range(ROWS))


@pytest.mark.parametrize("kind", ["torch", "cuda"])
def test_ranks_share_the_batches_of_an_enqueuer(of_ranks, kind):
    for epoch in range(2):
        first, second = (found[kind][epoch] for found in of_ranks)
        assert len(first) == len(second) == ROWS // 8
        # `drop_last` leaves out what is not a batch for each rank.
        rows = list(itertools.chain(*first, *second))
        assert len(set(rows)) == len(rows) == ROWS // 8 * 8


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


@pytest.mark.parametrize("kind", ["torch", "cuda"])
def test_the_position_of_a_loader_of_an_enqueuer_is_saved_when_it_is_registered(
    accelerator, tmp_path, kind
):
    loader = accelerator.prepare(of_enqueuer(kind))
    accelerator.register_for_checkpointing(loader)
    whole = [batch.tolist() for batch in loader]
    loader.stop()
    taken = [batch.tolist() for batch in itertools.islice(loader, 5)]
    accelerator.save_state(tmp_path)
    loader.stop()
    accelerator.load_state(tmp_path)
    assert taken + [batch.tolist() for batch in loader] == whole
    loader.stop()


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
