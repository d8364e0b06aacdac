"""Progress: a bar on a terminal, nothing on a pipe, and the same batches."""

import contextlib
import io
import itertools
import json
import subprocess
import sys
import time

import pytest
from helpers import LIMIT, Bar, needs, twelve

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, merge_states, prefetch
from enqueuer.monitoring import progress

tqdm = needs("tqdm").tqdm


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    Bar.made = []
    # The monitor of tqdm is a thread that stays.
    monkeypatch.setattr(tqdm, "monitor_interval", 0)


@pytest.fixture
def often(monkeypatch):
    """Have the statistics looked at for each batch."""
    monkeypatch.setattr(progress, "_SNAPSHOT_NS", 0)


class Terminal(io.StringIO):
    """Stands for one."""

    def isatty(self):
        return True


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_each_batch_is_shown(backend):
    with GeneratorEnqueuer(twelve, backend=backend, progress=Bar) as enqueuer:
        assert list(enqueuer) == list(range(12))
    (bar,) = Bar.made
    assert (bar.done, bar.options["total"], bar.options["desc"]) == (12, None, "epoch 0")
    assert bar.closed


def test_a_sequence_has_a_total_and_goes_on_where_it_was():
    with OrderedEnqueuer(range(10), abs, progress=Bar) as enqueuer:
        for batch in enqueuer:
            if batch == 3:
                break
        assert list(enqueuer) == [4, 5, 6, 7, 8, 9]
    assert [bar.options["total"] for bar in Bar.made] == [10, 10]
    assert [bar.options["initial"] for bar in Bar.made] == [0, 4]
    assert [bar.done for bar in Bar.made] == [4, 10]


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_after_a_break_a_bar_goes_on_where_it_was(backend):
    with GeneratorEnqueuer(twelve, progress=Bar, workers=2, backend=backend) as enqueuer:
        for _ in range(2):
            for _ in itertools.islice(enqueuer, 5):
                pass
            list(enqueuer)
    assert [bar.options["initial"] for bar in Bar.made] == [0, 5, 0, 5]


def test_after_a_merge_the_total_is_what_is_left():
    def make(rank, world_size, **options):
        ranks = dict(rank=rank, world_size=world_size)
        return OrderedEnqueuer(range(40), abs, random_seed=1, **ranks, **options)

    states = []
    for rank in range(2):
        with make(rank, 2) as enqueuer:
            batches = iter(enqueuer)
            for _ in range(5):
                next(batches)
            states.append(enqueuer.state_dict())
    enqueuer = make(0, 3, progress=Bar)
    enqueuer.load_state_dict(merge_states(states))
    with enqueuer:
        assert len(list(enqueuer)) == 10
        assert (Bar.made[-1].options["total"], Bar.made[-1].done) == (10, 10)
        # The next epoch is whole.
        assert len(list(enqueuer)) == 14
        assert (Bar.made[-1].options["total"], Bar.made[-1].done) == (14, 14)


def test_a_new_epoch_has_a_new_bar():
    with GeneratorEnqueuer(twelve, progress=Bar) as enqueuer:
        list(enqueuer)
        list(enqueuer)
    assert [bar.options["desc"] for bar in Bar.made] == ["epoch 0", "epoch 1"]


def test_a_bar_ends_with_an_error_and_with_a_break():
    def fail():
        yield 1
        raise ValueError("no")

    with GeneratorEnqueuer(fail, progress=Bar) as enqueuer, pytest.raises(ValueError, match="no"):
        list(enqueuer)
    with GeneratorEnqueuer(twelve, progress=Bar) as enqueuer:
        for _ in enqueuer:
            break
    assert all(bar.closed for bar in Bar.made)


@pytest.mark.usefixtures("often")
def test_beside_it_stand_waits_queue_and_workers():
    with GeneratorEnqueuer(twelve, workers=2, progress=Bar) as enqueuer:
        list(enqueuer)
    text = Bar.made[0].texts[-1]
    assert text.startswith("waiting ")
    assert "queue 0/10, 2 workers busy " in text


def test_on_a_pipe_nothing_is_shown(capfd):
    assert list(prefetch(twelve, progress=True)) == list(range(12))
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("often")
def test_on_a_terminal_tqdm_draws_it():
    with contextlib.redirect_stderr(Terminal()) as terminal:
        assert list(prefetch(twelve, progress=True)) == list(range(12))
    text = terminal.getvalue()
    assert "epoch 0: 12batch" in text
    assert "1 worker busy" in text
    assert text.endswith("\n")


def test_the_rate_is_that_of_the_statistics():
    """Of the loop's time after its first batch; what tqdm sees is the start, too."""

    def source():
        time.sleep(0.3)
        yield from range(50)

    with contextlib.redirect_stderr(Terminal()) as terminal:
        with GeneratorEnqueuer(source, progress=True) as enqueuer:
            for _ in enqueuer:
                time.sleep(0.002)
            stats = enqueuer.stats()
    last = terminal.getvalue().split("\r")[-1]
    assert f", {stats.items_per_s:.2f}batch/s, waiting " in last


def test_tqdm_itself_will_do():
    with contextlib.redirect_stderr(Terminal()) as terminal:
        assert list(prefetch(twelve, progress=tqdm)) == list(range(12))
    assert "12batch" in terminal.getvalue()


def test_a_bar_of_a_command_shows_text():
    with (
        contextlib.redirect_stderr(Terminal()) as terminal,
        progress.bar("packing", 4, "shard") as update,
    ):
        update(3, "300 rows")
        update(1)
    text = terminal.getvalue()
    assert "packing: 100%" in text
    assert "300 rows" in text


def test_a_bar_that_is_not_to_be_shown_shows_nothing():
    with (
        contextlib.redirect_stderr(Terminal()) as terminal,
        progress.bar("packing", 4, "shard", shown=False) as update,
    ):
        update(4)
    assert terminal.getvalue() == ""


NOTEBOOK = """
import warnings
warnings.simplefilter("ignore")  # tqdm warns if ipywidgets is not installed
from enqueuer import GeneratorEnqueuer
enqueuer = GeneratorEnqueuer(lambda: iter(range(12)), progress=True)
batches = list(enqueuer)
enqueuer.stop()
enqueuer.stats()
"""


RUN = """
import json, sys, nbclient, nbformat
cell = nbformat.v4.new_code_cell(sys.stdin.read())
book = nbformat.v4.new_notebook(cells=[cell])
nbclient.NotebookClient(book, timeout=60).execute()
print(json.dumps(cell.outputs))
"""


def test_a_notebook_shows_the_bar_and_a_table():
    needs("ipykernel")
    needs("nbclient")
    # In a process of its own, as the client leaves descriptors open.
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=NOTEBOOK, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout)
    (table,) = (each["data"] for each in outputs if each["output_type"] == "execute_result")
    assert "worker 0" in table["text/html"]
    assert table["text/plain"].startswith("<Stats 12 batches in ")
    drawn = "".join(map(str, outputs))
    assert "epoch 0" in drawn
    assert "12batch" in drawn or "12/? " in drawn or "FloatProgress" in drawn
