"""The server that is to be measured: what it tells of itself, and whether it may be loaded."""

from __future__ import annotations

from emberkv.app.load.client import Client, is_loopback
from emberkv.app.metrics_page import Page
from emberkv.errors import UsageError, WorldError
from emberkv.observe.baseline import ServerFacts


def require_own(url: str, *, is_mine: bool) -> None:
    """Raise `UsageError` for a server elsewhere, unless the user says that it is theirs."""
    if not is_mine and not is_loopback(url):
        raise UsageError(
            f"{url} is not on this machine, and this loads a server heavily: add "
            "--this-server-is-mine if it may"
        )


def require_no_tiers(page: Page, *, with_tiers: bool) -> None:
    """Raise `UsageError` for a server that runs with emberkv, unless that is wanted."""
    if page.shows_tiers and not with_tiers:
        raise UsageError(
            "this server runs with emberkv's tiers, and a baseline is recorded without: start it "
            "as plain vllm serve, or add --with-tiers"
        )


async def server_facts(client: Client, page: Page, model: str | None) -> ServerFacts:
    """What the server tells. Raises `UsageError` if it has no such model."""
    served = (await client.facts("/v1/models")).get("data") or []
    names = [str(each.get("id")) for each in served if isinstance(each, dict)]
    if not names:
        raise WorldError(f"{client.url}/v1/models names no model")
    if model is not None and model not in names:
        raise UsageError(f"the server has no model '{model}'; it has {', '.join(names)}")
    chosen = served[names.index(model) if model else 0]
    version = (await client.facts("/version")).get("version")
    longest = chosen.get("max_model_len")
    return ServerFacts(
        url=client.url,
        model=str(chosen["id"]),
        engine_version=None if version is None else str(version),
        max_model_tokens=longest if isinstance(longest, int) else None,
        block_tokens=_number(page.label("vllm:cache_config_info", "block_size")),
        device_blocks=_number(page.label("vllm:cache_config_info", "num_gpu_blocks")),
        has_tiers=page.shows_tiers,
    )


def longest_prompt(facts: ServerFacts, answer_tokens: int) -> int | None:
    """The longest prompt that leaves room for the answer; None if it is not known."""
    return None if facts.max_model_tokens is None else facts.max_model_tokens - answer_tokens


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
