"""Errors can be pickled, and their texts are complete."""

import pickle

import pytest

import enqueuer
from enqueuer import DataFileError, EnqueuerError, WorkerDied, WorkerError

ERRORS = [
    thing
    for name in enqueuer.__all__
    if isinstance(thing := getattr(enqueuer, name), type) and issubclass(thing, EnqueuerError)
]


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_pickles(kind):
    copy = pickle.loads(pickle.dumps(kind("what, where, what to do")))
    assert type(copy) is kind
    assert str(copy) == "what, where, what to do"


@pytest.mark.thorough("processes")
@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_is_made_by_its_new(kind):
    """`tblib`, which `ray` and others may load, unpickles exceptions so."""
    assert type(kind.__new__(kind, "what, where, what to do")) is kind


def test_attributes_travel():
    died = pickle.loads(pickle.dumps(WorkerDied("gone", 3, -9)))
    assert (str(died), died.worker, died.exitcode) == ("gone", 3, -9)
    failed = pickle.loads(pickle.dumps(WorkerError("failed", "Traceback ...")))
    assert failed.traceback_text == "Traceback ..."
    assert str(failed) == "failed\n\nTraceback ..."
    missing = pickle.loads(pickle.dumps(DataFileError("a.h5: no such file", "a.h5")))
    assert (str(missing), missing.path) == ("a.h5: no such file", "a.h5")
