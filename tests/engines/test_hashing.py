"""The names that a dry run gives to chunks are those that vLLM's own requests have."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from rig_parts import BLOCK_TOKENS, Setup
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_offload.config import OffloadingCacheConfig
from vllm.v1.request import Request

from emberkv.domain.types import RequestId
from emberkv.engines.vllm import compat
from emberkv.engines.vllm.hashing import PIECE_BLOCKS, PromptHasher
from emberkv.errors import UsageError

if TYPE_CHECKING:
    from scheduler_rig import Rig

NUMBERS = random.Random(5)


def hasher_for(algorithm: str, tokens_per_hash: int, blocks_per_chunk: int) -> PromptHasher:
    config: Any = SimpleNamespace(
        cache=OffloadingCacheConfig(tokens_per_hash, blocks_per_chunk),
        groups=(SimpleNamespace(tokens_per_block=2 * tokens_per_hash),),
    )
    vllm_config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm)
    )
    return PromptHasher(vllm_config, config)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash"])
@pytest.mark.parametrize("salt", [None, "a salt"])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 16 * PIECE_BLOCKS, 16 * PIECE_BLOCKS * 3 + 7])
def test_a_prompt_is_named_as_a_request_is(algorithm: str, salt: str | None, count: int) -> None:
    function = get_hash_fn_by_name(algorithm)
    init_none_hash(function)
    tokens = [NUMBERS.randrange(50_000) for _ in range(count)]
    for blocks_per_chunk in (1, 3):
        request = Request(
            "a",
            tokens.copy(),
            SamplingParams(max_tokens=1),
            None,
            cache_salt=salt,
            block_hasher=get_request_block_hasher(16, function),
        )
        named = hasher_for(algorithm, 16, blocks_per_chunk)(tokens, salt)
        assert named == compat.chunk_keys(request, 2 * blocks_per_chunk)
        assert len(named) == count // (32 * blocks_per_chunk)


def test_an_empty_salt_is_refused_as_the_engine_refuses_it() -> None:
    with pytest.raises(UsageError):
        hasher_for("sha256", 16, 1)([1, 2, 3], "")


@pytest.mark.parametrize("entry", ["connector", "spec"])
def test_the_manager_of_an_engine_knows_a_requests_chunks(
    make_rig: Callable[[Setup], Rig], entry: str
) -> None:
    """All of them with our connector; without it those that were looked up."""
    rig = make_rig(Setup(entry=entry))
    tiers = rig.scheduler.connector.connector_scheduler.manager.tiers
    prompt = [NUMBERS.randrange(200) for _ in range(5 * BLOCK_TOKENS + 3)]
    request = rig.add("a", prompt)
    while "a" not in rig.finished:
        rig.step()
    rig.step()  # tells the manager of the end
    (trail,) = tiers.recent.ended()
    assert trail.facts.request == RequestId(request.request_id)
    keys = tuple(compat.chunk_keys(request, 1))[:5]
    assert trail.keys == (keys if entry == "connector" else None)
    assert trail.stopped == keys[0]
