"""The design page shows the true path of a batch: one is profiled for each backend."""

import json
import logging
import os
import re
import sys
import threading
from pathlib import Path

import pytest
from conftest import IS_RAY
from helpers import LIMIT, wait_until

import enqueuer
from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Processes
from enqueuer.enqueuers.enqueuer import core_of

PACKAGE = Path(enqueuer.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "design.rst"
BACKENDS = {"threads": "thread", "processes": Processes(start_method="fork"), "Ray": "ray"}
AT = 4  # the batch that is profiled; at the first ones a start shows, too
STREAM = "backends/ray/actor.py"


class Files:
    """The files of the package whose functions are called, in the order of their first call.

    Several threads may have it as their profiler, also before `is_on`.
    """

    def __init__(self):
        self.seen = {}
        self.is_on = False

    def __call__(self, frame, event, argument):
        path = frame.f_code.co_filename
        if event == "call" and self.is_on and path.startswith(f"{PACKAGE}{os.sep}"):
            self.seen[Path(path).relative_to(PACKAGE).as_posix()] = None

    def start(self):
        self.is_on = True
        sys.setprofile(self)

    def stop(self):
        sys.setprofile(None)
        self.is_on = False


def profile_stream(files):
    """Profile the thread of an actor in which Ray sends its packets.

    No Python code starts this thread, and only what a packet is pickled with runs in it.
    """

    class Record(logging.LogRecord):
        def __copy__(self):
            return self

        def __reduce__(self):
            sys.setprofile(files)
            return logging.makeLogRecord, (self.__dict__,)

    logging.setLogRecordFactory(Record)
    logging.getLogger("path").warning("pickled in the thread of the stream")
    logging.setLogRecordFactory(logging.LogRecord)


class Work:
    """A source, or a map, whose worker waits with one batch until the loop waits for it."""

    def __init__(self, path, gate, is_actor):
        self.path, self.gate, self.is_actor, self.files = path, gate, is_actor, Files()

    def __call__(self, shard):
        for number in range(3 * AT):
            self.made(number)
            yield number

    def made(self, number):
        if number == 0 and self.is_actor:
            profile_stream(self.files)
        if number == AT:
            open(self.gate).close()
            self.files.start()
        elif number == AT + 1:
            if self.is_actor:
                wait_until(lambda: STREAM in self.files.seen)
            self.files.stop()
            self.path.write_text(json.dumps(list(self.files.seen)))
        return number


def path_of(kind, backend, tmp_path):
    """Return the files that one batch passes: in the worker, and in the process of the loop."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    work = Work(tmp_path / "files.json", gate, backend == "ray")
    options = dict(backend=backend, max_queue_size=1)
    if kind == "batch":
        made = GeneratorEnqueuer(work, **options)
    else:
        made = OrderedEnqueuer(range(3 * AT), work.made, **options)
    files = Files()
    if backend == "ray":
        threading.setprofile(files)  # for the thread that receives what the actor sends
    try:
        with made:
            batches = iter(made)
            assert [next(batches) for _ in range(AT)] == list(range(AT))
            threading.setprofile(None)

            def open_gate():
                wait_until(lambda: core_of(made).run.meter.since)
                open(gate, "w").close()

            opening = threading.Thread(target=open_gate)
            opening.start()
            files.start()
            assert next(batches) == AT
            files.stop()
            opening.join(LIMIT)
            next(batches)
            wait_until(work.path.exists)
            wait_until(work.path.read_text)
    finally:
        threading.setprofile(None)
        files.stop()
    return json.loads(work.path.read_text()), list(files.seen)


def shown(kind, backend):
    """Return the files of the page's two lists; those in parentheses are not always passed."""
    page = PAGE.read_text(encoding="utf-8")
    section = page.split(f"The path of a {kind}\n", 1)[1].split("\n---", 1)[0]
    found = re.search(rf"With {backend}:\n\n- worker: (.*)\n- loop: (.*)\n", section)
    return [re.findall(r"(\(?)`([\w/]+\.py)`", line) for line in found.groups()]


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
def test_the_design_page_shows_the_files_that_a_batch_passes(kind, backend, tmp_path):
    passed = path_of(kind, BACKENDS[backend], tmp_path)
    for files, listed in zip(passed, shown(kind, backend), strict=True):
        assert {name for mark, name in listed if not mark} <= set(files)
        assert set(files) <= {name for _, name in listed}


@pytest.mark.parametrize("kind", ["batch", "task"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_files_that_the_design_page_shows_exist(kind, backend):
    names = {name for listed in shown(kind, backend) for _, name in listed}
    assert {name for name in names if not (PACKAGE / name).exists()} == set()
