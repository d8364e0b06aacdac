"""Statistics in the forms of others."""

import asyncio
import dataclasses
import itertools
import json
import os
import threading
import time

import pytest
from helpers import LIMIT

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer
from enqueuer.exports import line, prometheus, tensorboard, write_prometheus


@pytest.fixture(scope="module")
def stats():
    with GeneratorEnqueuer(lambda shard: shard.split(range(20)), workers=2) as enqueuer:
        list(enqueuer)
        return enqueuer.stats()


def test_a_line_has_rates_waits_fill_and_workers(stats):
    text = line(stats)
    assert "batches/s" in text
    assert "the loop waits" in text
    assert "0/10 in the queue" in text
    # The shares of the loop and of two workers.
    assert text.count("%") == 3
    assert "error" not in text


def test_a_line_shows_errors_and_restarts_if_there_were_some(stats):
    text = line(dataclasses.replace(stats, error_count=2, restart_count=1))
    assert text.endswith(", 2 errors, 1 restarts")


def test_prometheus_gets_each_metric_once_with_help_and_type(stats):
    lines = prometheus(stats).splitlines()
    names = [text.split()[2] for text in lines if text.startswith("# TYPE")]
    assert len(names) == len(set(names))
    assert "enqueuer_batches_total 20" in lines
    assert 'enqueuer_worker_items_total{worker="1"} 10' in lines
    for text in lines:
        if not text.startswith("#"):
            name, value = text.rsplit(" ", 1)
            float(value)
            name = name.split("{")[0]
            assert name.startswith("enqueuer_wait_seconds_") or name in names


def test_labels_are_added_and_escaped(stats):
    text = prometheus(stats, {"job": 'a "quoted"\\ name'})
    assert 'enqueuer_queue_size{job="a \\"quoted\\"\\\\ name"} 0' in text
    assert '{job="a \\"quoted\\"\\\\ name",worker="0"}' in text


def test_prometheus_gets_the_waits_as_a_histogram(stats):
    waits = {0.0005: 7, 0.001: 1, 0.5: 2, 30.0: 1}
    lines = prometheus(dataclasses.replace(stats, waits=waits, waiting_s=33.5)).splitlines()
    start = lines.index("# TYPE enqueuer_wait_seconds histogram")
    assert lines[start + 1 : start + 9] == [
        'enqueuer_wait_seconds_bucket{le="0.001"} 8',
        'enqueuer_wait_seconds_bucket{le="0.01"} 8',
        'enqueuer_wait_seconds_bucket{le="0.1"} 8',
        'enqueuer_wait_seconds_bucket{le="1"} 10',
        'enqueuer_wait_seconds_bucket{le="10"} 10',
        'enqueuer_wait_seconds_bucket{le="+Inf"} 11',
        "enqueuer_wait_seconds_sum 33.5",
        "enqueuer_wait_seconds_count 11",
    ]


def test_prometheus_gets_cpu_times_and_the_time_to_the_first_batch(stats):
    workers = [
        dataclasses.replace(worker, cpu_s=cpu_s)
        for worker, cpu_s in zip(stats.workers, (2.5, None), strict=True)
    ]
    known = dataclasses.replace(stats, loop_cpu_s=1.5, first_batch_s=0.25, workers=workers)
    lines = prometheus(known, {"rank": "0"}).splitlines()
    assert 'enqueuer_loop_cpu_seconds_total{rank="0"} 1.5' in lines
    assert 'enqueuer_first_batch_seconds{rank="0"} 0.25' in lines
    worker_times = [text for text in lines if text.startswith("enqueuer_worker_cpu_seconds_total")]
    # Some systems do not report it.
    assert worker_times == ['enqueuer_worker_cpu_seconds_total{rank="0",worker="0"} 2.5']
    before = prometheus(dataclasses.replace(stats, first_batch_s=None)).splitlines()
    assert not [text for text in before if text.startswith("enqueuer_first_batch_seconds")]


def test_the_page_of_prometheus_is_replaced_in_one_step(stats, tmp_path):
    page = tmp_path / "training.prom"
    write_prometheus(page, stats)
    with page.open() as reader:
        write_prometheus(str(page), stats, {"rank": "0"})
        # Who reads meanwhile gets all of the old page.
        assert reader.read() == prometheus(stats)
    assert page.read_text() == prometheus(stats, {"rank": "0"})
    assert list(tmp_path.iterdir()) == [page]


def test_a_link_in_the_place_of_the_draft_is_not_followed(stats, tmp_path):
    path, precious = tmp_path / "run.prom", tmp_path / "precious"
    precious.write_text("mine")
    draft = tmp_path / f"run.prom.{os.getpid()}.{threading.get_ident()}"
    draft.symlink_to(precious)
    write_prometheus(path, stats)
    assert precious.read_text() == "mine" and path.read_text() == prometheus(stats)
    assert not path.is_symlink() and not os.path.lexists(draft)


def test_a_page_that_cannot_be_written_leaves_the_old_one_and_no_draft(stats, tmp_path):
    page, folder = tmp_path / "training.prom", tmp_path / "folder.prom"
    write_prometheus(page, stats)
    folder.mkdir()
    with pytest.raises(UnicodeEncodeError):
        write_prometheus(page, stats, {"host": "\udc80"})
    with pytest.raises(IsADirectoryError):
        write_prometheus(folder, stats)
    with pytest.raises(FileNotFoundError):
        write_prometheus(tmp_path / "missing" / "training.prom", stats)
    assert page.read_text() == prometheus(stats)
    assert {*tmp_path.iterdir()} == {page, folder}


class Steps:
    """What `tensorboard` needs of a SummaryWriter; keeps the steps of each tag."""

    def __init__(self):
        self.of = {}

    def add_scalar(self, tag, value, step):
        self.of.setdefault(tag, []).append(step)


def steps_of(enqueuer, batches):
    """Read some batches; return the steps that TensorBoard got for one tag."""
    steps = Steps()
    enqueuer.on_stats(tensorboard(steps, prefix="train/"), every=0)
    with enqueuer:
        for _ in range(batches):
            next(enqueuer.get())
    return steps.of["train/batches_per_s"]


def test_the_steps_of_tensorboard_are_batches_and_go_on_after_a_resume():
    before, after = OrderedEnqueuer(range(40)), OrderedEnqueuer(range(40))
    steps = steps_of(before, 25)
    assert 0 < steps[0] <= steps[-1] < 25
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    later = steps_of(after, 10)
    assert 25 < later[0] <= later[-1] < 35


# --- on_stats ---


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_callbacks_get_the_statistics_since_the_last_call(backend):
    seen = []
    # Without an end: a callback is due every few milliseconds, and not at each batch.
    with OrderedEnqueuer(itertools.count(), abs, backend=backend) as enqueuer:
        enqueuer.on_stats(seen.append, every=0)
        numbers, before = [], time.monotonic()
        for number in enqueuer:
            numbers.append(number)
            if len(seen) > 2 or time.monotonic() - before > LIMIT:
                break
        total = enqueuer.stats()
    assert len(seen) > 2
    assert 0 < sum(stats.items for stats in seen) <= total.items == len(numbers)


def test_by_default_a_line_is_logged(caplog):
    caplog.set_level("INFO", "enqueuer")
    with GeneratorEnqueuer(lambda: iter(range(50))) as enqueuer:
        enqueuer.on_stats(every=0)
        list(enqueuer)
    assert "the loop waits" in caplog.text


def test_a_callback_that_fails_is_logged_and_called_no_more(caplog):
    calls = []

    def fail(stats):
        calls.append(stats)
        raise ValueError("no")

    with GeneratorEnqueuer(lambda: iter(range(50))) as enqueuer:
        enqueuer.on_stats(fail, every=0)
        assert list(enqueuer) == list(range(50))
    assert len(calls) == 1
    assert "ValueError: no" in caplog.text


def test_no_callback_is_called_before_its_time():
    seen = []
    with GeneratorEnqueuer(lambda: iter(range(50))) as enqueuer:
        enqueuer.on_stats(seen.append, every=3600)
        list(enqueuer)
    assert seen == []


def test_after_a_new_start_callbacks_get_statistics_of_the_new_run():
    seen = []
    enqueuer = GeneratorEnqueuer(lambda: iter(range(50)))
    enqueuer.on_stats(seen.append, every=0)
    for _ in range(2):
        with enqueuer:
            list(enqueuer)
    assert all(stats.items >= 0 for stats in seen)
    assert sum(stats.items for stats in seen) <= 100


@pytest.mark.parametrize(
    ("given", "error"),
    [({"callback": "print"}, TypeError), ({"every": "10"}, TypeError), ({"every": -1}, ValueError)],
)
def test_what_cannot_be_called_or_waited_for_is_refused(given, error):
    with pytest.raises(error, match="got"):
        GeneratorEnqueuer(lambda: iter("abc")).on_stats(**given)


def test_while_a_callback_runs_others_may_change_the_enqueuer():
    enqueuer = GeneratorEnqueuer(lambda shard: shard.split(range(200)), shards=2)
    other = threading.Thread(target=enqueuer.reconfigure, args=(2,), daemon=True)
    ended = []

    def wait_for_it(stats):
        if other.ident is None:
            other.start()
            other.join(LIMIT / 3)
            ended.append(not other.is_alive())

    enqueuer.on_stats(wait_for_it, every=0)
    with enqueuer:
        assert list(enqueuer) == list(range(200))
    assert ended == [True]


def test_in_asyncio_callbacks_run_in_the_thread_of_the_loop():
    threads = []

    def source():
        for number in range(50):
            time.sleep(0.002)
            yield number

    async def main():
        async with GeneratorEnqueuer(source) as enqueuer:
            enqueuer.on_stats(lambda _: threads.append(threading.current_thread()), every=0)
            async for _ in enqueuer:
                pass

    asyncio.run(main())
    assert set(threads) == {threading.current_thread()}


@pytest.mark.parametrize("export", [prometheus, lambda stats: write_prometheus("never", stats)])
def test_what_are_no_statistics_is_refused(export):
    with pytest.raises(TypeError, match=r"takes the result of stats\(\), got 3"):
        export(3)
