"""Both ends of a channel in one process, over both kinds of sockets."""

import contextlib
import errno
import logging
import os
import pickle
import signal
import socket
import sys
import threading
from collections import deque

import numpy as np
import pytest
from helpers import LIMIT, wait_until

from enqueuer import Closed, TransportError
from enqueuer.backends.shard_schedule import AsTheyCome
from enqueuer.common.descriptors import Descriptor
from enqueuer.errors import BlockMemoryError, ItemNotLoadable
from enqueuer.transport import memory, receiver, sender
from enqueuer.transport import ring as layout
from enqueuer.transport.block_map import BlockMap
from enqueuer.transport.packets import Packets, pair
from enqueuer.transport.protocol import FRAME, PACKET, Credit, Kind
from enqueuer.transport.receiver import ItemReceiver, ReceiverControl
from enqueuer.transport.ring import RING_BYTES, Ring, open_ring
from enqueuer.transport.sender import ItemSender, send_ready
from enqueuer.transport.task_queue import TaskQueue
from enqueuer.workers.messages import End, Epoch, Failure, Item, Start

LARGE = 50_000


def items_of(consumer, most, order=None):
    """Return the items that are next, at most so many."""
    taken, order = deque(), AsTheyCome({}) if order is None else order
    while most > len(taken) and consumer.head() is True:
        taken.extend(consumer.items(most - len(taken), order))
    return taken


class Channel:
    """A worker's end, used by a thread, and the consumer's end."""

    def __init__(self, kind, credit, room):
        ours, its = pair(kind)
        memory = Descriptor(open_ring())
        self.raw = Packets(its)
        self.ring = Ring.of(memory.fileno())
        send_ready(self.raw)
        self.worker = ItemSender(self.raw, Ring.of(memory.fileno()), credit)
        self.consumer = ItemReceiver(
            Packets(ours), Ring.of(memory.fileno()), credit, "worker 0", room
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
        wait_until(lambda: self.consumer.has_message)
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


def test_a_worker_is_asked_to_stop_only_once(open_channel):
    channel = open_channel()
    ours, its = pair()
    with contextlib.closing(CountedPackets(ours)) as packets, its:
        control = ReceiverControl(packets, channel.ring, BlockMap(), "worker 0")
        for _ in range(3):
            control.ask_to_stop()
        assert packets.count == 1


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
    for value in "ab":
        wait_until(lambda: channel.consumer.is_asking)
        assert not channel.consumer.has_message
        channel.consumer.grant(room=0, wanted=True)
        channel.consumer.grant(room=0, wanted=True)  # said twice, it is still one
        channel.wait(1)
        assert channel.take().value == value
    channel.join()


def test_bytes_that_wait_are_bounded(open_channel):
    channel = open_channel(items=10, waiting_bytes=250_000)
    channel.send(*items(*[np.zeros(100_000, np.uint8)] * 3))
    channel.wait(2)
    assert channel.consumer.waiting == 2
    channel.take()
    channel.consumer.grant(room=10)
    channel.wait(2)
    channel.join()


def test_what_is_too_large_comes_when_it_is_wanted(open_channel):
    channel = open_channel(items=10, waiting_bytes=1000)
    channel.send(*items(np.zeros(100_000)))
    channel.consumer.grant(room=10)
    channel.consumer.grant(room=10, wanted=True)
    channel.wait(1)
    channel.join()


def test_blocks_are_used_again(open_channel):
    channel = open_channel(items=1)
    for number in range(20):
        channel.send(Item(0, number, np.full(100_000, number)))
        channel.wait(1)
        channel.join()
        assert (channel.take().value == number).all()
        channel.consumer.grant(room=10)
    assert channel.worker.blocks.pool.count <= 2


def test_what_is_kept_is_never_overwritten(open_channel):
    channel = open_channel(items=1)
    kept = []
    for number in range(20):
        channel.send(Item(0, number, np.full(100_000, number)))
        channel.wait(1)
        channel.join()
        kept.append(channel.take().value)
        channel.consumer.grant(room=10)
    assert all((array == number).all() for number, array in enumerate(kept))


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
    monkeypatch.setattr(sender, "_MOST_RECORDS", 50)
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


def test_a_gap_in_the_sequence_is_an_error(open_channel):
    channel = open_channel()
    channel.raw.send(PACKET.pack(Kind.WAKE, 2))
    with pytest.raises(TransportError, match="sent packet 2, but 1 was due"):
        wait_until(lambda: channel.consumer.control.pump())
    assert channel.consumer.control.is_ready


def test_a_repeated_packet_is_passed_over(open_channel):
    channel = open_channel()
    body = pickle.dumps(record("once").__dict__)
    for sequence in (1, 1, 2):
        channel.raw.send(PACKET.pack(Kind.RECORD, sequence) + body)
    control = channel.consumer.control
    wait_until(lambda: control.pump() or len(control.records) == 2)
    channel.consumer.control.pump()
    assert len(channel.consumer.control.records) == 2


def test_nonsense_is_an_error(open_channel):
    channel = open_channel()
    channel.raw.send(b"?")
    with pytest.raises(TransportError, match="malformed packet"):
        wait_until(lambda: channel.consumer.control.pump())
    channel.worker.send_item(0, 0, "a")
    size, table, _, shard, number = FRAME.unpack_from(channel.ring.frames, 0)
    FRAME.pack_into(channel.ring.frames, 0, size, table, 99, shard, number)
    assert list(channel.consumer.items(1, AsTheyCome({}))) == []
    with pytest.raises(TransportError, match="malformed frame"):
        channel.consumer.head()


def test_many_laps_of_the_ring_with_frames_of_every_size(open_channel):
    channel = open_channel(items=1000)
    sizes = [(number * 7919) % 16_000 for number in range(1000)]
    channel.send(*items(*[bytes([size % 256]) * size for size in sizes]))
    for number, size in enumerate(sizes):
        assert channel.take() == Item(0, number, bytes([size % 256]) * size)
        channel.consumer.grant(room=1000)
    channel.join()
    assert sum(sizes) > 10 * RING_BYTES


def test_many_laps_of_the_ring_with_runs_and_other_frames(open_channel):
    channel = open_channel(items=5000)
    values = [
        bytes(1000 + number % 4000)
        if number % 97 == 0
        else (number, "t" * (number % 200))[number % 2]
        for number in range(20_000)
    ]
    channel.send(*items(*values))
    taken, order = deque(), AsTheyCome({})
    while len(taken) < len(values):
        wait_until(lambda: channel.consumer.has_message)
        taken.extend(items_of(channel.consumer, 1 + len(taken) % 300, order))
        assert order.numbers == {0: len(taken)}
        channel.consumer.acknowledge()
        channel.consumer.grant(room=5000)
    channel.join()
    assert taken == deque(items(*values))
    assert channel.consumer.position > 2 * RING_BYTES
    assert not channel.consumer.has_message


def test_items_of_a_run_can_be_taken_as_soon_as_each_is_sent(open_channel):
    channel = open_channel()
    for number, value in enumerate([1, "two", 3.0, True, b"five"]):
        channel.worker.send_item(0, number, value)
        assert channel.consumer.waiting == 1
        assert channel.consumer.head() is True
        assert channel.take() == Item(0, number, value)
        assert not channel.consumer.has_message
        assert channel.ring.words[layout.TAKEN] == number + 1
        channel.consumer.grant(room=10)


def test_a_run_ends_where_the_shard_or_the_number_leaps_or_another_frame_comes(open_channel):
    channel = open_channel(items=20)
    sent = [
        Item(0, 0, "a"),
        Item(0, 1, "b"),
        Item(1, 2, "c"),
        Item(1, 4, "d"),
        Item(1, 5, ["no scalar"]),
        Item(1, 6, "e"),
        End(1, None, 7),
        Item(0, 2, "f"),
    ]
    channel.send(*sent)
    channel.join()
    assert [channel.take() for _ in sent] == sent
    assert not channel.consumer.has_message


def test_an_item_that_is_half_written_into_a_run_is_not_read(open_channel):
    channel = open_channel()
    channel.send(*items(1, 2))
    channel.join()
    words = channel.ring.words
    before = words[layout.SENT], words[layout.WRITTEN]
    channel.send(Item(0, 2, "half"))
    channel.join()
    # A worker that is killed has written the bytes, and has not stored how many there are.
    words[layout.SENT], words[layout.WRITTEN] = before
    assert [channel.take().value for _ in range(2)] == [1, 2]
    assert not channel.consumer.has_message


def test_what_is_left_of_a_run_counts_as_not_taken(open_channel):
    channel = open_channel()
    channel.send(*items(*range(5)), End(0))
    channel.join()
    order = AsTheyCome({})
    assert [item[2] for item in items_of(channel.consumer, 2, order)] == [0, 1]
    channel.consumer.acknowledge()
    assert (channel.consumer.waiting, channel.consumer.load) == (3, 8)
    assert channel.consumer.has_message
    assert channel.consumer.head() is True
    assert [item[2] for item in items_of(channel.consumer, 9, order)] == [2, 3, 4]
    assert channel.ring.words[layout.TAKEN] == 2
    assert channel.take() == End(0)


def test_a_full_ring_makes_the_worker_wait(open_channel):
    channel = open_channel(items=1000)
    channel.send(*items(*[bytes(10_000)] * 100))
    wait_until(lambda: channel.ring.words[layout.WORKER_ASLEEP])
    assert 10 < channel.consumer.waiting < 100
    for number in range(100):
        assert channel.take().number == number
        channel.consumer.grant(room=1000)
    channel.join()


def test_an_exception_of_a_signal_handler_in_the_middle_of_an_item_loses_nothing(open_channel):
    channel = open_channel()
    channel.send(*items("a", Interrupts(), "c"))
    channel.join()
    taken, order = deque(), AsTheyCome({})
    Interrupts.error = TimeoutError("from a signal handler")
    with pytest.raises(TimeoutError):
        while channel.consumer.head() is True:
            taken.extend(channel.consumer.items(10, order))
    assert channel.consumer.head() is True
    taken.extend(items_of(channel.consumer, 10))
    assert [value for _, _, value, _ in taken] == ["a", "whole", "c"]


def test_an_interrupted_item_is_whole_at_the_next_try_and_its_block_is_released_once(
    open_channel, monkeypatch
):
    blocks = BlockMap()
    monkeypatch.setattr(receiver, "BlockMap", lambda: blocks)
    channel = open_channel(items=2)
    channel.send(*items((np.full(LARGE, 0), Interrupts()), *[np.full(LARGE, n) for n in (1, 2, 3)]))
    channel.wait(2)
    Interrupts.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        list(channel.consumer.items(1, AsTheyCome({})))
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
    assert sorted(lease.number for lease in blocks.released) == [1, 2, 3, 4]


def test_a_block_that_was_being_added_at_an_interrupt_is_there_at_the_next_try(open_channel):
    """Whichever line was interrupted, its descriptor is closed once."""
    for line in range(1000):
        channel = open_channel()
        channel.send(Item(0, 0, np.full(LARGE, 5)))
        channel.join()
        was_interrupted = interrupted_at(line, channel.consumer.control.pump, ADDING)
        assert (channel.take().value == 5).all()
        channel.close()
        if not was_interrupted:
            break
    assert 3 < line < 999


ADDING = {"block_map.py", "memory.py"}


def interrupted_at(line, call, files):
    """Call, with a KeyboardInterrupt at the so-manieth line in files; return whether it came."""
    lines = iter(range(line + 1))

    def trace(frame, event, _):
        if os.path.basename(frame.f_code.co_filename) not in files:
            return None
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def interrupted():
    errors, Interrupts.error = [Interrupts.error], None  # a signal comes once
    if errors[0] is not None:
        handle(signal.SIGALRM, sys._getframe(), errors)
    return "whole"


def handle(number, frame, errors):
    raise errors.pop()


class Interrupts:
    error = None

    def __reduce__(self):
        return interrupted, ()


def test_a_forked_copy_cannot_write_to_the_ring(open_channel):
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


# --- results of tasks, of which the loop awaits one ---


class Answers:
    """A worker that sends results of tasks, and a loop that may sleep for one of them."""

    def __init__(self, channel, packet):
        self.channel, self.queue = channel, TaskQueue()
        self.socket = channel.worker.task_socket = self.queue.worker_socket()
        tickets = [(number, 0, (number,), None) for number in packet]
        assert self.queue.send(1, packet[0], pickle.dumps(tickets))
        channel.ring.words[layout.LIMIT] = 1 << 62
        channel.consumer.control.pump()

    def sleep(self, number, is_patient=False):
        """Begin to sleep for the result of a task."""
        self.channel.consumer.control.arm_wake_up(2 + 2 * number + is_patient)

    def do(self, value):
        """Do the next task; return whether its result has woken the loop."""
        ticket = self.channel.worker.next_ticket()
        self.channel.worker.send_item(0, ticket.number, value)
        self.channel.consumer.control.pump()
        return self.woken

    @property
    def woken(self):
        sent = self.channel.ring.words[layout.PACKETS]
        last, self.packets = getattr(self, "packets", 1), sent
        return sent > last

    def close(self):
        self.socket.close()
        self.queue.close()


@pytest.fixture
def open_answers(open_channel):
    with contextlib.ExitStack() as stack:

        def open_one(*packet):
            answers = Answers(open_channel(), packet)
            stack.callback(answers.close)
            return answers

        yield open_one


@pytest.mark.parametrize("value", [7, {"x": 7}])
def test_a_loop_that_sleeps_for_a_result_is_woken_by_that_one_only(open_answers, value):
    answers = open_answers(4, 5, 6)
    answers.sleep(5)
    assert [answers.do(value) for _ in range(3)] == [False, True, False]


@pytest.mark.parametrize("value", [7, {"x": 7}])
def test_a_patient_loop_is_woken_at_the_end_of_the_packet(open_answers, value):
    answers = open_answers(4, 5, 6, 7)
    answers.sleep(5, is_patient=True)
    assert [answers.do(value) for _ in range(4)] == [False, False, False, True]


def test_a_patient_loop_is_not_woken_by_other_packets(open_answers):
    answers = open_answers(4, 5)
    answers.sleep(9, is_patient=True)
    assert [answers.do(value) for value in "ab"] == [False, False]


def test_a_new_sleep_does_not_end_for_the_result_of_the_last_one(open_answers):
    answers = open_answers(4, 5, 6, 7)
    answers.sleep(4, is_patient=True)
    assert not answers.do("a")
    answers.sleep(6)
    assert [answers.do(value) for value in "bcd"] == [False, True, False]


def test_a_worker_without_room_wakes_a_loop_that_sleeps_for_a_later_result(open_channel):
    channel = open_channel(room=None)
    channel.consumer.control.arm_wake_up(2 + 2 * 1000)
    channel.send(*items(*[bytes([n]) * 60_000 for n in range(10)]))
    wait_until(lambda: channel.ring.words[layout.PACKETS] > 1)
    assert [channel.take().number for _ in range(8)] == list(range(8))
    assert [channel.take().number for _ in range(2)] == [8, 9]
    channel.join()
