"""Explanations in sentences: one line per run of chunks that share a story, and a summary first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from emberkv.app.elsewhere import Elsewhere
from emberkv.app.figures import age, count, span
from emberkv.live.control.messages import Explanation, Happened, Place, Stretch

TIERS: Final = {"ram": "RAM", "disk": "disk"}

HAPPENED: Final = {
    "admitted": "stored in {tier}",
    "evicted": "evicted from {tier}{policy}",
    "lost": "found damaged in {tier} (its checksum was wrong, or another chunk was in its place)",
    "promoted": "brought up into {tier}",
    "written_behind": "written to {tier}",
    "promotion_failed": "could not be read from {tier}",
    "write_behind_failed": "could not be written to {tier}",
    "shed_queue_full": "not written to {tier}: too many writes were under way",
    "shed_no_room": "not written to {tier}: nothing there could make room",
    "shed_slow_tier": "not written to {tier}: it was slow, and reads went first",
    "refused_no_room": "not stored in {tier}: everything there was in use",
    "refused_unreachable": "not stored in {tier}: the chunk before it was nowhere",
    "refused_by_hint": "not stored in {tier}: the request asked not to keep it",
    "refused_by_gate": "not stored in {tier}: the tier was shut or draining",
    "refused_by_quota": "not stored in {tier}: its tenant's share was full",
    "promotion_cut": "known on disk, but RAM had no room for it",
    "not_worth_loading": "on disk, but to compute it was quicker",
    "wait_spent": "on disk, but it did not come in the time that a request may wait",
    "wasted": "brought up, and evicted before anyone loaded it",
}
"""What each event of a chunk means to an operator."""

REASONS: Final = {
    "never_seen": "never stored: nobody has offered it since the record began{began}",
    "behind_a_break": "there, but of no use: a chunk before it is missing",
    "not_given_yet": "found, and the request is about to get it",
    "not_looked_up": "the engine did not ask for it",
    "writing": "being computed for another request; it can be used when that is done",
    "shut": "there, but the tier is shut",
    "purge": "forgotten by a purge",
    "reset": "forgotten when the engine's cache was reset",
    "no_room": "on disk, but RAM had no room for it",
    "wait_spent": "on disk, but it did not come in the time that the request may wait",
    "transfer_failed": "on disk, but it could not be read, or its checksum was wrong",
    "not_worth": "there, but to compute it was quicker than to load it",
    "canary": "computed on purpose, to be compared with what the tiers keep",
    "hint": "the request's own hints asked for no more",
    "tier_shut": "there, but its tier was not loaded from",
    "not_serving": "the tiers were off",
    "not_asked": "the engine did not ask for it",
    "whole": "the engine did not ask for it",
}
"""What else keeps a chunk from being of use."""

PLACES: Final = {
    Place.DEVICE: "device cache",
    Place.RAM: "RAM",
    Place.DISK: "disk",
    Place.COMING: "on its way from disk to RAM",
    Place.WRITING: "being computed",
    Place.NOWHERE: "nowhere",
}


def summary(explanation: Explanation, elsewhere: Sequence[Elsewhere] = ()) -> str:
    """All in one sentence: how much, from where, and why no more."""
    got = _got(explanation)
    broken = next((s for s in explanation.stretches if not s.usable), None)
    whole = explanation.stretches[-1].end if explanation.stretches else 0
    if broken is None:
        return f"{got}; {_tail(explanation, whole)}."
    at = broken.first * explanation.tokens_per_chunk
    return f"{got}; from token {at} on: {why(explanation, broken, elsewhere)}."


def _got(explanation: Explanation) -> str:
    of = "" if explanation.prompt_tokens is None else f" of {explanation.prompt_tokens}"
    asked = explanation.request
    if asked is None:
        places = {place: _tokens_in(explanation, place) for place in PLACES}
        disk = places[Place.DISK] + places[Place.COMING]
        total = places[Place.RAM] + disk
        if not total:
            return f"A request would get none{of} tokens from the tiers now"
        return (
            f"A request would get {total}{of} tokens from the tiers now "
            f"({places[Place.RAM]} RAM, {disk} disk)"
        )
    name = asked.external_id or asked.request
    if not asked.ended and asked.why_not_more == "not_asked":
        return f"{name} is here and has not been looked up yet"
    if not asked.ended:
        name += ", which is still here,"
    total = asked.device_tokens + asked.ram_tokens + asked.disk_tokens
    waited = f", after {span(asked.wait_s)} of waiting" if asked.wait_s else ""
    return (
        f"{name} got {total}{of} prompt tokens ({asked.device_tokens} device, "
        f"{asked.ram_tokens} RAM, {asked.disk_tokens} disk){waited}"
    )


def _tokens_in(explanation: Explanation, place: Place) -> int:
    return sum(
        (s.end - s.first) * explanation.tokens_per_chunk
        for s in explanation.stretches
        if s.usable and s.place is place
    )


def _tail(explanation: Explanation, whole_chunks: int) -> str:
    """What is said of a prompt all of whose whole chunks were found."""
    size = explanation.tokens_per_chunk
    if explanation.prompt_tokens is None:
        return "nothing more was asked for"
    rest = explanation.prompt_tokens - whole_chunks * size
    if not whole_chunks:
        return f"it is shorter than a chunk of {size} tokens, the least that is kept"
    if rest <= 0:
        return "that is every chunk"
    return f"the last {rest} are no whole chunk of {size} and are always computed"


def why(explanation: Explanation, stretch: Stretch, elsewhere: Sequence[Elsewhere] = ()) -> str:
    """Why chunks are of no use, or nothing."""
    if stretch.reason is None:
        return ""
    said = REASONS.get(stretch.reason)
    if said is None:
        last = next((h for h in reversed(stretch.happened) if h.event == stretch.reason), None)
        said = _happened(last) if last is not None else stretch.reason.replace("_", " ")
    elif stretch.reason in ("purge", "reset") and stretch.happened:
        said = f"{said} {age(stretch.happened[-1].age_s)} ago"
    began = explanation.record_age_s
    said = said.replace("{began}", "" if began is None else f" {age(began)} ago")
    if stretch.asked_before is not None:
        said += (
            f", though {stretch.asked_before} had it in its prompt: that ended before it was "
            "computed, or the device cache had it"
        )
    for other in elsewhere:
        if other.chunks.intersection(stretch.keys):
            fields = ", ".join(
                f"{name} ({there}, here {here})" for name, there, here in other.fields
            )
            said += f"; stored under namespace {other.namespace[:16]}, which differs in {fields}"
    return said


def history(stretch: Stretch) -> list[str]:
    """What happened to the first of these chunks, oldest first."""
    return [_happened(happened) for happened in stretch.happened]


def _happened(happened: Happened) -> str:
    ago = f" {age(happened.age_s)} ago"
    if happened.event is None:
        what = TIERS.get(happened.tier or "", "everything")
        return f"{what} emptied by a {happened.cause}{ago}"
    text = HAPPENED.get(happened.event, happened.event.replace("_", " ") + " in {tier}")
    policy = f" by {happened.policy}" if happened.policy else ""
    return text.format(tier=TIERS.get(happened.tier or "", "a tier"), policy=policy) + ago


def lines(explanation: Explanation, elsewhere: Sequence[Elsewhere] = ()) -> list[tuple[str, ...]]:
    """For each run of chunks: chunks, tokens, where they are, and the story."""
    size = explanation.tokens_per_chunk
    found: list[tuple[str, ...]] = []
    for stretch in explanation.stretches:
        last = stretch.end - 1
        chunks = str(stretch.first) if last == stretch.first else f"{stretch.first}-{last}"
        tokens = f"{stretch.first * size}-{stretch.end * size - 1}"
        story = why(explanation, stretch, elsewhere)
        if stretch.usable and explanation.request is None:
            story = "would be used"
        elif stretch.usable:
            story = "used"
        found.append((chunks, tokens, PLACES[stretch.place], story))
    whole = explanation.stretches[-1].end if explanation.stretches else 0
    if explanation.prompt_tokens is not None and explanation.all_known:
        rest = explanation.prompt_tokens - whole * size
        if rest > 0:
            tokens = f"{whole * size}-{explanation.prompt_tokens - 1}"
            found.append(("-", tokens, "nowhere", f"shorter than a chunk of {count(size)} tokens"))
    return found
