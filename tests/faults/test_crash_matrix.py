"""The crash matrix: what goes wrong x where. What was sent before arrives, then the error."""

import re
import signal
import time

import helpers
import pytest
from helpers import METHODS, CrashesWhenLoaded, Crashing

from enqueuer import (
    GeneratorEnqueuer,
    ItemNotLoadable,
    ItemNotPicklable,
    Processes,
    WorkerDied,
    WorkerError,
)

DEATHS = [
    (helpers.kill_self, -signal.SIGKILL, "was killed by SIGKILL"),
    (helpers.segfault, -signal.SIGSEGV, "was killed by SIGSEGV"),
    (helpers.abort, -signal.SIGABRT, "was killed by SIGABRT"),
    (helpers.exit_hard, 0, "ended with exit code 0"),
    (helpers.exit_hard_three, 3, "ended with exit code 3"),
]
FAILURES = [
    (helpers.raise_value_error, ValueError, "bad value"),
    (helpers.raise_two_arguments, helpers.TwoArguments, "1 and two"),
    (helpers.exit_zero, WorkerError, "SystemExit"),
    (helpers.interrupt, WorkerError, "KeyboardInterrupt"),
    (helpers.recurse, RecursionError, "maximum recursion depth"),
]
PLACES = {"load": 0, "open": 0, "first": 0, "third": 2, "pickling": 2, "finally": 3}  # delivered


def rows(table):
    """Yield (start method, row, place): all of them, but for spawn, which is slow, each once."""
    for method in METHODS:
        for at, row in enumerate(table):
            for place_at, place in enumerate(PLACES):
                if method == "fork" and place == "load":
                    continue  # a forked worker has its source already
                if method != "spawn" or place_at % len(table) == at:
                    name = f"{method}-{row[0].__name__}-{place}"
                    yield pytest.param(method, *row, place, id=name)


def run(source, method, error):
    """Return what arrives before `error`, and the error."""
    delivered = []
    with GeneratorEnqueuer(source, backend=Processes(start_method=method)) as enqueuer:
        with pytest.raises(error) as caught:
            for item in enqueuer:
                delivered.append(item)  # it raises
        caught.value.seen_at = time.monotonic()
    return delivered, caught.value


@pytest.mark.parametrize(("method", "act", "exitcode", "says", "place"), list(rows(DEATHS)))
@helpers.retry_if_disturbed
def test_a_death_names_worker_cause_and_item(method, act, exitcode, says, place, tmp_path):
    mark = tmp_path / "mark"
    delivered, error = run(Crashing(place, act, mark), method, WorkerDied)
    assert delivered == [0, 1, 2][: PLACES[place]]
    assert says in str(error) and error.exitcode == exitcode
    assert re.match(rf"worker 0 \(process \d+, {method}\) ", str(error))
    assert error.worker == 0
    assert error.__notes__[-1].endswith(f"shard 0, item {PLACES[place]}")
    helpers.check_prompt(
        error.seen_at - float(mark.read_text()), 1
    )  # 0.1 s, with nothing else to do


@pytest.mark.parametrize(("method", "act", "kind", "says", "place"), list(rows(FAILURES)))
def test_an_error_arrives_wherever_it_was_raised(method, act, kind, says, place, tmp_path):
    if place == "pickling" and issubclass(kind, Exception) and kind is not WorkerError:
        kind = ItemNotPicklable  # which says what happened, and names the part of the item
    delivered, error = run(Crashing(place, act, tmp_path / "mark"), method, kind)
    assert delivered == [0, 1, 2][: PLACES[place]]
    assert says in str(error)
    assert error.__notes__[-1].endswith(f"shard 0, item {PLACES[place]}")


@pytest.mark.parametrize("act", [helpers.raise_value_error, helpers.recurse])
def test_an_item_that_cannot_be_loaded_says_so(process, act):
    def source():
        yield 1
        yield CrashesWhenLoaded(act)
        yield 2

    delivered = []
    with GeneratorEnqueuer(source, **process) as enqueuer:
        with pytest.raises(ItemNotLoadable, match="could not be loaded here") as caught:
            delivered.extend(enqueuer)
    assert type(caught.value.__cause__) in (ValueError, RecursionError)
    assert caught.value.__notes__[-1].endswith("shard 0, item 1")


@pytest.mark.parametrize(
    "act",
    [helpers.kill_self, helpers.exit_hard, helpers.raise_value_error, helpers.exit_zero],
    ids=lambda act: act.__name__,
)
@helpers.retry_if_disturbed
def test_a_crash_while_stopping_is_nobodys_error(process, act, tmp_path):
    source = Crashing("finally", act, tmp_path / "mark")
    with GeneratorEnqueuer(source, max_queue_size=1, workers=2, **process) as enqueuer:
        assert next(iter(enqueuer)) == 0
        before = time.monotonic()
        enqueuer.stop()
        helpers.check_prompt(time.monotonic() - before, 1)
