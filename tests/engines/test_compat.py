"""Everything of vLLM that we rely on beyond its public contract: each name, in one place.

A release that moves one of these fails here, by name, and not in somebody's server.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from rig_parts import Setup, configure
from scheduler_rig import Rig
from vllm.config import get_current_vllm_config_or_none, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import worker as connector_worker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.utils import random_uuid
from vllm.v1.engine import input_processor
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    ReqContext,
)
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.request import Request

from emberkv.engines.vllm import compat, region
from emberkv.engines.vllm.connector import EmberConnector
from emberkv.engines.vllm.manager import EmberOffloadingManager
from emberkv.engines.vllm.region import USED_OF_REGION, ArenaRegion
from emberkv.engines.vllm.slots import ArenaSlots
from emberkv.engines.vllm.spec import EmberOffloadingSpec
from emberkv.engines.vllm.worker import ArenaCopyWorker
from emberkv.errors import ConfigError, UsageError
from emberkv.live.arena import Arena, ArenaGeometry, create_memory

pytestmark = pytest.mark.engine

OURS = [
    (EmberOffloadingManager, OffloadingManager),
    (EmberOffloadingSpec, OffloadingSpec),
    (ArenaCopyWorker, OffloadingWorker),
    (EmberConnector, OffloadingConnector),
]


def test_the_installed_version_is_one_that_was_tested() -> None:
    version = compat.engine_version()
    assert version is not None
    assert compat.is_tested(version)


def test_another_version_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "engine_version", lambda: "0.31.2")
    with pytest.raises(UsageError, match=r"0\.31\.2 is not a version .* tested with \(0\.32\.x\)"):
        compat.require_tested()


@pytest.mark.parametrize(("ours", "theirs"), OURS, ids=lambda each: each.__name__)
def test_every_method_takes_arguments_of_later_releases(ours: type, theirs: type) -> None:
    """Releases add keyword arguments to these calls."""
    overridden = [
        name
        for name, method in vars(ours).items()
        if inspect.isfunction(method) and not name.startswith("_") and hasattr(theirs, name)
    ]
    assert overridden
    strict = [
        name
        for name in overridden
        if inspect.Parameter.VAR_KEYWORD
        not in {each.kind for each in inspect.signature(getattr(ours, name)).parameters.values()}
    ]
    assert strict == []


@pytest.mark.parametrize(("ours", "theirs"), OURS, ids=lambda each: each.__name__)
def test_every_positional_argument_is_one_of_theirs(ours: type, theirs: type) -> None:
    for name, method in vars(ours).items():
        if not inspect.isfunction(method) or name.startswith("_") or not hasattr(theirs, name):
            continue
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        mine, their = (
            [n for n, p in inspect.signature(m).parameters.items() if p.kind in kinds]
            for m in (method, getattr(theirs, name))
        )
        assert mine == their[: len(mine)], name


def test_no_method_is_left_abstract() -> None:
    assert not EmberOffloadingManager.__abstractmethods__
    assert not EmberOffloadingSpec.__abstractmethods__
    assert not ArenaCopyWorker.__abstractmethods__


def test_what_a_request_is_asked_for() -> None:
    """By the connector, of vLLM's requests and of their contexts."""
    attributes = inspect.getsource(Request)
    for name in ("request_id", "num_prompt_tokens"):
        assert f"self.{name}" in attributes
    context = ReqContext(req_id="r")
    context.set_state(test_what_a_request_is_asked_for)
    context.set_offload_key_position(b"key", 64)
    assert context.get_offload_key_position(b"key") == 64
    assert context.get_offload_key_position(b"other") is None


def test_how_the_engine_makes_a_request_id_its_own() -> None:
    """It appends a dash and eight hexadecimal digits; a client knows the rest."""
    assert 'f"{request.external_req_id}-{random_uuid():.8}"' in inspect.getsource(input_processor)
    assert compat.external_id(f"chatcmpl-77-{random_uuid():.8}") == "chatcmpl-77"
    assert compat.external_id("plain-name") == "plain-name"


def test_what_a_connector_is_asked_for(make_rig: Callable[[Setup], Rig]) -> None:
    rig = make_rig(Setup("connector"))
    connector = rig.scheduler.connector
    assert isinstance(connector.connector_scheduler.manager, EmberOffloadingManager)
    assert connector._vllm_config is not None
    worker_side = rig.worker.connector
    assert worker_side.connector_scheduler is None
    assert isinstance(worker_side.connector_worker.worker, ArenaCopyWorker)


def test_our_connector_refuses_another_spec(tmp_path: Any) -> None:
    config = configure(Setup("connector"), tmp_path, "engine", 1 << 20)
    extra = config.kv_transfer_config.kv_connector_extra_config
    extra.update(spec_name="CPUOffloadingSpec", spec_module_path=None)
    from fake_model import kv_cache_config

    with (
        set_current_vllm_config(config),
        pytest.raises(ConfigError, match="set spec_name to 'EmberOffloadingSpec'"),
    ):
        KVConnectorFactory.create_connector(
            config, KVConnectorRole.SCHEDULER, kv_cache_config(8, 32)
        )


def test_where_the_configuration_is_seen(tmp_path: Any) -> None:
    assert get_current_vllm_config_or_none() is None
    config = configure(Setup(), tmp_path, "engine", 1 << 20)
    with set_current_vllm_config(config):
        assert get_current_vllm_config_or_none() is config


def test_how_metrics_are_handed_over() -> None:
    stats = OffloadingConnectorStats()
    stats.increase_counter("c", 2, ("ram",))
    stats.set_gauge("g", 3, ())
    stats.observe_histogram("h", 0.5, ())
    assert stats.data["types"] == {"c": "counter", "g": "gauge", "h": "histogram"}
    assert stats.data["data"]["c"] == {("ram",): 2}


def test_what_a_transfer_says_of_its_blocks() -> None:
    device = GPULoadStoreSpec([4, 5], group_sizes=[2], block_indices=[3])
    assert (device.block_ids.tolist(), list(device.block_indices)) == ([4, 5], [3])
    assert device.block_ids.dtype == np.int32
    assert issubclass(ArenaSlots, BlockIDsLoadStoreSpec)


def test_in_which_order_a_worker_is_called() -> None:
    """Stores of a step are submitted in the next, and what must be flushed is waited for first."""
    source = inspect.getsource(connector_worker.OffloadingConnectorWorker.handle_preemptions)
    assert source.index("submit_store") < source.index("self.worker.wait(")
    source = inspect.getsource(connector_worker.OffloadingConnectorWorker.start_kv_transfers)
    assert source.index("submit_store") < source.index("submit_load")


# ── the region of vLLM's GPU worker ──────────────────────────────────────────────────────────────


def attributes_used(module: ModuleType, names: frozenset[str]) -> set[str]:
    """Attributes that a module takes from variables, or attributes of self, of these names."""
    used = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if not isinstance(node, ast.Attribute):
            continue
        of = node.value
        name = (
            of.id if isinstance(of, ast.Name) else of.attr if isinstance(of, ast.Attribute) else ""
        )
        if name in names:
            used.add(node.attr)
    return used


def test_every_attribute_that_the_gpu_worker_uses_of_its_region() -> None:
    used = attributes_used(gpu_worker, frozenset({"region", "mmap_region", "_mmap_region"}))
    assert used == USED_OF_REGION


def test_our_region_has_them_all_but_the_canonical_view() -> None:
    """That one is used with `canonical_layout` only, which we refuse as a key."""
    arena = make_arena(4, 8192)
    ours = ArenaRegion(arena, 0, 8192, lambda: None)
    assert {name for name in USED_OF_REGION if not hasattr(ours, name)} == {
        "create_next_canonical_view"
    }
    ours.cleanup()
    arena.close()


def test_how_the_gpu_worker_is_built() -> None:
    parameters = list(inspect.signature(CPUOffloadingWorker).parameters)
    assert parameters[:4] == ["kv_caches", "blocks_per_chunk", "num_cpu_chunks", "mmap_region"]
    assert issubclass(CPUOffloadingWorker, OffloadingWorker)


PAGES = (96, 64, 96)
BLOCKS = 12


def make_arena(slots: int, chunk_bytes: int) -> Arena:
    import os

    geometry = ArenaGeometry(slots, chunk_bytes)
    fd = create_memory(geometry)
    try:
        return Arena(fd, geometry)
    finally:
        os.close(fd)


def device_tensors(seed: int) -> CanonicalKVCaches:
    source = np.random.default_rng(seed)
    tensors = [
        torch.from_numpy(source.integers(-128, 128, (BLOCKS, page), dtype=np.int8))
        for page in PAGES
    ]
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(t, page) for t, page in zip(tensors, PAGES, strict=True)], []
    )


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_region_lays_rows_out_as_our_worker_does(blocks_per_chunk: int, rank: int) -> None:
    """What our worker has stored, vLLM's pointers find: tensor by tensor, block by block."""
    rank_bytes = blocks_per_chunk * sum(PAGES)
    arena = make_arena(5, 2 * rank_bytes)
    device = device_tensors(1)
    ours = ArenaCopyWorker(device, arena, blocks_per_chunk, rank)
    blocks = [7, 2, 9, 3, 4, 5][: 2 * blocks_per_chunk]
    slots = ArenaSlots([3, 1])
    source = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
    assert ours.submit_store(1, source, slots)

    shared = ArenaRegion(arena, rank, rank_bytes, lambda: None)
    assert shared._base is not None
    assert shared._base.data_ptr() == arena.rows_address
    assert shared._base.numel() == shared.total_size_bytes == 5 * shared._row_stride
    for each, page in zip(device.tensors, PAGES, strict=True):
        view = shared.create_next_worker_view(page * blocks_per_chunk)
        assert view.shape == (5, page * blocks_per_chunk)
        pointers = np.empty(len(blocks), dtype=np.uint64)
        gpu_worker.compute_sub_block_ptrs(slots.block_ids, blocks_per_chunk, pointers, view)
        at = pointers.astype(np.int64) - arena.rows_address + arena.geometry.header_bytes
        for block, offset in zip(blocks, at, strict=True):
            found = arena.bytes[offset : offset + page]
            assert found.tobytes() == each.tensor[block].numpy().tobytes()
    with pytest.raises(AssertionError, match="more than this rank's part"):
        shared.create_next_worker_view(1)
    ours.shutdown()


def test_the_region_ends_once_and_closes_its_arena_last(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[object] = []
    arena = make_arena(2, 4096)
    ours = ArenaRegion(arena, 0, 4096, lambda: order.append("closed"))
    ours.is_pinned = True
    ours.pinned_addresses.extend([1, 2])
    monkeypatch.setattr(region, "host_unregister", order.append)
    ours.cleanup()
    ours.cleanup()
    assert order == [2, 1, "closed"]
    assert not ours.is_pinned


def test_a_gpu_worker_that_cannot_start_lets_go_of_the_arena() -> None:
    """Here vLLM's worker refuses, since the tensors are not on a GPU."""
    closed: list[bool] = []
    arena = make_arena(2, 4096)
    with pytest.raises(AssertionError):
        region.gpu_worker(device_tensors(1), arena, 1, 0, close=lambda: closed.append(True))
    assert closed == [True]
    arena.close()


def test_ranks_with_unequal_parts_are_refused(make_rig: Callable[[Setup], Rig]) -> None:
    rig = make_rig(Setup())
    spec = rig.worker.connector.connector_worker.spec
    with pytest.raises(ConfigError, match="rank 0 holds 256 bytes per block, not the 512"):
        spec.get_worker(device_tensors(1))
