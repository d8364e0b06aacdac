"""What faulthandler writes, read in pieces; what is made of it."""

import faulthandler
import tempfile
import threading

import pytest

from enqueuer.backends import stall
from enqueuer.backends.pool import WorkerSnapshot
from enqueuer.backends.shard_schedule import ShardSchedule
from enqueuer.backends.stall import Wait, WaitLimits, WaitSnapshot, parse, report
from enqueuer.backends.task_schedule import TaskSchedule
from enqueuer.order.messages import Epoch, Start, Ticket
from enqueuer.order.sequence import ShardOrder, TaskOrder
from enqueuer.workers import loop

WORKER = loop.__file__
ANSWER = f"""
Stack (most recent call first):
  File "/data/train.py", line 12 in load
  File "/data/train.py", line 30 in batches
  File "{WORKER}", line 270 in advance
  File "/data/train.py", line 99 in <module>
"""


def test_an_answer_is_whole_once_its_frames_reach_the_worker():
    seen = [parse(ANSWER[:end]) for end in range(len(ANSWER) + 1)]
    first = next(end for end, (_, is_whole) in enumerate(seen) if is_whole)
    assert ANSWER[:first].endswith(f'"{WORKER}", line 270 in advance\n')
    assert all(is_whole for _, is_whole in seen[first:])
    stack, _ = seen[first]
    assert [frame.name for frame in stack] == ["advance", "batches", "load"]


def test_what_is_left_of_an_earlier_answer_is_passed_over():
    stack, is_whole = parse(ANSWER[-60:] + ANSWER[:60])
    assert ([frame.name for frame in stack], is_whole) == ([], False)


def test_an_answer_that_faulthandler_has_cut_is_whole():
    text = 'Stack (most recent call first):\n  File "a.py", line ??? in f\n  ...\n'
    stack, is_whole = parse(text)
    assert (stack[0].name, is_whole) == ("f", True)


def test_what_faulthandler_of_this_python_writes_is_understood():
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=False)
        file.seek(0)
        stack, _ = parse(file.read().decode())
    assert stack[-1].name == "test_what_faulthandler_of_this_python_writes_is_understood"
    assert stack[-1].line == "faulthandler.dump_traceback(file, all_threads=False)"


def test_a_report_shows_the_frames_within_the_worker():
    stack, _ = parse(ANSWER)
    view = WaitSnapshot("shard 0, item 3", 1, [WorkerSnapshot("worker 0 (thread)", (0, 2), stack)])
    assert report(2.5, view, epoch=4) == (
        "no batch came for 2.5 s: the loop waits for shard 0, item 3, of epoch 4\n"
        "(1 finished batch waits behind it)\n"
        "worker 0 (thread), shards 0, 2, is here:\n"
        '  File "/data/train.py", line 30, in batches\n'
        '  File "/data/train.py", line 12, in load'
    )


def test_what_is_awaited_is_named():
    epoch = Epoch(0, dict.fromkeys(range(2), Start(5)))
    shards = ShardSchedule([], {}, 1)
    assert shards.awaited(ShardOrder(epoch, range(2), ordered=True)) == "shard 0, item 5"
    assert (
        shards.awaited(ShardOrder(epoch, range(2), ordered=False)) == "the next item of any shard"
    )
    schedule = TaskSchedule([], None, 1, measure=False)
    tasks = TaskOrder(Epoch(0, {0: Start(2)}), 10, ordered=True)
    assert schedule.awaited(tasks) == "task 2"
    schedule.results.tickets[12] = Ticket(12, 0, (4, 5))
    assert schedule.awaited(tasks) == "task 2 (elements 4, 5)"
    unordered = TaskOrder(Epoch(0, {0: Start(2)}), 10, ordered=False)
    assert schedule.awaited(unordered) == "the result of any task"


def test_a_thread_that_has_ended_has_no_stack():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert stall.stacks_of_threads([thread]) == [None]


@pytest.mark.parametrize(
    ("warn_s", "timeout_s", "waited_s", "next_s"),
    [
        (60.0, None, 0.0, 60.0),
        (60.0, 90.0, 0.0, 60.0),
        (60.0, 30.0, 0.0, 30.0),
        (None, 30.0, 10.0, 20.0),
        (None, None, 0.0, None),
    ],
)
def test_a_wait_is_cut_at_the_first_limit(monkeypatch, warn_s, timeout_s, waited_s, next_s):
    monkeypatch.setattr(stall.time, "monotonic", lambda: 1000.0)
    until = Wait(WaitLimits(warn_s, timeout_s), waited_s).until
    assert until == (None if next_s is None else 1000.0 + next_s)
