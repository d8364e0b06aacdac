"""Both ends of a channel in one process, over both kinds of sockets."""

import logging
import threading

import numpy as np
import pytest
from helpers import LIMIT, wait_until

from enqueuer import Closed, TransportError
from enqueuer.errors import ItemNotLoadable
from enqueuer.messages import End, Failure, Item
from enqueuer.transport import worker_end
from enqueuer.transport.channel import HEADER, Credit, Kind
from enqueuer.transport.consumer_end import ConsumerEnd
from enqueuer.transport.packets import Packets, pair
from enqueuer.transport.worker_end import WorkerEnd


class Channel:
    """A worker's end, used by a thread, and the consumer's end."""

    def __init__(self, kind, credit):
        ours, its = pair(kind)
        self.raw = Packets(its)
        self.worker = WorkerEnd(self.raw)
        self.worker.open(credit)
        self.consumer = ConsumerEnd(Packets(ours), credit, "worker 0", batch=1)
        self.errors = []
        self.thread = None

    def send(self, *messages):
        """Send messages in a thread."""

        def run():
            try:
                for message in messages:
                    self.worker.send(message)
            except BaseException as error:
                self.errors.append(error)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def pump(self, count):
        """Read until `count` messages are in the inbox."""
        wait_until(lambda: self.consumer.pump() or len(self.consumer.inbox) >= count)

    def join(self):
        self.thread.join(LIMIT)
        assert not self.thread.is_alive()

    def close(self):
        self.consumer.close()
        if self.thread is not None:
            self.join()
        self.worker.close()


@pytest.fixture(params=["seqpacket", "stream"])
def open_channel(request):
    channels = []

    def open_one(items=10, waiting_bytes=None, ask=False):
        channels.append(Channel(request.param, Credit(items, waiting_bytes, ask)))
        return channels[-1]

    yield open_one
    while channels:
        channels.pop().close()


def items(*values):
    return [Item(0, number, value) for number, value in enumerate(values)]


@pytest.mark.parametrize("size", [0, 10, 1000, 100_000, 3_000_000])
def test_items_arrive_equal_and_writable(open_channel, size):
    channel = open_channel()
    value = {"x": np.arange(size), "text": "t" * size, "bytes": b"b" * size}
    channel.send(Item(3, 7, value), End(3))
    channel.pump(2)
    message = channel.consumer.take()
    assert (message.shard, message.number) == (3, 7)
    assert (message.value["x"] == value["x"]).all()
    message.value["x"] += 1
    assert message.value["text"] == value["text"]
    assert message.value["bytes"] == value["bytes"]
    assert channel.consumer.take() == End(3)


def test_no_more_is_sent_than_there_is_credit_for(open_channel):
    channel = open_channel(items=2)
    channel.send(*items("a", "b", "c", "d"), End(0))
    channel.pump(2)
    channel.consumer.take()
    channel.consumer.pump()
    assert len(channel.consumer.inbox) == 1
    channel.consumer.grant(room=10)
    channel.pump(2)
    assert channel.consumer.items == 2
    channel.consumer.grant(room=10)
    assert channel.consumer.load == 2
    channel.consumer.take()
    channel.consumer.grant(room=0)
    assert channel.consumer.load == 1
    channel.consumer.take()
    channel.consumer.grant(room=10)
    channel.join()
    channel.pump(2)
    assert [channel.consumer.take() for _ in range(2)] == [Item(0, 3, "d"), End(0)]


def test_without_credit_an_item_comes_when_it_is_wanted(open_channel):
    channel = open_channel(items=0, ask=True)
    channel.send(*items("a", "b"))
    for value in "ab":
        wait_until(lambda: channel.consumer.pump() or channel.consumer.asked)
        assert not channel.consumer.inbox
        channel.consumer.grant(room=0, wanted=True)
        channel.consumer.grant(room=0, wanted=True)  # said twice, it is still one
        channel.pump(1)
        assert channel.consumer.take().value == value
    channel.join()


def test_bytes_that_wait_are_bounded(open_channel):
    channel = open_channel(items=10, waiting_bytes=250_000)
    channel.send(*items(*[np.zeros(100_000, np.uint8)] * 3))
    channel.pump(2)
    channel.consumer.pump()
    assert channel.consumer.items == 2
    channel.consumer.take()
    channel.consumer.grant(room=10)
    channel.pump(2)
    channel.join()


def test_what_is_too_large_comes_when_it_is_wanted(open_channel):
    channel = open_channel(items=10, waiting_bytes=1000)
    channel.send(*items(np.zeros(100_000)))
    channel.consumer.grant(room=10)
    channel.consumer.grant(room=10, wanted=True)
    channel.pump(1)
    channel.join()


def test_blocks_are_used_again(open_channel):
    channel = open_channel(items=1)
    for number in range(20):
        channel.send(Item(0, number, np.full(100_000, number)))
        channel.pump(1)
        channel.join()
        assert (channel.consumer.take().value == number).all()
        channel.consumer.grant(room=10)
    assert channel.worker._pool._count <= 2


def test_what_is_kept_is_never_overwritten(open_channel):
    channel = open_channel(items=1)
    kept = []
    for number in range(20):
        channel.send(Item(0, number, np.full(100_000, number)))
        channel.pump(1)
        channel.join()
        kept.append(channel.consumer.take().value)
        channel.consumer.grant(room=10)
    assert all((array == number).all() for number, array in enumerate(kept))


def test_an_error_arrives_as_itself(open_channel):
    channel = open_channel()
    channel.send(Failure(1, 5, KeyError("k" * 100_000)))
    channel.pump(1)
    failure = channel.consumer.take()
    assert (failure.shard, failure.number) == (1, 5)
    assert failure.error.args == ("k" * 100_000,)


def explode():
    raise ValueError("cannot be loaded")


class Explosive:
    def __reduce__(self):
        return explode, ()


def test_an_item_that_cannot_be_loaded_is_a_failure_and_the_next_is_fine(open_channel):
    channel = open_channel()
    channel.send(*items("a", Explosive(), "c"))
    channel.pump(3)
    assert channel.consumer.take() == Item(0, 0, "a")
    failure = channel.consumer.take()
    assert isinstance(failure.error, ItemNotLoadable)
    assert "cannot be loaded" in str(failure.error.__cause__)
    assert channel.consumer.take() == Item(0, 2, "c")


def record(text):
    return logging.LogRecord("name", logging.INFO, __file__, 1, text, None, None)


def test_records_come_in_their_order_among_items(open_channel):
    channel = open_channel()
    channel.worker.send_record(record("one"))
    channel.send(*items("a"))
    channel.join()
    channel.worker.send_record(record("two" * 10_000))
    wait_until(lambda: channel.consumer.pump() or len(channel.consumer.records) == 2)
    assert [r.getMessage() for r in channel.consumer.records] == ["one", "two" * 10_000]
    assert len(channel.consumer.inbox) == 1


def test_a_flood_of_records_never_waits_and_is_counted(open_channel, monkeypatch):
    monkeypatch.setattr(worker_end, "_MOST_RECORDS", 50)
    channel = open_channel()
    for number in range(20_000):
        channel.worker.send_record(record(str(number)))
    channel.send(*items("a"))
    texts = []

    def ended():
        channel.consumer.pump()
        while channel.consumer.records:
            texts.append(channel.consumer.records.popleft().getMessage())
        return channel.consumer.inbox

    wait_until(ended)
    channel.join()
    numbers = [int(text) for text in texts if text.isdigit()]
    dropped = [int(text.split()[0]) for text in texts if not text.isdigit()]
    assert numbers == sorted(numbers)
    assert len(numbers) + sum(dropped) == 20_000
    assert dropped


def test_a_record_of_a_destructor_in_the_middle_of_a_send_does_no_harm(open_channel):
    channel = open_channel()

    class Logs:
        def __reduce__(self):
            channel.worker.send_record(record("while pickling"))
            return str, ("logs",)

    with channel.worker._lock:  # as a destructor would find it
        channel.worker.send_record(record("while sending"))
    channel.send(*items(Logs()))
    channel.pump(1)
    channel.join()
    assert channel.consumer.take().value == "logs"
    texts = [r.getMessage() for r in channel.consumer.records]
    assert texts == ["while sending", "while pickling"]


@pytest.mark.parametrize("how", ["ask_to_stop", "close"])
def test_a_worker_that_waits_learns_that_the_consumer_left(open_channel, how):
    channel = open_channel(items=0)
    channel.send(*items("a"))
    getattr(channel.consumer, how)()
    channel.join()
    assert [type(error) for error in channel.errors] == [Closed]
    assert channel.worker.next_epoch() is None


def test_epochs_are_told(open_channel):
    channel = open_channel()
    channel.consumer.begin(0)
    channel.consumer.begin(1)
    assert [channel.worker.next_epoch(), channel.worker.next_epoch()] == [0, 1]


def test_a_gap_in_the_sequence_is_an_error(open_channel):
    channel = open_channel()
    channel.raw.send(HEADER.pack(Kind.HELLO, 0, 0, 0))
    channel.raw.send(HEADER.pack(Kind.END, 2, 0, 0))
    with pytest.raises(TransportError, match="sent packet 2, but 1 was due"):
        wait_until(lambda: channel.consumer.pump())
    assert channel.consumer.greeted


def test_a_repeated_packet_is_passed_over(open_channel):
    channel = open_channel()
    for sequence in (0, 0, 1):
        channel.raw.send(HEADER.pack(Kind.END, sequence, sequence, 0))
    channel.pump(2)
    assert [channel.consumer.take() for _ in range(2)] == [End(0), End(1)]
    assert not channel.consumer.inbox


def test_nonsense_is_an_error(open_channel):
    channel = open_channel()
    channel.raw.send(b"?")
    with pytest.raises(TransportError, match="malformed"):
        wait_until(lambda: channel.consumer.pump())
