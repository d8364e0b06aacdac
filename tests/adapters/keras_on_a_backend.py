"""What test_keras.py runs in a process of its own for each backend of Keras: these are tests."""

import functools
import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
from helpers import (
    LIMIT,
    column,
    column_of,
    columns,
    columns_then,
    five_columns_then_fail,
    kill_self,
    sums,
)

from enqueuer import (
    EmptyEpochWarning,
    GeneratorEnqueuer,
    InvalidState,
    OrderedEnqueuer,
    Processes,
)
from enqueuer.adapters.keras import EnqueuerDataset
from enqueuer.enqueuers.enqueuer import core_of

# of Keras with torch
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
IF_DROPPED = pytest.mark.skipif(
    ON_TENSORFLOW, reason="TensorFlow keeps each dataset as long as the program runs"
)
BOTH = pytest.mark.parametrize(
    "backend",
    [{"backend": "thread"}, {"backend": Processes(start_method="forkserver")}],
    ids=["thread", "process"],
)


class Recorder(keras.layers.Layer):
    """Gives back what it gets; a weight, so that there is something to train."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return x + 0 * self.scale


class Numbers(keras.callbacks.Callback):
    """Notes the number of each batch that was trained, tested or predicted, as its metric."""

    def __init__(self):
        super().__init__()
        self.trained, self.tested = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.trained.append(round(float(logs["number"])))

    def on_test_batch_end(self, batch, logs=None):
        self.tested.append(round(float(logs["number"])))


class Number(keras.metrics.Metric):
    """The mean target of the last batch."""

    def __init__(self):
        super().__init__(name="number")
        self.last = self.add_variable(shape=(), initializer="zeros", name="last")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.last.assign(keras.ops.mean(keras.ops.cast(y_true, "float32")))

    def result(self):
        return self.last + 0


def ordered(count, **options):
    return OrderedEnqueuer(range(count), column_of, **options)


def recorder():
    """A model that is not built: Keras looks at a batch in order to build it."""
    model = keras.Sequential([Recorder()])
    model.compile("sgd", "mse", metrics=[Number()])
    return model


def trained(model, dataset, **options):
    """Return the numbers of the batches that a fit trained with."""
    numbers = Numbers()
    model.fit(dataset, verbose=0, callbacks=[numbers], **options)
    return numbers.trained


def predicted(model, dataset, **options):
    results = model.predict(dataset, verbose=0, **options)
    return results[::3, 0].astype(int).tolist()


def runs(enqueuer):
    return not core_of(enqueuer).is_idle


def gone(enqueuer):
    """Return whether the workers are gone, now that nothing refers to the dataset."""
    gc.collect()  # an exception may be in a circle
    return not runs(enqueuer)


@pytest.fixture(scope="session", autouse=True)
def warm():
    """Have the framework open what it will keep open, before the first census."""
    x, y = np.zeros((8, 1)), np.zeros((8, 1))
    recorder().fit(Plain(), verbose=0)
    recorder().fit(x, y, verbose=0)
    recorder().predict(x, verbose=0)


@pytest.fixture(autouse=True)
def stopped(monkeypatch):
    """Stop the datasets that TensorFlow keeps as long as the program runs."""
    make, made = EnqueuerDataset, weakref.WeakSet()

    def note(*arguments, **options):
        dataset = make(*arguments, **options)
        made.add(dataset)
        return dataset

    monkeypatch.setitem(globals(), "EnqueuerDataset", note)
    yield
    for dataset in made:
        dataset.stop()


class Plain(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return column(index)


# --- every batch once, in order ----------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_epoch_has_its_batches_in_order(backend, count):
    dataset, model = EnqueuerDataset(ordered(count, workers=2, **backend)), recorder()
    if count < 3:
        model.fit(np.zeros((3, 1)), np.zeros((3, 1)), verbose=0)  # now it is built
    expected = [100 * epoch + number for epoch in range(3) for number in range(count)]
    assert trained(model, dataset, epochs=3) == expected
    assert trained(model, dataset) == [300 + number for number in range(count)]


def test_a_second_fit_goes_on():
    dataset, model = EnqueuerDataset(ordered(4)), recorder()
    assert trained(model, dataset, epochs=2) == [0, 1, 2, 3, 100, 101, 102, 103]
    assert trained(model, dataset) == [200, 201, 202, 203]
    assert trained(recorder(), dataset) == [300, 301, 302, 303]


def test_steps_per_epoch_cuts_what_has_no_end():
    dataset = EnqueuerDataset(GeneratorEnqueuer(columns, workers=2), steps_per_epoch=5)
    model = recorder()
    assert trained(model, dataset, epochs=2) == list(range(10))
    assert trained(model, dataset, epochs=2, initial_epoch=1) == list(range(10, 15))


@BOTH
def test_predict_gives_results_in_order(backend):
    dataset = EnqueuerDataset(ordered(20, workers=3, **backend))
    model = recorder()
    assert predicted(model, dataset) == list(range(20))
    assert predicted(model, dataset) == list(range(100, 120))


def test_validation_goes_beside_the_training():
    model, numbers = recorder(), Numbers()
    model.fit(
        EnqueuerDataset(ordered(4)),
        validation_data=EnqueuerDataset(ordered(3)),
        epochs=3,
        verbose=0,
        callbacks=[numbers],
    )
    assert numbers.trained == [0, 1, 2, 3, 100, 101, 102, 103, 200, 201, 202, 203]
    assert numbers.tested == [0, 1, 2, 100, 101, 102, 200, 201, 202]


def test_one_dataset_may_train_and_test():
    model, numbers = recorder(), Numbers()
    dataset = EnqueuerDataset(ordered(3))
    model.fit(dataset, validation_data=dataset, epochs=2, verbose=0, callbacks=[numbers])
    assert numbers.trained == [0, 1, 2, 200, 201, 202]
    assert numbers.tested == [100, 101, 102, 300, 301, 302]


def test_keras_may_cut_epochs_shorter():
    dataset, model = EnqueuerDataset(ordered(6)), recorder()
    assert trained(model, dataset, steps_per_epoch=3, epochs=2) == list(range(6))
    assert trained(model, dataset, steps_per_epoch=4) == [100, 101, 102, 103]
    assert predicted(model, dataset) == list(range(200, 206))  # as a whole, not the rest


def test_a_look_by_the_user_loses_nothing():
    dataset = EnqueuerDataset(ordered(4))
    x, y = dataset[0]
    assert x.shape == y.shape == (3, 1)
    assert trained(recorder(), dataset) == [0, 1, 2, 3]


def test_a_list_of_batches_will_do():
    dataset, model = EnqueuerDataset([column(number) for number in range(4)]), recorder()
    assert trained(model, dataset, epochs=2) == [0, 1, 2, 3] * 2
    assert predicted(model, dataset) == [0, 1, 2, 3]


def test_a_short_epoch_is_filled_from_the_next():
    """Such as of an enqueuer that skips what fails; asking on from Keras cannot be refused."""
    dataset = EnqueuerDataset(GeneratorEnqueuer(lambda: map(column, range(3))), steps_per_epoch=5)
    assert trained(recorder(), dataset, epochs=2) == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]


# --- what a batch may be -----------------------------------------------------------------------


def test_lists_weights_and_dicts_of_inputs():
    def weighted(shard):
        while True:
            x = shard.rng.random((8, 2)).astype("float32")
            yield {"a": x, "b": -x}, x[:, :1], np.ones(8, "float32")

    a, b = keras.Input((2,), name="a"), keras.Input((2,), name="b")
    output = keras.layers.Dense(1)(keras.layers.concatenate([a, b]))
    model = keras.Model({"a": a, "b": b}, output)
    model.compile("sgd", "mse")
    assert model.fit(EnqueuerDataset(GeneratorEnqueuer(weighted), 4), verbose=0).history["loss"]

    def in_a_list():
        while True:
            yield list(column(0))

    dataset = EnqueuerDataset(GeneratorEnqueuer(in_a_list), 4)
    assert recorder().fit(dataset, verbose=0, class_weight={0: 2.0}).history["loss"]


@BOTH
def test_a_training_run_learns(backend):
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    train = GeneratorEnqueuer(sums, workers=2, random_seed=1, **backend)
    check = GeneratorEnqueuer(sums, workers=1, random_seed=2, **backend)
    with EnqueuerDataset(train, 50) as training, EnqueuerDataset(check, 5) as checking:
        stopping = keras.callbacks.EarlyStopping(min_delta=10, patience=3)
        history = model.fit(
            training, validation_data=checking, epochs=9, verbose=0, callbacks=[stopping]
        ).history
        assert model.evaluate(checking, verbose=0) < 0.1
    assert len(history["loss"]) == 4
    assert history["loss"][-1] < history["loss"][0] / 4
    assert not runs(train)
    assert not runs(check)


# --- stopping ----------------------------------------------------------------------------------


class StopAt(keras.callbacks.Callback):
    """Raises, or asks Keras to stop, after some batches."""

    def __init__(self, batch, error=None):
        super().__init__()
        self.batch, self.error = batch, error

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            if self.error is not None:
                raise self.error
            self.model.stop_training = True


@IF_DROPPED
@BOTH
def test_the_workers_go_with_the_dataset(backend):
    enqueuer = ordered(4, **backend)
    model, dataset = recorder(), EnqueuerDataset(enqueuer)
    assert trained(model, dataset) == [0, 1, 2, 3]
    assert runs(enqueuer)
    del dataset
    assert gone(enqueuer)


@IF_DROPPED
def test_the_workers_end_after_a_fit_whose_result_is_dropped():
    train, check = ordered(4), ordered(3)
    model = recorder()
    model.fit(EnqueuerDataset(train), validation_data=EnqueuerDataset(check), verbose=0)
    assert gone(train)
    assert gone(check)


@IF_DROPPED
@pytest.mark.parametrize("error", [RuntimeError("diverged"), KeyboardInterrupt()], ids=repr)
def test_the_workers_go_after_an_exception_in_a_callback(error):
    enqueuer, model = ordered(50), recorder()

    def train():
        model.fit(EnqueuerDataset(enqueuer), verbose=0, callbacks=[StopAt(5, error)])

    with pytest.raises(type(error)):
        train()
    error.__traceback__ = None  # or the parameter would keep it
    assert gone(enqueuer)


@pytest.mark.parametrize("is_mine", [True, False])
@pytest.mark.parametrize("error", [None, RuntimeError("diverged")], ids=["stop", "error"])
def test_after_a_broken_epoch_the_next_one_begins(is_mine, error):
    enqueuer = ordered(50)
    if is_mine:
        enqueuer.start()
    dataset, model = EnqueuerDataset(enqueuer), recorder()
    try:
        assert trained(model, dataset) == list(range(50))
        model.fit(dataset, verbose=0, callbacks=[StopAt(10, error)], epochs=3)
    except RuntimeError:
        error.__traceback__ = None  # or the parameter would keep it
    assert predicted(model, dataset) == list(range(200, 250))
    assert trained(model, dataset) == list(range(300, 350))
    assert runs(enqueuer)
    enqueuer.stop()


def test_a_thread_that_still_reads_for_an_old_call_takes_nothing():
    """On TensorFlow it waits for a batch when the next call begins."""
    go = threading.Event()

    def column_after(element, task):
        if element == 4:
            go.wait(LIMIT)
        return column_of(element, task)

    dataset, model = EnqueuerDataset(OrderedEnqueuer(range(8), column_after)), recorder()
    with pytest.raises(RuntimeError, match="diverged") as raised:
        model.fit(dataset, verbose=0, callbacks=[StopAt(2, RuntimeError("diverged"))])
    threading.Timer(0.1, go.set).start()
    assert predicted(model, dataset) == list(range(100, 108))
    assert raised.tb  # which has kept the iterator of Keras until now


def test_only_the_thread_that_asks_for_the_length_may_inspect():
    dataset = EnqueuerDataset(ordered(4))
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            assert dataset.num_batches == 4
            with pytest.raises(InvalidState, match="two calls"):
                pool.submit(dataset.__getitem__, 3).result(LIMIT)
            assert dataset[0][0][0, 0] == 0
            with pytest.raises(InvalidState, match="two calls"):
                pool.submit(dataset.__getitem__, 3).result(LIMIT)
    assert [dataset[i][0][0, 0] for i in range(1, 4)] == [1, 2, 3]


def test_after_a_break_what_has_no_end_goes_on():
    dataset = EnqueuerDataset(GeneratorEnqueuer(columns), steps_per_epoch=20)
    model = recorder()
    model.fit(dataset, verbose=0, callbacks=[StopAt(10)])
    numbers = trained(model, dataset)
    assert numbers == list(range(numbers[0], numbers[0] + 20))
    assert numbers[0] == 11 or ON_TENSORFLOW  # which reads ahead
    assert numbers[0] > 10


def test_stop_begins_anew():
    dataset, model = EnqueuerDataset(ordered(4)), recorder()
    for _ in range(2):
        assert trained(model, dataset) == [0, 1, 2, 3]
        dataset.stop()


def test_a_state_between_epochs_is_exact():
    dataset, model = EnqueuerDataset(ordered(5, random_seed=7)), recorder()
    assert trained(model, dataset, epochs=2)[-1] == 104
    state = dataset.state_dict()
    other = EnqueuerDataset(ordered(5))
    other.load_state_dict(state)
    assert trained(recorder(), other) == [200, 201, 202, 203, 204]


def test_a_stop_amid_an_epoch_is_an_error():
    dataset = EnqueuerDataset(ordered(50))

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            dataset.stop()

    kind = Exception if ON_TENSORFLOW else InvalidState
    with pytest.raises(kind, match="stopped while Keras was reading"):
        recorder().fit(dataset, verbose=0, callbacks=[Stop()])


# --- errors ------------------------------------------------------------------------------------


@BOTH
def test_an_error_of_the_generator_arrives(backend):
    dataset = EnqueuerDataset(
        GeneratorEnqueuer(five_columns_then_fail, **backend), steps_per_epoch=9
    )
    kind = Exception if ON_TENSORFLOW else KeyError
    with pytest.raises(kind, match="no such image"):
        recorder().fit(dataset, verbose=0)


def test_an_error_in_the_first_batch_arrives_as_itself():
    def failing():
        raise KeyError("no such image")
        yield

    dataset = EnqueuerDataset(GeneratorEnqueuer(failing), steps_per_epoch=9)
    with pytest.raises(KeyError, match="no such image"):
        recorder().fit(dataset, verbose=0)


@IF_DROPPED  # an enqueuer that has failed keeps its memory
def test_a_killed_worker_is_an_error():
    fatal = functools.partial(columns_then, kill_self, 5)
    enqueuer = OrderedEnqueuer(range(9), fatal, backend=Processes(start_method="forkserver"))
    with pytest.raises(Exception, match="SIGKILL"):
        recorder().fit(EnqueuerDataset(enqueuer), verbose=0)


def test_the_length_is_unknown():
    with pytest.raises(TypeError, match=r"GeneratorEnqueuer .* give steps_per_epoch"):
        EnqueuerDataset(GeneratorEnqueuer(columns))


def test_an_empty_loader_does_not_hang():
    dataset = EnqueuerDataset(GeneratorEnqueuer(lambda: iter(())), steps_per_epoch=2)
    with pytest.raises(ValueError, match="no batches"), pytest.warns(EmptyEpochWarning):
        recorder().fit(dataset, verbose=0)


def test_keras_is_to_have_no_workers_of_its_own():
    with pytest.raises(TypeError, match="workers"):
        EnqueuerDataset(ordered(4), workers=2)
    dataset = EnqueuerDataset(ordered(4))
    assert (dataset.workers, dataset.use_multiprocessing) == (1, False)


def test_a_stop_wakes_a_thread_that_waits_for_a_batch():
    asked, go, errors = threading.Event(), threading.Event(), []

    def slow():
        yield column(0)
        asked.set()
        go.wait(LIMIT)
        yield column(1)

    def read():
        try:
            dataset[0], dataset[1]
        except InvalidState as error:
            errors.append(error)

    dataset = EnqueuerDataset(GeneratorEnqueuer(slow), steps_per_epoch=2)
    thread = threading.Thread(target=read)
    thread.start()
    assert asked.wait(LIMIT)
    threading.Timer(0.1, go.set).start()  # a generator on a thread cannot be interrupted
    dataset.stop()
    thread.join(LIMIT)
    assert len(errors) == 1


def test_the_backend_is_the_one_that_was_asked_for():
    assert keras.backend.backend() == os.environ["KERAS_BACKEND"]
