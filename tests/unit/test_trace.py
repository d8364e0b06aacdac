"""The file of a timeline, and the writers that may still write to it."""

import json
import os
import signal

import pytest

from enqueuer.common import text
from enqueuer.monitoring import trace_file


@pytest.fixture
def place(tmp_path):
    return trace_file.begin(str(tmp_path / "run.json"), last=None)


def events(place):
    with open(place.path) as file:
        return json.load(file)[1:]


def test_what_several_write_is_one_list(place):
    writers = [trace_file.Track(place, 1) for _ in range(3)]
    for number in range(300):
        writers[number % 3].instant(str(number), number)
        if number % 7 == 0:
            writers[number % 3].flush()
    for writer in writers[1:]:
        writer.close()
    writers[0].end(0)
    writers[0].close()
    names = [event["name"] for event in events(place)]
    assert sorted(names[:-1], key=int) == [str(number) for number in range(300)]
    assert names[-1] == "end"


def test_what_comes_half_a_second_later_is_written_at_once(place):
    writer = trace_file.Track(place, 1)
    writer.instant("0", 0)
    begun = os.path.getsize(place.path)
    writer.instant("1", trace_file.FLUSH_NS)
    assert os.path.getsize(place.path) == begun
    writer.instant("2", trace_file.FLUSH_NS + 1)
    assert os.path.getsize(place.path) > begun
    writer.close()


def test_nothing_comes_after_the_end(place):
    late, writer = trace_file.Track(place, 1), trace_file.Track(place, 1)
    # As by a thread that hangs and continues after the stop.
    late.instant("late", 0)
    writer.end(0)
    writer.close()
    late.close()
    assert [event["name"] for event in events(place)] == ["end"]


def test_a_forked_copy_writes_nothing(place):
    writer = trace_file.Track(place, 1)
    writer.instant("once", 0)
    pid = os.fork()
    if pid == 0:
        try:
            writer.flush()
            writer.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    writer.end(0)
    writer.close()
    assert [event["name"] for event in events(place)] == ["once", "end"]


def test_another_file_of_the_same_name_is_left_alone(place):
    writer = trace_file.Track(place, 1)
    writer.close()
    other = trace_file.begin(place.path, last=None)
    assert other.file != place.file or other == place
    stranger = trace_file.Track(trace_file.TraceTarget(place.path, (0, 0), 0, os.getpid()), 1)
    assert stranger.trouble is not None
    stranger.instant("0", 0)
    stranger.close()
    with open(place.path) as file:
        assert len(file.readlines()) == 2


def test_a_file_that_another_program_has_ended_is_begun_anew(place):
    with open(place.path, "a") as file:
        file.write("{torn")
    again = trace_file.begin(place.path, last=place)
    writer = trace_file.Track(again, 1)
    writer.end(0)
    writer.close()
    assert [event["name"] for event in events(again)] == ["end"]


def test_an_error_whose_text_fails_has_a_name():
    class Silent(Exception):
        def __repr__(self):
            raise RuntimeError

    assert trace_file.text_of(Silent()) == "(its text is not available)"
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
