"""Meters: where time goes, how waits are sorted."""

import time

import pytest

from enqueuer.monitoring import meters
from enqueuer.monitoring.meters import (
    BEGAN,
    IDLE,
    WAITING,
    LoopMeter,
    Meter,
    WorkerStats,
    bucket_of,
    top_of,
)


@pytest.fixture
def clock(monkeypatch):
    """Stand for the clock: a list with the time in it."""
    now = [1_000_000_000]
    monkeypatch.setattr(meters, "clock", lambda: now[0])
    return now


def test_a_meter_adds_up_what_it_waited_and_idled(clock):
    meter = Meter()
    meter.begin()
    for phase, nanoseconds in ((WAITING, 5), (IDLE, 7), (WAITING, 20)):
        meter.pause(phase)
        clock[0] += nanoseconds
        meter.resume()
    assert (meter.words[WAITING], meter.words[IDLE]) == (25, 7)
    assert meter.words[BEGAN] == 1_000_000_000


@pytest.mark.parametrize("nanoseconds", [32, 33, 100, 1000, 123_456, 10**9, 10**12])
def test_a_bucket_is_a_sixteenth_wide(nanoseconds):
    top = top_of(bucket_of(nanoseconds))
    assert nanoseconds < top <= nanoseconds * 17 / 16 + 2
    assert bucket_of(top) == bucket_of(nanoseconds) + 1


def test_the_wait_for_the_first_batch_is_apart(clock):
    waits = LoopMeter()
    waits.pause(0)
    clock[0] += 500
    waits.resume()
    waits.look()
    assert (waits.first_wait, waits.waited, waits.buckets) == (500, 0, {})
    waits.pause(0)
    clock[0] += 300
    waits.resume()
    assert (waits.first_wait, waits.waited, waits.by_worker) == (500, 300, {0: 300})


def test_a_pause_within_a_pause_is_one(clock):
    waits = LoopMeter()
    waits.look()
    waits.pause(1)
    clock[0] += 10
    waits.pause(2)
    clock[0] += 10
    waits.resume()
    assert waits.by_worker == {1: 20}


def test_what_was_taken_is_counted_however_often_the_loop_looks(clock):
    waits = LoopMeter()
    taken = 0
    for count in [1, 3, 1, 7, 2] * 200:
        taken += count
        clock[0] += 1000
        if waits.count(count):
            waits.look()
        assert waits.taken == taken


def test_reading_is_waiting_and_known_apart(clock):
    waits = LoopMeter()
    for nanoseconds in (500, 300, 2_000_000):
        waits.pause(None)
        clock[0] += nanoseconds
        waits.resume(has_read=True)
        waits.look()
    assert (waits.first_wait, waits.waited, waits.reading) == (500, 2_000_300, 2_000_300)
    # Short reads are not counted, as counting would slow them down.
    assert sum(waits.buckets.values()) == 1


def test_between_epochs_the_loop_idles(clock):
    waits = LoopMeter()
    waits.epoch_ended()
    clock[0] += 100
    # The rest before the first batch does not count.
    waits.look()
    for nanoseconds in (7, 20):
        waits.epoch_ended()
        waits.epoch_ended()
        clock[0] += nanoseconds
        waits.epoch_began()
        clock[0] += 1000
        waits.epoch_began()
    assert (waits.idle, waits.ended) == (27, 0)
    waits.epoch_ended()
    clock[0] += 3
    assert waits.idled(clock[0])[0] == 30


def compute(seconds):
    """Use so much CPU time."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_what_the_process_computes_between_epochs_is_counted_apart():
    waits = LoopMeter()
    waits.look()
    compute(0.02)
    waits.epoch_ended()
    compute(0.05)
    assert waits.idled(0)[1] >= 0.05
    waits.epoch_began()
    compute(0.02)
    used_s = waits.idled(0)[1]
    compute(0.02)
    assert waits.idled(0)[1] == used_s < 0.07


@pytest.mark.parametrize("has_read", [False, True])
def test_after_a_long_wait_or_read_the_next_batch_is_looked_at(clock, has_read):
    waits = LoopMeter()
    for _ in range(5000):
        clock[0] += 100
        if waits.count(1):
            waits.look()
    waits.pause(None)
    clock[0] += 10**9
    waits.resume(has_read)
    assert waits.count(1)
    assert waits.taken == 5001


def test_the_epochs_of_a_long_run_keep_no_memory(clock):
    waits = LoopMeter()
    waits.look()
    began = []
    for _ in range(2000):
        clock[0] += 9 * 10**9
        waits.epoch_ended()
        clock[0] += 10**9
        waits.epoch_began()
        began.append(clock[0])
    assert max(len(value) for value in vars(waits).values() if isinstance(value, list)) <= 256
    # Of a worker that was there from the start, of one that came late, and of the last one.
    idle = [waits.idled_since(at, clock[0]) for at in (0, began[999], began[-1])]
    assert idle[0] == 2000 * 10**9
    assert idle[1] == pytest.approx(1000 * 10**9, rel=0.02)
    assert idle[2] == 0


def test_an_item_that_was_being_sent_at_the_earlier_snapshot_was_not_made_since():
    """Sending is noted at its end: until then it looks like making."""
    facts = dict(index=0, name="worker 0", shards=(0,), bytes=0, started=0, starting_s=0.0)
    facts |= dict(waiting_s=0.0, idle_s=0.0, cpu_s=None, cpu_wait_s=None, rss_bytes=None)
    facts |= dict(blocks=0, block_bytes=0, switches=None)
    earlier = WorkerStats(items=0, making_s=0.5, sending_s=0.0, **facts)
    later = WorkerStats(items=1, making_s=0.1, sending_s=0.9, **facts)
    between = later.since(earlier)
    assert (between.making_s, between.sending_s) == (0.0, pytest.approx(0.5))
