"""A batch takes a short path, which the design page shows: one is profiled for each backend."""

import json
import logging
import os
import re
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import IS_RAY
from helpers import LIMIT, wait_until

import enqueuer
from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Processes
from enqueuer.backends.ray.actor import RayWorker
from enqueuer.enqueuers.enqueuer import core_of

PACKAGE = Path(enqueuer.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "design.rst"
BACKENDS = {"threads": "thread", "processes": Processes(start_method="fork"), "Ray": "ray"}
AT = 20  # the batch that is profiled; at the first ones a start shows, too
STREAM = "backends/ray/actor.py", RayWorker.packets.__code__.co_firstlineno
LARGE = 100_000  # numbers, 800 kB
# Files, and functions, that may be passed on both sides.
LIMITS = {
    ("batch", "threads"): (12, 56),
    ("batch", "processes"): (16, 107),
    ("task", "threads"): (14, 79),
    ("task", "processes"): (17, 113),
}


class Calls:
    """The functions of the package that are called: the file and the line of each.

    Several threads may have it as their profiler, also before `is_on`.
    """

    def __init__(self):
        self.seen = {}
        self.is_on = False

    def __call__(self, frame, event, argument):
        path, line = frame.f_code.co_filename, frame.f_code.co_firstlineno
        if event == "call" and self.is_on and path.startswith(f"{PACKAGE}{os.sep}"):
            self.seen[Path(path).relative_to(PACKAGE).as_posix(), line] = None

    @property
    def files(self):
        return {file for file, _ in list(self.seen)}

    def start(self):
        self.is_on = True
        sys.setprofile(self)

    def stop(self):
        sys.setprofile(None)
        self.is_on = False


def profile_stream(calls):
    """Profile the thread of an actor in which Ray sends its packets.

    No Python code starts this thread, and only what a packet is pickled with runs in it.
    """

    class Record(logging.LogRecord):
        def __copy__(self):
            return self

        def __reduce__(self):
            sys.setprofile(calls)
            return logging.makeLogRecord, (self.__dict__,)

    logging.setLogRecordFactory(Record)
    logging.getLogger("path").warning("pickled in the thread of the stream")
    logging.setLogRecordFactory(logging.LogRecord)


class Work:
    """A source, or a map, whose worker waits with one batch until the loop waits for it."""

    def __init__(self, path, gate, is_actor, is_large):
        self.path, self.gate, self.is_actor, self.calls = path, gate, is_actor, Calls()
        self.is_large = is_large

    def __call__(self, shard):
        for number in range(2 * AT):
            yield self.made(number)

    def made(self, number):
        value = np.full(LARGE, number) if self.is_large else number
        if number == 0 and self.is_actor:
            profile_stream(self.calls)
        if number == AT:
            open(self.gate).close()
            self.calls.start()
        elif number == AT + 1:
            if self.is_actor:
                wait_until(lambda: STREAM in self.calls.seen)
            self.calls.stop()
            self.path.write_text(json.dumps(list(self.calls.seen)))
        return value


def path_of(kind, backend, is_large, tmp_path):
    """Return the functions that one batch passes, in the worker and in the process of the loop."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    work = Work(tmp_path / "calls.json", gate, backend == "ray", is_large)
    options = dict(backend=backend, max_queue_size=1)
    if kind == "batch":
        made = GeneratorEnqueuer(work, **options)
    else:
        made = OrderedEnqueuer(range(2 * AT), work.made, **options)
    calls = Calls()
    if backend == "ray":
        threading.setprofile(calls)  # for the thread that receives what the actor sends
    try:
        with made:
            batches = iter(made)
            for _ in range(AT):
                next(batches)
            threading.setprofile(None)

            def open_gate():
                wait_until(lambda: core_of(made).run.meter.since)
                open(gate, "w").close()

            opening = threading.Thread(target=open_gate)
            opening.start()
            calls.start()
            next(batches)
            calls.stop()
            opening.join(LIMIT)
            next(batches)
            wait_until(work.path.exists)
            wait_until(work.path.read_text)
    finally:
        threading.setprofile(None)
        calls.stop()
    return {*map(tuple, json.loads(work.path.read_text())), *calls.seen}


def shown(kind, backend):
    """Return the stops of a path on the page: a file and a sentence each."""
    page = PAGE.read_text(encoding="utf-8")
    section = page.split(f"The path of a {kind}\n", 1)[1].split("\n---", 1)[0]
    lists = re.findall(rf"(?:Everywhere|With {backend}):\n\n((?:- .*\n)+)", section)
    return re.findall(r"^- `([\w/]+\.py)`: \S.*\.$", "".join(lists), re.MULTILINE)


@pytest.mark.parametrize("kind", ["batch", "task"])
@pytest.mark.parametrize(
    "backend",
    [
        "threads",
        "processes",
        pytest.param(
            "Ray", id="ray", marks=pytest.mark.skipif(not IS_RAY, reason="ENQUEUER_RAY=1 runs it")
        ),
    ],
)
def test_the_path_of_a_batch_is_short_and_the_design_page_shows_it(kind, backend, tmp_path):
    is_large = kind == "batch" and backend != "Ray"
    passed = path_of(kind, BACKENDS[backend], is_large, tmp_path)
    files = {file for file, _ in passed}
    assert files <= set(shown(kind, backend))
    if backend != "Ray":
        most_files, most_functions = LIMITS[kind, backend]
        assert len(files) <= most_files
        assert len(passed) <= most_functions


@pytest.mark.parametrize("kind", ["batch", "task"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_path_on_the_design_page_has_no_superfluous_stop(kind, backend):
    stops = shown(kind, backend)
    assert len(stops) == len(set(stops))
    assert {name for name in stops if not (PACKAGE / name).exists()} == set()
    if backend != "Ray":
        assert len(stops) <= LIMITS[kind, backend][0]
