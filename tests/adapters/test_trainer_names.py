"""What trainers ask TorchLoader and CudaDataLoader for: it exists where it has a meaning."""

import itertools
import operator

import pytest
from helpers import needs, twelve

torch = needs("torch")

from enqueuer import GeneratorEnqueuer, InvalidState, OrderedEnqueuer  # noqa: E402
from enqueuer.adapters.cuda import CudaDataLoader  # noqa: E402
from enqueuer.adapters.torch import DataLoader, TorchLoader  # noqa: E402

NAMES = ("dataset", "batch_size", "sampler", "batch_sampler", "set_epoch")


def on_cpu(loader, **options):
    return CudaDataLoader(loader, "cpu", **options)


def nested(enqueuer):
    return on_cpu(TorchLoader(enqueuer))


@pytest.fixture(params=[TorchLoader, on_cpu, nested], ids=["torch", "cuda", "nested"])
def kind(request):
    return request.param


def found(loader):
    return [name for name in NAMES if hasattr(loader, name)]


def samples():
    return OrderedEnqueuer(range(10), batch_size=4, shuffle=True, random_seed=7)


def epochs_of(shard):
    for number in shard.split(range(4)):
        yield [number, shard.epoch]


def numbered(batches):
    return [[int(part) for part in batch] for batch in batches]


def test_an_enqueuer_that_makes_batches_of_samples_has_a_dataset(kind):
    loader = kind(samples())
    assert found(loader) == ["dataset", "batch_size", "set_epoch"]
    assert (loader.dataset, loader.batch_size, len(loader)) == (range(10), 4, 3)


@pytest.mark.parametrize(
    "make", [lambda: GeneratorEnqueuer(twelve), lambda: OrderedEnqueuer(list("ab"))]
)
def test_an_enqueuer_of_batches_has_no_dataset(kind, make):
    assert found(kind(make())) == ["set_epoch"]


@pytest.mark.parametrize("own", [TorchLoader, on_cpu])
def test_steps_that_the_loop_counts_have_other_epochs_than_the_enqueuer(own):
    assert found(own(samples(), steps_per_epoch=2)) == ["dataset", "batch_size"]
    with pytest.raises(AttributeError, match="with steps_per_epoch there is no set_epoch"):
        operator.attrgetter("set_epoch")(own(samples(), steps_per_epoch=2))


def test_a_loader_on_the_device_has_the_names_of_a_data_loader():
    dataset = torch.utils.data.TensorDataset(torch.arange(8))
    sampler = torch.utils.data.DistributedSampler(dataset, 2, 0, seed=7)
    loader = on_cpu(DataLoader(dataset, 2, sampler=sampler))
    assert found(loader) == list(NAMES)
    assert (loader.dataset, loader.batch_size, loader.sampler) == (dataset, 2, sampler)
    loader.set_epoch(3)
    assert sampler.epoch == 3
    assert found(on_cpu(torch.utils.data.DataLoader(dataset, 2))) == list(NAMES[:-1])
    assert found(on_cpu([1, 2])) == []


@pytest.mark.parametrize("ahead", [None, 7])
def test_set_epoch_sets_the_epoch_of_the_next_iteration(kind, ahead):
    loader = kind(GeneratorEnqueuer(epochs_of, random_seed=7, epochs=ahead))
    for epoch in (2, 3, 3, 0):
        loader.set_epoch(epoch)
        assert numbered(loader) == [[number, epoch] for number in range(4)]
    # After a `break`, the epoch begins again.
    for _ in range(2):
        loader.set_epoch(4)
        assert numbered(itertools.islice(loader, 2)) == [[0, 4], [1, 4]]
    # An iteration that has begun begins again.
    begun = iter(loader)
    loader.set_epoch(6)
    assert numbered(begun)[0] == [0, 6]
    loader.stop()


def test_the_epoch_that_comes_anyway_restarts_nothing(kind):
    enqueuer = samples()
    loader = kind(enqueuer)
    whole = [[batch.tolist() for batch in loader] for _ in range(3)]
    loader.stop()
    starts = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        # As trainers do, which never see the end of an epoch.
        batches = itertools.islice(loader, len(loader))
        assert [batch.tolist() for batch in batches] == whole[epoch]
        starts.append(enqueuer.stats().items)
    assert starts == [3, 6, 9]


def test_after_set_epoch_all_batches_are_counted_on():
    enqueuer = OrderedEnqueuer(range(10), random_seed=7)
    with TorchLoader(enqueuer) as loader:
        next(iter(loader))
        loader.set_epoch(1)
        list(loader)
        assert (enqueuer.stats().items, enqueuer.stats().total_items) == (10, 11)


def test_set_epoch_to_the_one_that_was_loaded_keeps_the_position(kind):
    one = kind(samples())
    one.set_epoch(2)
    taken = [batch.tolist() for batch in itertools.islice(one, 2)]
    state = one.state_dict()
    one.stop()
    one.set_epoch(2)
    whole = [batch.tolist() for batch in one]
    for begins in (False, True):
        other = kind(samples())
        if begins:
            iter(other)
        other.load_state_dict(state)
        other.set_epoch(2)
        assert taken + [batch.tolist() for batch in other] == whole


def test_set_epoch_does_not_stop_what_the_caller_has_started(kind):
    with GeneratorEnqueuer(epochs_of) as enqueuer:
        loader = kind(enqueuer)
        assert len(list(loader)) == 4
        loader.set_epoch(1)
        assert numbered(loader)[0] == [0, 1]
        with pytest.raises(InvalidState, match=r"set_epoch\(5\).*stop\(\)"):
            loader.set_epoch(5)
        with pytest.raises(ValueError, match="epoch"):
            loader.set_epoch(-1)
