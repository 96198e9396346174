"""From answers to the figures of a baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from emberkv.app.load.change import Change
from emberkv.app.load.client import Answer
from emberkv.app.load.runner import Gauges, StepRun
from emberkv.observe.baseline import (
    DeviceCache,
    Latencies,
    LengthClass,
    Step,
    class_bound,
    class_name,
    quantiles,
)


def latencies(answers: Sequence[Answer]) -> Latencies:
    """What requests felt."""
    return Latencies(
        requests=len(answers),
        first_token=quantiles([answer.first_token_s for answer in answers]),
        inter_token=quantiles([gap_s for answer in answers for gap_s in answer.gaps_s]),
        end_to_end=quantiles([answer.total_s for answer in answers]),
    )


def by_class(answers: Iterable[Answer]) -> tuple[LengthClass, ...]:
    """The same by class of context length, the shortest first."""
    found: dict[int | None, list[Answer]] = {}
    for answer in answers:
        found.setdefault(class_bound(answer.prompt_tokens), []).append(answer)
    return tuple(
        LengthClass(up_to_tokens=bound, latencies=latencies(found[bound]))
        for bound in sorted(found, key=lambda bound: (bound is None, bound))
    )


def step_of(run: StepRun) -> Step:
    """One step as a baseline holds it."""
    return Step(
        concurrency=run.concurrency, overall=latencies(run.good), classes=by_class(run.good)
    )


def lengths_of(answers: Iterable[Answer]) -> dict[str, int]:
    """How many requests there were of each class of prompt length."""
    return {class_name(x.up_to_tokens): x.latencies.requests for x in by_class(answers)}


def watched_latencies(change: Change) -> Latencies:
    """What the engine's own histograms took in: as fine as their buckets."""
    end_to_end = change.histogram("vllm:e2e_request_latency_seconds").quantiles()
    return Latencies(
        requests=0 if end_to_end is None else end_to_end.count,
        first_token=change.histogram("vllm:time_to_first_token_seconds").quantiles(),
        inter_token=change.histogram("vllm:inter_token_latency_seconds").quantiles(),
        end_to_end=end_to_end,
    )


def watched_lengths(change: Change) -> dict[str, int]:
    """How many requests there were by prompt length, in the engine's own classes."""
    found = change.histogram("vllm:request_prompt_tokens")
    pairs = zip(found.bounds, found.counts, strict=True)
    return {f"up to {bound:g}": round(count) for bound, count in pairs if count}


def device_cache(change: Change, gauges: Gauges) -> DeviceCache:
    """How the engine's own KV cache fared, as far as its metrics tell."""
    evicted = "vllm:kv_block_lifetime_seconds_count"
    usage = gauges.usage
    return DeviceCache(
        preemptions=round(change.counted("vllm:num_preemptions_total")),
        evictions=round(change.counted(evicted)) if change.after.has(evicted) else None,
        usage_mean=round(sum(usage) / len(usage), 4) if usage else None,
        usage_highest=round(max(usage), 4) if usage else None,
    )
