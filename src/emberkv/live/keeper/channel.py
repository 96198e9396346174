"""Whole messages over a Unix stream socket that never blocks; descriptors may travel along.

A frame is the protocol's number and the payload's length, four bytes each, and the payload. What
the socket does not take at once waits in memory, in order.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
from collections import deque
from typing import Final

from emberkv.errors import KeeperError

PROTOCOL: Final = 0x0003_4B45
"""Keeper and client must be of the same; raised with every change of the messages."""

MAX_FRAME_BYTES: Final = 1 << 26
MAX_DESCRIPTORS: Final = 4
"""More that nobody has taken are closed."""

READ_BYTES: Final = 1 << 18

_HEADER: Final = struct.Struct("<II")
_FD_SPACE: Final = socket.CMSG_SPACE(array.array("i").itemsize)


class Channel:
    """Both ends of a private socket. Owns the socket; closed at the first error or end.

    Frames of another `protocol`, or announced as longer than `max_frame_bytes`, close it.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        takes_descriptors: bool = False,
        protocol: int = PROTOCOL,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.closed = False
        self.max_frame_bytes = max_frame_bytes
        self.fault = "the connection was closed"
        self._takes_descriptors = takes_descriptors
        self._protocol = protocol
        self._descriptors: list[int] = []
        self._received = bytearray()
        self._unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0

    def fileno(self) -> int:
        return self.sock.fileno()

    def wait(
        self, timeout_s: float | None = None, *, reads: bool = True, writes: bool = False
    ) -> bool:
        """Wait until something can be read or, if asked for, sent; False if it takes too long.

        Also of use in a process with thousands of descriptors, where `select` is not.
        """
        if self.closed:
            return True
        poll = select.poll()
        events = (select.POLLIN if reads else 0) | (select.POLLOUT if writes else 0)
        poll.register(self.sock.fileno(), events)
        return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))

    def send(self, payload: bytes, descriptor: int | None = None) -> None:
        """Send a frame now, or as soon as `flush` can. A descriptor goes with the first frame only.

        Does nothing on a closed channel.
        """
        if self.closed:
            return
        frame = memoryview(_HEADER.pack(self._protocol, len(payload)) + payload)
        if descriptor is not None:
            frame = self._send_descriptor(frame, descriptor)
        if frame:
            self._unsent.append(frame)
            self.unsent_bytes += len(frame)
            self.flush()

    def _send_descriptor(self, frame: memoryview, descriptor: int) -> memoryview:
        try:
            sent = socket.send_fds(self.sock, [frame], [descriptor])
        except OSError as error:
            self._fail(error)
            return frame[:0]
        return frame[sent:]

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it."""
        while self._unsent and not self.closed:
            frame = self._unsent[0]
            try:
                sent = self.sock.send(frame, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                self._fail(error)
                return
            self.unsent_bytes -= sent
            if sent < len(frame):
                self._unsent[0] = frame[sent:]
            else:
                self._unsent.popleft()

    def receive(self) -> list[bytes]:
        """The whole frames that have arrived. Sets `closed` at the end of the stream."""
        while not self.closed:
            try:
                piece = self._read()
            except BlockingIOError:
                break
            except OSError as error:
                self._fail(error)
                break
            if not piece:
                self.close()
                break
            self._received += piece
            if len(piece) < READ_BYTES or len(self._received) > self.max_frame_bytes:
                break
        return self._frames() if self._received else []

    def _read(self) -> bytes:
        if not self._takes_descriptors:
            return self.sock.recv(READ_BYTES)
        piece, ancillary, _, _ = self.sock.recvmsg(READ_BYTES, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(content) - len(content) % 4
                self._descriptors += array.array("i", content[:whole])
        while len(self._descriptors) > MAX_DESCRIPTORS:
            os.close(self._descriptors.pop())
        return piece

    def _frames(self) -> list[bytes]:
        frames: list[bytes] = []
        at = 0
        received = self._received
        while len(received) - at >= _HEADER.size:
            protocol, length = _HEADER.unpack_from(received, at)
            if protocol != self._protocol or length > self.max_frame_bytes:
                self.fault = (
                    "the other side speaks another version of the protocol"
                    if protocol != self._protocol
                    else f"the other side announces a message of {length} bytes"
                )
                self.close()
                break
            end = at + _HEADER.size + length
            if len(received) < end:
                break
            frames.append(bytes(memoryview(received)[at + _HEADER.size : end]))
            at = end
        del received[:at]
        return frames

    def take_descriptor(self) -> int | None:
        """The descriptor that came along, now the caller's, or None."""
        return self._descriptors.pop(0) if self._descriptors else None

    def _fail(self, error: OSError) -> None:
        self.fault = error.strerror or str(error)
        self.close()

    def close(self) -> None:
        """Close the socket, and every descriptor that nobody took."""
        self.closed = True
        self.sock.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._unsent.clear()
        self.unsent_bytes = 0


def require_same_user(sock: socket.socket) -> None:
    """Raise `KeeperError` unless the process at the other end has this process's user id."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    if uid != os.geteuid():
        raise KeeperError(f"the keeper's socket belongs to user {uid}, not to {os.geteuid()}")
