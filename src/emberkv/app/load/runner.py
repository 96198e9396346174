"""Runs a workload on a server, step by step, and watches the engine's metrics meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from emberkv.app.load.change import Change
from emberkv.app.load.client import Answer, Client
from emberkv.app.load.workload import Prompt, Workload, plan, token_ids
from emberkv.app.metrics_page import Page
from emberkv.errors import WorldError
from emberkv.observe.baseline import Concurrency, PrefillPoint

POLL_S = 1.0
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class StepRun:
    """What one step of so many requests at a time has given."""

    concurrency: int
    answers: tuple[Answer, ...]
    seconds: float
    change: Change

    @property
    def failed(self) -> dict[str, int]:
        """How many requests failed, by what was said."""
        found: dict[str, int] = {}
        for answer in self.answers:
            if answer.error is not None:
                found[answer.error] = found.get(answer.error, 0) + 1
        return found

    @property
    def good(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error is None]


@dataclass(slots=True)
class Gauges:
    """Gauges of the engine, read again and again."""

    requests: list[float] = field(default_factory=list)
    usage: list[float] = field(default_factory=list)

    def read(self, page: Page) -> None:
        running = page.total("vllm:num_requests_running")
        self.requests.append(running + page.total("vllm:num_requests_waiting"))
        if page.has("vllm:kv_cache_usage_perc"):
            self.usage.append(page.total("vllm:kv_cache_usage_perc"))

    @property
    def concurrency(self) -> Concurrency | None:
        """Requests in the server at a time; None if nothing was read."""
        if not self.requests:
            return None
        mean = sum(self.requests) / len(self.requests)
        return Concurrency(mean=round(mean, 3), highest=max(self.requests))


class Runner:
    """Puts load on one model of one server."""

    def __init__(self, client: Client, model: str, workload: Workload) -> None:
        self._client = client
        self._model = model
        self.workload = workload
        self.gauges = Gauges()

    async def step(self, number: int, concurrency: int, progress: Progress) -> StepRun:
        """Ask the prompts of one step, so many at a time. Raises `WorldError` if none is answered.

        A closed loop: who has an answer asks the next. Prompts are made before the clock runs.
        """
        prompts = self._made(plan(self.workload, number))
        waiting = iter(prompts)
        answers: list[Answer] = []

        async def ask() -> None:
            for tokens in waiting:
                answers.append(
                    await self._client.complete(self._model, tokens, self.workload.answer_tokens)
                )
                progress(len(answers), len(prompts))

        before = await self._client.page()
        began_s = time.perf_counter()
        watcher = asyncio.create_task(self._watch())
        try:
            await asyncio.gather(*(ask() for _ in range(concurrency)))
        finally:
            watcher.cancel()
        seconds = time.perf_counter() - began_s
        change = Change(before, await self._client.page())
        run = StepRun(concurrency, tuple(answers), seconds, change)
        if not run.good:
            raise WorldError(f"no request was answered: {next(iter(run.failed))}")
        return run

    async def prefill(self, lengths: Sequence[int], repeats: int) -> list[PrefillPoint]:
        """Time to first token of single requests that share nothing; the quickest of some repeats.

        The quickest, because whatever disturbs makes it only longer. Raises `WorldError`.
        """
        points = []
        for tokens in lengths:
            times_s = []
            for repeat in range(repeats):
                name = f"{self.workload.seed}/prefill/{tokens}/{repeat}"
                prompt = Prompt(tokens, name, tokens, name)
                answer = await self._client.complete(
                    self._model, token_ids(prompt, self.workload.vocabulary), 1
                )
                if answer.error is not None:
                    raise WorldError(f"a prompt of {tokens} tokens failed: {answer.error}")
                times_s.append(answer.first_token_s)
            points.append(PrefillPoint(tokens=tokens, seconds=round(min(times_s), 6)))
        return points

    async def warm_up(self) -> None:
        """One request that counts for nothing. Raises `WorldError` if it fails."""
        longest = max(self.workload.lengths)
        name = f"{self.workload.seed}/warm-up"
        prompt = token_ids(Prompt(longest, name, longest, name), self.workload.vocabulary)
        answer = await self._client.complete(self._model, prompt, self.workload.answer_tokens)
        if answer.error is not None:
            raise WorldError(
                f"the server refused a prompt of {longest} tokens: {answer.error} "
                "(--vocabulary says which token ids it knows)"
            )

    async def _watch(self) -> None:
        """Read the gauges until cancelled; a reading that fails is left out."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                self.gauges.read(await self._client.page())
            except WorldError:
                continue

    def _made(self, prompts: Iterator[Prompt]) -> list[list[int]]:
        return [token_ids(prompt, self.workload.vocabulary) for prompt in prompts]


async def watch(client: Client, seconds: float, progress: Progress) -> tuple[Change, Gauges]:
    """Read the engine's metrics for a while, and put no load on it. Raises `WorldError`."""
    gauges = Gauges()
    before = page = await client.page()
    began_s = time.monotonic()
    while (passed_s := time.monotonic() - began_s) < seconds:
        gauges.read(page)
        progress(int(passed_s), int(seconds))
        await asyncio.sleep(min(POLL_S, seconds - passed_s))
        page = await client.page()
    return Change(before, page), gauges
