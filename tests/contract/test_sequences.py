"""Stages over sequences: nothing is lost or invented, and they go on at any place."""

import itertools
import json

import numpy as np
import pytest
from helpers import Resumable, rest_of, taken
from hypothesis import given
from hypothesis import strategies as st

from enqueuer import (
    GeneratorEnqueuer,
    OrderedEnqueuer,
    Shard,
    StateMismatch,
    balance,
    batch_by_length,
    mix,
    pack,
    pad,
    prefetch,
)

METHODS = ["best_fit", "first_fit", "concat"]
DOCUMENTS = st.lists(st.integers(1, 40), max_size=60)
# Of a document; its first token says which one it is.
FIRST = 1000


def documents_of(lengths):
    """Return documents whose tokens all differ."""
    return [np.arange(FIRST * k, FIRST * k + n) for k, n in enumerate(lengths, 1)]


def rng_of(method, seed=7):
    return None if method == "concat" else np.random.default_rng(seed)


def plain(rows):
    """Return rows, or batches, as lists that can be compared."""
    return [{name: array.tolist() for name, array in row.items()} for row in rows]


def numbers(shard, first_item=0):
    """Yield the tokens of 40 documents of different lengths."""
    for k in shard.split(range(40))[first_item:]:
        READ.append(k)
        yield np.arange(FIRST * k, FIRST * k + 3 + k * 7 % 17)


READ = []


# --- packed rows ---


@given(DOCUMENTS, st.integers(1, 30), st.integers(1, 70), st.sampled_from(METHODS))
def test_no_token_is_lost_or_invented_and_no_row_is_too_long(lengths, room, window, method):
    documents = documents_of(lengths)
    rows = list(pack(documents, room, method=method, window=window, rng=rng_of(method)))
    assert all(array.shape == (room,) for row in rows for array in row.values())
    used = [row["document_ids"] > 0 for row in rows]
    had = [row["tokens"][at] for row, at in zip(rows, used, strict=True)]
    assert sorted(itertools.chain(*had)) == sorted(itertools.chain(*documents))
    assert all(not row["tokens"][~at].any() for row, at in zip(rows, used, strict=True))
    assert all(at.any() for at in used)


@given(DOCUMENTS, st.integers(1, 30), st.sampled_from(METHODS))
def test_positions_boundaries_and_labels_follow_the_documents(lengths, room, method):
    documents = documents_of(lengths)
    last = {document[-1] for document in documents}
    for row in pack(documents, room, method=method):
        for at in range(room):
            token, number = row["tokens"][at], row["document_ids"][at]
            begins = at == 0 or row["document_ids"][at - 1] != number
            if number:
                assert row["labels"][at] == (-100 if token in last else token + 1)
                assert row["positions"][at] == (0 if begins else row["positions"][at - 1] + 1)
                assert begins or token == row["tokens"][at - 1] + 1
            else:
                assert (row["labels"][at], row["positions"][at]) == (-100, 0)


@given(DOCUMENTS, st.integers(1, 30), st.sampled_from(METHODS))
def test_the_beginnings_of_documents_say_the_same_as_their_numbers(lengths, room, method):
    documents = documents_of(lengths)
    by_number = pack(documents, room, method=method)
    by_begin = pack(documents, room, method=method, boundaries="cu_seqlens", dtype="int32")
    for one, other in zip(by_number, by_begin, strict=True):
        sizes = np.diff(other["cu_seqlens"])
        assert sizes.min() > 0
        number = np.repeat(np.arange(1, len(sizes) + 1), sizes)
        used = one["document_ids"] > 0
        assert np.array_equal(number[used], one["document_ids"][used])
        assert other["cu_seqlens"].dtype == other["tokens"].dtype == np.int32


@pytest.mark.parametrize("method", METHODS)
def test_documents_that_are_too_long_are_split_or_dropped(method):
    documents = documents_of([5, 23, 4])
    rows = list(pack(documents, 10, method=method, too_long="drop"))
    tokens = np.concatenate([row["tokens"][row["document_ids"] > 0] for row in rows])
    assert sorted(tokens) == [*range(1000, 1005), *range(3000, 3004)]
    assert sum((row["document_ids"] > 0).sum() for row in pack(documents, 10)) == 32


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("row_length", [1024, 2048, 4096])
def test_nearly_all_tokens_of_rows_are_useful(method, row_length):
    """Of documents whose lengths are log-normal, with a mean of 500 tokens."""
    rng = np.random.default_rng(7)
    lengths = np.ceil(rng.lognormal(np.log(500) - 0.5, 1.0, 4000)).astype(int)
    rows = sum(1 for _ in pack([np.ones(n, int) for n in lengths], row_length, method=method))
    assert lengths.sum() / (rows * row_length) >= 0.95


@given(DOCUMENTS, st.integers(1, 30), st.integers(1, 20), st.sampled_from(METHODS), st.data())
def test_rows_go_on_at_any_place_with_what_waited(lengths, room, window, method, data):
    documents = documents_of(lengths)

    def make(seed=7):
        return pack(documents, room, method=method, window=window, rng=rng_of(method, seed))

    whole = plain(make())
    count = data.draw(st.integers(0, len(whole)))
    stage = make()
    assert plain(itertools.islice(stage, count)) == whole[:count]
    state = json.loads(json.dumps(stage.state_dict()))
    assert len(json.dumps(state)) < 1000
    # The seed is that of the state.
    later = make(seed=8)
    later.load_state_dict(state)
    assert plain(later) == whole[count:]
    # An iteration that has ended begins anew.
    assert plain(later) == whole


class Changing(Resumable):
    """Rows whose state is an object that changes, also that which was loaded."""

    def __init__(self, rows):
        super().__init__(rows)
        self.state = {"at": 0}

    def __next__(self):
        self.at = self.state["at"]
        row = super().__next__()
        self.state["at"] = self.at
        return row

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Anew(Resumable):
    """Rows that begin anew by a generator, which has the state of the end until it runs."""

    loaded = 0

    def __iter__(self):
        self.at, self.loaded = self.loaded, 0
        while self.at < len(self.rows):
            self.at += 1
            yield self.rows[self.at - 1]

    def load_state_dict(self, state):
        self.at = self.loaded = state["at"]


@given(
    st.lists(st.integers(1, 9), min_size=1), st.integers(1, 7), st.sampled_from([Changing, Anew])
)
def test_a_stream_with_a_state_goes_on_at_any_place(lengths, window, kind):
    documents = documents_of(lengths)

    def make():
        return pack(kind(documents), 9, window=window)

    whole = plain(make())
    # A stream that begins anew has a second epoch.
    stage = make()
    for epoch in range(2 if kind is Anew else 1):
        states = [stage.state_dict() for _ in stage]
        for count, state in enumerate(states, 1):
            later = make()
            later.load_state_dict(state)
            assert plain(later) == whole[count:], epoch


def test_the_order_is_a_function_of_the_seed():
    documents = documents_of(np.random.default_rng(7).integers(1, 20, 300))

    def rows(seed):
        return plain(pack(documents, 30, rng=np.random.default_rng(seed)))

    assert rows(7) == rows(7) != rows(8)
    assert sorted(map(str, rows(7))) == sorted(map(str, rows(8)))


# --- batches of like length ---


@given(DOCUMENTS, st.integers(40, 90), st.integers(1, 9), st.integers(1, 70))
def test_each_sample_is_in_one_batch_within_the_budget(lengths, budget, size, window):
    samples = documents_of(lengths)
    options = {"max_tokens": budget, "batch_size": size, "window": window}
    batches = list(batch_by_length(samples, **options, rng=np.random.default_rng(7)))
    assert sorted(s[0] for batch in batches for s in batch) == [s[0] for s in samples]
    for batch in batches:
        assert len(batch) <= size
        assert len(batch) * max(map(len, batch)) <= budget


def test_batches_of_like_length_have_little_padding():
    """In the order of the stream, four fifths of a batch of 32 would be padding."""
    lengths = np.random.default_rng(7).lognormal(5, 1, 4000).astype(int) + 1
    samples = [np.zeros(n, int) for n in lengths]
    sizes = [(len(b), max(map(len, b))) for b in batch_by_length(samples, batch_size=32)]
    assert sum(n for n, _ in sizes) == 4000
    assert {n for n, _ in sizes} == {32}
    assert lengths.sum() / sum(n * longest for n, longest in sizes) > 0.75
    by_budget = batch_by_length(samples, max_tokens=8192, window=4000)
    assert lengths.sum() / sum(len(b) * max(map(len, b)) for b in by_budget) > 0.9


@given(DOCUMENTS, st.integers(1, 20), st.data())
def test_batches_go_on_at_any_place(lengths, window, data):
    def make():
        rng = np.random.default_rng(7)
        samples = documents_of(lengths)
        return batch_by_length(samples, batch_size=3, window=window, rng=rng, collate=firsts)

    whole = list(make())
    count = data.draw(st.integers(0, len(whole)))
    stage = make()
    assert list(itertools.islice(stage, count)) == whole[:count]
    later = make()
    later.load_state_dict(stage.state_dict())
    assert list(later) == whole[count:]


def firsts(batch):
    return [int(sample[0]) for sample in batch]


# --- one stream for all shards ---


@given(DOCUMENTS, st.integers(1, 4), st.booleans(), st.sampled_from(METHODS))
def test_all_shards_end_at_the_same_number(lengths, shards, is_known, method):
    documents = documents_of(lengths or [1])
    known = {"lengths": lengths or [1]} if is_known else {}

    def make(**options):
        return pack(documents, 20, method=method, window=8, rng=rng_of(method), **known, **options)

    whole = plain(make())
    every = [plain(make(shard=Shard(i, shards))) for i in range(shards)]
    assert [row for turn in itertools.zip_longest(*every) for row in turn if row] == whole
    equal = [plain(make(shard=Shard(i, shards), drop_last=True)) for i in range(shards)]
    assert {len(rows) for rows in equal} == {len(whole) // shards}
    assert all(one == other[: len(one)] for one, other in zip(equal, every, strict=True))


class Counted(list):
    """A list that notes what is fetched."""

    def __getitem__(self, index):
        READ.append(index)
        return super().__getitem__(index)


def test_with_lengths_only_the_samples_of_the_shard_are_fetched():
    lengths = [3 + k * 7 % 17 for k in range(40)]
    documents = Counted(documents_of(lengths))
    READ.clear()
    rows = list(pack(documents, 20, lengths=lengths, shard=Shard(1, 4)))
    of_rows = {t // FIRST - 1 for row in rows for t in row["tokens"] if t}
    assert set(READ) == of_rows
    assert len(of_rows) < 20


def in_turns(shard):
    documents = list(numbers(Shard()))
    rng = np.random.default_rng([shard.random_seed, shard.epoch])
    return pack(documents, 20, rng=rng, shard=shard, drop_last=True)


def buckets(shard):
    documents = list(numbers(Shard()))
    options = {"max_tokens": 40, "collate": pad}
    return batch_by_length(documents, **options, shard=shard, drop_last=True)


@pytest.mark.parametrize("source", [in_turns, buckets])
@pytest.mark.parametrize("ranks", [2, 3])
def test_drop_last_ends_all_ranks_at_the_same_step(source, ranks):
    steps = []
    for rank in range(ranks):
        options = {"shards": 7, "random_seed": 7, "rank": rank, "world_size": ranks}
        with GeneratorEnqueuer(source, drop_last=True, **options) as enqueuer:
            steps.append(len(list(enqueuer)))
    assert len(set(steps)) == 1
    assert steps[0] > 2


# --- in an enqueuer ---


def packed(shard):
    def documents(first_item=0):
        return numbers(shard, first_item)

    return pack(documents, 20, window=6, rng=shard.rng)


def streamed(shard):
    """Of documents with a state of their own."""
    return pack(Resumable(numbers(shard)), 20, window=6, rng=shard.rng)


def mixed(shard):
    """Of a mixture that changes."""
    both = mix({"a": numbers, "b": numbers}, [(20, [1, 2]), (1, [1, 1])], at_end="continue")
    return pack(both(shard), 20, method="concat")


def bucketed(shard):
    options = {"max_tokens": 60, "window": 9, "rng": shard.rng}
    return batch_by_length(lambda first_item=0: numbers(shard, first_item), **options, collate=pad)


def restarted(shard):
    """A generator, which is run again."""
    yield from pack(numbers(shard), 20, rng=shard.rng)


SOURCES = [packed, streamed, mixed, bucketed, restarted]


def shown(batches):
    return [str(batch) for batch in batches]


@pytest.mark.parametrize("source", SOURCES)
def test_the_items_do_not_depend_on_the_workers(source, backend):
    with GeneratorEnqueuer(source, shards=3, random_seed=7) as enqueuer:
        whole = [shown(enqueuer) for _ in range(2)]
    assert source is mixed or whole[0] != whole[1]
    with GeneratorEnqueuer(source, shards=3, workers=2, random_seed=7, **backend) as enqueuer:
        assert [shown(enqueuer) for _ in range(2)] == whole


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_run_goes_on_at_each_item(source, batch_size):
    def make():
        batches = {"batch_size": batch_size, "collate": list} if batch_size else {}
        return GeneratorEnqueuer(source, shards=2, random_seed=7, **batches)

    with make() as enqueuer:
        whole = shown(enqueuer)
    for count in range(len(whole) + 1):
        _, state = taken(make(), count)
        assert len(json.dumps(state)) < 2000
        assert shown(rest_of(make(), state)) == whole[count:]


def test_no_document_before_the_window_is_read_again():
    def make():
        return GeneratorEnqueuer(packed, random_seed=7)

    with make() as enqueuer:
        whole = shown(enqueuer)
    _, state = taken(make(), len(whole) - 2)
    READ.clear()
    assert shown(rest_of(make(), state)) == whole[-2:]
    assert min(READ) >= 40 - 2 * 6


def test_an_ordered_enqueuer_runs_a_stage_and_ends_all_ranks_alike():
    def make(rank=0, ranks=1):
        stage = pack(numbers(Shard()), 20, window=6, rng=np.random.default_rng(7))
        options = {"rank": rank, "world_size": ranks, "drop_last": True, "random_seed": 7}
        return OrderedEnqueuer(stage, total, batch_size=2, **options)

    with make() as enqueuer:
        whole = shown(enqueuer)
    _, state = taken(make(), 4)
    assert shown(rest_of(make(), state)) == whole[4:]
    assert len({len(list(make(rank, 2))) for rank in range(2)}) == 1


def total(row):
    return int(row["tokens"].sum())


def test_samples_that_are_none_belong_to_no_window():
    gaps = [None, [1, 2], None, [3], None]
    assert [row["tokens"].tolist() for row in pack(gaps, 3)] == [[1, 2, 3]]
    assert list(batch_by_length(gaps, batch_size=3)) == [[[1, 2], [3]]]
    stage = batch_by_length(gaps, batch_size=1)
    next(iter(stage))
    assert list(stage_after(stage, gaps)) == [[[3]]]


def stage_after(stage, samples):
    later = batch_by_length(samples, batch_size=1)
    later.load_state_dict(stage.state_dict())
    return later


def test_a_state_of_other_options_is_refused():
    documents = documents_of([5, 6])
    state = pack(documents, 8).state_dict()
    with pytest.raises(StateMismatch, match="row_length is 8 in the state and 9 here"):
        pack(documents, 9).load_state_dict(state)
    with pytest.raises(StateMismatch, match="not the state of a stage of sequences"):
        pack(documents, 8).load_state_dict({"at": 3})
    with pytest.raises(StateMismatch, match="max_tokens is None in the state and 9 here"):
        batch_by_length(documents, max_tokens=9).load_state_dict(state)


# --- padding ---


@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.integers(1, 8), st.booleans())
def test_padding_adds_what_the_mask_leaves_out(lengths, multiple, is_left):
    samples = [np.arange(1, n + 1, dtype=np.int16) for n in lengths]
    side = "left" if is_left else "right"
    arrays, mask = pad(samples, -1, side=side, multiple_of=multiple)
    assert arrays.dtype == np.int16
    assert arrays.shape == mask.shape
    assert arrays.shape[1] % multiple == 0
    assert 0 <= arrays.shape[1] - max(lengths) < multiple
    assert (arrays[~mask] == -1).all()
    for array, own, sample in zip(arrays, mask, samples, strict=True):
        assert array[own].tolist() == sample.tolist()
        assert own[-1 if is_left else 0]


def test_fields_of_samples_are_padded_with_their_own_values():
    samples = [
        {"tokens": [1, 2, 3], "labels": [2, 3, 4], "image": np.zeros((2, 2)), "id": 7},
        {"tokens": [5], "labels": [6], "image": np.ones((2, 2)), "id": 8},
    ]
    batch = pad(samples, {"tokens": 0, "labels": -100})
    assert batch["tokens"].tolist() == [[1, 2, 3], [5, 0, 0]]
    assert batch["labels"].tolist() == [[2, 3, 4], [6, -100, -100]]
    assert batch["mask"].tolist() == [[True] * 3, [True, False, False]]
    assert batch["image"].shape == (2, 2, 2)
    assert batch["id"].tolist() == [7, 8]


def test_only_the_first_axis_is_padded():
    arrays, mask = pad([np.ones((2, 3)), np.ones((4, 3))], np.nan)
    assert arrays.shape == (2, 4, 3)
    assert mask.sum() == 6
    assert np.isnan(arrays).sum() == 6


# --- equal cost ---


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=80), st.integers(1, 9), st.booleans())
def test_the_parts_are_all_samples_in_equal_numbers(lengths, ranks, drop_last):
    drop_last = drop_last and len(lengths) >= ranks
    parts = balance(lengths, ranks, drop_last=drop_last)
    indices = np.concatenate(parts)
    counts = [len(part) for part in parts]
    assert len(set(indices.tolist())) == len(indices)
    assert len(indices) == len(lengths) - (len(lengths) % ranks if drop_last else 0)
    assert max(counts) - min(counts) <= (0 if drop_last else 1)
    assert all((np.diff(part) > 0).all() for part in parts)
    sums = [np.take(lengths, part).sum() for part in parts]
    assert max(sums) - np.mean(sums) <= max(lengths)


@pytest.mark.parametrize("ranks", [2, 8, 16])
@pytest.mark.parametrize("cost", [None, np.square], ids=["length", "square"])
@pytest.mark.parametrize("seed", range(5))
def test_the_costs_of_all_ranks_are_nearly_equal(ranks, cost, seed):
    lengths = np.random.default_rng(seed).lognormal(6, 0.8, 5000).astype(int) + 1
    costs = lengths if cost is None else lengths**2
    sums = [costs[part].sum() for part in balance(lengths, ranks, cost=cost)]
    assert max(sums) / np.mean(sums) <= 1.05


# --- bad input ---

OK = [[1, 2], [3]]


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: list(pack([[1], []], 4)), ValueError, r"pack\(\): sample 1 is empty; leave"),
        (lambda: list(pack([[1.5]], 4)), TypeError, "document 0 must be a list or array of ints"),
        (lambda: list(pack([[[1]]], 4)), TypeError, r"document 0 must be .* got \[\[1\]\]"),
        (lambda: list(pack([5], 4)), TypeError, r"pack\(\): sample 0 has no length: 5"),
        (lambda: pack("text", 4), TypeError, r"pack\(\) needs an iterable of samples in .* a str"),
        (lambda: pack({1, 2}, 4), TypeError, "in a fixed order, or .* got a set"),
        (lambda: pack(GeneratorEnqueuer, 4), TypeError, "got <class '.*GeneratorEnqueuer'>; bind"),
        (lambda: list(pack([{"ids": [1]}], 4)), TypeError, "document 0 must be .* got {'ids'"),
        (lambda: list(pack([[2**31]], 4, dtype="int32")), ValueError, "document 0 has tokens that"),
        (lambda: pack(5, 4), TypeError, r"pack\(\) needs an iterable of samples in .* an int"),
        (lambda: pack(lambda shard: OK, 4), TypeError, "without arguments but first_item=0"),
        (lambda: pack(OK, 0), ValueError, "row_length must be >= 1, got 0"),
        (lambda: pack(OK, 2.5), TypeError, "row_length must be an int, got 2.5"),
        (lambda: pack(OK, 4, window=0), ValueError, "window must be >= 1, got 0"),
        (lambda: pack(OK, 4, method="ffd"), ValueError, "method must be one of 'best_fit', 'fir"),
        (lambda: pack(OK, 4, too_long="cut"), ValueError, "too_long must be one of 'split', 'dr"),
        (lambda: pack(OK, 4, boundaries="mask"), ValueError, "boundaries must be one of 'docume"),
        (lambda: pack(OK, 4, dtype="uint8"), ValueError, "dtype must be int32 or int64, as label"),
        (lambda: pack(OK, 4, value=0.5), ValueError, "the padding value 0.5 is none that int64"),
        (lambda: pack(OK, 4, rng=7), TypeError, "rng must be a numpy.random.Generator, such as"),
        (lambda: pack(OK, 4, shard=1), TypeError, "shard must be a Shard or None, got 1"),
        (lambda: pack(OK, 4, drop_last=True), ValueError, "pass shard=shard with it"),
        (lambda: pack(OK, 4, lengths=[2]), ValueError, "lengths must be 2, one for each sample, g"),
        (lambda: pack(iter(OK), 4, lengths=[2, 1]), TypeError, "needs a sequence, got a list_iter"),
        (lambda: list(pack(OK, 4, lengths=[2, 3])), ValueError, "sample 1 has length 1, and .* 3"),
        (lambda: pack(OK, 4, lengths=[2, 0]), ValueError, "lengths must be >= 1, got 0 at 1"),
        (lambda: pack(OK, 4, lengths=[2, 1.0]), TypeError, "lengths must be ints below .* float64"),
        (
            lambda: pack(OK, 4, method="concat", rng=np.random.default_rng(7)),
            ValueError,
            "method='concat' keeps the order",
        ),
        (
            lambda: pack(OK, 4, shard=(one := Shard()), rng=one.rng),
            ValueError,
            "all shards must draw alike",
        ),
        (lambda: batch_by_length(OK), ValueError, "needs max_tokens, batch_size or both"),
        (lambda: batch_by_length(OK, max_tokens=0), ValueError, "max_tokens must be >= 1, got 0"),
        (lambda: batch_by_length(OK, batch_size=-1), ValueError, "batch_size must be >= 1, got -1"),
        (
            lambda: list(batch_by_length([[1, 2, 3]], max_tokens=2)),
            ValueError,
            "sample 0 has length 3, which is more than max_tokens=2; give a larger budget",
        ),
        (
            lambda: list(batch_by_length(OK, length=lambda s: 1.5, batch_size=2)),
            TypeError,
            "the length of sample 0 must be an int, got 1.5",
        ),
        (
            lambda: list(batch_by_length(OK, length=lambda s: -1, batch_size=2)),
            ValueError,
            "the length of sample 0 must be >= 0, got -1",
        ),
        (
            lambda: batch_by_length(OK, length=[2], batch_size=2),
            TypeError,
            "of a sample, .*see len",
        ),
        (lambda: batch_by_length(OK, collate=3, batch_size=2), TypeError, "collate must be a fun"),
        (lambda: pad([]), ValueError, "needs at least one sample"),
        (lambda: pad("ab"), TypeError, r"pad\(\) needs a list of samples, got a str"),
        (lambda: pad([[1], []]), ValueError, "sample 1 of the batch is empty"),
        (lambda: pad([[1], 5]), TypeError, "sample 1 of the batch must be an array or list"),
        (lambda: pad([["a"]]), TypeError, "sample 0 of the batch must be an array or list of numb"),
        (lambda: pad([np.ones((1, 2)), np.ones((1, 3))]), ValueError, "only the first axis may d"),
        (lambda: pad({1, 2}), TypeError, r"pad\(\) needs a list of samples, got a set"),
        (lambda: pad([[[1], [1, 2]]]), ValueError, "sample 0 of the batch has lists of different"),
        (lambda: pad([{"a": [[1], [1, 2]]}]), ValueError, "sample 0 of 'a' has lists of different"),
        (lambda: pad([[1], [2**63]]), TypeError, "no dtype holds the ints of the batch"),
        (lambda: pad(OK, side="top"), ValueError, "side must be one of 'right', 'left', got"),
        (lambda: pad(OK, multiple_of=0), ValueError, "multiple_of must be >= 1, got 0"),
        (lambda: pad([np.ones(2, np.uint8)], -100), ValueError, "padding value -100 .* uint8 can"),
        (lambda: pad([{"a": [1]}, {"b": [1]}]), ValueError, "sample 1 .* has other fields than"),
        (lambda: pad([{"mask": [1]}]), ValueError, "the samples have one; rename it"),
        (lambda: pad([{"a": [1]}], {"b": 0}), ValueError, r"value is for \['b'\], and the samples"),
        (lambda: pad([{"a": [1], "b": [1, 2]}]), ValueError, "'b' has other lengths than the fie"),
        (lambda: balance([], 2), ValueError, "lengths must be a list of at least one length"),
        (lambda: balance([1.5], 2), TypeError, "lengths must be ints below 2.*63, got"),
        (lambda: balance([1, -2], 2), ValueError, "lengths must be >= 1, got -2 at 1"),
        (
            lambda: balance([2**63], 2),
            TypeError,
            "must be ints below 2.*63, got an array of uint64",
        ),
        (lambda: balance([1], 2, drop_last=True), ValueError, "leaves none of 1 samples for 2 ran"),
        (lambda: balance([1], 0), ValueError, "ranks must be >= 1, got 0"),
        (lambda: balance([1, 2], 2, cost=sum), ValueError, "cost must return a number for each of"),
        (lambda: balance([1], 2, cost=lambda n: -n), ValueError, "cost must return finite numbers"),
    ],
)
def test_input_that_cannot_work_is_refused(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_an_error_in_a_worker_names_the_document():
    with pytest.raises(ValueError, match=r"pack\(\): sample 3 is empty"):
        list(prefetch(lambda shard: pack([[1], [2], [3], []], 4)))
