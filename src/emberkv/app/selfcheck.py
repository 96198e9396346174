"""The self-check: answers from every tier, on a server of one's own, against computed answers.

    start      computed (several times, alone and beside others: the engine's own spread)
               cold → device → RAM
    kill       RAM again, as a crash leaves it to the next start
    stop       disk, RAM empty

Each answer must come from where it should, whole chunk for whole chunk: the request log says so.
An answer from elsewhere checks nothing and fails the check.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from emberkv.app.agreement import (
    Comparison,
    Limits,
    Said,
    Verdict,
    compare_forced,
    compare_tokens,
    distance,
    limit_of,
)
from emberkv.app.asking import Answer, Ask, LoggedRequests, ask_each, force, served_model
from emberkv.app.own_server import OwnServer

ANSWER_TOKENS: Final = 16
LONG_CHUNKS: Final = 16
LONG_TOKENS: Final = 512
EAGER_SPEC: Final = ("EagerOffloadingSpec", "emberkv.engines.vllm.eager")
"""Every answer shall come from its tier, also where computing it would be quicker."""

FIRST_TOKEN_ID: Final = 100
LAST_TOKEN_ID: Final = 1000
"""Every vocabulary has the ids in between."""

Say = Callable[[str], None]


class Source(enum.StrEnum):
    """Where an answer's prompt comes from."""

    COMPUTED = "computed"
    DEVICE = "device"
    RAM = "ram"
    RAM_AFTER_KILL = "ram after a kill"
    DISK = "disk"


LOGGED_TOKENS: Final = {
    Source.COMPUTED: "computed_tokens",
    Source.DEVICE: "device_tokens",
    Source.RAM: "ram_tokens",
    Source.RAM_AFTER_KILL: "ram_tokens",
    Source.DISK: "disk_tokens",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One answer and what was found. `loaded_tokens` of the prompt came from the source."""

    chunk_tokens: int
    prompt_tokens: int
    source: Source
    loaded_tokens: int
    comparison: Comparison
    problem: str = ""

    @property
    def agrees(self) -> bool:
        return not self.problem and self.comparison.verdict is not Verdict.DIFFERENT

    def facts(self) -> dict[str, object]:
        """The row for programs."""
        return {
            "chunk_tokens": self.chunk_tokens,
            "prompt_tokens": self.prompt_tokens,
            "source": self.source.value,
            "loaded_tokens": self.loaded_tokens,
            "agrees": self.agrees,
            "verdict": self.comparison.verdict.value,
            "distance": self.comparison.distance,
            "limit": self.comparison.limit,
            "problem": self.problem,
        }


@dataclass(slots=True)
class Prompt:
    """A prompt and what the engine says to it by itself."""

    tokens: tuple[int, ...]
    computed: list[Said] = field(default_factory=list)
    contrast: float = 0.0


def prompt_lengths(chunk_tokens: int, longest: int) -> list[int]:
    """Below a chunk, at its borders, one over, some chunks, many."""
    many = max(LONG_CHUNKS * chunk_tokens, LONG_TOKENS) + chunk_tokens // 2
    wanted = {
        max(1, chunk_tokens // 2),
        chunk_tokens,
        chunk_tokens + 1,
        3 * chunk_tokens,
        3 * chunk_tokens + chunk_tokens // 2,
        min(many, longest),
    }
    return sorted(length for length in wanted if length <= longest)


def prompt_of(seed: str, length: int) -> tuple[int, ...]:
    """A prompt of its own for each seed."""
    numbers = random.Random(seed)
    return tuple(numbers.randrange(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(length))


class SelfCheck:
    """One layout's check. `longest` bounds prompts to what the RAM tier can hold."""

    def __init__(
        self, server: OwnServer, block_tokens: int, chunk_tokens: int, longest: int, say: Say
    ) -> None:
        self._server = server
        self._block_tokens = block_tokens
        self._chunk_tokens = chunk_tokens
        self._longest = longest
        self._say = say
        self._log = LoggedRequests(server.request_log)
        self._asked = 0
        self._model = ""
        self._limits = Limits(0.0, 0.0)

    def run(self) -> Iterator[Row]:
        """Check; rows come as they are found. The server is started and ended here."""
        with self._server:
            prompts = self.measure()
            yield from self.cold_and_device(prompts)
            self._server.reset_device()
            yield from self.rows(prompts, Source.RAM)
            options = self._server.options
            if options.keep_s is None or options.keep_s > 0:
                self._say("kill and restart")
                self._server.restart_after_kill()
                yield from self.rows(prompts, Source.RAM_AFTER_KILL)
            if options.disk is not None:
                self.settle(prompts)
                self._say("restart with an empty RAM tier")
                self._server.empty_ram()
                yield from self.rows(prompts, Source.DISK)

    # ── the engine by itself ─────────────────────────────────────────────────────────────────

    def measure(self) -> list[Prompt]:
        """What the engine says without tiers: alone, from its own cache, and beside others.

        Returns the prompts of the check, and what was said to each.
        """
        self._say("the engine's own spread")
        model = served_model(self._server.url)
        self._model = model.name
        longest = min(self._longest, model.max_tokens - ANSWER_TOKENS - 1)
        prompts = [
            Prompt(prompt_of(f"{self._chunk_tokens} {length}", length))
            for length in prompt_lengths(self._chunk_tokens, longest)
        ]
        direct: list[float] = []
        forced: list[float] = []
        salt = self._name()
        rounds = [
            [found for prompt in prompts for found in self._twice(prompt, salt)],
            self._ask([self._request(p, self._name()) for p in prompts], at_once=True),
            self._ask([self._request(p, self._name()) for p in (*prompts, *prompts)], at_once=True),
        ]
        for answer in (answer for each in rounds for answer in each):
            prompt = next(p for p in prompts if p.tokens == answer.ask.prompt)
            said = _said(answer)
            known = [old for old in prompt.computed if old.tokens == said.tokens]
            direct += [distance(said.candidates, old.candidates) for old in known]
            if not known:
                forced.append(distance(said.candidates, self._forced(prompt.tokens, said)))
            prompt.computed.append(said)
        for prompt in prompts:
            altered = _with_other_first_chunk(prompt.tokens, self._chunk_tokens)
            said = prompt.computed[0]
            prompt.contrast = distance(said.candidates, self._forced(altered, said))
        self._limits = Limits(limit_of(direct), limit_of([*direct, *forced]))
        return prompts

    def _twice(self, prompt: Prompt, salt: str) -> list[Answer]:
        """Computed, and then from the device's own cache: the tiers have no part in either."""
        return self._ask([self._request(prompt, salt), self._request(prompt, salt)])

    def _forced(self, prompt: tuple[int, ...], said: Said) -> list[dict[int, float]]:
        ask = Ask(self._name(), prompt, 1, salt=self._name())
        return force(self._server.url, self._model, ask, said.tokens)

    # ── the tiers ────────────────────────────────────────────────────────────────────────────

    def cold_and_device(self, prompts: Sequence[Prompt]) -> Iterator[Row]:
        """Answers that are computed and stored, and the same from the device's cache."""
        self._say("computed, and from the device")
        for prompt in prompts:
            yield self._row(prompt, Source.COMPUTED)
            yield self._row(prompt, Source.DEVICE)

    def rows(self, prompts: Sequence[Prompt], source: Source) -> Iterator[Row]:
        """One answer to each prompt, which must come from `source` now."""
        self._say(f"from {source.value}")
        for prompt in prompts:
            yield self._row(prompt, source)

    def _row(self, prompt: Prompt, source: Source) -> Row:
        """Ask once, and compare what comes back and where it came from."""
        (answer,) = self._ask([self._request(prompt, None)])
        said = _said(answer)
        found = compare_tokens(said, prompt.computed, self._limits, prompt.contrast)
        if found is None:
            forced = self._forced(prompt.tokens, said)
            found = compare_forced(said, forced, self._limits, prompt.contrast)
        facts = self._logged(answer.ask.name)
        loaded = int(facts[LOGGED_TOKENS[source]])
        problem = self._wrong_place(len(prompt.tokens), source, facts)
        return Row(self._chunk_tokens, len(prompt.tokens), source, loaded, found, problem)

    def _wrong_place(self, length: int, source: Source, facts: dict[str, Any]) -> str:
        """Why the answer shows nothing of its source; empty if it does."""
        unit = self._block_tokens if source is Source.DEVICE else self._chunk_tokens
        own = facts[LOGGED_TOKENS[source]]
        match source:
            case Source.COMPUTED:
                is_right = own == length
            case Source.DEVICE:
                # The device computes the last token again, and with it its block at a border; a
                # tier may bring that block.
                is_right = own == (length - 1) // unit * unit
            case _:
                is_right = own == length // unit * unit
        if not is_right:
            places = ", ".join(
                f"{facts[f'{name}_tokens']} {name}"
                for name in ("device", "ram", "disk", "computed")
            )
            return f"came from elsewhere: {places} ({facts['why_not_more']})"
        return ""

    def settle(self, prompts: Sequence[Prompt]) -> None:
        """Wait until everything is on disk; small requests make the engine look."""

        def is_written() -> bool:
            self._ask([Ask(self._name(), prompt_of(self._name(), 3), 1)])
            page = self._server.page()
            return page.chunks("disk") > 0 and not page.chunks_under_way("disk")

        if any(len(prompt.tokens) >= self._chunk_tokens for prompt in prompts):
            self._server.wait_until(is_written, "everything was written behind")

    # ── asking ───────────────────────────────────────────────────────────────────────────────

    def _request(self, prompt: Prompt, salt: str | None) -> Ask:
        return Ask(self._name(), prompt.tokens, ANSWER_TOKENS, salt)

    def _ask(self, asks: Sequence[Ask], *, at_once: bool = False) -> list[Answer]:
        return ask_each(self._server.url, self._model, asks, at_once=at_once)

    def _logged(self, name: str) -> dict[str, Any]:
        self._server.wait_until(
            lambda: self._log.find(name) is not None, f"the request log had a line of {name}"
        )
        facts = self._log.find(name)
        assert facts is not None
        return facts

    def _name(self) -> str:
        self._asked += 1
        return f"check-{self._asked}"


class Finding(enum.Enum):
    """What a whole check says, worst last."""

    AGREES = enum.auto()
    BLIND = enum.auto()  # of some source, no row could have told a wrong chunk
    ELSEWHERE = enum.auto()
    DIFFERENT = enum.auto()


ADVICE: Final[Mapping[Finding, str]] = {
    Finding.DIFFERENT: (
        "answers from a tier are not what this engine computes: serve without that tier (leave "
        "--disk out, or emberkv itself), keep what --json prints, and report it"
    ),
    Finding.ELSEWHERE: (
        "answers did not come from where they should, so they show nothing: is a tier smaller than "
        "the prompts, or off? The server's log says why a tier is off"
    ),
    Finding.BLIND: (
        "the engine's own answers differ as much as a wrong chunk would make them: check the same "
        "layout with --dtype float32, or with larger chunks"
    ),
}


def finding(rows: Sequence[Row]) -> Finding:
    """The worst that the rows say."""
    if any(row.comparison.verdict is Verdict.DIFFERENT for row in rows):
        return Finding.DIFFERENT
    if any(row.problem for row in rows):
        return Finding.ELSEWHERE
    sources = {(row.chunk_tokens, row.source) for row in rows}
    told = {
        (row.chunk_tokens, row.source)
        for row in rows
        if row.loaded_tokens and row.comparison.verdict is not Verdict.CANNOT_TELL
    }
    return Finding.AGREES if sources == told else Finding.BLIND


def _said(answer: Answer) -> Said:
    return Said(tuple(answer.tokens), tuple(answer.candidates))


def _with_other_first_chunk(prompt: tuple[int, ...], chunk_tokens: int) -> tuple[int, ...]:
    """What a wrong first chunk stands for: the same prompt after another beginning."""
    count = min(chunk_tokens, len(prompt))
    return (*prompt_of(f"another {len(prompt)}", count), *prompt[count:])


def longest_prompt(ram_bytes: int, token_bytes: int | None) -> int:
    """Prompt tokens that surely fit into the RAM tier, all of the check's prompts together."""
    return LONG_TOKENS if token_bytes is None else max(1, ram_bytes // token_bytes // 4)
