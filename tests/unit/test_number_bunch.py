"""Numbers that C code moves from a generator into the ring, over a channel within one process."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enqueuer.backends.order import AsTheyCome
from enqueuer.common.descriptors import Descriptor
from enqueuer.transport.item_receiver import ItemReceiver
from enqueuer.transport.item_sender import ItemSender
from enqueuer.transport.packets import Packets, pair
from enqueuer.transport.protocol import Credit
from enqueuer.transport.ring import IS_STRONG, Ring, open_ring
from enqueuer.transport.sender_control import send_ready
from enqueuer.workers.messages import Reported

pytestmark = pytest.mark.skipif(not IS_STRONG, reason="C code needs barriers here")

CREDIT = 1000
NUMBERS = st.integers() | st.floats() | st.booleans() | st.none() | st.text(max_size=3)


class Channel:
    """Both ends of a channel, and an item that has been sent, after which a bunch may follow."""

    def __init__(self, first=0, credit=CREDIT):
        ours, its = pair("seqpacket")
        memory, credit = Descriptor(open_ring()), Credit(credit, None, False)
        packets = Packets(its)
        send_ready(packets)
        self.worker = ItemSender(packets, Ring.of(memory.fileno()), credit)
        self.consumer = ItemReceiver(Packets(ours), Ring.of(memory.fileno()), credit, "worker 0")
        memory.close()
        # The first item asks for the credit.
        self.worker.send_item(0, 0, first)
        self.worker.send_item(0, 1, first)
        self.take()

    def take(self):
        """Return what has come, as numbers and values, or the message that is no item."""
        taken = [item[1:3] for item in self.consumer.items(10**6, AsTheyCome({}))]
        if not taken and self.consumer.has_message:
            taken = [self.consumer.other()]
            self.consumer.pass_over()
        self.consumer.acknowledge()
        return taken

    def fill(self, values, number=2):
        """Fill a bunch; return the counts and what is left."""
        bunch = self.worker.open_bunch(0)
        assert bunch is not None
        try:
            bunch.fill(number, iter(values))
        finally:
            self.counts = bunch.asked, bunch.made
            self.worker.close_bunch(bunch)
        return *self.counts, bunch.left

    def close(self):
        self.consumer.close()
        self.worker.close()


@pytest.fixture
def channel():
    channels = []

    def open_one(*options):
        channels.append(Channel(*options))
        return channels[-1]

    yield open_one
    while channels:
        channels.pop().close()


@pytest.mark.parametrize(
    ("values", "made", "left"),
    [
        ([], 0, []),
        ([1, -2, 2**63 - 1, -(2**63)], 4, []),
        ([1, None, 2], 1, []),
        ([None], 0, []),
        ([1, True], 1, [True]),
        ([1, 2.5], 1, [2.5]),
        ([1, "a"], 1, ["a"]),
        ([1, 2**63, 2], 1, [2**63]),
        ([2**200], 0, [2**200]),
    ],
)
def test_numbers_are_sent_up_to_another_value(channel, values, made, left):
    one = channel()
    # The end, or None, is counted as an item that was asked for.
    assert one.fill(values) == (made + (not left), made, left)
    assert one.take() == [(2 + place, value) for place, value in enumerate(values[:made])]


def test_floats_arrive_bit_for_bit(channel):
    one, values = channel(0.5), [0.1, -0.0, float("inf"), float("nan"), 5e-324]
    assert one.fill(values)[1] == len(values)
    packed = [struct.pack("d", value) for _, value in one.take()]
    assert packed == [struct.pack("d", value) for value in values]


@pytest.mark.parametrize("error", [ValueError, struct.error])
def test_an_error_of_the_generator_is_raised_after_its_numbers(channel, error):
    def values():
        yield from (1, 2)
        raise error("of the generator")

    one = channel()
    with pytest.raises(error, match="of the generator"):
        one.fill(values())
    assert one.counts[1] == 2
    assert one.take() == [(2, 1), (3, 2)]


def test_each_number_can_be_read_as_soon_as_it_is_made(channel):
    one, seen = channel(), []

    def values():
        for value in range(5):
            yield value
            seen.append(one.take())

    one.fill(values())
    assert seen == [[(2 + value, value)] for value in range(5)]


@pytest.mark.parametrize("event", ["arm_wake_up", "ask_to_stop"])
def test_a_bunch_ends_when_the_loop_falls_asleep_or_has_ordered_something(channel, event):
    one = channel()

    def values():
        yield from (1, 2)
        getattr(one.consumer, event)()
        yield 3
        pytest.fail("the loop waits for the last one")

    assert one.fill(values()) == (3, 3, [])
    assert one.take() == [(2, 1), (3, 2), (4, 3)]
    # The loop was woken by a packet.
    assert one.consumer.has_packets == (event == "arm_wake_up")


def test_a_report_comes_before_the_item_that_is_being_made(channel):
    one, report = channel(), Reported(0, 4, ValueError("seen"))

    def values():
        yield from (1, 2)
        one.worker.send_report(report)
        yield 3

    assert one.fill(values()) == (2, 2, [3])
    one.worker.send_item(0, 4, 3)
    assert one.take() == [(2, 1), (3, 2)]
    (reported,) = one.take()
    assert (reported.number, str(reported.error)) == (4, "seen")
    assert one.take() == [(4, 3)]


def test_a_bunch_is_never_larger_than_the_credit(channel):
    one = channel(0, 20)
    assert one.fill(range(100))[:2] == (18, 18)
    assert one.worker.open_bunch(0) is None


def test_a_number_that_does_not_follow_in_its_run_is_sent_by_itself(channel):
    assert channel().fill([7, 8], number=5) == (0, 0, [7])
    assert channel().fill([None, 8], number=5) == (1, 0, [])


@given(values=st.lists(NUMBERS, max_size=60))
def test_any_values_arrive_as_they_are(values):
    channel, number, source = Channel(), 2, iter(values)
    try:
        left = []
        while number < 2 + len(values):
            bunch = None if left else channel.worker.open_bunch(0)
            if bunch is None:
                value = left.pop() if left else next(source)
                if value is not None:
                    channel.worker.send_item(0, number, value)
                number += 1
                continue
            bunch.fill(number, source)
            channel.worker.close_bunch(bunch)
            # The end of the source counts as an item of None.
            number += bunch.asked
            left = list(bunch.left)
        taken = channel.take()
        assert [place - 2 for place, _ in taken] == [
            place for place, value in enumerate(values) if value is not None
        ]
        assert [repr(value) for _, value in taken] == [
            repr(value) for value in values if value is not None
        ]
    finally:
        channel.close()
