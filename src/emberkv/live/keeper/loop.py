"""The keeper's one event loop: sockets, timers, and calls handed in by other threads."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import selectors
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from emberkv.live.keeper.channel import Channel

Call = Callable[[], None]

_IDLE_S: Final = 60.0
_log = logging.getLogger(__name__)


class Loop:
    """Runs every call on the thread that called `run`. Only `post` may be used by other threads.

    A call that raises is logged and the loop goes on: one bad message must not end the keeper.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._woken)
        self._posted: deque[Call] = deque()
        self._timers: list[tuple[float, int, Call]] = []
        self._order = itertools.count()
        self._running = True
        self.now_s = time.monotonic

    def post(self, call: Call) -> None:
        """Have a call made soon, from any thread."""
        self._posted.append(call)
        # A blocked eventfd means that a wake-up is due already.
        os.eventfd_write(self._wake_fd, 1)

    def call_later(self, delay_s: float, call: Call) -> None:
        heapq.heappush(self._timers, (self.now_s() + delay_s, next(self._order), call))

    def watch(self, source: Channel | int, on_readable: Call) -> None:
        """Call when there is something to read; a descriptor or a channel."""
        self._selector.register(source, selectors.EVENT_READ, on_readable)

    def expect_writable(self, channel: Channel, on_ready: Call, *, writing: bool) -> None:
        """Also call `on_ready`, or no longer, when the channel can send again."""
        if channel.closed:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        if self._selector.get_key(channel).events != events:
            self._selector.modify(channel, events, on_ready)

    def forget(self, channel: Channel) -> None:
        """Stop watching; before the channel is closed, or after."""
        for key in list(self._selector.get_map().values()):
            if key.fileobj is channel:
                self._selector.unregister(channel)

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        """Work until `stop`."""
        while self._running:
            due_s = self._timers[0][0] - self.now_s() if self._timers else _IDLE_S
            for key, _ in self._selector.select(max(0.0, min(due_s, _IDLE_S))):
                self._make(key.data)
            while self._posted:
                self._make(self._posted.popleft())
            while self._timers and self._timers[0][0] <= self.now_s():
                self._make(heapq.heappop(self._timers)[2])

    def _make(self, call: Call) -> None:
        try:
            call()
        except Exception:
            _log.exception("a call of the keeper's loop failed")

    def _woken(self) -> None:
        os.eventfd_read(self._wake_fd)
