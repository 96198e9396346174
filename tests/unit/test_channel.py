"""The channel: whole frames in order, whatever the socket takes at once."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

import pytest

from emberkv.live.keeper.channel import MAX_DESCRIPTORS, MAX_FRAME_BYTES, PROTOCOL, Channel

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channels = Channel(one), Channel(other, takes_descriptors=True)
    yield channels
    for channel in channels:
        channel.close()


def test_frames_arrive_whole_and_in_order(pair: Pair) -> None:
    here, there = pair
    for frame in (b"one", b"", b"three" * 1000):
        here.send(frame)
    assert there.receive() == [b"one", b"", b"three" * 1000]
    assert there.receive() == []
    assert not there.closed


def test_what_the_socket_does_not_take_is_sent_later(pair: Pair) -> None:
    here, there = pair
    large = os.urandom(5_000_000)
    here.send(large)
    here.send(b"after")
    assert here.unsent_bytes > 0
    frames: list[bytes] = []
    while len(frames) < 2:
        frames += there.receive()
        here.flush()
    assert frames == [large, b"after"]
    assert here.unsent_bytes == 0


def test_a_descriptor_travels_with_its_frame(pair: Pair) -> None:
    here, there = pair
    fd = os.memfd_create("test")
    here.send(b"take this", fd)
    assert there.receive() == [b"take this"]
    taken = there.take_descriptor()
    assert taken is not None
    assert os.path.sameopenfile(fd, taken)
    assert there.take_descriptor() is None
    for each in (fd, taken):
        os.close(each)


def test_the_end_of_the_stream_closes(pair: Pair) -> None:
    here, there = pair
    here.send(b"last words")
    here.close()
    assert there.receive() == [b"last words"]
    assert there.receive() == []
    assert there.closed
    there.send(b"to nobody")  # nothing happens


def test_sending_to_one_who_is_gone_closes(pair: Pair) -> None:
    here, there = pair
    there.close()
    here.send(b"x")
    here.send(b"y")
    assert here.closed
    assert here.unsent_bytes == 0


@pytest.mark.parametrize(
    ("header", "fault"),
    [((PROTOCOL + 1, 3), "version"), ((PROTOCOL, MAX_FRAME_BYTES + 1), "of 67108865 bytes")],
)
def test_another_protocol_or_too_long_a_message_closes(
    pair: Pair, header: tuple[int, int], fault: str
) -> None:
    here, there = pair
    here.sock.send(struct.pack("<II", *header) + b"abc")
    assert there.receive() == []
    assert there.closed
    assert fault in there.fault


def test_descriptors_that_nobody_takes_are_closed(pair: Pair) -> None:
    here, there = pair
    reader, writer = os.pipe()
    for _ in range(MAX_DESCRIPTORS + 3):
        here.send(b"take this", writer)
        assert there.receive() == [b"take this"]
    os.close(writer)
    taken = [there.take_descriptor() for _ in range(MAX_DESCRIPTORS + 1)]
    assert taken.count(None) == 1
    for each in taken:
        if each is not None:
            assert not os.get_inheritable(each)
            os.close(each)
    assert os.read(reader, 1) == b""  # nobody holds the other end any more
    os.close(reader)
