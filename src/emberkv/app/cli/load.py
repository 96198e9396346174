"""`emberkv load`: put rising load on a server of one's own, and compare with a baseline."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from emberkv.app.cli.load_options import asked, load_options
from emberkv.app.cli.options import (
    DIRECTORY,
    ManyOptions,
    as_json,
    console,
    print_json,
    progress_bar,
)

if TYPE_CHECKING:
    from rich.console import Console

    from emberkv.app.load.compare import Verdict
    from emberkv.app.load.record import Asked, Bar
    from emberkv.app.load.runner import StepRun
    from emberkv.observe.baseline import ServerFacts

_HELP = """Put mixed short and long requests on a server of your own, more at a time in each step.

\b
    emberkv load --server http://127.0.0.1:8000
    emberkv load --server http://127.0.0.1:8000 --baseline baseline.json --budget 1.05

It loads the server heavily. With --baseline the same workload as the baseline's should run: the
exit status is 1 if a figure is over its budget, if none could be judged, or if requests failed.
"""


@click.command(
    "load",
    cls=ManyOptions,
    help=_HELP,
    short_help="Put load on a server of your own, and compare.",
)
@load_options
@click.option(
    "--baseline", type=DIRECTORY, metavar="FILE", help="A baseline to compare every figure with."
)
@click.option(
    "--budget",
    type=click.FloatRange(min=1),
    default=1.05,
    show_default=True,
    metavar="FACTOR",
    help="How many times the baseline's figure a figure may be.",
)
@as_json
def command(given: Mapping[str, Any]) -> int:
    """Run the steps and show their figures; the help text is `_HELP`."""
    from emberkv.app.load.compare import compare, is_broken
    from emberkv.observe.baseline import read_baseline

    baseline = None if given["baseline"] is None else read_baseline(given["baseline"])
    facts, runs = asyncio.run(_run(asked(given), progress_bar))
    verdicts = None
    if baseline is not None:
        verdicts = compare(baseline, runs, given["budget"])
    if given["as_json"]:
        print_json(_facts(facts, runs, verdicts))
    else:
        _show(facts, runs)
        if verdicts is not None:
            _show_verdicts(verdicts, given["budget"])
    failed = any(run.failed for run in runs)
    return int(failed or (verdicts is not None and is_broken(verdicts)))


async def _run(what: Asked, bar: Bar) -> tuple[ServerFacts, list[StepRun]]:
    from emberkv.app.load.client import Client
    from emberkv.app.load.record import run_step, workload_for
    from emberkv.app.load.runner import Runner
    from emberkv.app.load.server import server_facts

    async with Client(what.url, what.timeout_s) as client:
        facts = await server_facts(client, await client.page(), what.model)
        runner = Runner(client, facts.model, workload_for(what, facts))
        await runner.warm_up()
        runs = [await run_step(runner, *step, bar) for step in enumerate(what.concurrency)]
    return facts, runs


def _show(facts: ServerFacts, runs: Sequence[StepRun]) -> None:
    screen = console()
    tiers = "with emberkv's tiers" if facts.has_tiers else "without tiers"
    screen.print(f"{facts.model} at {facts.url}, {tiers}", markup=False)
    for run in runs:
        _show_step(screen, run)


def _show_step(screen: Console, run: StepRun) -> None:
    from emberkv.app.load.figures import step_of
    from emberkv.app.load.tables import latency_table, sources_line

    step, failed = step_of(run), sum(run.failed.values())
    rate = run.seconds and len(run.good) / run.seconds
    out = run.seconds and sum(answer.answer_tokens for answer in run.good) / run.seconds
    screen.print(f"\n[bold]{run.concurrency} at a time[/]: {len(run.answers)} requests, ", end="")
    screen.print(f"{failed} failed, {rate:.1f} requests/s, {out:.0f} answer tokens/s")
    screen.print(latency_table(step.overall, step.classes))
    screen.print(sources_line(run.change.tokens_by_source()))
    for error, count in run.failed.items():
        screen.print(f"failed {count} times: {error}", markup=False)


def _show_verdicts(verdicts: Sequence[Verdict], budget: float) -> None:
    from emberkv.app.load.tables import verdict_summary, verdict_table

    screen = console()
    screen.print()
    screen.print(verdict_table(verdicts, budget))
    screen.print(verdict_summary(verdicts, budget))


def _facts(
    facts: ServerFacts, runs: Sequence[StepRun], verdicts: Sequence[Verdict] | None
) -> dict[str, object]:
    from msgspec import to_builtins

    from emberkv.app.load.figures import step_of

    steps = [
        to_builtins(step_of(run))
        | {
            "seconds": round(run.seconds, 3),
            "failed": run.failed,
            "prompt_tokens_by_source": run.change.tokens_by_source(),
        }
        for run in runs
    ]
    found: dict[str, object] = {"server": to_builtins(facts), "steps": steps}
    if verdicts is not None:
        found["verdicts"] = [
            {
                "concurrency": each.concurrency,
                "prompt_tokens": each.length_class,
                "signal": each.signal,
                "quantile": each.quantile,
                "seconds": each.seconds,
                "baseline_s": each.baseline_s,
                "held": each.held.value,
            }
            for each in verdicts
        ]
    return found
