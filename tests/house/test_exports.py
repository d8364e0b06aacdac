"""What is public is listed, sorted, documented and typed."""

import inspect

import pytest

import enqueuer

PUBLIC = [getattr(enqueuer, name) for name in enqueuer.__all__]


def test_all_is_sorted_and_true():
    assert enqueuer.__all__ == sorted(enqueuer.__all__)
    assert all(hasattr(enqueuer, name) for name in enqueuer.__all__)


@pytest.mark.parametrize("thing", PUBLIC, ids=enqueuer.__all__)
def test_every_public_name_is_documented(thing):
    assert inspect.getdoc(thing)
    if inspect.isclass(thing):
        for name, method in vars(thing).items():
            if not name.startswith("_") and (callable(method) or isinstance(method, property)):
                assert inspect.getdoc(method), f"{thing.__name__}.{name} has no docstring"


@pytest.mark.parametrize(
    "thing",
    [
        enqueuer.GeneratorEnqueuer,
        enqueuer.OrderedEnqueuer,
        enqueuer.Buffer,
        enqueuer.Shard,
        enqueuer.Task,
        enqueuer.prefetch,
        enqueuer.empty,
        enqueuer.empty_like,
        enqueuer.headroom,
    ],
)
def test_what_one_uses_shows_an_example_that_runs(thing):
    assert ">>>" in inspect.getdoc(thing)


def test_exceptions_are_named_as_one_imports_them():
    for thing in PUBLIC:
        if inspect.isclass(thing) and issubclass(thing, (Exception, Warning)):
            assert thing.__module__ == "enqueuer"
            assert issubclass(thing, (enqueuer.EnqueuerError, enqueuer.EnqueuerWarning))
