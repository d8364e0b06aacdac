"""The time limit of an element: its worker is replaced, and the element fails as if it raised."""

import logging
import time

import helpers
import pytest
from conftest import PROCESSES, chosen
from helpers import Hanging, HangingSequence, SlowToLoad

from enqueuer import (
    ElementTimeout,
    GeneratorEnqueuer,
    OrderedEnqueuer,
    Processes,
    replay,
)

# Seconds. All other elements take no time, even on a busy machine.
LIMIT_S = 1.0
OTHERS = [0, 1, 2, 4, 5, 6, 7]
HANGS = [helpers.hang, helpers.hang_in_a_regex, helpers.hang_in_a_lock, helpers.stop_self]
NAMES = [act.__name__ for act in HANGS]
# An actor has no limit.
LIMITED = [one for one in PROCESSES if one.id != "ray"]


@pytest.fixture(params=LIMITED)
def started(request, monkeypatch):
    """Options for each start method."""
    return {**chosen(request.param, monkeypatch), "element_timeout": LIMIT_S}


@pytest.fixture
def limited():
    """Options for tests to which the start method makes no difference; fork is the quickest."""
    return {"backend": Processes(start_method="fork"), "element_timeout": LIMIT_S}


def stand_in(error):
    return f"instead: {type(error).__name__}"


def raised_by(enqueuer):
    with enqueuer, pytest.raises(ElementTimeout) as caught:
        list(enqueuer)
    return caught.value


# --- tasks ----------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("act", HANGS, ids=NAMES)
def test_an_element_that_hangs_is_left_out(started, act, caplog):
    work = Hanging(3, act=act)
    with OrderedEnqueuer(range(8), work, workers=2, on_error="skip", **started) as enqueuer:
        assert list(enqueuer) == OTHERS
        assert (enqueuer.error_count, enqueuer.restart_count) == (1, 0)
        ((origin, text),) = enqueuer.skipped
    assert (origin.item, origin.element) == (3, 3)
    assert "an element took longer than element_timeout=1 s" in text
    logged = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(logged) == 1 and "task 3, element 3" in logged[0]


@pytest.mark.thorough
def test_the_error_names_the_element_and_shows_where_it_hung(limited):
    work = Hanging(3)
    error = raised_by(OrderedEnqueuer(range(8), work, workers=2, **limited))
    assert isinstance(error, TimeoutError)
    assert "time.sleep(1000)" in str(error) or "in hang" in str(error)
    assert "task 3, element 3" in error.__notes__[0]
    work.places = ()
    assert replay(error) == 3


@pytest.mark.thorough
@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_batch_is_smaller_by_the_element(limited, concurrency):
    options = {"batch_size": 4, "collate": list, "concurrency": concurrency, **limited}
    with OrderedEnqueuer(range(8), Hanging(3, 6), on_error="skip", **options) as enqueuer:
        assert list(enqueuer) == [[0, 1, 2], [4, 5, 7]]
        assert enqueuer.error_count == 2
    with OrderedEnqueuer(range(8), Hanging(3), on_error=stand_in, **options) as enqueuer:
        assert list(enqueuer) == [[0, 1, 2, "instead: ElementTimeout"], [4, 5, 6, 7]]
    error = raised_by(OrderedEnqueuer(range(8), Hanging(3), **options))
    assert "task 0, element 3" in error.__notes__[0]


@pytest.mark.thorough
def test_other_elements_of_the_worker_are_made_again(started):
    options = {"workers": 1, "concurrency": 4, "on_error": "skip", **started}
    with OrderedEnqueuer(range(8), Hanging(0, 5), **options) as enqueuer:
        assert list(enqueuer) == [1, 2, 3, 4, 6, 7]
        assert enqueuer.error_count == 2


@pytest.mark.thorough
def test_a_coroutine_that_hangs_is_left_out(limited):
    work = Hanging(3)
    options = {"workers": 1, "concurrency": 2, "on_error": "skip", **limited}
    with OrderedEnqueuer(range(8), work.awaited, **options) as enqueuer:
        assert list(enqueuer) == OTHERS


@pytest.mark.thorough
def test_elements_are_fetched_alone_if_all_at_once_take_too_long(limited):
    options = {"batch_size": 4, "collate": list, "on_error": "skip", **limited}
    with OrderedEnqueuer(HangingSequence(6), **options) as enqueuer:
        assert list(enqueuer) == [[0, 1, 2, 3], [4, 5, 7]]
    with OrderedEnqueuer(HangingSequence(6, alone=False), **options) as enqueuer:
        assert list(enqueuer) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        ((_, text),) = enqueuer.skipped
        assert "the call that fetches all elements of a batch took longer" in text


@pytest.mark.thorough
def test_a_batch_whose_collate_hangs_is_left_out(limited):
    work = Hanging(3)
    options = {"batch_size": 4, "collate": work.collate, "on_error": "skip", **limited}
    with OrderedEnqueuer(range(8), **options) as enqueuer:
        assert list(enqueuer) == [[4, 5, 6, 7]]
        assert enqueuer.error_count == 1


# --- shards ---------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("act", HANGS, ids=NAMES)
def test_a_generator_that_hangs_ends_its_shard(started, act):
    work, options = Hanging((0, 2), act=act), {"workers": 2, "shards": 3, **started}
    with GeneratorEnqueuer(work.items, on_error="skip", **options) as enqueuer:
        for epoch in range(2):
            found = list(enqueuer)
            assert sorted(found) == [(s, n) for s in range(3) for n in range(4 if s else 2)]
            assert (enqueuer.error_count, enqueuer.restart_count) == (epoch + 1, 0)
        (origin, text), _ = enqueuer.skipped
    assert (origin.shard, origin.item) == (0, 2)
    assert "item 2 of shard 0 took longer than element_timeout=1 s" in text


@pytest.mark.thorough
def test_the_order_is_that_of_a_generator_that_raises(limited):
    def found(work, **options):
        options |= {"shards": 3, "on_error": stand_in, **limited}
        with GeneratorEnqueuer(work.items, **options) as enqueuer:
            return [str(item).partition(":")[0] for item in enqueuer]

    hanging = found(Hanging((1, 2)), workers=2)
    assert hanging == found(Hanging((1, 2), act=helpers.raise_value_error), workers=2)
    assert hanging == found(Hanging((1, 2)), workers=1)


@pytest.mark.thorough
def test_a_function_with_first_item_goes_on_behind_the_item(started):
    work, options = Hanging((0, 2), (1, 0)), {"workers": 2, "shards": 2, **started}
    wanted = [(0, 0), (0, 1), (0, 3), (1, 1), (1, 2), (1, 3)]
    with GeneratorEnqueuer(work.items_from, on_error="skip", **options) as enqueuer:
        assert sorted(enqueuer) == wanted
        assert enqueuer.error_count == 2
    with GeneratorEnqueuer(work.items_from, on_error=stand_in, **options) as enqueuer:
        assert sorted(item for item in enqueuer if type(item) is tuple) == wanted


@pytest.mark.thorough
def test_an_item_behind_some_that_are_none_is_the_one_that_is_named(limited):
    error = raised_by(GeneratorEnqueuer(Hanging((0, 2)).some_items, **limited))
    assert "item 2 of shard 0" in str(error)
    error = raised_by(GeneratorEnqueuer(Hanging((0, 3)).some_items, **limited))
    assert error.enqueuer_origin.item == 3


@pytest.mark.thorough
def test_an_async_generator_that_hangs_ends_its_shard(limited):
    work, options = Hanging((0, 2)), {"workers": 1, "shards": 2, "on_error": "skip", **limited}
    with GeneratorEnqueuer(work.awaited_items, **options) as enqueuer:
        assert sorted(enqueuer) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]


@pytest.mark.thorough
def test_the_state_of_a_shard_goes_on_behind_its_replacement(limited):
    def enqueuer():
        options = {"workers": 2, "shards": 2, "on_error": stand_in, "random_seed": 7, **limited}
        return GeneratorEnqueuer(Hanging((0, 1)).items, **options)

    with enqueuer() as first:
        batches = iter(first)
        before = [next(batches) for _ in range(4)]
        assert before == [(0, 0), (1, 0), "instead: ElementTimeout", (1, 1)]
        state = first.state_dict()
    second = enqueuer()
    second.load_state_dict(state)
    with second:
        assert list(second) == [(1, 2), (1, 3)]


# --- what does not count --------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_wait_for_room_and_the_start_do_not_count(started):
    options = {**started, "element_timeout": 0.5, "max_queue_size": 1, "workers": 1}
    for enqueuer in (
        OrderedEnqueuer(range(4), SlowToLoad(), **options),
        GeneratorEnqueuer(SlowToLoad().items, **options),
    ):
        with enqueuer:
            batches = iter(enqueuer)
            next(batches)
            time.sleep(1)  # the work of the loop
            assert len(list(batches)) == 3


def test_only_processes_have_the_limit():
    for options in (
        {"backend": "thread"},
        {},
        {"backend": "ray"},
        {"backend": "process", "workers": 0},
    ):
        with pytest.raises(ValueError, match="element_timeout=3 needs backend='process'"):
            GeneratorEnqueuer(Hanging().items, element_timeout=3, **options)
    GeneratorEnqueuer(Hanging().items, element_timeout=3, use_multiprocessing=True)
    with pytest.raises(ValueError, match="element_timeout must be > 0"):
        GeneratorEnqueuer(Hanging().items, element_timeout=0, backend="process")
