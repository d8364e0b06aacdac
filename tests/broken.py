"""A pytest plugin that breaks one promise of the thread backend: the suite must turn red."""

import os

from enqueuer.backends import threads
from enqueuer.messages import End, Failure, Item

_send, _send_item = threads.Road.send, threads.Road.send_item


def send(road, message):
    if isinstance(message, Item):
        _send_item(road, message.shard, message.number, message.value, message.state)
    else:
        _send(road, message)


def drops_an_item(road, message):
    if not (isinstance(message, Item) and message.number == 2):
        send(road, message)


def sends_twice(road, message):
    send(road, message)
    if isinstance(message, Item) and message.number == 1:
        send(road, message)


def swaps_two_items(road, message):
    match message:
        case Item(shard, 1, value):
            road.kept = Item(shard, 1, value)
        case _:
            send(road, message)
            if isinstance(message, Item) and message.number == 2:
                send(road, road.kept)


def ends_instead_of_failing(road, message):
    send(road, End(message.shard) if isinstance(message, Failure) else message)


def never_waits_for_room(road, message):
    road._buffer.max_size += 1
    send(road, message)


def forgets_its_end(road, message):
    """Break the end: the consumer would hang, so the test's own limit must speak."""
    if not isinstance(message, End):
        send(road, message)


BREAKAGES = {
    function.__name__: function
    for function in (
        drops_an_item,
        sends_twice,
        swaps_two_items,
        ends_instead_of_failing,
        never_waits_for_room,
        forgets_its_end,
    )
}


def pytest_configure(config):
    broken = BREAKAGES[os.environ["BREAK"]]
    threads.Road.send = broken
    threads.Road.send_item = lambda road, *parts: broken(road, Item(*parts))
