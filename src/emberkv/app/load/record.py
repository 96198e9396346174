"""Records a baseline: by a workload of our own, or by watching the engine's metrics."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Final

from emberkv.app.load import figures
from emberkv.app.load.change import Change
from emberkv.app.load.client import Client
from emberkv.app.load.runner import Progress, Runner, StepRun, watch
from emberkv.app.load.server import longest_prompt, require_no_tiers, server_facts
from emberkv.app.load.workload import Workload, fitting
from emberkv.errors import WorldError
from emberkv.observe.baseline import P99_SAMPLES, Baseline, PrefillPoint, ServerFacts

SHORTEST_PREFILL: Final = 128
PREFILL_REPEATS: Final = 3

Bar = Callable[[str], AbstractContextManager[Progress]]
"""Shows how far something has come, by a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a user has asked for, of `baseline` and of `load`. None: what fits the server."""

    url: str
    model: str | None
    lengths: tuple[int, ...] | None
    workload: Workload
    concurrency: tuple[int, ...]
    timeout_s: float
    watch_s: float | None = None
    prefill_lengths: tuple[int, ...] | None = None
    with_tiers: bool = False
    command: str = ""


async def record(asked: Asked, bar: Bar) -> Baseline:
    """Record a baseline. Raises `UsageError` for a server with tiers, `WorldError` for no answers.

    Single requests come first, while nothing else of ours runs.
    """
    async with Client(asked.url, asked.timeout_s) as client:
        page = await client.page()
        require_no_tiers(page, with_tiers=asked.with_tiers)
        facts = await server_facts(client, page, asked.model)
        workload = workload_for(asked, facts)
        runner = Runner(client, facts.model, workload)
        if asked.watch_s is None:
            await runner.warm_up()
        prefill = await _prefill(asked, facts, runner, bar)
        if asked.watch_s is not None:
            return await _watched(asked, client, facts, prefill, bar)
        runs = [await run_step(runner, *step, bar) for step in enumerate(asked.concurrency)]
    return _measured(asked, facts, prefill, runs, runner)


async def run_step(runner: Runner, number: int, concurrency: int, bar: Bar) -> StepRun:
    """Run one step with its bar."""
    with bar(f"{concurrency} at a time") as progress:
        return await runner.step(number, concurrency, progress)


def workload_for(asked: Asked, facts: ServerFacts) -> Workload:
    """The workload with lengths that the server takes. Raises `UsageError`."""
    longest = longest_prompt(facts, asked.workload.answer_tokens)
    return replace(asked.workload, lengths=fitting(asked.lengths, longest))


def prefill_lengths(longest: int) -> tuple[int, ...]:
    """Lengths that double up to the longest, which is one of them."""
    doubling, tokens = [], SHORTEST_PREFILL
    while tokens < longest:
        doubling.append(tokens)
        tokens *= 2
    return (*doubling, longest)


async def _prefill(
    asked: Asked, facts: ServerFacts, runner: Runner, bar: Bar
) -> tuple[PrefillPoint, ...]:
    lengths = asked.prefill_lengths
    if lengths is None:
        lengths = prefill_lengths(max(runner.workload.lengths))
    else:
        fitting(lengths or None, longest_prompt(facts, 1))
    if not lengths:
        return ()
    points: list[PrefillPoint] = []
    with bar("single requests") as progress:
        for number, tokens in enumerate(lengths, 1):
            points += await runner.prefill([tokens], PREFILL_REPEATS)
            progress(number, len(lengths))
    return tuple(points)


def _measured(
    asked: Asked,
    facts: ServerFacts,
    prefill: tuple[PrefillPoint, ...],
    runs: Sequence[StepRun],
    runner: Runner,
) -> Baseline:
    answers = [answer for run in runs for answer in run.good]
    classes = figures.by_class(answers)
    whole = Change(runs[0].change.before, runs[-1].change.after)
    device = figures.device_cache(whole, runner.gauges)
    failed = sum(len(run.answers) for run in runs) - len(answers)
    few = [each for each in classes if each.latencies.requests < P99_SAMPLES]
    notes = _notes(device.evictions)
    if failed:
        notes.append(f"{failed} requests failed and are not counted")
    if few:
        notes.append(
            f"{len(few)} of {len(classes)} classes of context length have fewer than "
            f"{P99_SAMPLES} requests: no budget can be relative to their time to first token"
        )
    return Baseline(
        recorded_at=_now(),
        command=asked.command,
        how="workload",
        server=facts,
        overall=figures.latencies(answers),
        classes=classes,
        steps=tuple(figures.step_of(run) for run in runs),
        lengths=figures.lengths_of(answers),
        concurrency=runner.gauges.concurrency,
        prefill=prefill,
        reused_share=whole.reused_share(),
        device_cache=device,
        notes=tuple(notes),
    )


async def _watched(
    asked: Asked,
    client: Client,
    facts: ServerFacts,
    prefill: tuple[PrefillPoint, ...],
    bar: Bar,
) -> Baseline:
    assert asked.watch_s is not None
    with bar("watching") as progress:
        change, gauges = await watch(client, asked.watch_s, progress)
    overall = figures.watched_latencies(change)
    if not overall.requests:
        raise WorldError(
            f"no request ended in {asked.watch_s:g} s: watch longer, or leave --watch out"
        )
    device = figures.device_cache(change, gauges)
    notes = _notes(device.evictions)
    notes.append("by watching, figures are not known by class of context length")
    notes.append("by watching, times are as fine as the buckets of the engine's histograms")
    if prefill:
        notes.append("the single requests ran beside the server's own traffic")
    return Baseline(
        recorded_at=_now(),
        command=asked.command,
        how="watched",
        server=facts,
        overall=overall,
        lengths=figures.watched_lengths(change),
        concurrency=gauges.concurrency,
        prefill=prefill,
        reused_share=change.reused_share(),
        device_cache=device,
        notes=tuple(notes),
    )


def _notes(evictions: int | None) -> list[str]:
    if evictions is not None:
        return ["evictions of device blocks are those of the engine's sample"]
    return ["evictions of device blocks are not known: vLLM tells them with --kv-cache-metrics"]


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
