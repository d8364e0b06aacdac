"""What a worker says of itself on its page."""

import multiprocessing

from helpers import LIMIT

from enqueuer.common.descriptors import Descriptor
from enqueuer.transport.channel import Records, Status, open_status


def test_both_sides_see_the_same_records():
    memory = Descriptor(open_status())
    worker, consumer = Status.of(memory.fileno()), Status.of(memory.fileno())
    memory.close()
    assert (consumer.meter.read(), consumer.claims.read(), consumer.watches.read()) == ([], [], [])
    worker.meter.new()(*range(12))
    first, second = worker.claims.new(), worker.claims.new()
    second(7)
    # A thread that has not written its record yet hides those of no others.
    assert consumer.claims.read() == [(0,), (7,)]
    first(5)
    worker.watches.new()(1, -2, 3)
    assert consumer.meter.read() == [tuple(range(12))]
    assert (consumer.claims.read(), consumer.watches.read()) == ([(5,), (7,)], [(1, -2, 3)])


def test_a_record_that_is_half_written_is_the_one_before():
    memory = memoryview(bytearray(Records.bytes_of(2, 1)))
    worker, consumer = Records(memory, 2), Records(memory, 2)
    write = worker.new()
    write(1, 2)
    assert consumer.read() == [(1, 2)]
    memory[0] = 99
    assert consumer.read() == [(1, 2)]
    assert Records(memory, 2).read() == []
    write(3, 4)
    assert consumer.read() == [(3, 4)]


def write_alike(status):
    write = status.watches.new()
    for number in range(100_000):
        write(number, number, number)


def test_a_record_is_whole_while_it_is_written():
    memory = Descriptor(open_status())
    status = Status.of(memory.fileno())
    memory.close()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=write_alike, args=(status,))
    process.start()
    found = set()
    while process.is_alive():
        found.update(status.watches.read())
    process.join(LIMIT)
    assert process.exitcode == 0
    assert all(len(set(record)) == 1 for record in found)
    assert status.watches.read() == [(99_999,) * 3]
