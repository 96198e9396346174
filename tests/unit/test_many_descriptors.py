"""A process with thousands of descriptors, as servers are, can wait for a channel."""

from __future__ import annotations

import os
import socket

from emberkv.live.keeper.channel import Channel


def test_a_channel_beyond_what_select_takes_can_be_waited_for() -> None:
    opened = [os.dup(0) for _ in range(1100)]
    try:
        ours, theirs = socket.socketpair()
        assert ours.fileno() > 1024
        channel, other = Channel(ours), Channel(theirs)
        assert not channel.wait(0.0)
        assert channel.wait(0.0, writes=True)
        other.send(b"a frame")
        assert channel.wait(5.0)
        assert channel.receive() == [b"a frame"]
        other.close()
        assert channel.wait(5.0)
        channel.close()
        assert channel.wait(5.0)
    finally:
        for descriptor in opened:
            os.close(descriptor)
