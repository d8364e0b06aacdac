"""An enqueuer as a tf.data.Dataset: signatures, passes, stopping, errors, a training run."""

import gc
import re
import sys
from collections import namedtuple

import numpy as np
import pytest
from helpers import (
    Failing,
    Reiterable,
    collect_until,
    counting,
    hang,
    needs,
    points,
    ragged,
    raise_key_error,
    run_program,
    twelve,
)

from enqueuer import GeneratorEnqueuer, Processes
from enqueuer.enqueuers.enqueuer import core_of

tf = needs("tensorflow")
from enqueuer.adapters.tensorflow import as_dataset  # noqa: E402

Pair = namedtuple("Pair", "x y")
INT = tf.TensorSpec((), tf.int32)


@pytest.fixture(scope="module", autouse=True)
def threads_of_tensorflow():
    """Let TensorFlow start its threads, which stay, before the first census."""
    list(tf.data.Dataset.range(4).map(lambda x: x + 1, num_parallel_calls=2).prefetch(1))
    keras = needs("keras")
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(loss="mse")
    model.fit(np.zeros((4, 2)), np.zeros(4), verbose=0)


def runs(enqueuer):
    return not core_of(enqueuer).is_idle


def numbers(dataset):
    return [int(number) for number in dataset]


# --- signatures --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "spec"),
    [
        (3, tf.TensorSpec((), tf.int32)),
        (2**40, tf.TensorSpec((), tf.int64)),
        (1.5, tf.TensorSpec((), tf.float32)),
        (True, tf.TensorSpec((), tf.bool)),
        ("ä", tf.TensorSpec((), tf.string)),
        (b"\xff\0", tf.TensorSpec((), tf.string)),
        (np.int16(3), tf.TensorSpec((), tf.int16)),
        (np.zeros(()), tf.TensorSpec((), tf.float64)),
        (np.zeros((4, 2, 3), np.uint8), tf.TensorSpec((None, 2, 3), tf.uint8)),
        ([1, 2, 3], tf.TensorSpec((None,), tf.int32)),
        ([[1.0, 2.0]], tf.TensorSpec((None, 2), tf.float32)),
        (["a", "bc"], tf.TensorSpec((None,), tf.string)),
        (np.array(["a", "ä"]), tf.TensorSpec((None,), tf.string)),
        (np.array([b"a", b"bc"]), tf.TensorSpec((None,), tf.string)),
        (np.array(["a", b"bc"], object), tf.TensorSpec((None,), tf.string)),
        (Pair(1, ("b",)), Pair(INT, (tf.TensorSpec((), tf.string),))),
        ({"b": {"c": 1}, "a": ()}, {"b": {"c": INT}, "a": ()}),
        (([np.zeros(2), 1], 2), ((tf.TensorSpec((None,), tf.float64), INT), INT)),
    ],
    ids=lambda value: re.sub(r"\s+", " ", repr(value))[:40],
)  # fmt: skip
def test_the_signature_is_that_of_the_first_batch(item, spec):
    dataset = as_dataset([item, item])
    assert dataset.element_spec == spec
    assert len(list(dataset)) == 2


def test_the_values_are_those_of_the_batches(backend):
    dataset = as_dataset(GeneratorEnqueuer(ragged, **backend))
    assert dataset.element_spec["x"] == tf.TensorSpec((None, 2), tf.float32)
    batches = list(dataset)
    assert [batch["x"].shape[0] for batch in batches] == [4, 4, 2]
    assert np.array_equal(np.concatenate([b["x"] for b in batches])[:, 0], np.arange(10))
    names = [name.decode() for batch in batches for name in batch["names"].numpy()]
    assert names == [f"row {row}" for row in range(10)]


@pytest.mark.parametrize("text", [["a", "ä€"], [b"a\0b", b"\xff"], np.array(["a", "ä€"])])
def test_strings_arrive_as_their_bytes(text):
    (batch,) = as_dataset([text])
    assert [*batch.numpy()] == [t if isinstance(t, bytes) else t.encode() for t in text]


def test_a_given_signature_is_used_and_nothing_is_taken_for_it():
    source = Reiterable(3)
    dataset = as_dataset(source, INT)
    assert source.at == 0
    assert dataset.element_spec == INT
    assert numbers(dataset) == [0, 1, 2]


def test_a_given_signature_may_be_ragged():
    def rows():
        yield tf.ragged.constant([[1, 2], [3]])

    spec = tf.RaggedTensorSpec((None, None), tf.int32)
    (batch,) = as_dataset(GeneratorEnqueuer(rows), spec)
    assert batch.to_list() == [[1, 2], [3]]


def test_numbers_of_another_precision_are_cast():
    spec = (tf.TensorSpec((None,), tf.float32), tf.TensorSpec((), tf.uint8))
    ((x, y),) = as_dataset([(np.ones(2), 255)], spec)
    assert (x.dtype, y.dtype, int(y)) == (tf.float32, tf.uint8, 255)


def test_tensors_of_torch_become_tensors_of_tensorflow():
    torch = needs("torch")
    (batch,) = as_dataset([torch.arange(4.0, requires_grad=True)])
    assert batch.numpy().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "bad", [None, object(), [[1, 2], [3]], np.array([{}]), np.array(["2026"], "M8[D]")]
)
def test_what_cannot_be_a_tensor_is_named(bad):
    with pytest.raises(TypeError, match=re.escape("batch['a'][1] cannot be a tensor: it is ")):
        as_dataset([{"a": (1, bad)}])


def test_an_empty_source_needs_a_signature():
    with pytest.raises(ValueError, match="give output_signature"):
        as_dataset([])
    assert numbers(as_dataset([], INT)) == []


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            np.zeros((2, 3)),
            np.zeros((2, 4)),
            r"\(2, 4\) and dtype float64.*\(None, 3\)",
        ),
        ({"a": 1}, {"a": 1.5}, r"batch\['a'\] does .*1\.5 \(float\).*int32"),
        ({"a": 1}, {"b": 1}, r"batch does .*keys \['b'\].*'a'"),
        ((1, "a"), (1, 2), r"batch\[1\] does .*2 \(int\).*string"),
        ((1, "a"), (1,), r"a tuple of length 1"),
        (1, "a", r"'a' \(str\).*int32"),
        (1, None, r"None \(NoneType\).*int32"),
        (1, 2**40, r"1099511627776 \(int\).*int32"),
    ],
)
def test_a_batch_that_does_not_fit_is_named_with_the_signature(first, second, message):
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"(?s){message}.*output_signature"):
        list(as_dataset([first, second]))


# --- passes ------------------------------------------------------------------------------------


def test_each_pass_is_an_epoch_and_repeat_loses_nothing(backend):
    dataset = as_dataset(GeneratorEnqueuer(ragged, **backend)).map(lambda b: b["epoch"])
    assert numbers(dataset.repeat(2)) == [0, 0, 0, 1, 1, 1]
    assert numbers(dataset) == [2, 2, 2]


def test_after_an_early_end_the_next_pass_goes_on(backend):
    dataset = as_dataset(GeneratorEnqueuer(twelve, **backend))
    assert numbers(dataset.take(3)) == [0, 1, 2]
    for number in dataset:
        if number == 5:
            break
    assert numbers(dataset) == list(range(6, 12))
    assert numbers(dataset) == list(range(12))


def test_an_iterator_that_is_dropped_unused_loses_nothing():
    dataset = as_dataset(GeneratorEnqueuer(twelve))
    iter(dataset)
    assert numbers(dataset) == list(range(12))


def test_a_pass_that_was_left_after_its_last_batch_is_followed_by_the_next_epoch():
    dataset = as_dataset(GeneratorEnqueuer(twelve))
    assert numbers(dataset.take(12)) == list(range(12))
    assert numbers(dataset) == list(range(12))


def test_nothing_is_read_ahead_so_the_position_is_exact():
    def make():
        return GeneratorEnqueuer(twelve, random_seed=7)

    enqueuer = make()
    for number in as_dataset(enqueuer):
        if number == 5:
            state = enqueuer.state_dict()
            break
    later = make()
    later.load_state_dict(state)
    assert numbers(as_dataset(later)) == list(range(6, 12))


def test_steps_per_epoch_makes_passes_of_a_generator_without_an_end(backend):
    enqueuer = GeneratorEnqueuer(counting, **backend)
    dataset = as_dataset(enqueuer, steps_per_epoch=4)
    assert len(dataset) == 4
    parts = [dataset.repeat(2), dataset.take(2), dataset]
    assert [[int(number) for _, number in part] for part in parts] == [
        list(range(8)),
        [8, 9],
        [10, 11, 12, 13],
    ]


def test_it_can_be_shuffled_batched_and_repeated(backend):
    dataset = as_dataset(GeneratorEnqueuer(twelve, **backend))
    batches = list(dataset.shuffle(12, seed=7).batch(5).repeat(2).prefetch(2))
    assert [len(batch) for batch in batches] == [5, 5, 2] * 2
    assert sorted(np.concatenate(batches[:3])) == list(range(12))
    assert np.concatenate(batches[:3]).tolist() != list(range(12))


def test_two_iterators_share_the_batches():
    dataset = as_dataset(GeneratorEnqueuer(twelve))
    first, second = iter(dataset), iter(dataset)
    assert numbers([next(first), next(second), next(first)]) == [0, 1, 2]


def test_a_tf_function_can_iterate_over_it():
    @tf.function
    def total(dataset):
        result = 0
        for number in dataset:
            result += number
        return result

    dataset = as_dataset(GeneratorEnqueuer(twelve))
    assert [int(total(dataset)), int(total(dataset))] == [66, 66]


# --- stopping ----------------------------------------------------------------------------------


def test_the_workers_end_with_the_dataset(backend):
    enqueuer = GeneratorEnqueuer(counting, **backend)
    dataset = as_dataset(enqueuer)
    assert runs(enqueuer)
    assert len(list(dataset.take(2))) == 2
    assert runs(enqueuer)
    del dataset
    collect_until(lambda: not runs(enqueuer))


def test_they_end_with_a_dataset_that_was_never_iterated():
    enqueuer = GeneratorEnqueuer(counting)
    as_dataset(enqueuer)
    collect_until(lambda: not runs(enqueuer))


def test_they_live_as_long_as_what_was_made_of_the_dataset():
    enqueuer = GeneratorEnqueuer(counting)
    batches = iter(as_dataset(enqueuer).map(lambda s, n: n).shuffle(3).batch(2).repeat())
    gc.collect()
    next(batches)
    assert runs(enqueuer)
    del batches
    collect_until(lambda: not runs(enqueuer))


def test_a_break_and_nothing_else_ends_them(backend):
    enqueuer = GeneratorEnqueuer(counting, **backend)
    for _ in as_dataset(enqueuer).map(lambda s, n: n).prefetch(2):
        break
    collect_until(lambda: not runs(enqueuer))


def test_a_break_while_a_batch_is_waited_for_ends_them():
    enqueuer = GeneratorEnqueuer(Failing(2, hang), backend=Processes(start_method="fork"))
    for _ in as_dataset(enqueuer).prefetch(4):
        break
    collect_until(lambda: not runs(enqueuer))


def test_what_outlives_the_dataset_says_so():
    spec = (INT, INT)
    enqueuer = GeneratorEnqueuer(counting)
    dataset = as_dataset(enqueuer, spec)
    variant = tf.data.experimental.to_variant(dataset)
    del dataset
    gc.collect()
    orphan = tf.data.experimental.from_variant(variant, spec)
    with pytest.raises(tf.errors.UnknownError, match="keep it as long as"):
        next(iter(orphan))


# --- errors ------------------------------------------------------------------------------------


def test_an_error_of_the_generator_says_all_and_can_be_had_as_itself(backend):
    enqueuer = GeneratorEnqueuer(Failing(1, raise_key_error), **backend)
    dataset = as_dataset(enqueuer)
    batches = iter(dataset)
    next(batches)
    with pytest.raises(tf.errors.UnknownError, match=r"(?s)KeyError: 'missing'.*raise_key_error"):
        next(batches)
    with pytest.raises(KeyError, match="missing") as info:
        next(enqueuer.get())
    assert "worker 0" in info.value.__notes__[0]
    del info, batches, dataset
    collect_until(lambda: not runs(enqueuer))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes are shown from Python 3.11 on")
def test_an_error_of_the_generator_names_the_worker():
    with pytest.raises(tf.errors.UnknownError, match=r"in worker 0 .*shard 0, item 1"):
        list(as_dataset(GeneratorEnqueuer(Failing(1, raise_key_error))))


def test_an_error_before_the_first_batch_comes_as_itself():
    enqueuer = GeneratorEnqueuer(Failing(0, raise_key_error))
    with pytest.raises(KeyError, match="missing"):
        as_dataset(enqueuer)
    collect_until(lambda: not runs(enqueuer))


# --- programs ----------------------------------------------------------------------------------

PROGRAM = """
    import os, sys, threading
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf
    from enqueuer import GeneratorEnqueuer, Processes
    from enqueuer.adapters.tensorflow import as_dataset

    def counting(shard):
        number = 0
        while True:
            yield number
            number += 1

    def stuck(shard):
        yield 0
        threading.Event().wait()

    enqueuer = GeneratorEnqueuer({source}, {options})
    dataset = as_dataset(enqueuer).prefetch(2)
    {body}
    print("done")
    """

OPTIONS = {
    "thread": "",
    "forkserver": "backend=Processes(start_method='forkserver'), workers=2",
    "fork": "backend=Processes(start_method='fork'), workers=2",
}
BODIES = {
    "break": "for batch in dataset: break",
    "an iterator is left": "batches = iter(dataset); next(batches)",
    "sys.exit in the loop": "for batch in dataset: print('done'); sys.exit()",
    "a batch is waited for": "batches = iter(dataset); next(batches)",
}


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ("break", "forkserver"),
        ("an iterator is left", "thread"),
        ("sys.exit in the loop", "fork"),
        ("a batch is waited for", "thread"),
        ("a batch is waited for", "forkserver"),
    ],
)
def test_a_program_that_leaves_the_loop_ends(tmp_path, body, options):
    source = "stuck" if "waited" in body else "counting"
    text = PROGRAM.format(source=source, options=OPTIONS[options], body=BODIES[body])
    code, out, err = run_program(tmp_path, text)
    assert (code, out) == (0, "done\n"), err
    assert "Traceback" not in err


# --- training ----------------------------------------------------------------------------------


def learn(enqueuer, steps_per_epoch):
    """Return the losses of four epochs, and what epochs had been given out by then."""
    keras = needs("keras")
    dataset = as_dataset(enqueuer, steps_per_epoch=steps_per_epoch)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.5), loss="mse")
    losses = model.fit(dataset, epochs=4, verbose=0, shuffle=False).history["loss"]
    return losses, enqueuer.state_dict()["epoch"]


def test_keras_learns_a_line_from_it(backend):
    enqueuer = GeneratorEnqueuer(points, workers=2, random_seed=7, **backend)
    losses, epoch = learn(enqueuer, steps_per_epoch=20)
    assert losses[-1] < 0.01 < losses[0]
    assert epoch in (3, 4)  # the fourth was given to its last batch, and perhaps to its end
    collect_until(lambda: not runs(enqueuer))


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # how Keras finds out the length
def test_keras_learns_without_knowing_the_length():
    losses, epoch = learn(GeneratorEnqueuer(points, random_seed=7), steps_per_epoch=None)
    assert losses[-1] < 0.01 < losses[0]
    assert epoch in (3, 4)
