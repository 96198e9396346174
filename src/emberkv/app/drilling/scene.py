"""The scene of all drills: a server whose faults can be switched, load on it, and the yardstick.

The yardstick is the same server without tiers, under the same load: what each prompt is answered
there, and how long a first token takes.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from emberkv.app.agreement import (
    Limits,
    Said,
    Verdict,
    compare_forced,
    compare_tokens,
    distance,
    limit_of,
)
from emberkv.app.asking import Ask, LoggedRequests, force, served_model
from emberkv.app.drilling.load import ROUND, RunningLoad, Sample, Workload, burst
from emberkv.app.launch import ServeOptions
from emberkv.app.own_server import OwnServer, ServerError, kill_keeper
from emberkv.app.selfcheck import prompt_of
from emberkv.domain.units import format_size, size_argument
from emberkv.drills.plan import (
    NOTHING,
    PLAN_VARIABLE,
    Plan,
    followed,
    is_followed,
    write_plan,
)
from emberkv.engines.vllm.command_line import Flags, Launch
from emberkv.errors import UsageError
from emberkv.live.arena import ArenaGeometry
from emberkv.observe.baseline import quantile
from emberkv.tiers.format import SlabGeometry

ANSWER_TOKENS: Final = 8
CLIENTS: Final = 2
FRESH: Final = 6
RAM_PROMPTS: Final = 4
"""The RAM tier of a drill holds no more than so many prompts: the others come from disk."""

WARM_UPS: Final = 2

DRILL_SPEC: Final = ("DrillOffloadingSpec", "emberkv.drills.spec")
GRACE_S: Final = 0.05
"""Waits are counted in steps of the engine, and a step may take as long."""

Say = Callable[[str], None]


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest rank; no number of an empty sequence."""
    return quantile(sorted(values), share) if values else math.nan


@dataclass(frozen=True, slots=True)
class Shape:
    """How the load and the server's caches are cut for each other, in tokens and prompts."""

    prompt_tokens: int
    returning: int
    device_blocks: int
    ram_bytes: int
    chunk_tokens: int

    @property
    def whole_tokens(self) -> int:
        """What a tier can give of a prompt."""
        return self.prompt_tokens // self.chunk_tokens * self.chunk_tokens


def shape_of(options: ServeOptions, engine: Launch, prompt_tokens: int) -> Shape:
    """Caches so small that a returning prompt has left the device, and mostly RAM, before.

    The user's own number of device blocks stays. Where the size of a token is not known, so does
    the RAM tier's.

    Raises `UsageError` if the disk tier is too small for two rounds of the load: prompts that its
    policy evicts before they return would look like losses.
    """
    block_tokens = engine.block_tokens()
    chunk_tokens = options.chunk_tokens or block_tokens * (options.blocks_per_chunk or 1)
    blocks = -(-(prompt_tokens + ANSWER_TOKENS) // block_tokens) + 1
    device_blocks = int(engine.flags.number("--num-gpu-blocks-override", (CLIENTS + 1) * blocks))
    device_prompts = device_blocks // blocks
    ram_bytes = options.ram_bytes
    token_bytes = engine.kv_bytes_per_token()
    if token_bytes is not None:
        chunks = RAM_PROMPTS * (-(-prompt_tokens // chunk_tokens) + 1)
        few = ArenaGeometry(chunks, token_bytes * chunk_tokens).total_bytes
        ram_bytes = min(ram_bytes, few)
    # Of the prompts in between, a third is fresh and takes room as well.
    returning = max(2 * RAM_PROMPTS, 2 * device_prompts)
    if options.disk_bytes is not None and token_bytes is not None:
        chunks = 2 * returning * ROUND // (ROUND - 1) * -(-prompt_tokens // chunk_tokens)
        round_bytes = SlabGeometry(chunks, token_bytes * chunk_tokens).total_bytes
        if options.disk_bytes < round_bytes:
            raise UsageError(
                f"--disk-size {size_argument(options.disk_bytes)} cannot keep two rounds of the "
                f"drills' prompts; give {format_size(round_bytes)} or more, or fewer "
                "--prompt-tokens"
            )
    return Shape(prompt_tokens, returning, device_blocks, ram_bytes, chunk_tokens)


@dataclass(slots=True)
class Yardstick:
    """What the server says and takes without tiers."""

    said: dict[tuple[int, ...], list[Said]]
    limits: Limits
    first_token_s: list[float]
    burst_first_token_s: list[float]

    @property
    def p99_s(self) -> float:
        return percentile(self.first_token_s, 0.99)

    @property
    def median_s(self) -> float:
        return percentile(self.first_token_s, 0.5)


def measure_yardstick(
    server: OwnServer, shape: Shape, workload: Workload, requests: int
) -> Yardstick:
    """Run the load on a server without tiers, which is started and ended here."""
    with server:
        model = served_model(server.url).name
        load = RunningLoad(server.url, model, workload, CLIENTS)
        load.start("warm-up")
        load.wait_for("warm-up", ROUND * max(shape.returning, FRESH))
        load.enter("measured")
        load.wait_for("measured", requests)
        load.stop()
        asks = [replace(ask, name=f"burst {ask.name}") for ask in burst_of(workload)]
        together = burst(server.url, model, asks, "burst")
        samples = [*load.samples("warm-up"), *load.samples("measured"), *together]
        said: dict[tuple[int, ...], list[Said]] = {}
        direct: list[float] = []
        forced: list[float] = []
        for sample in samples:
            if sample.answer is None:
                raise ServerError(f"the server does not answer without tiers: {sample.failure}")
            own = Said(tuple(sample.answer.tokens), tuple(sample.answer.candidates))
            known = [old for old in said.get(sample.ask.prompt, ()) if old.tokens == own.tokens]
            direct += [distance(own.candidates, old.candidates) for old in known]
            if not known:
                forced_too = force(server.url, model, sample.ask, own.tokens)
                forced.append(distance(own.candidates, forced_too))
            said.setdefault(sample.ask.prompt, []).append(own)
    limits = Limits(limit_of(direct), limit_of([*direct, *forced]))
    return Yardstick(said, limits, _firsts(load.samples("measured")), _firsts(together))


def burst_of(workload: Workload) -> list[Ask]:
    """Every returning prompt once."""
    return [
        Ask(f"{at}", prompt, workload.answer_tokens) for at, prompt in enumerate(workload.returning)
    ]


def _firsts(samples: Sequence[Sample]) -> list[float]:
    return [sample.answer.first_token_s for sample in samples if sample.answer is not None]


@dataclass(frozen=True, slots=True)
class Row:
    """What one drill showed."""

    drill: str
    passed: bool
    detail: str
    p99_ratio: float | None

    def facts(self) -> dict[str, object]:
        """The row for programs."""
        ratio = None if self.p99_ratio is None else round(self.p99_ratio, 3)
        return {
            "drill": self.drill,
            "passed": self.passed,
            "detail": self.detail,
            "p99_ratio": ratio,
        }


class Scene:
    """A server with tiers under load, and the hands that make it suffer."""

    def __init__(
        self,
        options: ServeOptions,
        directory: Path,
        shape: Shape,
        workload: Workload,
        requests: int,
    ) -> None:
        """`requests` are asked in each phase of a drill."""
        self.shape = shape
        self.workload = workload
        self.requests = requests
        self.yardstick: Yardstick | None = None
        self._plan_path = directory / "plan.json"
        write_plan(self._plan_path, NOTHING)
        self._options = laid_out(options, shape)
        self._directory = directory
        self.server = OwnServer(
            self._options,
            directory,
            spec=DRILL_SPEC,
            environment={PLAN_VARIABLE: str(self._plan_path)},
        )
        self._log = LoggedRequests(self.server.request_log)
        self._model = ""
        self._load: RunningLoad | None = None
        self._asked = 0

    @property
    def has_disk(self) -> bool:
        return self.server.disk is not None

    def measure(self) -> Yardstick:
        """Measure without tiers. The server is not up meanwhile."""
        flags = (*self._options.vllm_arguments, "--no-enable-prefix-caching")
        plain = OwnServer(
            replace(self._options, vllm_arguments=flags, disk=None, disk_bytes=None),
            self._directory,
            plain=True,
        )
        self.yardstick = measure_yardstick(plain, self.shape, self.workload, self.requests)
        return self.yardstick

    def begin(self) -> None:
        """The server is up: fill its tiers, and let the load run."""
        self._model = served_model(self.server.url).name
        self._load = RunningLoad(self.server.url, self._model, self.workload, CLIENTS)
        self._load.start("warm-up")
        self._load.wait_for("warm-up", ROUND * self.shape.returning)

    def end(self) -> None:
        """Stop the load."""
        write_plan(self._plan_path, NOTHING)
        if self._load is not None:
            self._load.stop()

    @property
    def load(self) -> RunningLoad:
        assert self._load is not None
        return self._load

    # ── what is done to the server ───────────────────────────────────────────────────────────

    def suffer(self, plan: Plan) -> None:
        """Let faults begin, or end with `NOTHING`; returns when the disk tier follows."""
        write_plan(self._plan_path, plan)
        if self.has_disk and self.server.process.is_healthy():
            self.server.wait_until(lambda: is_followed(self._plan_path), "the plan was followed")

    def mend(self) -> None:
        """Take every fault away, and start the server again if it is gone."""
        self.suffer(NOTHING)
        if not self.server.process.is_healthy():
            self.load.pause()
            self.server.process.kill()
            self.server.process.start()
        self.load.go_on()

    def lose_disk(self) -> None:
        """Stop the server, lose everything that its tiers hold, and start it again."""
        self.load.pause()
        self.server.process.stop()
        kill_keeper(self.server.instance)
        if self.server.disk is not None:
            shutil.rmtree(self.server.disk)
            self.server.disk.mkdir()
        self.server.process.start()
        self._warm_up()

    def empty_ram(self) -> None:
        """Empty the RAM tier, the disk left as it is."""
        self.load.pause()
        self.settle()
        self.server.empty_ram()
        self._warm_up()

    def kill(self) -> None:
        """SIGKILL the server in the middle of its work, and start it again."""
        self.server.process.kill()
        self.load.pause()
        self.server.process.start()
        self._warm_up()

    def _warm_up(self) -> None:
        """Let an engine that has just started compute something: its first request is its slowest.

        What is asked is asked once: it comes from nowhere and never comes back.
        """
        prompts = self.workload.fresh[:CLIENTS]
        for turn in range(WARM_UPS):
            self._asked += 1
            asks = [
                Ask(f"warm-{self._asked}-{at}", prompt, ANSWER_TOKENS, f"{self._asked} {turn}")
                for at, prompt in enumerate(prompts)
            ]
            burst(self.server.url, self._model, asks, "warm-up")

    def settle(self) -> None:
        """Wait until everything is on disk; small requests make the engine look."""

        def is_written() -> bool:
            self._asked += 1
            name = f"look-{self._asked}"
            burst(self.server.url, self._model, [Ask(name, prompt_of(name, 3), 1)], "look")
            return not self.server.page().chunks_under_way("disk")

        if self.has_disk:
            self.server.wait_until(is_written, "everything was written behind")

    def burst(self, asks: Sequence[Ask], phase: str) -> list[Sample]:
        """Ask everything at once, beside the load."""
        return burst(self.server.url, self._model, asks, phase)

    def count(self, metric: str, labels: Mapping[str, str]) -> float:
        """A counter of the server, over all other labels."""
        return self.server.page().total(metric, labels)

    def ram_tokens(self) -> int:
        """Tokens that the RAM tier holds when it is full."""
        page = self.server.page()
        used = page.total("emberkv:tier_used_bytes", {"tier": "ram"})
        capacity = page.total("emberkv:tier_capacity_bytes", {"tier": "ram"})
        return round(capacity / used * page.chunks("ram")) * self.shape.chunk_tokens if used else 0

    def chunks_met(self) -> int:
        """Chunks that a planned fault has met since the keeper's start."""
        return followed(self._plan_path).chunks_met

    # ── what is asked of it ──────────────────────────────────────────────────────────────────

    def facts(self, sample: Sample) -> dict[str, Any]:
        """What the server's request log says of a request."""
        name = sample.ask.name
        self.server.wait_until(
            lambda: self._log.find(name) is not None, f"the request log had a line of {name}"
        )
        found = self._log.find(name)
        assert found is not None
        return found

    def loaded(self, sample: Sample, *tiers: str) -> int:
        """Prompt tokens that a request got from tiers."""
        facts = self.facts(sample)
        return sum(int(facts[f"{tier}_tokens"]) for tier in tiers)

    def problems(self, samples: Sequence[Sample]) -> list[str]:
        """Requests that were not answered, or not as computed."""
        found = [f"not answered: {each.failure}" for each in samples if each.answer is None]
        wrong = [sample.ask.name for sample in samples if not self._is_right(sample)]
        if wrong:
            found.append(f"{len(wrong)} answers differ from the computed ones ({wrong[0]}, …)")
        return found

    def late(self, samples: Sequence[Sample], share: float) -> list[str]:
        """Requests that waited longer than a share of what computing everything takes."""
        assert self.yardstick is not None
        limit_s = share * self.yardstick.median_s + GRACE_S
        answered = [sample for sample in samples if sample.answer is not None]
        waits = [float(self.facts(sample)["wait_s"]) for sample in answered]
        late = [wait_s for wait_s in waits if wait_s > limit_s]
        if not late:
            return []
        found = (
            f"{len(late)} of {len(waits)} requests waited longer than {limit_s:.2f} s for a tier"
        )
        return [f"{found}, up to {max(late):.2f} s"]

    def p99_ratio(self, samples: Sequence[Sample], computed_s: Sequence[float] = ()) -> float:
        """Their p99 of time to first token over that of computed ones."""
        assert self.yardstick is not None
        return percentile(_firsts(samples), 0.99) / percentile(
            computed_s or self.yardstick.first_token_s, 0.99
        )

    def wait_until_loaded(self, phase: str, tiers: Sequence[str], timeout_s: float) -> float | None:
        """Wait for the first request of a phase that gets something from tiers.

        Two rounds of the returning prompts are waited for at least. Returns the seconds from now
        to the sending of that request; None if there was none in time.
        """
        began_s = time.monotonic()
        seen = 0
        while True:
            samples = self.load.samples(phase)
            for sample in samples[seen:]:
                if sample.answer is not None and self.loaded(sample, *tiers):
                    return max(0.0, sample.sent_s - began_s)
            seen = len(samples)
            is_late = time.monotonic() - began_s > timeout_s
            if is_late and seen >= ROUND * self.shape.returning:
                return None
            self.load.wait_for(phase, seen + 1)

    def _is_right(self, sample: Sample) -> bool:
        if sample.answer is None:
            return True  # counted as not answered
        assert self.yardstick is not None
        said = Said(tuple(sample.answer.tokens), tuple(sample.answer.candidates))
        computed = self.yardstick.said.get(sample.ask.prompt, [])
        limits = self.yardstick.limits
        found = compare_tokens(said, computed, limits, math.inf)
        if found is None:
            self._asked += 1
            ask = replace(sample.ask, name=f"forced-{self._asked}")
            forced = force(self.server.url, self._model, ask, said.tokens)
            found = compare_forced(said, forced, limits, math.inf)
        return found.verdict is not Verdict.DIFFERENT


def laid_out(options: ServeOptions, shape: Shape) -> ServeOptions:
    """The user's options with caches as the drills need them."""
    flags = options.vllm_arguments
    if Flags(flags).value("--num-gpu-blocks-override") is None:
        flags = (*flags, "--num-gpu-blocks-override", str(shape.device_blocks))
    return replace(options, vllm_arguments=flags, ram_bytes=shape.ram_bytes)
