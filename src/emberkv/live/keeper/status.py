"""Which keepers this user has, and how they are."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import msgspec

from emberkv.errors import KeeperError
from emberkv.live.keeper.address import instances, try_connect
from emberkv.live.keeper.channel import Channel
from emberkv.live.keeper.messages import Status, StatusRequest, decode_for_client, encode

ANSWER_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class KeeperInfo:
    """A keeper that listens; `status` is None if it does not answer in time."""

    instance: str
    status: Status | None


def find_keepers() -> list[KeeperInfo]:
    """Every keeper of this user in this network namespace, by instance; a second each at most."""
    return [KeeperInfo(instance, ask_status(instance)) for instance in instances()]


def ask_status(instance: str, timeout_s: float = ANSWER_S) -> Status | None:
    """How an instance's keeper is; None if there is none, or it does not answer."""
    try:
        sock = try_connect(instance)
    except KeeperError:
        return None
    if sock is None:
        return None
    channel = Channel(sock)
    deadline_s = time.monotonic() + timeout_s
    channel.send(encode(StatusRequest()))
    frames: list[bytes] = []
    while not frames and not channel.closed and time.monotonic() < deadline_s:
        channel.wait(deadline_s - time.monotonic())
        frames = channel.receive()
    channel.close()
    try:
        answer = decode_for_client(frames[0]) if frames else None
    except msgspec.MsgspecError:
        return None
    return answer if isinstance(answer, Status) else None
