"""What a beginner does wrong is an error or a warning that says what to do, and never silent."""

import copy
import functools
import pathlib
import pickle
import warnings

import pytest

from enqueuer import (
    DuplicateDataWarning,
    EmptyEpochWarning,
    EnqueuerWarning,
    GeneratorEnqueuer,
    OrderedEnqueuer,
    Shard,
    SourceNotPicklable,
    StateMismatch,
    imap,
)


async def fetch(element):
    return element


class Fetcher:
    async def __call__(self, element):
        return element


@pytest.mark.parametrize("function", [fetch, Fetcher(), functools.partial(fetch)])
def test_an_async_function_gives_results_and_no_coroutines(function):
    for use in (OrderedEnqueuer, lambda elements, map: imap(map, elements)):
        assert list(use(range(3), function)) == [0, 1, 2]


def numbers(shard):
    yield from range(20)


def paths(shard):
    for number in range(20):
        yield f"images/{number:05}.jpg"


@pytest.mark.parametrize("source", [numbers, paths])
def test_plain_values_of_shards_that_forgot_to_split_are_noticed(source):
    with GeneratorEnqueuer(source, shards=2, workers=2) as enqueuer:
        with pytest.warns(DuplicateDataWarning, match="shard.split"):
            list(enqueuer)


@pytest.mark.parametrize("ordered", [False, True])
def test_two_loops_over_one_epoch_are_warned_about(ordered):
    warned = pytest.warns(EnqueuerWarning, match="two loops of this thread read the same epoch")
    with OrderedEnqueuer(range(100), max_queue_size=1, ordered=ordered) as enqueuer, warned:
        list(zip(enqueuer, enqueuer, strict=False))
    with OrderedEnqueuer(range(100), max_queue_size=1, ordered=ordered) as enqueuer, warned:
        for _ in enqueuer:
            for _ in enqueuer:
                pass


def test_one_loop_after_the_other_is_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with OrderedEnqueuer(range(30), max_queue_size=1) as enqueuer:
            for _ in range(2):
                first = iter(enqueuer)
                next(first)
                for element in enqueuer:
                    if element == 20:
                        break
                assert list(enqueuer) == list(range(21, 30))


def test_shuffle_is_answered_with_what_shuffles():
    says = "there is no option 'shuffle'; .*shuffle_buffer.*OrderedEnqueuer"
    with pytest.raises(TypeError, match=says):
        GeneratorEnqueuer(numbers, shuffle=True)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({}, r"the state is empty: give what state_dict\(\)"),
        (
            {"layer.weight": 0, "layer.bias": 0},
            r"as it has the keys \['layer.weight', 'layer.bias'\]: ",
        ),
        ("state.json", "as it is 'state.json': give what its state_dict"),
    ],
)
def test_what_is_no_state_is_refused_with_what_to_give(state, says):
    with pytest.raises(StateMismatch, match=says):
        GeneratorEnqueuer(numbers).load_state_dict(state)


@pytest.mark.parametrize("text", ["train.txt", b"train.txt"])
def test_a_text_is_no_list_of_elements(text):
    with pytest.raises(TypeError, match=r"got the text .*train.txt', .* pass a list: \[text\]"):
        OrderedEnqueuer(text)


class OnGpu:
    def __reduce__(self):
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess; use 'spawn'")


def test_a_source_that_holds_what_is_on_a_gpu_is_not_only_sent_to_fork():
    model = OnGpu()
    says = r"or use backend='thread'\. A forked process cannot use CUDA"
    with pytest.raises(SourceNotPicklable, match=says):
        GeneratorEnqueuer(lambda: iter([model]), backend="process").start()


def test_a_number_is_not_split():
    with pytest.raises(TypeError, match=r"split\(\) divides items, got 5: give range\(5\)"):
        Shard().split(5)


@pytest.mark.parametrize(
    "read", [GeneratorEnqueuer, lambda numbers: OrderedEnqueuer(numbers, str)], ids=["all", "map"]
)
def test_two_enqueuers_over_one_iterator_are_warned_about(read):
    shared = iter(range(40))
    with read(shared) as one:
        next(one.get())
        with pytest.warns(EnqueuerWarning, match="another enqueuer.* reads the same iterator"):
            read(shared).start()
    # The other one has stopped.
    with warnings.catch_warnings():
        warnings.simplefilter("error", EnqueuerWarning)
        with read(shared):
            pass


def test_the_error_of_a_list_that_became_shorter_says_so():
    elements = list(range(30))
    with pytest.raises(IndexError) as caught:
        with OrderedEnqueuer(elements, max_queue_size=2) as enqueuer:
            for _ in enqueuer:
                del elements[5:]
    if hasattr(caught.value, "__notes__"):
        assert "has become shorter meanwhile (5 elements)" in caught.value.__notes__[-1]


def read_and_change(change, at, **options):
    """Read two epochs of a list of 40 paths, and change it in the first one or behind that."""
    paths = [pathlib.Path(f"{number}.jpg") for number in range(40)]
    with OrderedEnqueuer(paths, str, workers=2, max_queue_size=2, **options) as enqueuer:
        for number, _ in enumerate(enqueuer):
            if number == at:
                change(paths)
        if at is None:
            change(paths)
        return list(enqueuer), [*map(str, paths)]


def test_a_list_that_is_changed_while_threads_read_it_is_told_of():
    with pytest.warns(EnqueuerWarning, match="the list was changed during an epoch.*shuffle=True"):
        second, paths = read_and_change(list.reverse, 3)
    assert second == paths


@pytest.mark.parametrize("at", [3, None], ids=["in the epoch", "behind it"])
def test_a_list_that_becomes_longer_or_changes_between_epochs_is_read_as_it_is(at):
    change = list.reverse if at is None else lambda paths: paths.append("another.jpg")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second, paths = read_and_change(change, at)
    assert second == paths


def test_a_list_of_objects_that_is_changed_beside_processes_is_told_of(process):
    with pytest.warns(EnqueuerWarning, match="the sequence was changed since the workers started"):
        read_and_change(list.reverse, None, **process)


@pytest.mark.parametrize("size", [None, 3])
def test_a_result_that_is_none_is_logged_once(caplog, size):
    def load(path):
        return None if path in ("b", "d") else path

    enqueuer = OrderedEnqueuer(list("abcde"), load, batch_size=size, collate=size and "".join)
    with enqueuer:
        assert "".join(enqueuer) == "ace"
    (text,) = caplog.messages
    assert text.startswith("the result of element 1 ('b') is None, so it is left out")


def test_a_skipped_element_is_not_taken_for_none(caplog):
    with OrderedEnqueuer([1, 0], lambda x: 1 // x, batch_size=2, on_error="skip") as enqueuer:
        assert len(list(enqueuer)) == 1
    assert not [text for text in caplog.messages if "is None" in text]


def test_an_iterator_that_was_read_before_is_told_of():
    used = iter([])
    with pytest.warns(EmptyEpochWarning, match="the iterator is at its end.*pass the generator"):
        list(GeneratorEnqueuer(used))


def few(shard):
    yield from range(6)


@pytest.mark.parametrize("source", [few, lambda: iter("abcdef")])
def test_few_equal_items_of_shards_are_noticed_at_their_end(source):
    with GeneratorEnqueuer(source, shards=2) as enqueuer:
        with pytest.warns(DuplicateDataWarning, match="shards 0 and 1"):
            list(enqueuer)


@pytest.mark.parametrize("source", [lambda: iter("aab"), lambda: iter("aaaabbbb")])
def test_few_items_that_may_be_equal_by_chance_are_not(source):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with GeneratorEnqueuer(source, shards=2) as enqueuer:
            list(enqueuer)


def test_batches_of_different_shapes_name_the_generator():
    def ragged():
        yield [1, 2]
        yield [1]

    import numpy as np

    with GeneratorEnqueuer(lambda: map(np.array, ragged()), batch_size=2) as enqueuer:
        with pytest.raises(ValueError, match="let the generator, or map, make them equal"):
            list(enqueuer)


class Mine(OrderedEnqueuer):
    """A subclass whose constructor takes other arguments."""

    def __init__(self, name):
        super().__init__(range(3), str)
        self.name = name

    def shout(self):
        return self.name.upper()


class Slotted(OrderedEnqueuer):
    __slots__ = ("name",)


def test_a_subclass_with_slots_can_be_copied():
    with pickled(Slotted([1, 2], abs)) as copied:
        assert type(copied) is Slotted
        assert list(copied) == [1, 2]


def pickled(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_has_the_class_and_the_attributes_of_a_subclass(copied):
    mine = copied(Mine("data"))
    assert type(mine) is Mine
    assert mine.shout() == "DATA"
    with mine:
        assert list(mine) == ["0", "1", "2"]
