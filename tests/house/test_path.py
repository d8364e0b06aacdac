"""The design page shows the true path of a batch: one is profiled for each backend."""

import json
import os
import re
import sys
import threading
from pathlib import Path

import pytest
from helpers import LIMIT, wait_until

import enqueuer
from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Processes
from enqueuer.enqueuers.enqueuer import core_of

PACKAGE = Path(enqueuer.__file__).parent
PAGE = PACKAGE.parent / "docs" / "design.rst"
BACKENDS = {"threads": "thread", "processes": Processes(start_method="fork")}
AT = 4  # the batch that is profiled; at the first ones a start shows, too


class Files:
    """The files of the package whose functions are called, in the order of their first call."""

    def __init__(self):
        self.seen = {}

    def __call__(self, frame, event, argument):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{PACKAGE}{os.sep}"):
            self.seen[Path(path).relative_to(PACKAGE).as_posix()] = None


def stop_profiling():
    sys.setprofile(None)


class Work:
    """A source, or a map, whose worker waits with one batch until the loop waits for it."""

    def __init__(self, path, gate):
        self.path, self.gate, self.files = path, gate, Files()

    def __call__(self, shard):
        for number in range(3 * AT):
            self.made(number)
            yield number

    def made(self, number):
        if number == AT:
            os.read(self.gate, 1)
            sys.setprofile(self.files)
        elif number == AT + 1:
            stop_profiling()
            self.path.write_text(json.dumps(list(self.files.seen)))
        return number


def path_of(kind, backend, tmp_path):
    """Return the files that one batch passes: in the worker, and in the thread of the loop."""
    read, write = os.pipe()
    work = Work(tmp_path / "files.json", read)
    options = dict(backend=backend, max_queue_size=1)
    if kind == "batch":
        made = GeneratorEnqueuer(work, **options)
    else:
        made = OrderedEnqueuer(range(3 * AT), work.made, **options)
    files = Files()
    try:
        with made:
            batches = iter(made)
            assert [next(batches) for _ in range(AT)] == list(range(AT))

            def open_gate():
                wait_until(lambda: core_of(made).run.meter.since)
                os.write(write, b"x")

            opening = threading.Thread(target=open_gate)
            opening.start()
            sys.setprofile(files)
            assert next(batches) == AT
            stop_profiling()
            opening.join(LIMIT)
            next(batches)
            wait_until(work.path.exists)
            wait_until(work.path.read_text)
    finally:
        stop_profiling()
        os.close(read)
        os.close(write)
    return json.loads(work.path.read_text()), list(files.seen)


def shown(kind, backend):
    """Return the files of the page's two lists; those in parentheses are not always passed."""
    page = PAGE.read_text(encoding="utf-8")
    section = page.split(f"The path of a {kind}\n", 1)[1].split("\n---", 1)[0]
    found = re.search(rf"With {backend}:\n\n- worker: (.*)\n- loop: (.*)\n", section)
    return [re.findall(r"(\(?)`([\w/]+\.py)`", line) for line in found.groups()]


@pytest.mark.parametrize("kind", ["batch", "task"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_design_page_shows_the_files_that_a_batch_passes(kind, backend, tmp_path):
    passed = path_of(kind, BACKENDS[backend], tmp_path)
    for files, listed in zip(passed, shown(kind, backend), strict=True):
        assert {name for mark, name in listed if not mark} <= set(files)
        assert set(files) <= {name for _, name in listed}
