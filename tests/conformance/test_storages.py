"""Every storage keeps the protocol of `SlotStorage`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkv.domain.types import ChunkKey, Outcome, Slot
from emberkv.drills.faults import FaultyStorage
from emberkv.testing.storage import DurableSlotStorageTests, SlotStorageTests
from emberkv.tiers import slab_files
from emberkv.tiers.base import Record, SlotStorage
from emberkv.tiers.format import SlabGeometry, StoredNamespace
from emberkv.tiers.memory import MemoryStorage
from emberkv.tiers.slab import Slab
from emberkv.tiers.slab_directory import SlabDirectory

NAMESPACE = StoredNamespace(bytes(range(16)), {"model": "tiny", "chunk_tokens": 32})


class TestMemory(SlotStorageTests):
    def make(self, slot_count: int, payload_bytes: int) -> SlotStorage:
        return MemoryStorage(slot_count, payload_bytes)


class TestFaultyWithoutFaults(TestMemory):
    def make(self, slot_count: int, payload_bytes: int) -> SlotStorage:
        return FaultyStorage(MemoryStorage(slot_count, payload_bytes))


class TestSlab(DurableSlotStorageTests):
    @pytest.fixture(autouse=True)
    def _own_directory(self, tmp_path: Path) -> Iterator[None]:
        self.root_dir = tmp_path
        self.opened: list[Slab] = []
        yield
        for slab in self.opened:
            slab.close()

    def make(self, slot_count: int, payload_bytes: int) -> SlotStorage:
        self.size_bytes = SlabGeometry(slot_count, payload_bytes).total_bytes
        self.chunk_bytes = payload_bytes
        return self._open()

    def reopen(self, storage: SlotStorage) -> SlotStorage:
        storage.close()
        return self._open()

    def _open(self) -> Slab:
        slab = SlabDirectory(self.root_dir, self.size_bytes).open_slab(NAMESPACE, self.chunk_bytes)
        self.opened.append(slab)
        return slab


class TestSlabWithoutDirectIo(TestSlab):
    @pytest.fixture(autouse=True)
    def _buffered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(slab_files, "supports_direct_io", lambda _directory_fd: False)

    def test_says_so(self) -> None:
        slab = self.make(1, 4096)
        assert isinstance(slab, Slab)
        assert not slab.direct_io


def test_keys_of_every_length_come_back(tmp_path: Path) -> None:
    slab = SlabDirectory(tmp_path, 1 << 20).open_slab(NAMESPACE, 4096)
    keys = [ChunkKey(bytes([length]) * length) for length in range(1, 41)]
    payload = memoryview(bytes(4096))
    records = [Record(key, key, Slot(at), 0) for at, key in enumerate(keys)]
    assert set(slab.write(records, [payload] * 40)) == {Outcome.OK}
    assert [(entry.key, entry.parent) for entry in slab.entries()] == [(key, key) for key in keys]
    slab.close()
