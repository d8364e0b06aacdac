"""Both ends of a channel in one process, over both kinds of sockets."""

import contextlib
import errno
import logging
import os
import socket
import threading

import numpy as np
import pytest
from helpers import LIMIT, wait_until

from enqueuer import Closed, TransportError
from enqueuer.common.descriptors import Descriptor
from enqueuer.errors import BlockMemoryError, ItemNotLoadable
from enqueuer.monitoring.meters import PHASE, WAITING
from enqueuer.order.messages import End, Epoch, Failure, Item, Start
from enqueuer.transport import memory, receiver, sender
from enqueuer.transport.blocks import BlockMap
from enqueuer.transport.channel import PACKET, Credit, Kind, Packets, Status, open_status, pair
from enqueuer.transport.receiver import ItemReceiver, ReceiverControl
from enqueuer.transport.sender import Account, ItemSender, send_ready

LARGE = 50_000


def items_of(consumer, most):
    """Return the items that are next, at most so many."""
    taken = []
    while most > len(taken) and consumer.head() is True:
        taken.extend(consumer.take(most - len(taken)))
    return taken


class Channel:
    """A worker's end, used by a thread, and the consumer's end."""

    def __init__(self, kind, credit, room):
        ours, its = pair(kind)
        memory = Descriptor(open_status())
        self.raw = Packets(its)
        send_ready(self.raw)
        self.worker = ItemSender(self.raw, Status.of(memory.fileno()), credit)
        self.consumer = ItemReceiver(
            Packets(ours), Status.of(memory.fileno()), credit, "worker 0", room
        )
        memory.close()
        self.errors = []
        self.thread = None

    def send(self, *messages):
        """Send messages in a thread."""

        def run():
            try:
                for message in messages:
                    if isinstance(message, Item):
                        self.worker.send_item(message.shard, message.number, message.value)
                    else:
                        self.worker.send(message)
            except BaseException as error:
                self.errors.append(error)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def wait(self, count=1):
        """Wait until so many items, or anything else, are there."""

        def has_come():
            self.consumer.control.pump()
            return self.consumer.waiting >= count or self.is_other()

        wait_until(has_come)

    def is_other(self):
        return self.consumer.has_message and not self.consumer.waiting

    def take(self):
        """Return the next message, and count it as consumed."""
        wait_until(lambda: self.consumer.head() is not False)
        taken = items_of(self.consumer, 1)
        if taken:
            message = Item(*taken[0])
        else:
            message = self.consumer.head()
            self.consumer.remove(message)
        self.consumer.acknowledge()
        return message

    def join(self):
        self.thread.join(LIMIT)
        assert not self.thread.is_alive()

    def close(self):
        self.consumer.close()
        if self.thread is not None:
            self.join()
        self.worker.close()


@pytest.fixture(params=[socket.SOCK_SEQPACKET, socket.SOCK_STREAM], ids=["seqpacket", "stream"])
def open_channel(request):
    channels = []

    def open_one(items=10, waiting_bytes=None, ask=False, room=lambda: 0):
        channels.append(Channel(request.param, Credit(items, waiting_bytes, ask), room))
        return channels[-1]

    yield open_one
    while channels:
        channels.pop().close()


def items(*values):
    return [Item(0, number, value) for number, value in enumerate(values)]


class CountedPackets(Packets):
    """Packets that counts those that were sent, also in vain."""

    count = 0

    def send(self, data, fds=(), *, wait=True):
        self.count += 1
        return super().send(data, fds, wait=wait)


def test_a_worker_is_asked_to_stop_only_once():
    ours, its = pair()
    with contextlib.closing(CountedPackets(ours)) as packets, its:
        control = ReceiverControl(packets, BlockMap(), "worker 0")
        for _ in range(3):
            control.ask_to_stop()
        assert packets.count == 1


def test_the_bytes_of_all_items_are_known_at_the_end(open_channel):
    channel = open_channel()
    channel.send(*items(*["x" * 100] * 9), End(0))
    while not isinstance(channel.take(), End):
        pass
    count, size = channel.consumer.sent
    assert count == 9
    assert size > 900


@pytest.mark.parametrize("size", [0, 10, 1000, 100_000, 3_000_000])
def test_items_arrive_equal_and_writable(open_channel, size):
    channel = open_channel()
    value = {"x": np.arange(size), "text": "t" * size, "bytes": b"b" * size}
    channel.send(Item(3, 7, value), End(3))
    message = channel.take()
    assert (message.shard, message.number) == (3, 7)
    assert (message.value["x"] == value["x"]).all()
    message.value["x"] += 1
    assert message.value["text"] == value["text"]
    assert message.value["bytes"] == value["bytes"]
    assert channel.take() == End(3)


def test_no_more_is_sent_than_there_is_credit_for(open_channel):
    channel = open_channel(items=2)
    channel.send(*items("a", "b", "c", "d"), End(0))
    channel.wait(2)
    channel.take()
    channel.consumer.control.pump()
    assert channel.consumer.waiting == 1
    channel.consumer.grant(room=10)
    channel.wait(2)
    assert channel.consumer.waiting == 2
    channel.consumer.grant(room=10)
    assert channel.consumer.load == 2
    channel.take()
    channel.consumer.grant(room=0)
    assert channel.consumer.load == 1
    channel.take()
    channel.consumer.grant(room=10)
    channel.join()
    assert [channel.take() for _ in range(2)] == [Item(0, 3, "d"), End(0)]


def test_without_credit_an_item_comes_when_it_is_wanted(open_channel):
    channel = open_channel(items=0, ask=True)
    channel.send(*items("a", "b"))
    control = channel.consumer.control
    for value in "ab":
        wait_until(lambda: control.pump() or channel.consumer.is_asking)
        assert not channel.consumer.has_message
        channel.consumer.grant(room=0, wanted=True)
        channel.consumer.grant(room=0, wanted=True)  # said twice, it is still one
        channel.wait(1)
        assert channel.take().value == value
    channel.join()


class Orders:
    """The control of a worker to which credit comes while it sleeps."""

    closed = False

    def __init__(self):
        self.granted, self.steps = 1, []

    @property
    def limit(self):
        self.steps.append("ask")
        return self.granted

    def read_orders(self):
        self.steps.append("read")

    check = look = read_orders

    def sleep(self):
        self.steps.append("sleep")
        self.granted += 1


def test_a_worker_reads_no_orders_between_the_question_for_credit_and_its_sleep():
    """Credit that it reads there would not wake it."""
    orders = Orders()
    account = Account(Credit(1, None, False), orders)
    account.sent = 1
    account.wait(0)
    assert orders.steps[:4] == ["ask", "read", "ask", "sleep"]


def test_blocks_are_used_again(open_channel):
    channel = open_channel(items=1)
    for number in range(20):
        channel.send(Item(0, number, np.full(100_000, number)))
        channel.wait(1)
        channel.join()
        assert (channel.take().value == number).all()
        channel.consumer.grant(room=10)
    assert channel.worker.blocks.pool.count <= 2


def test_an_error_arrives_as_itself(open_channel):
    channel = open_channel()
    channel.send(Failure(1, 5, KeyError("k" * 100_000)))
    failure = channel.take()
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
    assert channel.take() == Item(0, 0, "a")
    failure = channel.take()
    assert isinstance(failure.error, ItemNotLoadable)
    assert "cannot be loaded" in str(failure.error.__cause__)
    assert channel.take() == Item(0, 2, "c")


def record(text):
    return logging.LogRecord("name", logging.INFO, __file__, 1, text, None, None)


def test_records_come_in_their_order_among_items(open_channel):
    channel = open_channel()
    channel.worker.send_record(record("one"))
    channel.send(*items("a"))
    channel.join()
    channel.worker.send_record(record("two" * 10_000))
    control = channel.consumer.control
    wait_until(lambda: control.pump() or len(control.records) == 2)
    assert [r.getMessage() for r in channel.consumer.control.records] == ["one", "two" * 10_000]
    assert channel.consumer.waiting == 1


def test_a_flood_of_records_never_waits_and_is_counted(open_channel, monkeypatch):
    monkeypatch.setattr(sender, "_MAX_RECORDS", 50)
    channel = open_channel()
    for number in range(20_000):
        channel.worker.send_record(record(str(number)))
    channel.send(*items("a"))
    texts = []

    def ended():
        channel.consumer.control.pump()
        while channel.consumer.control.records:
            texts.append(channel.consumer.control.records.popleft().getMessage())
        return channel.consumer.has_message

    wait_until(ended)
    ended()  # what had come between the pump and the item
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

    send = channel.raw.send

    def send_and_destroy(*args, **kwargs):
        channel.raw.send = send
        channel.worker.send_record(record("while sending"))
        return send(*args, **kwargs)

    channel.raw.send = send_and_destroy
    channel.worker.send_record(record("first"))
    channel.send(*items(Logs()))
    channel.wait(1)
    channel.join()
    assert channel.take().value == "logs"
    channel.consumer.control.pump()
    texts = [r.getMessage() for r in channel.consumer.control.records]
    assert texts == ["first", "while sending", "while pickling"]


@pytest.mark.parametrize("how", [lambda end: end.control.ask_to_stop(), ItemReceiver.close])
def test_a_worker_that_waits_learns_that_the_consumer_left(open_channel, how):
    channel = open_channel(items=0)
    channel.send(*items("a"))
    how(channel.consumer)
    channel.join()
    assert [type(error) for error in channel.errors] == [Closed]
    assert channel.worker.next_epoch() is None


def test_epochs_are_told(open_channel):
    channel = open_channel()
    channel.consumer.control.begin(Epoch(0))
    channel.consumer.control.begin(Epoch(1, {3: Start(5, b"x" * 100_000)}))
    assert channel.worker.next_epoch() == Epoch(0)
    assert channel.worker.next_epoch() == Epoch(1, {3: Start(5, b"x" * 100_000)})


def refuse(size):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_an_order_for_which_no_descriptor_is_left_is_an_error(open_channel, monkeypatch):
    channel, epoch = open_channel(), Epoch(1, {3: Start(5, b"x" * 100_000)})
    with monkeypatch.context() as without, pytest.raises(BlockMemoryError, match="descriptors"):
        without.setattr(memory, "open_nameless", refuse)
        channel.consumer.control.begin(epoch)
    channel.consumer.control.begin(epoch)
    assert channel.worker.next_epoch() == epoch


def test_a_long_record_for_which_no_descriptor_is_left_is_counted(open_channel, monkeypatch):
    channel = open_channel()
    monkeypatch.setattr(memory, "open_nameless", refuse)
    channel.worker.send_record(record("long" * 10_000))
    channel.send(*items("a"))
    assert channel.take().value == "a"
    channel.join()
    channel.consumer.control.pump()
    texts = [r.getMessage() for r in channel.consumer.control.records]
    assert [text.split()[:3] for text in texts] == [["1", "log", "records"]]


@pytest.mark.parametrize(
    ("packet", "says"),
    [
        # One that was repeated, and one that was lost.
        (PACKET.pack(Kind.READY, 0), "sent packet 0, but 1 was due"),
        (PACKET.pack(Kind.READY, 2), "sent packet 2, but 1 was due"),
        (b"?", "malformed packet"),
        (PACKET.pack(Kind.ITEM, 1) + b"?", "malformed frame"),
        (PACKET.pack(99, 1) + b"?", "of kind 99"),
    ],
)
def test_a_packet_that_makes_no_sense_is_an_error(open_channel, packet, says):
    channel = open_channel()
    channel.raw.send(packet)
    with pytest.raises(TransportError, match=says):
        wait_until(lambda: channel.consumer.control.pump())
    assert channel.consumer.control.is_ready


def test_what_is_taken_is_acknowledged_and_the_rest_waits(open_channel):
    channel = open_channel()
    channel.send(*items(*range(5)), End(0))
    channel.join()
    assert [item[2] for item in items_of(channel.consumer, 2)] == [0, 1]
    channel.consumer.acknowledge()
    assert (channel.consumer.waiting, channel.consumer.load) == (3, 8)
    assert channel.consumer.has_message
    assert channel.consumer.head() is True
    assert [item[2] for item in items_of(channel.consumer, 9)] == [2, 3, 4]
    assert channel.take() == End(0)


def test_a_full_socket_makes_the_worker_wait(open_channel):
    channel = open_channel(items=1000)
    channel.send(*items(*[bytes(10_000)] * 100))
    wait_until(lambda: channel.consumer.meter[PHASE] == WAITING)
    assert 10 < channel.consumer.waiting < 100
    for number in range(100):
        assert channel.take().number == number
        channel.consumer.grant(room=1000)
    channel.join()


@pytest.mark.parametrize("again", ["grant", "settle"])
def test_credit_that_finds_the_socket_full_is_owed_and_sent_once_it_can_be(open_channel, again):
    channel = open_channel(items=1)
    channel.worker.send_item(0, 0, "a")
    channel.consumer.control.packets.send = lambda *args, **options: False
    assert channel.take() == Item(0, 0, "a")
    channel.consumer.grant(room=1)
    assert channel.consumer.is_owing
    assert channel.consumer.settle()
    del channel.consumer.control.packets.send
    if again == "grant":
        channel.consumer.grant(room=1)
    else:
        assert not channel.consumer.settle()
    assert not channel.consumer.is_owing
    channel.worker.send_item(0, 1, "b")
    assert channel.take() == Item(0, 1, "b")


def test_an_interrupted_item_is_whole_at_the_next_try_and_its_block_is_released_once(
    open_channel, monkeypatch
):
    blocks = BlockMap()
    monkeypatch.setattr(receiver, "BlockMap", lambda: blocks)
    channel = open_channel(items=2)
    channel.send(*items((np.full(LARGE, 0), Interrupts()), *[np.full(LARGE, n) for n in (1, 2, 3)]))
    channel.wait(2)
    ERRORS.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        channel.consumer.take(1)
    first = channel.take().value
    assert first[1] == "whole"
    kept = [first[0]]
    for _ in range(3):
        channel.consumer.grant(room=10)
        kept.append(channel.take().value)
    channel.join()
    assert [int(array[0]) for array in kept] == [0, 1, 2, 3]
    assert all((array == array[0]).all() for array in kept)
    del first, kept
    assert sorted(lease.key for lease in blocks.released) == [(1, 1), (2, 1), (3, 1), (4, 1)]


def interrupted():
    if ERRORS:
        raise ERRORS.pop()
    return "whole"


ERRORS = []  # what the code of an item raises, once each


class Interrupts:
    def __reduce__(self):
        return interrupted, ()


def test_a_forked_copy_cannot_send(open_channel):
    channel = open_channel()
    pid = os.fork()
    if not pid:
        try:
            channel.worker.send_item(0, 0, "from the copy")
        except Closed:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert not channel.consumer.has_message
