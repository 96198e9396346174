"""A worker's side of the keeper: the arena, and a socket that stays open as a sign of life."""

from __future__ import annotations

import logging
import os
import socket
import threading
from contextlib import suppress

import msgspec

from emberkv.domain.namespace import Namespace
from emberkv.live.arena import Arena
from emberkv.live.keeper.client import JOIN_S, geometry_of
from emberkv.live.keeper.joining import Joined, Joining, Place, Rejoining
from emberkv.live.keeper.messages import (
    Hello,
    KeeperConfig,
    PopulatedSlots,
    Role,
    decode_for_client,
)
from emberkv.live.paging import map_slots

logger = logging.getLogger(__name__)


def join_worker(
    place: Place,
    rank: int,
    config: KeeperConfig,
    namespace: Namespace,
    *,
    timeout_s: float = JOIN_S,
) -> WorkerAttachment:
    """Attach a worker of an engine; starts a keeper if there is none.

    Raises `ConfigError` for what the user must mend, `KeeperError` for everything else.
    """
    hello = Hello(Role.WORKER, place.engine_id, os.getpid(), rank, config, namespace.fields)
    joined = Joining(place, hello, timeout_s=timeout_s, may_start=True).run()
    return WorkerAttachment(place, hello, joined)


class WorkerAttachment:
    """What a worker has of the keeper; open until `close` or the end of the process.

    A thread that mostly sleeps in the kernel maps rows as they get their memory, and watches the
    socket; when a keeper dies, the worker gets attached to the next one, the memory the same.
    """

    def __init__(self, place: Place, hello: Hello, joined: Joined) -> None:
        """Map the arena of an attachment, which is this object's from now on."""
        self.instance = joined.instance
        self._arena = Arena(joined.memory_fd, geometry_of(hello.config))
        os.close(joined.memory_fd)
        self._place = place
        self._hello = msgspec.structs.replace(hello, rejoins=True)
        self._lock = threading.Lock()
        self._closed = False
        self._rejoining: Rejoining | None = None
        self._watch(joined)

    @property
    def arena(self) -> Arena:
        return self._arena

    @property
    def is_attached(self) -> bool:
        """Whether a keeper knows this worker at present."""
        return not self._channel.closed

    def close(self) -> None:
        """Let go of keeper and arena; rows given out must be gone."""
        with self._lock:
            self._closed = True
        if self._rejoining is not None:
            self._rejoining.stop()
        with suppress(OSError):
            self._channel.sock.shutdown(socket.SHUT_RDWR)
        self._watcher.join()
        self._arena.close()

    def _watch(self, joined: Joined) -> None:
        with self._lock:
            self._channel = joined.channel
            if self._closed:
                joined.channel.close()
                return
            self._watcher = threading.Thread(
                target=self._serve, args=(joined,), name="emberkv-keeper-watch", daemon=True
            )
            self._watcher.start()

    def _serve(self, joined: Joined) -> None:
        channel = joined.channel
        frames = joined.later
        while True:
            try:
                self._hear(frames)
            except msgspec.MsgspecError as error:
                channel.fault = f"it says what nobody understands: {error}"
                channel.close()
            if channel.closed:
                break
            channel.wait()
            frames = channel.receive()
        with self._lock:
            if self._closed:
                return
            logger.warning("the keeper is gone: %s", channel.fault)
            self._rejoining = Rejoining(self._place, self._hello, self._arena.fd, self._rejoined)

    def _hear(self, frames: list[bytes]) -> None:
        for frame in frames:
            message = decode_for_client(frame)
            if isinstance(message, PopulatedSlots):
                if message.first_slot + message.slot_count > self._arena.geometry.slot_count:
                    raise msgspec.ValidationError("populated slots beyond the end")
                map_slots(self._arena, message.first_slot, message.slot_count)

    def _rejoined(self, joined: Joined) -> None:
        """On the thread of `Rejoining`."""
        os.close(joined.memory_fd)
        self._watch(joined)
