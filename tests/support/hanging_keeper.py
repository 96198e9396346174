"""A keeper whose disk hangs while a FIFO stands at a path, or fails as a file beside it says.

    hanging_keeper.py INSTANCE GATE LOG

The gate holds every `read`, `write` and `reset` of the storage, and its opening, as long as a FIFO
of that name exists: the call sleeps in the kernel until someone opens it for writing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from emberkv.domain.namespace import Namespace
from emberkv.domain.types import Entry, Outcome
from emberkv.errors import StorageError
from emberkv.live.keeper.address import try_listen
from emberkv.live.keeper.disk import open_slab
from emberkv.live.keeper.messages import DiskSettings
from emberkv.live.keeper.process import run
from emberkv.live.keeper.server import Patience
from emberkv.tiers.base import Record, SlotStorage


class Gated:
    """A storage behind gates: `gate.read`, `gate.write`, `gate.reset` and `gate.fail-reset`."""

    def __init__(self, inner: SlotStorage, gate: Path) -> None:
        self._inner = inner
        self._gate = gate

    @property
    def slot_count(self) -> int:
        return self._inner.slot_count

    @property
    def payload_bytes(self) -> int:
        return self._inner.payload_bytes

    def read(
        self, records: Sequence[Record], payloads: Sequence[memoryview], /
    ) -> Sequence[Outcome]:
        pass_gate(self._gate, "read")
        return self._inner.read(records, payloads)

    def write(
        self, records: Sequence[Record], payloads: Sequence[memoryview], /
    ) -> Sequence[Outcome]:
        pass_gate(self._gate, "write")
        return self._inner.write(records, payloads)

    def entries(self) -> Iterator[Entry]:
        return self._inner.entries()

    def reset(self, *, passing: bool = False) -> None:
        pass_gate(self._gate, "reset")
        if self._gate.with_suffix(".fail-reset").exists():
            raise StorageError("the device refuses")
        self._inner.reset(passing=passing)

    def close(self) -> None:
        self._inner.close()


def pass_gate(gate: Path, name: str) -> None:
    """Sleep while the gate of a name is shut."""
    try:
        fd = os.open(gate.with_suffix(f".{name}"), os.O_RDONLY)
    except FileNotFoundError:
        return
    os.close(fd)


def main() -> None:
    """Be the keeper."""
    instance, gate, log = sys.argv[1], Path(sys.argv[2]), sys.argv[3]

    def open_storage(settings: DiskSettings, namespace: Namespace, chunk_bytes: int) -> SlotStorage:
        pass_gate(gate, "open")
        return Gated(open_slab(settings, namespace, chunk_bytes), gate)

    listener = try_listen(instance)
    assert listener is not None
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    patience = Patience(predecessor_s=0.5, disk_s=1.0, drain_s=1.0, settle_s=1.0)
    run(listener.detach(), instance, log, open_storage=open_storage, patience=patience)


if __name__ == "__main__":
    main()
