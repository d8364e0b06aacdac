"""A pytest plugin that breaks one promise of the thread backend: the suite must turn red."""

import os

from enqueuer.backends.thread_channel import ThreadSender
from enqueuer.order.messages import End, Failure, Item

_send, _send_item = ThreadSender.send, ThreadSender.send_item


def send(sender, message):
    if isinstance(message, Item):
        _send_item(sender, message.shard, message.number, message.value, message.state)
    else:
        _send(sender, message)


def drops_an_item(sender, message):
    if not (isinstance(message, Item) and message.number == 2):
        send(sender, message)


def sends_twice(sender, message):
    send(sender, message)
    if isinstance(message, Item) and message.number == 1:
        send(sender, message)


def swaps_two_items(sender, message):
    match message:
        case Item(shard, 1, value):
            sender.kept = Item(shard, 1, value)
        case _:
            send(sender, message)
            if isinstance(message, Item) and message.number == 2:
                send(sender, sender.kept)


def ends_instead_of_failing(sender, message):
    send(sender, End(message.shard) if isinstance(message, Failure) else message)


def never_waits_for_room(sender, message):
    sender.inbox.max_size += 1
    send(sender, message)


def forgets_its_end(sender, message):
    """Break the end: the consumer would hang, so the test's own limit must speak."""
    if not isinstance(message, End):
        send(sender, message)


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
    ThreadSender.send = broken
    ThreadSender.send_item = lambda sender, *parts: broken(sender, Item(*parts))
