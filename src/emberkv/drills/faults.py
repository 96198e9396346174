"""A storage that goes wrong as planned: fails, waits, damages, or mixes up verified bytes.

`FaultyStorage` stands between a tier's I/O and its real storage. What it mixes up has passed the
storage's own verification: only a comparison of answers can tell.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from emberkv.domain.types import ChunkKey, Entry, Outcome, Slot
from emberkv.tiers.base import Record, SlotStorage

OK = Outcome.OK


class Operation(enum.StrEnum):
    """Which call of a storage a fault is for."""

    READ = "read"
    WRITE = "write"


class MixUp(enum.StrEnum):
    """Wrong bytes under a right checksum."""

    OTHER_CHUNK = "bytes of another chunk"
    SHIFTED_LAYER = "one layer shifted"
    STALE_GENERATION = "a stale generation"
    WRONG_RANK = "a wrong rank's part"
    OTHER_NAMESPACE = "another namespace"


@dataclass(frozen=True, slots=True)
class Parts:
    """How a payload is divided, for mixing it up: equal parts for ranks, of equal layers."""

    ranks: int = 2
    layers: int = 2


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, for which chunks of which call.

    `outcome` replaces the storage's own, and then nothing is read or written. `flip` damages the
    payload on its way instead: what was written is corrupt from then on, what is read only this
    time. `release` holds the whole call until the test sets it. `latency_s` is added to each call,
    and `bytes_per_s` is the most that all calls together move. `mix_up` makes a read that went
    well deliver something else, of a payload divided into `parts`. `slots` None means all.
    """

    operation: Operation
    slots: frozenset[Slot] | None = None
    outcome: Outcome | None = None
    flip: bool = False
    release: threading.Event | None = None
    latency_s: float = 0.0
    bytes_per_s: float | None = None
    mix_up: MixUp | None = None
    parts: Parts = Parts()

    def hits(self, operation: Operation, slot: Slot) -> bool:
        return operation is self.operation and (self.slots is None or slot in self.slots)


class FaultyStorage:
    """A storage that passes on to `inner` and goes wrong as planned; implements `SlotStorage`.

    `foreign` gives a key's payload in another namespace, for `OTHER_NAMESPACE`.
    """

    def __init__(
        self,
        inner: SlotStorage,
        faults: Sequence[Fault] = (),
        *,
        foreign: Callable[[ChunkKey], bytes | None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._inner = inner
        self._faults = tuple(faults)
        self._foreign = foreign
        self._sleep = sleep
        self._met = 0
        self._held = 0
        self.closed = False
        self._changed = threading.Condition()
        self._line = threading.Lock()

    def plan(self, *faults: Fault) -> None:
        """Replace the faults, for the calls that begin from now on."""
        self._faults = faults

    def wait_until_held(self, calls: int, timeout_s: float) -> bool:
        """Wait until `calls` calls are being held by a `release`; False if it takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._held >= calls, timeout_s)

    @property
    def chunks_met(self) -> int:
        """Chunks that a fault was planned for when they were written or read."""
        return self._met

    @property
    def slot_count(self) -> int:
        return self._inner.slot_count

    @property
    def payload_bytes(self) -> int:
        return self._inner.payload_bytes

    def write(
        self, records: Sequence[Record], payloads: Sequence[memoryview], /
    ) -> Sequence[Outcome]:
        """Write what no fault hits, damaged where a fault says so."""
        faults = self._faults
        self._hold(faults, Operation.WRITE, records)
        sent = [
            memoryview(_flipped(payload))
            if self._flips(faults, Operation.WRITE, record)
            else payload
            for record, payload in zip(records, payloads, strict=True)
        ]
        left, outcomes = self._refuse(faults, Operation.WRITE, records)
        done = self._inner.write([records[at] for at in left], [sent[at] for at in left])
        for at, outcome in zip(left, done, strict=True):
            outcomes[at] = outcome
        return outcomes

    def read(
        self, records: Sequence[Record], payloads: Sequence[memoryview], /
    ) -> Sequence[Outcome]:
        """Read what no fault hits; what a fault flips is CORRUPT, what it mixes up is OK."""
        faults = self._faults
        self._hold(faults, Operation.READ, records)
        left, outcomes = self._refuse(faults, Operation.READ, records)
        mixes_up = any(fault.mix_up for fault in faults)
        before = [bytes(payloads[at]) for at in left] if mixes_up else []
        done = self._inner.read([records[at] for at in left], [payloads[at] for at in left])
        for at, outcome in zip(left, done, strict=True):
            outcomes[at] = outcome
            if outcome is OK and self._flips(faults, Operation.READ, records[at]):
                payloads[at].cast("B")[:] = _flipped(payloads[at])
                outcomes[at] = Outcome.CORRUPT
        for at, old in zip(left, before, strict=False):
            fault = _mixing_up(faults, records[at].slot)
            if outcomes[at] is OK and fault is not None:
                payloads[at].cast("B")[:] = self._mixed_up(fault, records[at], payloads[at], old)
        return outcomes

    def entries(self) -> Iterator[Entry]:
        return self._inner.entries()

    def reset(self, *, passing: bool = False) -> None:
        self._inner.reset(passing=passing)

    def close(self) -> None:
        self.closed = True
        self._inner.close()

    def _hold(
        self, faults: Sequence[Fault], operation: Operation, records: Sequence[Record]
    ) -> None:
        for fault in faults:
            met = sum(fault.hits(operation, record.slot) for record in records)
            if not met:
                continue
            with self._changed:
                self._met += met
            if fault.release:
                self._count_held(+1)
                fault.release.wait()
                self._count_held(-1)
            if fault.latency_s:
                self._sleep(fault.latency_s)
            if fault.bytes_per_s:
                with self._line:  # one line for all threads, as a device has
                    self._sleep(len(records) * self.payload_bytes / fault.bytes_per_s)

    def _count_held(self, change: int) -> None:
        with self._changed:
            self._held += change
            self._changed.notify_all()

    @staticmethod
    def _flips(faults: Sequence[Fault], operation: Operation, record: Record) -> bool:
        return any(fault.flip and fault.hits(operation, record.slot) for fault in faults)

    @staticmethod
    def _refuse(
        faults: Sequence[Fault], operation: Operation, records: Sequence[Record]
    ) -> tuple[list[int], list[Outcome]]:
        """Positions that no outcome is planned for, and the outcomes so far."""
        left: list[int] = []
        outcomes: list[Outcome] = []
        for at, record in enumerate(records):
            planned = next(
                (it.outcome for it in faults if it.outcome and it.hits(operation, record.slot)),
                None,
            )
            outcomes.append(planned or Outcome.SHED)
            if planned is None:
                left.append(at)
        return left, outcomes

    def _mixed_up(self, fault: Fault, record: Record, payload: memoryview, old: bytes) -> bytes:
        """What is delivered instead of a payload; `old` is what its room held before."""
        right = bytes(payload)
        match fault.mix_up:
            case MixUp.OTHER_CHUNK:
                return self._another(record) or right
            case MixUp.STALE_GENERATION:
                return old
            case MixUp.WRONG_RANK:
                at = len(right) // fault.parts.ranks
                return right[at:] + right[:at]
            case MixUp.SHIFTED_LAYER:
                return b"".join(
                    _rotated(part, len(part) // fault.parts.layers)
                    for part in _equal_parts(right, fault.parts.ranks)
                )
            case MixUp.OTHER_NAMESPACE:
                found = None if self._foreign is None else self._foreign(record.key)
                return found or right
            case None:
                return right

    def _another(self, record: Record) -> bytes | None:
        """The payload of some other chunk of this storage, if it has one."""
        room = bytearray(self.payload_bytes)
        for entry in self._inner.entries():
            other = Record(entry.key, entry.parent, entry.slot)
            if entry.key != record.key and self._inner.read([other], [memoryview(room)])[0] is OK:
                return bytes(room)
        return None


def _mixing_up(faults: Sequence[Fault], slot: Slot) -> Fault | None:
    return next((it for it in faults if it.mix_up and it.hits(Operation.READ, slot)), None)


def _equal_parts(payload: bytes, count: int) -> list[bytes]:
    size = len(payload) // count
    return [payload[at : at + size] for at in range(0, size * count, size)]


def _rotated(payload: bytes, by: int) -> bytes:
    return payload[by:] + payload[:by]


def _flipped(payload: memoryview) -> bytes:
    changed = bytearray(payload)
    changed[len(changed) // 2] ^= 0x10
    return bytes(changed)
