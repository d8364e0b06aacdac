"""The timeline: what is in it, that viewers can read it, and that it changes nothing."""

import copy
import itertools
import json
import os
import pickle
import signal
import threading
import time
from collections import defaultdict

import numpy as np
import pytest
from helpers import (
    LIMIT,
    DiesOnce,
    counting,
    run_in_threads,
    run_program,
    twelve,
    wait_until,
)

import enqueuer
from enqueuer import (
    GeneratorEnqueuer,
    OrderedEnqueuer,
    Processes,
    Ray,
)
from enqueuer.enqueuers.enqueuer import core_of, of_rank
from enqueuer.monitoring import trace as trace_module

SPANS = {"next", "send", "wait", "work", "read"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.json"


def read(path):
    """Return the events of a trace that was ended, which is JSON in the strict sense."""
    events = json.loads(path.read_text())
    check_rules(events)
    return events


def named(events, name, **args):
    wanted = args.items()
    return [e for e in events if e["name"] == name and wanted <= e.get("args", {}).items()]


def rows(events):
    """Return the name of each row."""
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in named(events, "thread_name")}


def row_of(events, event):
    return rows(events)[event["pid"], event["tid"]]


def check_rules(events):
    """Fail unless viewers can make sense of it: spans of a row lie beside each other."""
    by_row = defaultdict(list)
    for event in events:
        assert isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["name"] in SPANS
            assert type(event["ts"]) is type(event["dur"]) is int
            assert event["dur"] >= 0
            by_row[event["pid"], event["tid"]].append(event)
        elif event["ph"] != "M":
            assert type(event["ts"]) is int
    assert set(by_row) <= set(rows(events))
    for spans in by_row.values():
        for one, following in itertools.pairwise(spans):
            assert one["ts"] + one["dur"] <= following["ts"], following


def double(number):
    return 2 * number


def fail_at_three(number):
    if number == 3:
        raise KeyError("three")
    return number


@pytest.mark.ahead
def test_each_item_is_made_sent_and_taken(backend, path):
    with GeneratorEnqueuer(twelve, workers=2, trace=path, max_queue_size=3, **backend) as enqueuer:
        assert list(enqueuer) == list(range(12))
    events = read(path)
    items = {(shard, item) for shard in range(2) for item in range(6)}
    for name in ("next", "send", "work"):
        found = [e["args"] for e in named(events, name, epoch=0)]
        assert {(a["shard"], a["item"]) for a in found if "end" not in a} == items, name
    assert {name[:8] for name in rows(events).values()} == {"the loop", "worker 0", "worker 1"}
    for event in named(events, "next", shard=1):
        assert row_of(events, event).startswith("worker 1")
    assert named(events, "queue")
    assert [e["name"] for e in events if e["name"] in ("bottleneck", "end")] == [
        "bottleneck",
        "end",
    ]


def test_processes_are_named_by_their_pids(process, path):
    with GeneratorEnqueuer(twelve, trace=path, **process) as enqueuer:
        list(enqueuer)
    events = read(path)
    names = [e["args"]["name"] for e in named(events, "process_name")]
    pid = next(e["pid"] for e in named(events, "next"))
    if process["backend"].__class__.__name__ == "Ray" and names == ["the loop"]:
        pytest.skip("Ray runs the actor's code in a thread, whose row alone has a name")
    assert names == ["the loop", "worker 0"]
    assert {e["pid"] for e in named(events, "process_name")} == {os.getpid(), pid}


def test_tasks_are_told_by_their_elements(backend, path):
    with OrderedEnqueuer(range(9), double, batch_size=2, workers=2, trace=path, **backend) as tasks:
        assert len(list(tasks)) == 5
        assert len(list(tasks)) == 5
    events = read(path)
    for epoch in range(2):
        made = [e["args"] for e in named(events, "next", epoch=epoch) if "task" in e["args"]]
        assert sorted(a["element"] for a in made) == [0, 2, 4, 6, 8]
    assert len(named(events, "work")) == 10
    assert [e["args"] for e in named(events, "epoch")] == [{"epoch": 0}, {"epoch": 1}]


@pytest.mark.ahead
def test_a_worker_that_waits_for_room_says_so(backend, path):
    with GeneratorEnqueuer(counting, max_queue_size=1, trace=path, **backend) as enqueuer:
        batches = iter(enqueuer)
        next(batches)
        wait_until(lambda: enqueuer.queue.qsize() == 1)
        # the worker has the third in hand, or will have; what is taken makes room for it
        wait_until(lambda: is_blocked(enqueuer), LIMIT)
        next(batches)
        next(batches)
    events = read(path)
    wait = named(events, "wait", **{"for": "room"})[0]
    sends = named(events, "send")
    before = [e["args"] for e in sends if end_of(e) == wait["ts"]]
    after = [e["args"] for e in sends if e["ts"] == end_of(wait)]
    assert before[-1] == after[0]


def end_of(event):
    return event["ts"] + event["dur"]


def is_blocked(enqueuer):
    """Return whether the one worker waits for room."""
    before = enqueuer.stats().workers[0].waiting_s
    return enqueuer.stats().workers[0].waiting_s > before  # that lasts


def test_the_kind_of_workers_is_recorded(backend, path):
    with GeneratorEnqueuer(twelve, trace=path, **backend) as enqueuer:
        list(enqueuer)
    [start] = named(read(path), "start")
    match backend["backend"]:
        case Processes(start_method=method):
            assert start["args"]["backend"] == "process"
            assert start["args"]["start_method"] == method
        case Ray():
            assert start["args"]["backend"] == "ray"
        case name:
            assert start["args"]["backend"] == name == "thread"


def test_bytes_of_arrays_are_told(backend, path):
    with GeneratorEnqueuer(arrays, trace=path, **backend) as enqueuer:
        list(enqueuer)
    assert [e["args"]["bytes"] for e in named(read(path), "next")[:-1]] == [800, 1603, 4, 0]


def arrays():
    yield np.zeros(100)
    yield {"x": [np.zeros(100), np.zeros(100)], "name": b"abc"}
    yield "text"
    yield object()


def test_an_array_made_in_place_is_still_not_copied(process, path, caplog):
    with GeneratorEnqueuer(in_place, trace=path, **process) as enqueuer:
        assert [batch[0] for batch in enqueuer] == [0, 1, 2]
    assert "is copied before it is sent" not in caplog.text


def in_place():
    for number in range(3):
        array = enqueuer.empty(100_000, np.uint8)
        array[:] = number
        yield array
        del array


def test_errors_are_told_whether_raised_or_skipped(backend, path):
    options = dict(trace=path, workers=2, **backend)
    with OrderedEnqueuer(range(6), fail_at_three, on_error="skip", **options) as tasks:
        assert list(tasks) == [0, 1, 2, 4, 5]
    told = named(read(path), "skipped")
    assert [e["args"]["error"] for e in told] == ["KeyError('three')"]
    with OrderedEnqueuer(range(6), fail_at_three, **options) as tasks:
        with pytest.raises(KeyError):
            list(tasks)
    events = read(path)
    assert [e["args"]["error"] for e in named(events, "error")] == ["KeyError('three')"]
    assert named(events, "next", error="KeyError('three')")


def test_a_killed_worker_leaves_a_trace_and_its_successor_goes_on(process, path, tmp_path):
    options = dict(shards=3, max_restarts=1, trace=path, **process)
    with GeneratorEnqueuer(DiesOnce(tmp_path), **options) as enqueuer:
        assert [int(batch[0]) for batch in enqueuer] == [0, 1, 2] * 2
    events = read(path)
    assert len(named(events, "restart")) == 1
    assert sorted(rows(events).values()) == ["the loop", "worker 0", "worker 0"]


def test_another_start_goes_on_in_the_same_file(backend, path):
    enqueuer = GeneratorEnqueuer(twelve, trace=path, **backend)
    for _ in range(3):
        with enqueuer:
            list(enqueuer)
    events = read(path)
    assert len(named(events, "start")) == 3
    assert len(named(events, "end")) == 3
    assert len(named(events, "work")) == 36


@pytest.mark.ahead
def test_other_workers_go_on_in_the_same_file(backend, path):
    with GeneratorEnqueuer(twelve, shards=4, trace=path, **backend) as enqueuer:
        batches = iter(enqueuer)
        first = [next(batches) for _ in range(3)]
        enqueuer.reconfigure(workers=3)
        assert first + list(batches) == list(range(12))
    events = read(path)
    (change,) = named(events, "reconfigured")
    assert change["args"] == {"workers": 3}
    assert len(named(events, "end")) == 1
    assert {name[:8] for name in rows(events).values()} >= {"worker 0", "worker 1", "worker 2"}


def test_a_trace_is_replaced_and_any_other_file_is_not(path):
    for _ in range(2):
        with GeneratorEnqueuer(twelve, trace=path) as enqueuer:
            list(enqueuer)
    assert len(named(read(path), "start")) == 1
    for text in ('[{"id": 1}]', "data"):
        path.write_text(text)
        with pytest.raises(FileExistsError, match="no trace of an enqueuer"):
            GeneratorEnqueuer(twelve, trace=path).start()
        assert path.read_text() == text


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_is_not_followed(tmp_path, is_there):
    link, precious = tmp_path / "trace.json", tmp_path / "precious"
    if is_there:
        precious.touch()
    link.symlink_to(precious)
    with pytest.raises(FileExistsError, match="names a link"):
        GeneratorEnqueuer(twelve, trace=link).start()
    assert precious.exists() == is_there and link.is_symlink()


def test_a_folder_that_is_not_there_is_told_at_the_start(tmp_path):
    with pytest.raises(FileNotFoundError):
        GeneratorEnqueuer(twelve, trace=tmp_path / "no" / "run.json").start()


def test_copies_have_the_same_file_and_ranks_one_each(path, tmp_path):
    made = GeneratorEnqueuer(twelve, shards=4, random_seed=7, trace=path)
    for twin in (copy.copy(made), pickle.loads(pickle.dumps(made))):
        with twin:
            list(twin)
        assert len(named(read(path), "work")) == 12
        path.unlink()
    for maker in (made, OrderedEnqueuer(range(12), trace=path)):
        for rank in range(2):
            with of_rank(maker, rank, 2) as portion:
                list(portion)
        assert sorted(p.name for p in tmp_path.iterdir()) == [
            "run.0-of-2.json",
            "run.1-of-2.json",
        ]
        for file in tmp_path.iterdir():
            assert len(named(read(file), "work")) == 6
            file.unlink()
    options = dict(shards=4, rank=1, world_size=4, random_seed=7, trace=path)
    with GeneratorEnqueuer(twelve, **options) as enqueuer:
        list(enqueuer)
    assert [p.name for p in tmp_path.iterdir()] == ["run.1-of-4.json"]


def test_several_threads_that_take_make_one_row(path):
    with GeneratorEnqueuer(numbers, trace=path, max_queue_size=64) as enqueuer:
        taken = []
        run_in_threads([lambda: taken.extend(iter(enqueuer))] * 3)
    assert sorted(taken) == list(range(2000))
    read(path)


def numbers():
    yield from range(2000)


def test_what_is_dropped_at_the_stop_was_not_taken(process, path):
    with GeneratorEnqueuer(counting, trace=path, max_queue_size=64, **process) as enqueuer:
        wait_until(lambda: enqueuer.queue.qsize() == 64)
        assert next(iter(enqueuer)) == (0, 0)
    assert [e["args"]["item"] for e in named(read(path), "work")] == [0]


@pytest.mark.parametrize("options", [{"backend": "thread"}, {"backend": "process"}])
def test_no_more_than_max_queue_size_is_recorded_to_wait(options, tmp_path):
    """A finished batch that each worker may have beyond it counts as held by the worker."""
    path = tmp_path / "trace.json"
    options = {"workers": 3, "max_queue_size": 2, "trace": path, **options}
    with OrderedEnqueuer(range(20), **options) as enqueuer:
        batches = iter(enqueuer)
        next(batches)
        wait_until(lambda: sum(one.items for one in enqueuer.stats().workers) >= 5)
        list(batches)
    assert 0 < max(e["args"]["items"] for e in named(read(path), "queue")) <= 2


@pytest.mark.ahead
def test_the_counter_falls_with_each_item_that_is_taken(backend, path):
    with GeneratorEnqueuer(twelve, trace=path, max_queue_size=20, **backend) as enqueuer:
        # `queue.qsize()` would look into the queue, and so be told of.
        wait_until(lambda: enqueuer.stats().queue_size == 12)
        list(enqueuer)
    told = [e["args"]["items"] for e in named(read(path), "queue")]
    assert (told[0], told[-1]) == (11, 0)
    assert told == sorted(told, reverse=True)


def test_a_large_trace_says_so_and_ends(monkeypatch, path):
    monkeypatch.setattr(trace_module, "MAX_BYTES", 100_000)
    with GeneratorEnqueuer(numbers, trace=path) as enqueuer:
        assert sum(1 for _ in enqueuer) == 2000
    events = read(path)
    assert len(named(events, "full")) == 2  # of the worker and the loop
    assert path.stat().st_size < 100_000 + 3 * trace_module.FLUSH_BYTES
    assert events[-1]["name"] == "end"


@pytest.mark.ahead
def test_a_worker_that_cannot_record_says_so_and_works(backend, path, caplog):
    with GeneratorEnqueuer(twelve, shards=4, trace=path, **backend) as enqueuer:
        batches = iter(enqueuer)
        first = next(batches)
        path.unlink()
        enqueuer.reconfigure(workers=2)
        assert [first, *batches] == list(range(12))
    assert f"nothing more of worker 1 is recorded in the trace {path}: [Errno 2]" in caplog.text
    assert not path.exists()


@pytest.mark.thorough
def test_a_disk_that_is_full_is_a_warning_for_each_row_and_the_run_goes_on(tmp_path):
    code, out, err = run_program(
        tmp_path,
        f"""
        import logging, resource
        from enqueuer import GeneratorEnqueuer, Processes
        logging.basicConfig(format="%(levelname)s %(message)s")
        resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, 700_000))
        def numbers(): yield from range(2000)
        forked = Processes(start_method="fork", forward_logs=False)
        for name, backend in dict(thread="thread", process=forked).items():
            path = {str(tmp_path)!r} + "/" + name + ".json"
            with GeneratorEnqueuer(numbers, trace=path, backend=backend) as enqueuer:
                print(sum(enqueuer))
        """,
    )
    assert (code, out.split()) == (0, ["1999000", "1999000"])
    for row in ("the loop", "worker 0"):
        assert err.count(f"nothing more of {row} is recorded") == 2, err
    assert len(err.splitlines()) == 4


@pytest.mark.thorough
def test_what_a_killed_program_leaves_is_whole_lines(path, tmp_path):
    code, _, err = run_program(
        tmp_path,
        f"""
        import os, signal
        from enqueuer import GeneratorEnqueuer
        def numbers(): yield from range(5000)
        enqueuer = GeneratorEnqueuer(numbers, trace={str(path)!r}, backend="process")
        for number in enqueuer:
            if number == 4000:
                os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert code == -9, err
    lines = path.read_text().splitlines()
    assert lines[0] == "["
    events = [json.loads(line.rstrip(",")) for line in lines[1:]]
    check_rules(events)
    assert len(named(events, "work")) > 100


def test_a_forgotten_enqueuer_ends_its_file(path):
    for batch in GeneratorEnqueuer(counting, trace=path):
        assert batch == (0, 0)
        break
    assert read(path)[-1]["name"] == "end"


@pytest.mark.parametrize("options", [{"backend": "thread"}, {"backend": "process"}, {"workers": 0}])
def test_each_item_of_a_queue_that_is_full_is_recorded_by_itself(options, path):
    """Without a trace, several items are taken at once."""
    with OrderedEnqueuer(range(30), max_queue_size=20, trace=path, **options) as enqueuer:
        for _ in enqueuer:
            time.sleep(0.002)
    works = named(read(path), "work")
    assert [e["args"]["item"] for e in works] == list(range(30))
    assert min(e["dur"] for e in works) >= 2000


def test_a_forked_child_does_not_wait_for_a_thread_that_records(tmp_path, monkeypatch):
    enqueuer = OrderedEnqueuer(range(9), abs, backend="thread", trace=tmp_path / "run.json")
    with enqueuer:
        next(iter(enqueuer))
        held, done = threading.Event(), threading.Event()

        class Slow:
            """A limit with which the size of the file is compared while it is written."""

            def __lt__(self, size):
                held.set()
                done.wait(LIMIT)
                return False

        monkeypatch.setattr(trace_module, "MAX_BYTES", Slow())
        monkeypatch.setattr(trace_module, "FLUSH_BYTES", 0)
        trace = core_of(enqueuer).trace
        recording = threading.Thread(target=trace.instant, args=("now", {}))
        recording.start()
        held.wait(LIMIT)
        pid = os.fork()
        if not pid:
            signal.alarm(int(LIMIT))
            trace.instant("in the child", {})
            enqueuer.stop()
            os._exit(7)
        done.set()
        recording.join()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
