"""The file of a timeline, and the writers that may still write to it."""

import json
import os
import signal
import sys

import pytest

from enqueuer.backends import timeline
from enqueuer.common import text
from enqueuer.monitoring import trace_file


@pytest.fixture
def place(tmp_path):
    return trace_file.begin(str(tmp_path / "run.json"), run=0, last=None)


def events(place):
    with open(place.path) as file:
        return json.load(file)[1:]


def line(number):
    return json.dumps({"name": str(number), "ph": "i", "pid": 1})


def test_what_several_write_is_one_list(place):
    writers = [trace_file.Lines(place) for _ in range(3)]
    for number in range(300):
        writers[number % 3].add(line(number), now=number)
        if number % 7 == 0:
            writers[number % 3].flush()
    for writer in writers[1:]:
        writer.close()
    writers[0].end(line("last"))
    writers[0].close()
    names = [event["name"] for event in events(place)]
    assert sorted(names[:-1], key=int) == [str(number) for number in range(300)]
    assert names[-1] == "last"


def test_what_comes_half_a_second_later_is_written_at_once(place):
    writer = trace_file.Lines(place)
    writer.add(line(0), now=0)
    begun = os.path.getsize(place.path)
    writer.add(line(1), now=trace_file.FLUSH_NS)
    assert os.path.getsize(place.path) == begun
    writer.add(line(2), now=trace_file.FLUSH_NS + 1)
    assert os.path.getsize(place.path) > begun
    writer.close()


def test_nothing_comes_after_the_end(place):
    late, writer = trace_file.Lines(place), trace_file.Lines(place)
    # As by a thread that hangs and continues after the stop.
    late.add(line("late"), now=0)
    writer.end(line("last"))
    writer.close()
    late.close()
    assert [event["name"] for event in events(place)] == ["last"]


def test_a_forked_copy_writes_nothing(place):
    writer = trace_file.Lines(place)
    writer.add(line("once"), now=0)
    pid = os.fork()
    if pid == 0:
        try:
            writer.flush()
            writer.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    writer.end(line("last"))
    writer.close()
    assert [event["name"] for event in events(place)] == ["once", "last"]


def test_another_file_of_the_same_name_is_left_alone(place):
    writer = trace_file.Lines(place)
    writer.close()
    other = trace_file.begin(place.path, run=0, last=None)
    assert other.file != place.file or other == place
    stranger = trace_file.Lines(trace_file.TraceTarget(place.path, (0, 0), 0, os.getpid()))
    assert stranger.trouble is not None
    stranger.add(line(0), now=0)
    stranger.close()
    with open(place.path) as file:
        assert len(file.readlines()) == 2


def test_a_file_that_another_program_has_ended_is_begun_anew(place):
    with open(place.path, "a") as file:
        file.write(line("torn")[:5])
    again = trace_file.begin(place.path, run=1, last=place.file)
    writer = trace_file.Lines(again)
    writer.end(line("last"))
    writer.close()
    assert [event["name"] for event in events(again)] == ["last"]


def test_an_error_whose_text_fails_has_a_name():
    class Silent(Exception):
        def __repr__(self):
            raise RuntimeError

    assert trace_file.text_of(Silent()) == "Silent"
    assert trace_file.text_of(ValueError("x" * 1000)).endswith("x...")


@pytest.mark.parametrize("text_of", [trace_file.text_of, text.str_of])
def test_ctrl_c_while_an_error_gives_its_text_is_not_lost(text_of):
    class Slow(Exception):
        def __str__(self):
            signal.raise_signal(signal.SIGINT)
            return "slow"

        __repr__ = __str__

    with pytest.raises(KeyboardInterrupt):
        text_of(Slow())


@pytest.mark.parametrize("nth", range(3))
def test_what_another_thread_takes_just_then_is_not_promised(nth):
    ready = timeline.RecordedItems(["batch"])
    returned = []

    # The other thread gets the interpreter after a call.
    def other_thread(frame, event, function):
        if event == "c_return":
            returned.append(function)
            if len(returned) == nth + 1:
                ready.clear()

    sys.setprofile(other_thread)
    try:
        is_promised = bool(ready)
    finally:
        sys.setprofile(None)
    assert is_promised == (len(ready) > 0)
