"""The disk tier as the keeper runs it: opened, scanned and reset off the event loop.

    OPENING ─► UP ◄─► RESETTING
       └───► OFF ◄───────┘ (a failed reset; a later one that succeeds brings the tier back)

A device may hang in any call, so each of these steps has a thread of its own, and the loop only
hears of its end. While the tier is not UP every copy ends as SHED.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Final, TypeVar

from emberkv.domain.namespace import Namespace
from emberkv.domain.types import DISK, Copy, Entry, Outcome, Slot
from emberkv.errors import ConfigError
from emberkv.live.arena import Arena
from emberkv.live.keeper.loop import Loop
from emberkv.live.keeper.messages import DiskSettings, Down, ResetDone, Up, found
from emberkv.live.keeper.seals import Seals
from emberkv.live.keeper.session import Session
from emberkv.live.keeper.tier_io import TierIo
from emberkv.tiers.base import SlotStorage
from emberkv.tiers.format import StoredNamespace
from emberkv.tiers.slab_directory import SlabDirectory, half_of_free_bytes

FOUND_BATCH: Final = 1024

OpenStorage = Callable[[DiskSettings, Namespace, int], SlotStorage]
_T = TypeVar("_T")


def open_slab(settings: DiskSettings, namespace: Namespace, chunk_bytes: int) -> SlotStorage:
    """The namespace's slab below `root_dir`. Raises `ConfigError` and `StorageError`."""
    root_dir = Path(settings.root_dir)
    size_bytes = settings.size_bytes
    if settings.size_is_default:
        size_bytes = min(size_bytes, half_of_free_bytes(root_dir))
    directory = SlabDirectory(root_dir, size_bytes, reserve_bytes=settings.reserve_bytes)
    stored = StoredNamespace(bytes.fromhex(namespace.digest), dict(namespace.fields))
    return directory.open_slab(stored, chunk_bytes)


class DiskState(enum.Enum):
    """See the module's drawing."""

    OPENING = "opening"
    UP = "up"
    RESETTING = "resetting"
    OFF = "off"


class DiskTier:
    """One storage and its queues, for as long as arena, namespace and settings stay.

    All methods are called on the loop's thread and return at once.
    """

    io_class: ClassVar[type[TierIo]] = TierIo

    def __init__(
        self,
        loop: Loop,
        arena: Arena,
        seals: Seals,
        settings: DiskSettings,
        open_storage: Callable[[], SlotStorage],
        *,
        settle_s: float,
    ) -> None:
        """Begin to open the storage.

        A new session's disk waits up to `settle_s` for what an earlier one left queued; then it
        is down until that has ended.
        """
        self.settings = settings
        self.state = DiskState.OPENING
        self.failure = "the disk tier did not open in time"
        self.is_users_mistake = False
        self.reset_owed = False
        self._loop = loop
        self._settle_s = settle_s
        self._arena = arena
        self._seals = seals
        self._io: TierIo | None = None
        self._session: Session | None = None
        self._has_told = False
        self._closed = False
        self._when_opened: list[Callable[[], None]] = []
        self._off_loop(open_storage, self._opened)

    @property
    def slot_count(self) -> int:
        """Slots of the storage; 0 as long as it is not open."""
        return 0 if self._io is None else self._io.storage.slot_count

    @property
    def chunks_under_way(self) -> int:
        return 0 if self._io is None else self._io.chunks_under_way

    def when_opened(self, call: Callable[[], None]) -> None:
        """Make a call when the storage is open or has failed to open."""
        if self.state is DiskState.OPENING:
            self._when_opened.append(call)
        else:
            call()

    def when_idle(self, call: Callable[[], None]) -> None:
        """Make a call on the loop when nothing is queued or running."""
        if self._io is None:
            call()
        else:
            self._io.when_idle(lambda: self._loop.post(call))

    def quarantine(self, on_read: Callable[[list[Slot]], None]) -> list[Slot]:
        """Cancel queued reads; the arena slots of those that run, each named again at its end."""
        if self._io is None:
            return []
        self._io.cancel(writes_too=False)
        return self._io.quarantine(lambda slots: self._loop.post(lambda: on_read(slots)))

    def serve(self, session: Session) -> None:
        """Work for a session from now on: once older work has ended, name what is stored."""
        self._session = session
        self._has_told = False
        self.when_opened(lambda: self._settle(session))

    def submit(self, copy: Copy) -> None:
        """Start a copy for the present session."""
        session = self._session
        if session is None:
            return
        if self._io is None or self.state is not DiskState.UP:
            session.progress(copy, 0, [Outcome.SHED] * len(copy.keys), 0.0)
        else:
            self._io.submit(copy, session.progress)

    def reset(self, number: int, *, passing: bool) -> None:
        """Cancel what is queued and forget everything stored, durably; ends in `ResetDone`.

        For `passing` see `SlotStorage.reset`.
        """
        session, io = self._session, self._io
        if session is None:
            return
        if io is None:
            session.send(ResetDone(number, self.failure))
            return
        self.state = DiskState.RESETTING
        self.reset_owed = True
        io.cancel(writes_too=True)
        io.when_written(
            lambda: self._loop.post(lambda: self._reset_storage(number, io, session, passing))
        )

    def close(self) -> None:
        """Let go of the storage; what runs ends by itself."""
        if self._closed:
            return
        self._closed = True
        self._session = None
        self.state = DiskState.OFF
        if self._io is not None:
            self._io.close()

    # ── inner ────────────────────────────────────────────────────────────────────────────────

    def _off_loop(
        self, work: Callable[[], _T], then: Callable[[_T | None, Exception | None], None]
    ) -> None:
        def run() -> None:
            try:
                result = work()
            except Exception as error:
                failure = error
                self._loop.post(lambda: then(None, failure))
            else:
                self._loop.post(lambda: then(result, None))

        self._in_background(run)

    def _in_background(self, call: Callable[[], None]) -> None:
        threading.Thread(target=call, name="disk", daemon=True).start()

    def _opened(self, storage: SlotStorage | None, error: Exception | None) -> None:
        if storage is not None and self._closed:
            storage.close()
        elif storage is not None:
            self._io = self.io_class(
                self._arena,
                self._seals,
                storage,
                read_threads=self.settings.read_threads,
                write_threads=self.settings.write_threads,
            )
            self.state = DiskState.UP
            self.reset_owed = False
        elif error is not None:
            self.state = DiskState.OFF
            self.failure = str(error)
            forbidden = isinstance(error.__cause__, PermissionError)
            self.is_users_mistake = isinstance(error, ConfigError) or forbidden
        calls, self._when_opened = self._when_opened, []
        for call in calls:
            call()

    def _settle(self, session: Session) -> None:
        """Scan when older work has ended; if it does not end, say so and scan when it has."""
        io = self._io
        if io is None:
            return
        settled = late = False

        def idle() -> None:
            nonlocal settled
            settled = True
            if self._session is session and self.state is DiskState.UP:
                if late:
                    session.send(Up(DISK, self.slot_count))
                self._scan(io, session)

        def overdue() -> None:
            nonlocal late
            # A reset has told the session what there is, nothing: from then on it is being used.
            if self._session is session and not settled and not self._has_told:
                late = True
                io.cancel(writes_too=True)
                session.send(Down(DISK, "the disk does not answer"))

        self.when_idle(idle)
        self._loop.call_later(self._settle_s, overdue)

    def _scan(self, io: TierIo, session: Session) -> None:
        def scanned(entries: Sequence[Entry] | None, error: Exception | None) -> None:
            if self._session is not session or self._has_told:
                return  # or a reset has told that nothing is stored
            if entries is None:
                self.state = DiskState.OFF
                self.failure = str(error)
                session.send(Down(DISK, self.failure))
                return
            self._tell(session, entries)

        self._off_loop(lambda: list(io.storage.entries()), scanned)

    def _tell(self, session: Session, entries: Sequence[Entry]) -> None:
        self._has_told = True
        for start in range(0, len(entries), FOUND_BATCH):
            session.send(found(DISK, entries[start : start + FOUND_BATCH], last=False))
        session.send(found(DISK, (), last=True))

    def _reset_storage(self, number: int, io: TierIo, session: Session, passing: bool) -> None:
        if not self._closed:
            self._off_loop(
                lambda: io.storage.reset(passing=passing),
                lambda _, error: self._was_reset(number, error, session),
            )

    def _was_reset(self, number: int, error: Exception | None, session: Session) -> None:
        if self._closed:
            return
        if error is None:
            self.state = DiskState.UP
            self.reset_owed = False
            session.send(ResetDone(number, None))
            if not self._has_told:
                self._tell(session, ())
        else:
            self.state = DiskState.OFF
            self.failure = f"the disk tier could not be reset: {error}"
            session.send(ResetDone(number, self.failure))
