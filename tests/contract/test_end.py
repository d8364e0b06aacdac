"""End: a finite source ends the iteration; iterating again runs the next epoch."""

import weakref

import pytest
from helpers import counting, start_method_of, twelve

from enqueuer import Closed, EmptyEpochWarning, GeneratorEnqueuer, OrderedEnqueuer, mix, prefetch


def test_each_loop_is_an_epoch_on_the_same_workers(process):
    def source(shard):
        import os

        yield shard.epoch, os.getpid()

    with GeneratorEnqueuer(source, workers=2, **process) as enqueuer:
        epochs = [list(enqueuer) for _ in range(3)]
    assert [[epoch for epoch, _ in batches] for batches in epochs] == [[0, 0], [1, 1], [2, 2]]
    assert len({tuple(pid for _, pid in batches) for batches in epochs}) == 1


def test_an_empty_source_is_an_ordinary_end(backend):
    with GeneratorEnqueuer(lambda: iter(()), workers=3, **backend) as enqueuer:
        with pytest.warns(EmptyEpochWarning):
            assert [list(enqueuer) for _ in range(3)] == [[], [], []]


def test_get_does_not_begin_a_new_epoch(backend):
    with GeneratorEnqueuer(twelve, workers=2, **backend) as enqueuer:
        assert list(enqueuer.get()) == list(range(12))
        assert list(enqueuer.get()) == []
        assert list(enqueuer) == list(range(12))


def test_the_queue_tells_that_the_end_was_reached(backend):
    with GeneratorEnqueuer(twelve, workers=2, **backend) as enqueuer:
        for _ in range(12):
            enqueuer.queue.get()
        with pytest.raises(Closed, match="the generator has ended"):
            enqueuer.queue.get()
        assert enqueuer.queue.empty()
        assert enqueuer.queue.qsize() == 0


def test_prefetch_yields_an_epoch_and_stops(backend):
    assert list(prefetch(twelve, workers=2, **backend)) == list(range(12))


def test_prefetch_stops_after_a_break(backend):
    for batch in prefetch(counting, workers=2, **backend):
        assert batch == (0, 0)
        break


def test_an_iterator_that_was_read_to_its_end_is_told_of_once(backend, no_warnings):
    if start_method_of(backend) not in (None, "fork"):
        pytest.skip("a running iterator is sent by fork")
    with GeneratorEnqueuer(iter("abc"), **backend) as enqueuer:
        assert list(enqueuer) == ["a", "b", "c"]
        with pytest.warns(EmptyEpochWarning, match="at its end.* pass the generator fun") as w:
            assert list(enqueuer) == []
        assert [warning.filename for warning in w] == [__file__]
        assert list(enqueuer) == []


def test_an_iterator_used_as_keras_does_is_not_told_of(no_warnings):
    with GeneratorEnqueuer(iter("abc")) as enqueuer:
        assert [next(enqueuer.get()) for _ in range(3)] == ["a", "b", "c"]
        assert list(enqueuer.get()) == []
        assert list(enqueuer.get()) == []


class Again:
    """An iterator that begins anew, as old loaders do."""

    def __iter__(self):
        self.left = 2
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left


def test_an_iterator_that_begins_anew_is_not_told_of(no_warnings):
    with GeneratorEnqueuer(Again()) as enqueuer:
        assert [list(enqueuer) for _ in range(2)] == [[1, 0], [1, 0]]


def test_an_epoch_with_a_reason_to_be_empty_is_not_told_of(no_warnings):
    def fails(x):
        raise ValueError

    with OrderedEnqueuer(range(2), fails, on_error=lambda error: None) as enqueuer:
        assert list(enqueuer) == []
    with GeneratorEnqueuer(lambda: iter("a"), workers=1) as enqueuer:
        assert next(iter(enqueuer)) == "a"
        state = enqueuer.state_dict()
    rest = GeneratorEnqueuer(lambda: iter("a"))
    rest.load_state_dict(state)
    with rest:
        assert list(rest) == []
    resumed = OrderedEnqueuer(range(2), abs)
    with OrderedEnqueuer(range(2), abs) as enqueuer:
        assert next(iter(enqueuer)) == 0
        resumed.load_state_dict(enqueuer.state_dict())
    with resumed:
        assert list(resumed) == [1]


def numbers(shard):
    yield from shard.split(range(6))


def nothing(element):
    return None


EMPTY = {
    "no elements": (lambda **o: OrderedEnqueuer([], abs, **o), "there are no elements"),
    "an empty iterable": (lambda **o: OrderedEnqueuer(iter(()), abs, **o), "are no elements"),
    "too few elements": (
        lambda **o: OrderedEnqueuer(range(3), abs, batch_size=4, drop_last=True, **o),
        "the length of 3 is too small for batch_size=4, world_size=1 and drop_last=True; give",
    ),
    "more ranks than elements": (
        lambda **o: OrderedEnqueuer(range(1), abs, rank=1, world_size=2, random_seed=1, **o),
        "the length of 1 is too small for batch_size=None, world_size=2 and drop_last=False",
    ),
    "no samples": (lambda **o: GeneratorEnqueuer(lambda: iter(()), **o), "yielded nothing"),
    "too few samples": (
        lambda **o: GeneratorEnqueuer(numbers, shards=2, batch_size=4, drop_last=True, **o),
        "no shard had the 4 samples of a batch, and drop_last is True; give a smaller batch_si",
    ),
    "no rows": (
        lambda **o: GeneratorEnqueuer(mix({"rows": lambda: iter(())}), **o),
        "the generator yielded nothing",
    ),
    "shards of None": (
        lambda **o: GeneratorEnqueuer(lambda: iter([None] * 4), **o),
        "all 4 of them were None",
    ),
    "tasks of None": (lambda **o: OrderedEnqueuer(range(4), nothing, **o), "all 4 of them were"),
    "an iterable of None": (
        lambda **o: OrderedEnqueuer(iter(range(4)), nothing, **o),
        "all 4 of them were None",
    ),
}


@pytest.mark.thorough("processes")
@pytest.mark.parametrize(("make", "says"), EMPTY.values(), ids=EMPTY)
def test_an_empty_epoch_is_told_of_once_with_its_cause(make, says, backend, no_warnings):
    with make(**backend) as enqueuer:
        with pytest.warns(EmptyEpochWarning, match=f"epoch 0 had no batches: .*{says}") as caught:
            assert list(enqueuer) == []
        assert [warning.filename for warning in caught] == [__file__]
        assert list(enqueuer) == []


def test_an_iterable_that_was_read_to_its_end_is_told_of(no_warnings):
    with OrderedEnqueuer(iter(range(3)), abs) as enqueuer:
        assert list(enqueuer) == [0, 1, 2]
        with pytest.warns(EmptyEpochWarning, match="epoch 1 .* pass one that begins anew"):
            assert list(enqueuer) == []


class TwoArguments(Exception):
    def __init__(self, path, reason):
        super().__init__(f"{path}: {reason}")


def raises_two(element):
    raise TwoArguments("a.png", element)


def test_an_error_that_cannot_be_copied_keeps_no_enqueuer_alive(backend):
    enqueuer = OrderedEnqueuer(range(4), raises_two, **backend)
    known = weakref.ref(enqueuer)
    with pytest.raises(TwoArguments, match=r"a\.png: 0"):
        list(enqueuer.start() or enqueuer)
    del enqueuer
    assert known() is None
