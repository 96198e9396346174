"""The server's side of the control socket: a thread that listens, and one per connection.

Nothing a client does or leaves undone reaches the engine: connections are few, each has its own
thread and a time limit for every step, and what is not understood is refused.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from emberkv.errors import ControlError, EmberError, KeeperError, UsageError
from emberkv.live.control.address import Listener, listen
from emberkv.live.control.messages import (
    MAX_REQUEST_BYTES,
    PROTOCOL,
    Answer,
    Refused,
    Request,
    decode_request,
    encode,
)
from emberkv.live.keeper.channel import Channel, require_same_user
from emberkv.live.operations import Operations

MAX_CONNECTIONS: Final = 8
IDLE_S: Final = 30.0
"""How long a client may take to ask, and to take an answer."""

logger = logging.getLogger(__name__)


class ControlServer:
    """Answers requests by `answer`, which is called on threads of this object."""

    def __init__(
        self, listener: Listener, answer: Callable[[Request], Answer], *, idle_s: float = IDLE_S
    ) -> None:
        """Start listening. The listener is this object's from now on, to be closed by `close`."""
        self._listener = listener
        self._answer = answer
        self._idle_s = idle_s
        self._ended = threading.Event()
        self._turned_away: deque[Channel] = deque()
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    @property
    def name(self) -> str:
        """The instance under which clients find this server."""
        return self._listener.name

    def close(self) -> None:
        """Stop listening and remove the socket's file; answers under way are given up."""
        if not self._ended.is_set():
            self._ended.set()
            _wake(self._listener.sock)
            self._listener.close()
            for channel in list(self._turned_away):
                channel.close()

    def _listen(self) -> None:
        while not self._ended.is_set():
            try:
                sock, _ = self._listener.sock.accept()
            except OSError as error:
                if self._ended.is_set():
                    return
                logger.warning("the control socket could not take a caller: %s", error)
                self._ended.wait(0.1)  # for instance out of descriptors
                continue
            if not self._places.acquire(blocking=False):
                self._turn_away(sock)
                continue
            try:
                threading.Thread(
                    target=self._serve, args=(sock,), name="control-client", daemon=True
                ).start()
            except RuntimeError:  # no more threads
                self._places.release()
                sock.close()

    def _turn_away(self, sock: socket.socket) -> None:
        """Say so, and stay open for a while: who still sends would not read it otherwise."""
        channel = Channel(sock, protocol=PROTOCOL, max_frame_bytes=MAX_REQUEST_BYTES)
        reason = f"the server answers {MAX_CONNECTIONS} clients already; try again"
        channel.send(encode(Refused(reason, mistake=False)))
        self._turned_away.append(channel)
        if len(self._turned_away) > MAX_CONNECTIONS:
            self._turned_away.popleft().close()

    def _serve(self, sock: socket.socket) -> None:
        channel = Channel(sock, protocol=PROTOCOL, max_frame_bytes=MAX_REQUEST_BYTES)
        try:
            require_same_user(sock)
            while not channel.closed and not self._ended.is_set():
                payloads = self._hear(channel)
                if not payloads:
                    return
                for payload in payloads:
                    self._say(channel, self._answer_to(payload))
        except KeeperError:
            logger.warning("another user's process tried to use the control socket")
        except Exception:
            logger.exception("a control connection failed")
        finally:
            channel.close()
            self._places.release()

    def _answer_to(self, payload: bytes) -> Answer:
        try:
            request = decode_request(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return Refused(f"not understood: {error}", mistake=True)
        try:
            return self._answer(request)
        except EmberError as error:
            return Refused(str(error), isinstance(error, UsageError))
        except Exception as error:
            logger.exception("a control command failed")
            return Refused(f"an error of emberkv: {error!r}", mistake=False)

    def _hear(self, channel: Channel) -> list[bytes]:
        """The next frames; none if the client is gone or takes too long."""
        deadline_s = time.monotonic() + self._idle_s
        while not channel.closed:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not channel.wait(left_s):
                return []
            frames = channel.receive()
            if frames:
                return frames
        return []

    def _say(self, channel: Channel, answer: Answer) -> None:
        deadline_s = time.monotonic() + self._idle_s
        channel.send(encode(answer))
        while channel.unsent_bytes and not channel.closed:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not channel.wait(left_s, reads=False, writes=True):
                channel.close()
                return
            channel.flush()


def start_control(operations: Operations) -> ControlServer | None:
    """Serve a manager's commands at its instance's address; None, and a warning, if that fails."""
    try:
        listener = listen(operations.instance)
    except ControlError as error:
        logger.warning("there is no control socket: %s", error)
        return None
    operations.instance = listener.name
    logger.info("emberkv status %s: control socket %s", listener.name, listener.path)
    return ControlServer(listener, operations.answer)


def _wake(sock: socket.socket) -> None:
    """Make a thread that waits in `accept` return."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
