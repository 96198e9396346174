"""A client of a server's control socket: asks, waits within a limit, gets an answer or an error."""

from __future__ import annotations

import time
from typing import Final, Self, TypeVar

import msgspec

from emberkv.errors import ControlError, UsageError
from emberkv.live.control.address import connect
from emberkv.live.control.messages import (
    MAX_ANSWER_BYTES,
    PROTOCOL,
    Answer,
    Message,
    Refused,
    decode_answer,
    encode,
)
from emberkv.live.keeper.channel import Channel

ANSWER_S: Final = 30.0

A = TypeVar("A", bound=Message)


class ControlClient:
    """One connection to the server of an instance. To be closed; a context manager."""

    def __init__(self, instance: str) -> None:
        """Connect. Raises `ControlError` if no server of that name answers."""
        self.instance = instance
        self._channel = Channel(
            connect(instance), protocol=PROTOCOL, max_frame_bytes=MAX_ANSWER_BYTES
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def ask(self, request: Message, kind: type[A], timeout_s: float = ANSWER_S) -> A:
        """The server's answer. Raises `UsageError` or `ControlError` with what it says against it.

        Also `ControlError` if there is no answer in time, or not one of that kind.
        """
        answer = self._exchange(request, time.monotonic() + timeout_s)
        if isinstance(answer, Refused):
            raise UsageError(answer.reason) if answer.mistake else ControlError(answer.reason)
        if not isinstance(answer, kind):
            raise ControlError(f"server '{self.instance}' gives an answer to something else")
        return answer

    def _exchange(self, request: Message, deadline_s: float) -> Answer:
        channel = self._channel
        channel.send(encode(request))
        frames: list[bytes] = []
        while not frames and not channel.closed:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not channel.wait(left_s, writes=channel.unsent_bytes > 0):
                channel.close()
                raise ControlError(f"server '{self.instance}' does not answer; it may hang")
            channel.flush()
            frames = channel.receive()
        if not frames:
            raise ControlError(f"server '{self.instance}' can't be asked: {channel.fault}")
        try:
            return decode_answer(frames[0])
        except msgspec.MsgspecError as error:
            channel.close()
            raise ControlError(
                f"server '{self.instance}' says what this version does not understand: {error}"
            ) from error
