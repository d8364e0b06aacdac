"""What is public is listed, sorted, documented and typed."""

import inspect
import re
from pathlib import Path

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
    ],
)
def test_what_one_uses_shows_an_example_that_runs(thing):
    assert ">>>" in inspect.getdoc(thing)


def test_exceptions_are_named_as_one_imports_them():
    for thing in PUBLIC:
        if inspect.isclass(thing) and issubclass(thing, (Exception, Warning)):
            assert thing.__module__ == "enqueuer"
            assert issubclass(thing, (enqueuer.EnqueuerError, enqueuer.EnqueuerWarning))


def test_the_reference_groups_all_options_by_purpose():
    page = Path(__file__).parents[2] / "docs" / "reference" / "api.rst"
    table = page.read_text(encoding="utf-8").split("Options by purpose\n")[1].split("\n---")[0]
    listed = set(re.findall(r"`(\w+)`", table))
    takers = [
        enqueuer.GeneratorEnqueuer,
        enqueuer.OrderedEnqueuer,
        enqueuer.prefetch,
        enqueuer.imap,
        enqueuer.Processes,
        enqueuer.Ray,
    ]
    options = {name for taker in takers for name in inspect.signature(taker).parameters}
    work = {"generator", "sequence", "map", "function", "elements"}
    roles = {"GeneratorEnqueuer", "OrderedEnqueuer", "Processes", "Ray", "prefetch", "imap"}
    assert listed - roles == options - work
