"""Logs: what a worker logs comes out of the parent's handlers, once, in order, losing nothing."""

import logging
import multiprocessing

import helpers
import pytest
from helpers import start_method_of, wait_until, with_backend

from enqueuer import GeneratorEnqueuer, Processes, WorkerDied

log = logging.getLogger("tests.worker")


@pytest.fixture
def heard():
    """Return the texts that a handler of the root logger gets."""

    class Ear(logging.Handler):
        def emit(self, record):
            texts.append(record.getMessage())

    texts, ear, root = [], Ear(), logging.getLogger()
    level = root.level
    root.addHandler(ear)
    root.setLevel(logging.INFO)
    yield texts
    root.removeHandler(ear)
    root.setLevel(level)


def chatty(shard):
    for number in range(3):
        log.info("shard %d item %d", shard.index, number)
        yield number
    log.info("shard %d ends", shard.index)


def test_records_come_once_and_in_order(backend, heard):
    before = list(logging.getLogger().handlers)
    with GeneratorEnqueuer(chatty, workers=2, **backend) as enqueuer:
        list(enqueuer)
        assert logging.getLogger().handlers == before
    for shard in range(2):
        mine = [text for text in heard if text.startswith(f"shard {shard}")]
        assert mine == [f"shard {shard} item {n}" for n in range(3)] + [f"shard {shard} ends"]
    assert len(heard) == 8


def test_nothing_is_lost_at_stop(backend, heard):
    def source():
        try:
            log.info("begun")
            while True:
                yield 1
        finally:
            log.info("closed")

    with GeneratorEnqueuer(source, **backend) as enqueuer:
        next(iter(enqueuer))
    assert heard == ["begun", "closed"]


@pytest.mark.local
def test_nothing_is_lost_to_a_kill(process, heard):
    def source():
        for number in range(50):
            log.info("%d", number)
        helpers.kill_self()
        yield

    with GeneratorEnqueuer(source, **process) as enqueuer:
        with pytest.raises(WorkerDied):
            next(iter(enqueuer))
    assert heard == [str(number) for number in range(50)]


def test_the_parents_levels_decide(process, heard):
    logging.getLogger("tests.quiet").setLevel(logging.ERROR)

    def source():
        log.debug("too low for the root logger")
        logging.getLogger("tests.quiet").warning("too low for its logger")
        logging.getLogger("tests.quiet").error("high enough")
        yield 1

    with GeneratorEnqueuer(source, **process) as enqueuer:
        list(enqueuer)
    logging.getLogger("tests.quiet").setLevel(logging.NOTSET)
    assert heard == ["high enough"]


def test_logs_can_be_left_in_the_worker(process, heard):
    with GeneratorEnqueuer(chatty, **with_backend(process, forward_logs=False)) as enqueuer:
        list(enqueuer)
        # In a fork, the inherited handler would fill a copy of the list.
        if start_method_of(process) != "fork":
            assert heard == []
    assert heard == []


@pytest.fixture
def fork_is_default():
    import multiprocessing

    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("fork_is_default")
class TestMultiprocessingLogging:
    def test_it_is_installed_for_a_run_and_taken_off_again(self, heard):
        root = logging.getLogger()
        before = list(root.handlers)
        forked = Processes(start_method="fork", forward_logs="multiprocessing-logging")
        with GeneratorEnqueuer(chatty, workers=2, backend=forked) as enqueuer:
            assert root.handlers != before
            list(enqueuer)
        assert root.handlers == before
        wait_until(lambda: len(heard) == 8)

    def test_who_has_installed_it_hears_every_record_once(self, heard):
        import multiprocessing_logging

        root = logging.getLogger()
        before = list(root.handlers)
        multiprocessing_logging.install_mp_handler()
        installed = list(root.handlers)
        try:
            for forward_logs in (True, "multiprocessing-logging"):
                heard.clear()
                forked = Processes(start_method="fork", forward_logs=forward_logs)
                with GeneratorEnqueuer(chatty, backend=forked) as enqueuer:
                    list(enqueuer)
                assert root.handlers == installed
                wait_until(lambda: len(heard) >= 4)
                assert len(heard) == 4
        finally:
            for handler in installed:
                if handler not in before:
                    handler.sub_handler = logging.NullHandler()
                    handler.close()
            root.handlers = before


@pytest.mark.thorough
def test_a_flood_of_records_does_not_outlast_a_timeout(process):
    import queue

    def source():
        while True:
            log.debug("%s", "x" * 1000)
        yield

    log.setLevel(logging.DEBUG)
    try:
        with GeneratorEnqueuer(source, **process) as enqueuer:
            with pytest.raises(queue.Empty):
                enqueuer.queue.get(timeout=0.5)
            enqueuer.stop(timeout=0.5)
    finally:
        log.setLevel(logging.NOTSET)


def test_a_handler_may_stop_the_enqueuer(process):
    class Stopper(logging.Handler):
        def emit(self, record):
            enqueuer.stop()

    def source():
        yield 1
        log.warning("stop")
        yield 2
        while True:
            yield 3

    enqueuer, stopper = GeneratorEnqueuer(source, **process), Stopper()
    logging.getLogger().addHandler(stopper)
    try:
        with enqueuer:
            assert list(enqueuer)[:1] in ([], [1])
    finally:
        logging.getLogger().removeHandler(stopper)


@pytest.mark.local
def test_a_record_has_the_name_of_its_worker(process, caplog):
    caplog.set_level(logging.INFO)
    with GeneratorEnqueuer(chatty, workers=2, **process) as enqueuer:
        list(enqueuer)
    assert {record.processName for record in caplog.records} == {
        "enqueuer-worker-0",
        "enqueuer-worker-1",
    }
    assert multiprocessing.current_process().name == "MainProcess"
