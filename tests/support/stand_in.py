"""A process that stands in for an engine's scheduler, worker, or both; told what to do by lines.

Each line on standard input is a JSON object `{"do": name, …}`; each answer a JSON object, with
`error` if it failed. It makes chunks as an engine does: rows written by the worker's mapping,
headers by the manager's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from emberkv.domain.namespace import Namespace
from emberkv.domain.types import DISK, RAM, ChunkKey, Copy, Slot, TransferId
from emberkv.errors import EmberError
from emberkv.live.arena import Arena
from emberkv.live.driver import CopyProgress, Found, Populated, TierDown, TierUp
from emberkv.live.keeper.client import KeeperClient, join
from emberkv.live.keeper.joining import Place
from emberkv.live.keeper.messages import DiskSettings, KeeperConfig
from emberkv.live.keeper.worker import WorkerAttachment, join_worker

WAIT_S = 30
PAUSE_S = 0.002


def payload(name: str, chunk_bytes: int) -> bytes:
    """What the chunk of a name holds."""
    return (name.encode() * (chunk_bytes // len(name) + 1))[:chunk_bytes]


class StandIn:
    """The processes' state; each public method is a command."""

    def __init__(self) -> None:
        self._manager: KeeperClient | None = None
        self._worker: WorkerAttachment | None = None
        self._found: dict[int, list[tuple[str, int]]] = {RAM: [], DISK: []}
        self._named: set[int] = set()
        self._populated: set[int] = set()
        self._results: dict[int, dict[int, str]] = {}
        self._tier_events: list[str] = []
        self._longest_call_s = 0.0

    @property
    def manager(self) -> KeeperClient:
        assert self._manager is not None
        return self._manager

    @property
    def arena(self) -> Arena:
        return self._worker.arena if self._worker is not None else self.manager.arena

    # ── commands ─────────────────────────────────────────────────────────────────────────────

    def join(
        self,
        *,
        roles: list[str],
        instance: str,
        engine_id: str,
        config: dict[str, Any],
        namespace: dict[str, str] | None,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        disk = config.pop("disk", None)
        settings = KeeperConfig(**config, disk=None if disk is None else DiskSettings(**disk))
        place = Place(instance, engine_id, Path(options["log"]))
        named = None if namespace is None else Namespace.of(namespace)
        timeout_s = options.get("timeout_s", 60.0)
        began_s = time.monotonic()
        if "worker" in roles:
            assert named is not None
            rank = options.get("rank", 0)
            self._worker = join_worker(place, rank, settings, named, timeout_s=timeout_s)
        if "manager" not in roles:
            inode = os.fstat(self.arena.fd).st_ino
            return {"inode": inode, "instance": self._worker and self._worker.instance}
        self._manager = join(
            place,
            settings,
            None if "worker" in roles and options.get("learn", True) else named,
            worker_count=options.get("worker_count", int("worker" in roles)),
            timeout_s=timeout_s,
        )
        return {
            "keeper_pid": self.manager.keeper_pid,
            "instance": self.manager.instance,
            "slot_counts": self.manager.slot_counts,
            "disk_failure": self.manager.disk_failure,
            "namespace": dict(self.manager.namespace.fields),
            "inode": os.fstat(self.manager.arena.fd).st_ino,
            "join_s": time.monotonic() - began_s,
        }

    def found(self, populated: bool = True) -> dict[str, Any]:
        """Wait until every tier has named what it holds, and RAM is populated."""
        counts = self.manager.slot_counts
        self._until(lambda: self._named >= set(range(len(counts))))
        if populated:
            self._until(lambda: len(self._populated) == counts[RAM])
        found = {str(level): sorted(entries) for level, entries in self._found.items()}
        return {"found": found, "usable": sorted(self._populated)}

    def usable(self) -> dict[str, Any]:
        """Which slots may be used by the time RAM has named what it holds."""
        self._until(lambda: RAM in self._named)
        return {"usable": sorted(self._populated)}

    def store(self, names: list[str], first_slot: int, ready: bool = True) -> dict[str, Any]:
        """Make chunks as an engine does; returns when their rows are sealed."""
        slots = [Slot(first_slot + at) for at in range(len(names))]
        keys = [ChunkKey(name.encode()) for name in names]
        headers = self.manager.arena
        headers.mark_writing(slots, keys, [None, *keys[:-1]])
        for slot, name in zip(slots, names, strict=True):
            self.arena.row(slot)[:] = payload(name, self.arena.geometry.chunk_bytes)
        if ready:
            headers.mark_ready(slots, first_slot)
            self.manager.seal(slots)
            self._until(lambda: self._are_sealed(slots))
        return {}

    def holds(self, names: list[str], first_slot: int) -> dict[str, Any]:
        """Which of these rows hold what their name says."""
        size = self.arena.geometry.chunk_bytes
        rows = [bytes(self.arena.row(Slot(first_slot + at))) for at in range(len(names))]
        return {"same": [r == payload(n, size) for r, n in zip(rows, names, strict=True)]}

    def tamper(self, slot: int) -> dict[str, Any]:
        row = self.arena.row(Slot(slot))
        row[0] ^= 1
        return {}

    def copy(
        self,
        *,
        transfer: int,
        names: list[str],
        ram_slot: int,
        disk_slot: int,
        up: bool,
        wait: bool,
    ) -> dict[str, Any]:
        keys = tuple(ChunkKey(name.encode()) for name in names)
        parents = (None, *keys[:-1])
        ram = tuple(Slot(ram_slot + at) for at in range(len(names)))
        disk = tuple(Slot(disk_slot + at) for at in range(len(names)))
        if up:
            self.manager.arena.mark_writing(ram, keys, parents)
        source, target = (DISK, RAM) if up else (RAM, DISK)
        source_slots, target_slots = (disk, ram) if up else (ram, disk)
        order = Copy(
            TransferId(transfer), source, target, keys, parents, source_slots, target_slots
        )
        self._timed(lambda: self.manager.submit([order]))
        return self.results(transfer, len(names)) if wait else {}

    def results(self, transfer: int, count: int) -> dict[str, Any]:
        self._until(lambda: len(self._results.get(transfer, {})) >= count)
        return {"outcomes": [self._results[transfer][at] for at in range(count)]}

    def reset(self) -> dict[str, Any]:
        self.manager.arena.mark_free([Slot(s) for s in range(self.manager.slot_counts[RAM])])
        return {"reset": self.manager.reset()}

    def tier_event(self, name: str) -> dict[str, Any]:
        """Wait for a tier to go down or come up."""
        self._until(lambda: name in [event.split(":")[0] for event in self._tier_events])
        events, self._tier_events = self._tier_events, []
        return {"events": events, "keeper_pid": self.manager.keeper_pid}

    def forget_found(self) -> dict[str, Any]:
        self._found = {RAM: [], DISK: []}
        self._named = {RAM}
        return {}

    def poll_for(self, seconds: float) -> dict[str, Any]:
        """Poll all the time; how long the longest call took."""
        self._longest_call_s = 0.0
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self._poll()
        return {"longest_call_s": self._longest_call_s}

    def attached(self) -> dict[str, Any]:
        """Wait until the worker is attached to a keeper."""
        worker = self._worker
        assert worker is not None
        self._until(lambda: worker.is_attached)
        return {}

    def close(self, clean: bool = True) -> dict[str, Any]:
        if self._manager is not None:
            self._manager.close(clean=clean)
        if self._worker is not None:
            self._worker.close()
        return {}

    def _are_sealed(self, slots: list[Slot]) -> bool:
        table = self.manager.arena.headers
        return bool((table["sealed"][slots] == table["generation"][slots]).all())

    # ── inner ────────────────────────────────────────────────────────────────────────────────

    def _timed(self, call: Callable[[], Any]) -> Any:
        began_s = time.monotonic()
        result = call()
        self._longest_call_s = max(self._longest_call_s, time.monotonic() - began_s)
        return result

    def _until(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > end_s:
                raise TimeoutError(f"named {self._named}, events {self._tier_events}")
            if self._manager is not None:
                self._poll()
            time.sleep(PAUSE_S)

    def _poll(self) -> None:
        for report in self._timed(self.manager.poll):
            match report:
                case CopyProgress():
                    results = self._results.setdefault(report.transfer, {})
                    for index, outcome in report.results:
                        assert index not in results, "a chunk has ended twice"
                        results[index] = outcome.value
                case Found():
                    named = [(entry.key.decode(), entry.slot) for entry in report.entries]
                    if report.level == RAM:
                        assert {slot for _, slot in named} <= self._populated
                    self._found[report.level] += named
                    if report.last:
                        self._named.add(report.level)
                case Populated(first, count):
                    slots = set(range(first, first + count))
                    assert not slots & self._populated, "a slot is populated twice"
                    self._populated |= slots
                case TierDown(level, reason):
                    self._tier_events.append(f"down:{level}:{reason}")
                case TierUp(level):
                    self._tier_events.append(f"up:{level}")


def main() -> None:
    """Carry out commands until the end of the input."""
    stand_in = StandIn()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(stand_in, command.pop("do"))(**command)
        except (EmberError, TimeoutError, AssertionError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
