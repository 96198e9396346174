"""The first look-up pass of a request: what is where, and what of it is worth asking for."""

from __future__ import annotations

from typing import Final

from emberkv.core.counts import Event
from emberkv.core.stack import TierStack
from emberkv.domain.types import RAM, ChunkKey, Level, RequestId
from emberkv.live.lookup import Lookup
from emberkv.live.requests import Answering, RequestState
from emberkv.observe.requests import MissReason

WALK_EVERY_STEPS: Final = 16
"""A request that is held looks through its chain so often."""


def look_up(stack: TierStack, state: RequestState, key: ChunkKey, now_s: float) -> Lookup:
    """Answer for the next chunk of a request that does not wait."""
    if state.answering is Answering.SETTLED:
        return settled(stack, state, key, now_s)
    return collect(stack, state, key, now_s)


def collect(stack: TierStack, state: RequestState, key: ChunkKey, now_s: float) -> Lookup:
    """Answer for the next chunk of a chain, and remember the chain. O(1) for almost every chunk.

    A chain that ends here is of a request that would be computed now. If that would make one late
    that came before it, it is held: asked again next step.
    """
    if state.held:
        return Lookup.MISS
    answer = _collect(stack, state, key, now_s)
    if answer is Lookup.MISS and not state.deferred:
        return _end(stack, state, len(state.chain), now_s)
    return answer


def settled(stack: TierStack, state: RequestState, key: ChunkKey, now_s: float) -> Lookup:
    """Answer for the next chunk of a chain that has been waited for: what is ready, or held too."""
    if state.held:
        return Lookup.MISS
    if stack.tiers[RAM].ready(key) and state.index != state.chunk_limit:
        state.index += 1
        return Lookup.HIT
    return _end(stack, state, state.index, now_s)


def _end(stack: TierStack, state: RequestState, hits: int, now_s: float) -> Lookup:
    """The chain ends after `hits` chunks: MISS, or RETRY for a request that is held.

    It is held as long as the earlier one may wait, and never longer than any may.
    """
    has_tokens = state.first_token + hits * stack.terms.tokens_per_chunk
    if _has_waited_its_share(stack, state, now_s) or stack.may_begin(
        RequestId(state.facts.request), has_tokens, now_s
    ):
        if state.held_since_s is not None:
            state.facts.held_s = now_s - state.held_since_s
        return Lookup.MISS
    state.held, state.held_tokens, state.walked_step = True, has_tokens, state.asked_step
    if state.held_since_s is None:
        state.held_since_s = now_s
    return Lookup.RETRY


def still_held(stack: TierStack, state: RequestState, now_s: float) -> bool:
    """Whether a request that was held in the step before is held on, with what it had then.

    So a queue of held requests does not cost a walk along each chain in every step; now and then
    each looks whether it has more by now.
    """
    walks = state.asked_step - state.walked_step >= WALK_EVERY_STEPS
    if walks or _has_waited_its_share(stack, state, now_s):
        return False
    return not stack.may_begin(RequestId(state.facts.request), state.held_tokens, now_s)


def _has_waited_its_share(stack: TierStack, state: RequestState, now_s: float) -> bool:
    since_s = state.held_since_s
    return since_s is not None and now_s - since_s > stack.limits.max_wait_s


def _collect(stack: TierStack, state: RequestState, key: ChunkKey, now_s: float) -> Lookup:
    level = stack.residence(key, now_s, state.levels)
    if level is None or len(state.chain) == state.chunk_limit:
        state.trail.stopped = key
        state.facts.miss_reason = _why_not(stack, state, key, level, now_s)
        return Lookup.MISS
    if not _pays(stack, state, key, level, now_s):
        state.facts.miss_reason = MissReason.NOT_WORTH
        return Lookup.MISS
    state.chain.append(key)
    state.trail.found.append(level)
    if level == RAM:
        return Lookup.HIT
    if not state.deferred:
        request, had = RequestId(state.facts.request), len(state.chain) - 1
        stack.defers(request, state.first_token, had, now_s)
        state.deferred = True
    return Lookup.RETRY


def _why_not(
    stack: TierStack, state: RequestState, key: ChunkKey, level: Level | None, now_s: float
) -> MissReason:
    if level is not None:
        return MissReason.HINT
    if state.levels is None or stack.residence(key, now_s) is None:
        return MissReason.NOT_STORED
    return MissReason.TIER_SHUT if state.hints.tiers is None else MissReason.HINT


def _pays(stack: TierStack, state: RequestState, key: ChunkKey, level: Level, now_s: float) -> bool:
    """Whether to load could gain anything; asked once per pass for RAM and for what is below.

    What does not pay is tried now and then, without anyone waiting.
    """
    if state.deferred if level != RAM else bool(state.chain):
        return True
    request = RequestId(state.facts.request)
    first = state.first_token + len(state.chain) * stack.terms.tokens_per_chunk
    if stack.pays(level, request, first, now_s):
        return True
    keys = [key] if state.keys is None else list(state.keys())
    here = keys.index(key) if key in keys else 0
    stack.journal.note(Event.NOT_WORTH_LOADING, level, keys[here:])
    if level != RAM:
        stack.probe(request, keys[here:], now_s)
    return False
