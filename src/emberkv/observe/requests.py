"""What is known of a request when it ends: the facts behind its log line and its metrics."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class MissReason(enum.Enum):
    """Why a request did not get more of its prompt from the tiers."""

    NOT_ASKED = "not_asked"  # the device cache held it, or the engine skips look-ups
    NOT_STORED = "not_stored"  # the chain goes on in no tier
    WHOLE = "whole"  # everything that could be asked for was served
    NOT_WORTH = "not_worth"  # known, but to compute it is quicker
    CANARY = "canary"  # computed on purpose, to be held against what a tier keeps
    HINT = "hint"  # the request itself asked for no more
    TIER_SHUT = "tier_shut"  # known, but its tier is not loaded from at present
    NO_ROOM = "no_room"  # known below, but it did not fit into RAM
    WAIT_SPENT = "wait_spent"  # the promotion took too long, or its tier stalled
    TRANSFER_FAILED = "transfer_failed"  # read error or checksum mismatch
    NOT_SERVING = "not_serving"  # the tiers are off


@dataclass(slots=True)
class RequestFacts:
    """What a request got and from where. Token counts are of its prompt, whole chunks.

    `held_s` is how long it let earlier requests go first.
    `first_token_s` runs from the request's arrival in the engine, `longest_gap_s` is the longest
    time between two of its output tokens.
    """

    request: str
    external_id: str | None = None
    prompt_tokens: int | None = None
    device_tokens: int = 0
    ram_tokens: int = 0
    disk_tokens: int = 0
    stored_chunks: int = 0
    wait_s: float = 0.0
    held_s: float = 0.0
    load_s: float = 0.0
    first_token_s: float | None = None
    output_tokens: int = 0
    longest_gap_s: float = 0.0
    miss_reason: MissReason = MissReason.NOT_ASKED
    preemptions: int = 0

    @property
    def computed_tokens(self) -> int | None:
        """Prompt tokens that no cache served; None where the prompt's length is not known."""
        if self.prompt_tokens is None:
            return None
        return self.prompt_tokens - self.device_tokens - self.ram_tokens - self.disk_tokens
