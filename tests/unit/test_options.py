"""Options: each is defined once, and signatures, docstrings and types say the same of it."""

import copy
import dataclasses
import inspect
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import typing

import numpy as np
import pytest
from helpers import LIMIT, METHODS

from enqueuer import (
    Auto,
    GeneratorEnqueuer,
    OrderedEnqueuer,
    Processes,
    Ray,
    imap,
    prefetch,
)
from enqueuer.datasets.arrays import ArraySource
from enqueuer.enqueuers.options import CommonOptions, EnqueuerOptions, Options

NAMES = [option.name for option in dataclasses.fields(Options)]
# What each takes, by position, so that it can be made.
MAKERS = {
    GeneratorEnqueuer: [iter(())],
    OrderedEnqueuer: [[1]],
    prefetch: [iter(())],
    imap: [str, [1]],
}


def described_in(docstring):
    """Return the names that the Args of a docstring describe."""
    arguments = inspect.cleandoc(docstring).split("\nArgs:\n", 1)[1].split("\n\n", 1)[0]
    return re.findall(r"^    (\w+): ", arguments, re.MULTILINE)


# --- one definition ---


def test_types_of_the_options_are_those_of_the_keywords():
    assert typing.get_type_hints(Options) == typing.get_type_hints(EnqueuerOptions)
    common = set(typing.get_type_hints(CommonOptions))
    assert set(NAMES) - common == {"max_queue_size", "epochs"}
    assert not EnqueuerOptions.__required_keys__


@pytest.mark.parametrize("kind", [Options, Processes, Ray, Auto])
def test_each_field_is_described_in_its_order(kind):
    assert described_in(kind.__doc__) == [option.name for option in dataclasses.fields(kind)]


@pytest.mark.parametrize("made", MAKERS, ids=lambda made: made.__name__)
def test_signature_and_docstring_list_every_option(made):
    parameters = inspect.signature(made).parameters
    # Functions give one epoch.
    lacks = {"epochs"} if made in (prefetch, imap) else set()
    assert set(NAMES) - set(parameters) == lacks
    assert set(described_in(made.__doc__)) == set(parameters)
    assert "{options}" not in made.__doc__
    types = typing.get_type_hints(Options)
    for option in dataclasses.fields(Options):
        if option.name in lacks:
            continue
        parameter = parameters[option.name]
        if option.name == "max_queue_size" and made in (prefetch, imap):
            continue  # which have a default of their own, and take it by position
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert (parameter.default, parameter.annotation) == (option.default, types[option.name])


def test_parameters_of_keras_keep_their_places():
    for_generators = list(inspect.signature(GeneratorEnqueuer).parameters)
    assert for_generators[:2] == ["generator", "use_multiprocessing"]
    assert list(inspect.signature(OrderedEnqueuer).parameters)[:3] == ["sequence", "map", "shuffle"]


@pytest.mark.parametrize(
    "function",
    [GeneratorEnqueuer.__init__, OrderedEnqueuer.__init__, prefetch, imap],
    ids=lambda function: function.__qualname__,
)
def test_annotations_can_be_evaluated(function):
    assert "options" in typing.get_type_hints(function)


@pytest.mark.thorough
def test_the_package_can_be_imported_without_docstrings():
    program = (
        "import enqueuer; print(enqueuer.GeneratorEnqueuer.__doc__, "
        "list(enqueuer.prefetch(iter('ab'), workers=1)))"
    )
    done = subprocess.run(
        [sys.executable, "-OO", "-c", program], capture_output=True, text=True, timeout=LIMIT
    )
    assert (done.stdout, done.stderr) == ("None ['a', 'b']\n", "")


# --- names that are no options ---


@pytest.mark.thorough("processes")
@pytest.mark.parametrize("made", MAKERS, ids=lambda made: made.__name__)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("worker", "there is no option 'worker'; give workers=..."),
        ("max_que_size", "there is no option 'max_que_size'; give max_queue_size=..."),
        ("xyz", "there is no option 'xyz'"),
        ("mp_context", "give backend=Processes(start_method=...)"),
        ("multiprocessing_context", "give backend=Processes(start_method=...)"),
        ("threads_per_worker", "give backend=Processes(threads=...)"),
        ("forward_logs", "give backend=Processes(forward_logs=...) or backend=Ray(forward_logs="),
        ("address", "give backend=Ray(address=...)"),
        ("ray_options", "give backend=Ray(actor_options=...)"),
        ("writable", "give backend=Ray(copy_arrays=True)"),
        ("max_workers", "give workers=Auto(most=...)"),
        ("num_workers", "give workers=..."),
        ("prefetch_factor", "give max_queue_size=..."),
        ("maxsize", "give max_queue_size=..."),
        ("collate_fn", "give collate=..."),
        ("batchsize", "give batch_size=..."),
        ("batch", "give batch_size=..."),
        ("prefetch", "give max_queue_size=..."),
        ("threads", "give workers=..."),
        ("drop_remainder", "give drop_last=..."),
        ("seed", "give random_seed=..."),
        ("pin_memory", "give pin_memory=... to TorchLoader, or use CudaDataLoader; the options"),
        ("sampler", "or the elements in the sampler's order; the options"),
        ("worker_init_fn", "give backend=Processes(initializer=...); the options"),
        ("persistent_workers", "give nothing to replace it: the workers stay until stop()"),
        ("transform", "give map=..."),
    ],
)
def test_a_name_that_is_no_option_is_answered_by_the_one_to_give(made, name, says):
    with pytest.raises(TypeError, match=re.escape(says)) as caught:
        made(*MAKERS[made], **{name: 1})
    _, names = str(caught.value).split(f"the options of {made.__name__} are ")
    assert names.split(", ") == sorted(inspect.signature(made).parameters)


@pytest.mark.parametrize(
    ("made", "name", "says"),
    [
        (Processes, "start_methd", "give start_method=...; the options of Processes are forward"),
        (Ray, "num_workers", "give workers=..., to the enqueuer; the options of Ray are actor_o"),
        (Auto, "max_workers", "give most=...; the options of Auto are first, most"),
        (ArraySource, "seed", "give random_seed=..., to the enqueuer; the options of ArraySource"),
    ],
)
def test_other_classes_answer_a_wrong_name_too(made, name, says):
    with pytest.raises(TypeError, match=re.escape(f"there is no option {name!r}; {says}")):
        made(**{name: 1})


# --- checks ---


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"workers": -1}, ValueError, "workers must be >= 0, got -1"),
        ({"workers": True}, TypeError, "workers must be an int, got True"),
        ({"workers": "2"}, ValueError, "workers must be an int, 'auto' or Auto(...), got '2'"),
        ({"backend": "ray2"}, ValueError, "backend must be 'thread', 'process', 'ray', Proc"),
        ({"backend": Processes}, ValueError, "backend must be 'thread', 'process', 'ray', Proc"),
        ({"max_queue_size": 0}, ValueError, "max_queue_size must be >= 1, got 0"),
        ({"max_queue_size": True}, TypeError, "max_queue_size must be an int, got True"),
        ({"max_queue_bytes": 0}, ValueError, "max_queue_bytes must be >= 1, got 0"),
        ({"max_queue_bytes": 1.5}, TypeError, "max_queue_bytes must be an int, got 1.5"),
        ({"epochs": 0}, ValueError, "epochs must be >= 1, got 0"),
        ({"epochs": 2.5}, TypeError, "epochs must be an int, math.inf or None"),
        ({"ordered": 3}, TypeError, "ordered must be True or False, got 3"),
        ({"ordered": 1}, TypeError, "ordered must be True or False, got 1"),
        ({"ordered": "yes"}, TypeError, "ordered must be True or False, got 'yes'"),
        ({"on_error": "stop"}, ValueError, "on_error must be 'raise', 'skip' or a callable"),
        ({"on_error": None}, TypeError, "on_error must be 'raise', 'skip' or a callable"),
        ({"max_errors": -1}, ValueError, "max_errors must be >= 0, got -1"),
        ({"max_restarts": -1}, ValueError, "max_restarts must be >= 0, got -1"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank must be < world_size, got rank=2"),
        ({"world_size": 0}, ValueError, "world_size must be >= 1, got 0"),
        ({"progress": "yes"}, TypeError, "progress must be True, False or a class such as tqdm"),
        ({"stall_timeout": -1}, ValueError, "stall_timeout must be >= 0 seconds, got -1"),
        ({"timeout": 0}, ValueError, "timeout must be > 0 seconds or None, got 0"),
        ({"timeout": "1"}, TypeError, "timeout must be seconds or None"),
        ({"stall_timeout": True}, TypeError, "stall_timeout must be seconds or None"),
        ({"trace": 1}, TypeError, "trace must be the path of a file or None, got 1"),
    ],
)
def test_an_option_is_checked(given, error, says):
    with pytest.raises(error, match=re.escape(says)):
        Options(**given)


@pytest.mark.parametrize("method", METHODS)
def test_a_start_method_may_be_a_context(method):
    context = multiprocessing.get_context(method)
    assert Processes(start_method=context) == Processes(start_method=method)


@pytest.mark.parametrize(
    ("kind", "given", "error", "says"),
    [
        (Processes, {"start_method": "thread"}, ValueError, "start_method must be one of 'fork'"),
        (Processes, {"start_method": 1}, ValueError, "a context of multiprocessing, got 1"),
        (Processes, {"threads": 0}, ValueError, "threads must be >= 1, got 0"),
        (Processes, {"threads": 1.5}, TypeError, "threads must be an int, got 1.5"),
        (Processes, {"initializer": 3}, TypeError, "initializer must be a function"),
        (Processes, {"initargs": 3}, TypeError, "initargs must be"),
        (Processes, {"forward_logs": "all"}, ValueError, "forward_logs must be True, False or"),
        (
            Processes,
            {"forward_logs": "multiprocessing-logging", "start_method": "spawn"},
            ValueError,
            "works with forked processes only: give start_method='fork' with it",
        ),
        (Ray, {"address": 1}, TypeError, "address must be a string or None, got 1"),
        (Ray, {"address": "ray://head:10001"}, ValueError, "is that of Ray Client, which cannot"),
        (Ray, {"actor_options": ["num_cpus"]}, TypeError, "actor_options must be a mapping"),
        (
            Ray,
            {"actor_options": {"name": "mine", "lifetime": "detached", "num_cpus": 1}},
            ValueError,
            "actor_options cannot set lifetime, name, which the enqueuer needs itself",
        ),
        (Ray, {"copy_arrays": 1}, TypeError, "copy_arrays must be True or False, got 1"),
        (Ray, {"forward_logs": "all"}, TypeError, "forward_logs must be True or False, got 'all'"),
        (Auto, {"most": 0}, ValueError, "most must be >= 1, got 0"),
        (Auto, {"most": "many"}, TypeError, "most must be an int, got 'many'"),
    ],
)
def test_an_option_of_one_kind_of_workers_is_checked(kind, given, error, says):
    with pytest.raises(error, match=re.escape(says)):
        kind(**given)


def test_multiprocessing_logging_needs_a_generator_that_is_forked():
    logs = Processes(forward_logs="multiprocessing-logging")
    GeneratorEnqueuer(iter(()), backend=logs)  # only a fork can hand over an iterator
    with pytest.raises(ValueError, match="works with forked processes only"):
        GeneratorEnqueuer(lambda: iter(()), backend=logs)


@pytest.mark.parametrize("backend", ["thread", "ray", Ray()])
def test_use_multiprocessing_contradicts_another_backend(backend):
    with pytest.raises(ValueError, match=r"contradict each other: use_multi.*; leave it out"):
        GeneratorEnqueuer(iter(()), use_multiprocessing=True, backend=backend)


def test_use_multiprocessing_may_stand_beside_the_backend_that_it_means():
    """As when the change of `Bottleneck` is pasted into an old call."""
    change = dict(backend="process", workers=2)
    assert Options.of(prefetch, True, change) == Options.of(prefetch, False, change)


def test_a_flag_of_numpy_is_a_flag():
    assert Options(ordered=np.True_).ordered is True
    assert Options(ordered=np.False_).ordered is False


def test_short_names_are_defaults_of_the_groups():
    assert Options(backend="process") == Options(backend=Processes())
    assert Options(backend="ray") == Options(backend=Ray())
    assert Options(workers="auto") == Options(workers=Auto())
    assert Options().backend_name == "thread"


# --- copies ---


def parent_and_threads(shard):
    """Yield the parent of the worker, and the limit of its threads."""
    yield os.getppid(), os.environ["OMP_NUM_THREADS"]


@pytest.mark.parametrize("made_again", [copy.copy, lambda one: pickle.loads(pickle.dumps(one))])
def test_options_outlive_a_copy(made_again, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    options = Options(
        workers=Auto(most=3),
        backend=Ray(address="auto", actor_options={"num_cpus": 1}, copy_arrays=True),
    )
    assert made_again(options) == options
    forked = Processes(start_method=multiprocessing.get_context("fork"), threads=3)
    with made_again(GeneratorEnqueuer(parent_and_threads, backend=forked)) as enqueuer:
        assert list(enqueuer) == [(os.getpid(), "3")]
