"""The file of a timeline, and its rows, which may still write to it."""

import json
import os
import signal

import pytest

from enqueuer.common import text
from enqueuer.monitoring import trace


@pytest.fixture
def place(tmp_path):
    return trace.begin(str(tmp_path / "run.json"), last=None)


def row(place):
    """Return a row that does not give the process its name."""
    return trace.Row(place, 1, "row", 0)


def events(place):
    """Return what was recorded, but for the names."""
    with open(place.path) as file:
        return [event for event in json.load(file) if event["ph"] != "M"]


def test_what_several_write_is_one_list(place):
    writers = [row(place) for _ in range(3)]
    for number in range(300):
        writers[number % 3].instant(str(number), {})
        if number % 7 == 0:
            writers[number % 3].flush()
    for writer in writers[1:]:
        writer.close()
    writers[0].end()
    names = [event["name"] for event in events(place)]
    assert sorted(names[:-1], key=int) == [str(number) for number in range(300)]
    assert names[-1] == "end"


def test_spans_lie_beside_each_other_also_if_one_was_told_late(place, monkeypatch):
    times = iter([1000, *range(5000, 9000)])
    monkeypatch.setattr(trace, "clock", lambda: next(times))
    writer = row(place)
    for until in (3000, 2000, 4000):
        writer.spent("work", {"until": until}, until)
    writer.spent("nothing", None, 5000)
    writer.spent("wait", {}, 6000)
    writer.end()
    spans = [(event["name"], event["ts"], event["dur"]) for event in events(place)[:-1]]
    assert spans == [("work", 1, 2), ("work", 3, 0), ("work", 3, 1), ("wait", 5, 1)]


def test_what_comes_half_a_second_later_is_written_at_once(place, monkeypatch):
    now = 0
    monkeypatch.setattr(trace, "clock", lambda: now)
    writer = row(place)
    writer.instant("0", {})
    begun = os.path.getsize(place.path)
    now = trace.FLUSH_NS
    writer.instant("1", {})
    assert os.path.getsize(place.path) == begun
    now += 1
    writer.instant("2", {})
    assert os.path.getsize(place.path) > begun
    writer.close()


def test_nothing_comes_after_the_end(place):
    late, writer = row(place), row(place)
    # As by a thread that hangs and continues after the stop.
    late.instant("late", {})
    writer.end()
    late.close()
    assert [event["name"] for event in events(place)] == ["end"]


def test_a_forked_copy_writes_nothing(place):
    writer = row(place)
    writer.instant("once", {})
    pid = os.fork()
    if pid == 0:
        try:
            writer.flush()
            writer.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    writer.end()
    assert [event["name"] for event in events(place)] == ["once", "end"]


def test_another_file_of_the_same_name_is_left_alone(place, caplog):
    writer = row(place)
    writer.close()
    other = trace.begin(place.path, last=None)
    assert other.file != place.file or other == place
    stranger = row(trace.TraceTarget(place.path, (0, 0), os.getpid()))
    assert "another file has taken its name" in caplog.text
    stranger.instant("0", {})
    stranger.close()
    with open(place.path) as file:
        assert len(file.readlines()) == 2


def test_a_file_that_another_program_has_ended_is_begun_anew(place):
    with open(place.path, "a") as file:
        file.write("{torn")
    again = trace.begin(place.path, last=place)
    row(again).end()
    assert [event["name"] for event in events(again)] == ["end"]


def test_an_error_whose_text_fails_has_a_name():
    class Silent(Exception):
        def __repr__(self):
            raise RuntimeError

    assert trace.text_of(Silent()) == "(its text is not available)"
    assert trace.text_of(ValueError("x" * 1000)).endswith("x...")


@pytest.fixture
def ctrl_c():
    """Let SIGINT raise; a shell has it ignored in what it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("text_of", [trace.text_of, text.str_of])
def test_ctrl_c_while_an_error_gives_its_text_is_not_lost(text_of):
    class Slow(Exception):
        def __str__(self):
            signal.raise_signal(signal.SIGINT)
            return "slow"

        __repr__ = __str__

    with pytest.raises(KeyboardInterrupt):
        text_of(Slow())
