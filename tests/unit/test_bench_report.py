"""What follows from measurements: the best choice, its line of code, table and JSON."""

import json

import pytest

from enqueuer.tools.bench import Measurement, Report, ladder


def one(backend, workers, rate, **more):
    return Measurement(backend, workers, max(10, 2 * workers), batches=rate, seconds=1.0, **more)


PLAIN = one("none", 0, 100)


def report(*measured, **more):
    options = dict(name="batches", takes_shard=True, cpus=2, seconds=1, max_workers=8, step_s=0)
    options["gil_share"] = 0.25
    return Report(**(options | more), measured=(PLAIN, *measured))


def test_the_fewest_workers_that_are_about_as_fast_are_the_best():
    found = report(
        *(one("thread", 2, 180), one("thread", 4, 300), one("thread", 8, 310)),
        *(one("process", 1, 90), one("process", 8, 315)),
    )
    assert (found.best.backend, found.best.workers, found.gain) == ("thread", 4, 3.0)


def test_threads_are_preferred_to_as_many_processes():
    found = report(one("process", 2, 200), one("thread", 2, 196))
    assert found.best.backend == "thread"


def test_what_failed_is_no_choice():
    failed = Measurement("process", 1, 10, failed="ItemNotPicklable: a lock")
    assert report(failed).best is None
    assert report(failed).line is None
    assert "1 process: ItemNotPicklable: a lock" in str(report(failed))


@pytest.mark.parametrize(
    ("workers", "line"),
    [
        (4, 'GeneratorEnqueuer(batches, workers=4, backend="process")'),
        (8, 'GeneratorEnqueuer(batches, workers=8, backend="process", max_queue_size=16)'),
    ],
)
def test_the_line_of_code_has_what_is_not_the_default(workers, line):
    assert report(one("process", workers, 300)).line == line


def test_the_table_has_a_row_for_each():
    found = report(one("thread", 1, 120), one("thread", 2, 240, batch_bytes=1000, cpus_used=1.5))
    rows = [line.split() for line in str(found).splitlines()]
    assert rows[1][:3] == ["plain", "loop", "100"]
    assert rows[3][:5] == ["2", "threads", "240", "240.0", "kB"]
    assert rows[3][5:] == ["1.0", "kB", "0", "s", "0", "%", "1.5", "-", "-"]
    assert "about 25 % of its time" in str(found)
    assert "Best: 2 threads, 2.4 times the plain loop." in str(found)


def test_a_plain_loop_that_is_as_fast_is_told():
    assert "No setting is faster than the plain loop" in str(report(one("thread", 1, 90)))


def test_a_generator_that_is_not_split_is_told():
    text = "takes no shard, so each worker makes the same batches"
    assert text in str(report(one("thread", 2, 200), takes_shard=False))
    assert text not in str(report(one("thread", 1, 200), takes_shard=False))
    assert text not in str(report(one("thread", 2, 200)))


@pytest.mark.parametrize(
    ("cpus_used", "cpu_wait_share", "is_told"),
    [(0.5, 0.6, True), (1.9, 0.6, False), (0.5, 0.1, False), (None, None, False)],
)
def test_cpus_that_others_take_are_told(cpus_used, cpu_wait_share, is_told):
    found = report(one("thread", 1, 90, cpus_used=cpus_used, cpu_wait_share=cpu_wait_share))
    assert ("Other programs kept the CPUs busy" in str(found)) is is_told


def test_all_of_it_is_plain_data():
    found = json.loads(json.dumps(report(one("thread", 1, 120)).as_dict()))
    assert found["best"] == 1
    assert found["measured"][1]["batches_per_s"] == 120
    assert found["line"] == 'GeneratorEnqueuer(batches, workers=1, backend="thread")'


def test_an_interrupted_report_can_be_shown():
    empty = Report("batches", True, 2, 1, 8, 0)
    assert (empty.best, empty.gain, empty.line) == (None, 0, None)
    assert "batches/s" in str(empty)
    assert json.dumps(empty.as_dict())


def test_workers_are_doubled_up_to_the_most():
    assert [ladder(most) for most in (1, 2, 3, 16)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8, 16]]
