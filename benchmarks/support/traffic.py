"""Many requests at once, streamed: when the first token of each came, and the gaps between all."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from support.engines import MODEL_NAME


@dataclass(frozen=True)
class Timed:
    """One request that is to be sent `at_s` after the beginning."""

    name: str
    at_s: float
    prompt: Sequence[int]
    output_tokens: int = 1


@dataclass
class Reply:
    """What came of a request; `error` says why nothing did."""

    name: str
    sent_s: float
    first_token_s: float = 0.0
    total_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    error: str = ""


async def _ask(client: httpx.AsyncClient, timed: Timed, began_s: float) -> Reply:
    await asyncio.sleep(max(0.0, began_s + timed.at_s - time.perf_counter()))
    body = {
        "model": MODEL_NAME,
        "prompt": list(timed.prompt),
        "max_tokens": timed.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    sent_s = time.perf_counter()
    reply = Reply(timed.name, sent_s - began_s)
    last_s = sent_s
    headers = {"X-Request-Id": timed.name}
    try:
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now_s = time.perf_counter()
                if "error" in json.loads(line.removeprefix("data: ")):
                    reply.error = line
                elif not reply.first_token_s:
                    reply.first_token_s = now_s - sent_s
                else:
                    reply.gaps_s.append(now_s - last_s)
                last_s = now_s
    except httpx.HTTPError as error:
        reply.error = f"{type(error).__name__}: {error}"
    reply.total_s = time.perf_counter() - sent_s
    return reply


async def _send(
    url: str, requests: Sequence[Timed], timeout_s: float, concurrency: int | None
) -> list[Reply]:
    gate = asyncio.Semaphore(concurrency or len(requests))

    async def in_turn(client: httpx.AsyncClient, timed: Timed, began_s: float) -> Reply:
        async with gate:
            return await _ask(client, timed, began_s)

    limits = httpx.Limits(max_connections=None)
    timeout = httpx.Timeout(timeout_s)
    async with httpx.AsyncClient(
        base_url=url, timeout=timeout, limits=limits, trust_env=False
    ) as client:
        began_s = time.perf_counter()
        return list(await asyncio.gather(*(in_turn(client, each, began_s) for each in requests)))


def send(
    url: str,
    requests: Sequence[Timed],
    *,
    timeout_s: float = 300.0,
    concurrency: int | None = None,
) -> list[Reply]:
    """Send requests at their times, so many at once at most; their replies, in the order given."""
    return asyncio.run(_send(url, requests, timeout_s, concurrency))
