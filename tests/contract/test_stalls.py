"""A loop that waits long is told for what, and where each worker is; `timeout` loses nothing."""

import asyncio
import contextlib
import functools
import logging
import os
import re
import signal
import tempfile
import time
import warnings
from queue import Empty

import helpers
import pytest
from helpers import Gated, handling, text_when, timeout_of, wait_until

from enqueuer import BatchTimeout, GeneratorEnqueuer, OrderedEnqueuer, StallWarning, prefetch
from enqueuer.enqueuers.enqueuer import core_of

ALL = [(shard, number) for number in range(3) for shard in range(2)]
SHORT_S = 0.1  # how long the loop waits, where it is known to wait for ever


def take(enqueuer, count):
    """Return so many batches, however long it takes."""
    batches = []
    while len(batches) < count:
        try:
            for batch in enqueuer:
                batches.append(batch)
                if len(batches) == count:
                    break
        except BatchTimeout:
            pass
    return batches


def new_folder(folder):
    return tempfile.mkdtemp(dir=folder)


class Heard:
    """The warnings about items of shard 1; at each of them `act` is called."""

    def __init__(self, monkeypatch, act=lambda: None):
        self.act = act
        self.texts = []
        self.places = []
        warnings.simplefilter("default", StallWarning)  # as users have it
        monkeypatch.setattr(warnings, "showwarning", self.show)

    def show(self, message, category, filename, lineno, file=None, line=None):
        if "waits for shard 1" in str(message):  # before that they are only starting
            self.texts.append(str(message))
            self.places.append(filename)
            self.act()


@pytest.mark.thorough
def test_each_stall_is_told_once_with_the_stack_of_the_worker(backend, tmp_path, monkeypatch):
    source = Gated(tmp_path, stops=[(1, 1), (1, 2)])
    heard = Heard(monkeypatch)
    with GeneratorEnqueuer(source, workers=2, stall_timeout=1.0, **backend) as enqueuer:
        assert take(enqueuer, 3) == ALL[:3]
        heard.texts.clear()  # of a machine so busy that these took a second
        heard.places.clear()
        heard.act = source.let_on
        assert list(enqueuer) == ALL[3:]
    first, second = heard.texts
    assert first.startswith("no batch came for 1 s: the loop waits for shard 1, item 1, of epoch 0")
    assert second.startswith("no batch came for 1 s: the loop waits for shard 1, item 2")
    lines = first.splitlines()
    assert lines[2].startswith("worker 1 (")
    assert lines[2].endswith("), shard 1, is here:")
    assert "in __call__" in lines[3]  # what lies outside of the user's code is left out
    assert "in wait_at_the_gate" in first
    assert "with open(self.gates[stop]):" in first
    assert set(heard.places) == {__file__}


@pytest.mark.thorough
def test_a_long_stall_is_told_once(backend, tmp_path, monkeypatch):
    source = Gated(tmp_path)
    with GeneratorEnqueuer(
        source, workers=2, stall_timeout=SHORT_S, timeout=5 * SHORT_S, **backend
    ) as enqueuer:
        heard = Heard(monkeypatch)
        assert take(enqueuer, 3) == ALL[:3]
        heard.texts.clear()
        timeout_of(enqueuer)
        assert len(heard.texts) == 1
        source.let_on()
        assert take(enqueuer, 3) == ALL[3:]


def test_a_timeout_loses_nothing(backend, tmp_path):
    source = Gated(tmp_path)
    with GeneratorEnqueuer(source, workers=2, timeout=SHORT_S, **backend) as enqueuer:
        assert take(enqueuer, 3) == ALL[:3]
        text = text_when(enqueuer, "in wait_at_the_gate")
        assert text.startswith("no batch came for 0.1 s: the loop waits for shard 1, item 1")
        assert text.endswith("iterating again goes on with the very next batch")
        assert enqueuer.is_running()
        source.let_on()
        assert take(enqueuer, 3) == ALL[3:]


def test_a_timeout_of_tasks_names_the_element_and_loses_nothing(backend, tmp_path):
    source = Gated(tmp_path, stops=[(1, 1)])
    work = functools.partial(source.item, 1)
    with OrderedEnqueuer(range(3), work, workers=2, timeout=SHORT_S, **backend) as enqueuer:
        assert take(enqueuer, 1) == [(1, 0)]
        text = text_when(enqueuer, "in wait_at_the_gate")
        assert "the loop waits for task 1 (element 1), of epoch 0" in text
        source.let_on()
        assert take(enqueuer, 2) == [(1, 1), (1, 2)]


def test_workers_that_are_not_busy_are_told_in_words(backend, tmp_path):
    source = Gated(tmp_path, stops=[(1, 1)])
    options = {"workers": 2, "timeout": SHORT_S, **backend}
    with GeneratorEnqueuer(source, **options) as enqueuer:
        assert take(enqueuer, 3) == ALL[:3]
        text_when(enqueuer, "has done all of this epoch")
        source.let_on()
        assert take(enqueuer, 3) == ALL[3:]
    source = Gated(new_folder(tmp_path), count=20)
    with GeneratorEnqueuer(source, max_queue_size=2, **options) as enqueuer:
        assert take(enqueuer, 3) == ALL[:3]
        text_when(enqueuer, "has made a batch and waits for room")
        source.let_on()
        assert len(take(enqueuer, 37)) == 37
    source = Gated(new_folder(tmp_path), stops=[(1, 1)])
    with OrderedEnqueuer(range(2), functools.partial(source.item, 1), **options) as enqueuer:
        assert take(enqueuer, 1) == [(1, 0)]
        text_when(enqueuer, "waits for a task")
        source.let_on()
        assert take(enqueuer, 1) == [(1, 1)]


@pytest.mark.local
@pytest.mark.parametrize(
    ("act", "where"),
    [
        (helpers.hang, "in hang"),
        (helpers.hang_in_a_regex, "in hang_in_a_regex"),
        (helpers.hang_in_a_lock, "in hang_in_a_lock"),
        (helpers.hang_deep, "in hang_deep"),
    ],
)
def test_a_process_tells_its_stack_whatever_it_does(process, tmp_path, act, where):
    source = Gated(tmp_path, act=act)
    with GeneratorEnqueuer(source, workers=2, timeout=SHORT_S, **process) as enqueuer:
        assert take(enqueuer, 3) == ALL[:3]
        text_when(enqueuer, where)
        enqueuer.stop(0.5)


@pytest.mark.thorough
@pytest.mark.local
def test_a_stopped_process_is_waited_for_only_so_long(process):
    with GeneratorEnqueuer(stopping, workers=2, timeout=SHORT_S, **process) as enqueuer:
        pids = take(enqueuer, 2)
        begin = time.monotonic()
        text = timeout_of(enqueuer)
        assert time.monotonic() - begin < helpers.LIMIT / 3
        assert f"worker 0 (process {pids[0]}, " in text
        assert "did not send its stack within 1 s: it is stopped" in text
        for _ in range(2):  # what is asked twice is answered twice, and late
            timeout_of(enqueuer)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert take(enqueuer, 2) == ["went on", "went on"]


def stopping():
    yield os.getpid()
    helpers.stop_self()
    yield "went on"


@pytest.mark.thorough
@pytest.mark.local
def test_a_worker_that_has_reset_the_signal_outlives_the_question(process):
    """As code does that resets all signals; the signal would end it."""

    def source(shard):
        yield os.getpid()
        for number in range(1, signal.NSIG):
            with contextlib.suppress(OSError, ValueError):  # some cannot be reset
                signal.signal(number, signal.SIG_DFL)
        yield "reset"
        helpers.hang()

    with GeneratorEnqueuer(source, timeout=SHORT_S, **process) as enqueuer:
        pid, _ = take(enqueuer, 2)
        for _ in range(2):
            assert "its code has reset the signal" in timeout_of(enqueuer)
        assert helpers.alive(pid)


@pytest.mark.thorough
def test_a_worker_that_logs_all_the_time_does_not_put_off_the_timeout(backend):
    with GeneratorEnqueuer(logging_for_long, timeout=3 * SHORT_S, **backend) as enqueuer:
        assert take(enqueuer, 1) == [0]
        timeout_of(enqueuer)


def logging_for_long(shard):
    yield 0
    for _ in range(100):
        logging.getLogger("tests").warning("still here")
        time.sleep(0.02)


def test_skipped_errors_do_not_put_off_the_timeout(backend):
    with OrderedEnqueuer(
        range(1000), fail_slowly, timeout=2 * SHORT_S, on_error=ignore, **backend
    ) as enqueuer:
        timeout_of(enqueuer)
        assert enqueuer.error_count < 1000


def fail_slowly(number):
    time.sleep(0.02)
    raise KeyError(number)


def ignore(error):
    return None


def test_any_shard_is_waited_for_if_there_is_no_order(backend, tmp_path):
    source = Gated(tmp_path, stops=[(0, 0)])
    with GeneratorEnqueuer(source, ordered=False, timeout=SHORT_S, **backend) as enqueuer:
        text = text_when(enqueuer, "in wait_at_the_gate")
        assert "the loop waits for the next item of any shard" in text
        source.let_on()
        assert take(enqueuer, 3) == [(0, 0), (0, 1), (0, 2)]


def test_async_for_times_out_and_loses_nothing(backend, tmp_path):
    source = Gated(tmp_path)

    async def main():
        batches, texts = [], []
        async with GeneratorEnqueuer(source, workers=2, timeout=SHORT_S, **backend) as enqueuer:
            while len(batches) < 6:
                try:
                    async for batch in enqueuer:
                        batches.append(batch)
                except BatchTimeout as error:
                    texts.append(str(error))
                    if len(batches) == 3 and "in wait_at_the_gate" in texts[-1]:
                        source.let_on()
        return batches, texts

    batches, texts = asyncio.run(main())
    assert batches == ALL
    assert "the loop waits for shard 1, item 1" in texts[-1]


def test_queue_get_times_out_as_the_loop_does_and_as_it_is_told(backend, tmp_path):
    source = Gated(tmp_path, stops=[(0, 0)])
    with GeneratorEnqueuer(source, timeout=SHORT_S, **backend) as enqueuer:
        with pytest.raises(BatchTimeout):
            enqueuer.queue.get()
        with pytest.raises(Empty):
            enqueuer.queue.get(timeout=SHORT_S / 2)
        with pytest.raises(Empty):
            enqueuer.queue.get_nowait()
        source.let_on()
        assert take(enqueuer, 3) == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("limit", [None, 20.0])
def test_a_timeout_error_of_the_users_own_passes(backend, tmp_path, limit):
    def alarm(number, frame):
        raise TimeoutError("my own")

    source = Gated(tmp_path, stops=[(0, 0)])
    with handling(signal.SIGALRM, alarm), GeneratorEnqueuer(source, **backend) as enqueuer:
        signal.setitimer(signal.ITIMER_REAL, SHORT_S)
        with pytest.raises(TimeoutError, match="my own"):
            enqueuer.queue.get(timeout=limit)
        source.let_on()
        assert list(enqueuer) == [(0, 0), (0, 1), (0, 2)]


def test_a_warning_that_is_made_an_error_loses_nothing(tmp_path, no_warnings):
    source = Gated(tmp_path)
    with GeneratorEnqueuer(source, workers=2, stall_timeout=SHORT_S) as enqueuer:
        batches = []
        with pytest.raises(StallWarning):
            for batch in enqueuer:
                batches.append(batch)  # it raises
        source.let_on()
        while len(batches) < 6:
            try:
                for batch in enqueuer:
                    batches.append(batch)
            except StallWarning:
                pass
    assert batches == ALL


@pytest.mark.local
def test_whoever_sets_no_limit_waits_without_one(process):
    """And no worker has a pipe to answer on."""
    with GeneratorEnqueuer(helpers.twelve, stall_timeout=None, **process) as enqueuer:
        assert core_of(enqueuer).run.backend.pool.workers[0].stacks is None
        assert list(enqueuer) == list(range(12))


def stuck(path):
    """Wait as a loader may for a file, until the test ends."""
    while os.path.exists(path):
        time.sleep(SHORT_S)


def stuck_row(folder, index):
    stuck(folder / "one")
    return index


def nested_and_stuck(folder, shard):
    yield list(prefetch(iter(range(3))))
    stuck(folder / "one")
    yield shard.index


def test_a_stall_of_a_source_that_has_used_an_enqueuer_shows_its_stack(backend, tmp_path):
    """Start and stop of the inner one put handlers of signals back."""
    (tmp_path / "one").touch()
    source = functools.partial(nested_and_stuck, tmp_path)
    with GeneratorEnqueuer(source, timeout=0.2, stall_timeout=None, **backend) as enqueuer:
        assert take(enqueuer, 1) == [[0, 1, 2]]
        text_when(enqueuer, "in stuck")
        (tmp_path / "one").unlink()


class Rows:
    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return stuck_row(self.folder, index)


def text_of(batches):
    """Return the text of the BatchTimeout of a DataLoader's batch that does not come."""
    with pytest.raises(BatchTimeout) as caught:
        next(batches)
    return str(caught.value)


def test_a_stall_of_a_dataset_is_told_by_the_users_code_in_it(tmp_path):
    helpers.needs("torch")
    from enqueuer.adapters.torch import DataLoader

    (tmp_path / "one").touch()
    iterator = iter(DataLoader(Rows(tmp_path), num_workers=1, timeout=0.2, stall_timeout=None))
    # The worker may not have begun in the first 0.2 s.
    wait_until(lambda: re.search(r"is here:(.|\n)*in stuck_row", text_of(iterator)))
    (tmp_path / "one").unlink()
    assert [row.item() for row in take(iterator, 1)] == [0]


def collate_stuck(folder, samples):
    stuck(folder / "two")
    return samples


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_a_stall_of_samples_in_threads_is_told_by_each_sample(backend, tmp_path):
    helpers.needs("torch")
    from enqueuer.adapters.torch import DataLoader

    for name in ("one", "two"):
        (tmp_path / name).touch()
    loader = DataLoader(
        *(Rows(tmp_path), 2),
        concurrency=2,
        collate_fn=functools.partial(collate_stuck, tmp_path),
        **{"num_workers": 1, "backend": backend, "timeout": 0.2, "stall_timeout": None},
    )
    batches = iter(loader)

    try:
        both = r"2 threads\nelements 0, 1 is here:\n(.*\n)+.*in stuck_row"
        wait_until(lambda: re.search(both, text_of(batches)))
        (tmp_path / "one").unlink()
        wait_until(lambda: re.search(r"is here:\n(.*\n)*.*in collate_stuck", text_of(batches)))
    finally:
        for path in tmp_path.iterdir():
            path.unlink()
    assert take(batches, 1) == [[0, 1]]
