"""Whole packets over both kinds of sockets."""

import os
import socket
import threading

import pytest
from helpers import LIMIT, wait_until

from enqueuer.common.descriptors import close_in_children
from enqueuer.transport.channel import Packets, pair


@pytest.fixture(params=[socket.SOCK_SEQPACKET, socket.SOCK_STREAM], ids=["seqpacket", "stream"])
def ends(request):
    one, other = pair(request.param)
    yield Packets(one), Packets(other)
    one.close()
    other.close()


def texts(packets):
    packets.drain()
    return [data for data, _ in packets.received]


def test_descriptors_travel(ends):
    one, other = ends
    read, write = os.pipe()
    one.send(b"none")
    one.send(b"two", [read, write])
    os.close(read), os.close(write)
    assert texts(other) == [b"none", b"two"]
    (_, none), (_, (read, write)) = other.received
    other.received.clear()
    assert none == []
    os.write(write, b"x")
    assert os.read(read, 1) == b"x"
    os.close(read), os.close(write)


@pytest.mark.parametrize("unread", [0, 1])
def test_what_was_sent_before_the_end_arrives(ends, unread):
    one, other = ends
    for _ in range(unread):
        other.send(b"unread")
    one.send(b"last words")
    one.close()
    assert texts(other) == [b"last words"]
    assert other.ended


def test_a_full_socket_refuses_without_waiting_and_loses_nothing(ends):
    one, other = ends
    numbers, received = iter(range(1000)), []
    reader = threading.Thread(target=read_until, args=(other, received, b"end"))
    while one.send((number := next(numbers)).to_bytes(4, "little") * 10, wait=False):
        if one.is_stream and number == 900:
            break  # it may take more than the test cares to send
    reader.start()
    one.send(b"end")
    reader.join(LIMIT)
    assert received == [n.to_bytes(4, "little") * 10 for n in range(len(received))]
    assert len(received) in (number, number + 1)


def read_until(packets, received, last):
    while True:
        packets.drain()
        while packets.received:
            data, _ = packets.received.popleft()
            if data == last:
                return
            received.append(data)


def test_a_stream_cut_anywhere_gives_only_whole_packets():
    one, other = pair(socket.SOCK_STREAM)
    sender, packets = Packets(one), []
    for text in (b"first", b"second", b""):
        sender.send(text)
    whole = other.recv(1000)
    for length in range(len(whole) + 1):
        left, right = socket.socketpair()
        left.sendall(whole[:length])
        left.close()
        receiver = Packets(right)
        packets.append(texts(receiver))
        assert receiver.ended
        right.close()
    assert packets[-1] == [b"first", b"second", b""]
    assert all(came == packets[-1][: len(came)] for came in packets)
    one.close()
    other.close()


def test_a_forked_child_does_not_keep_the_socket_open():
    one, other = pair()
    close_in_children(one)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)  # until the test is over
        os._exit(0)
    one.close()
    receiver = Packets(other)
    wait_until(lambda: receiver.drain() or receiver.ended)
    os.close(read), os.close(write)
    os.waitpid(pid, 0)
    other.close()
