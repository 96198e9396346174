"""A steady load: some clients, each with its next request as soon as its last is answered.

Two requests of three return: their prompts come round in turn, so that each has left the device's
cache, and mostly RAM, when it is asked again. The third is fresh: nobody has asked it before.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from emberkv.app.asking import Answer, AnswerError, Ask, Asker
from emberkv.app.own_server import ServerError
from emberkv.app.selfcheck import prompt_of

ROUND: Final = 3
"""Requests of which one is fresh."""

PHASE_S: Final = 900.0
_POLL_S: Final = 0.01
_AFTER_FAILURE_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts: `returning` come round, `fresh` are asked under a new salt each time."""

    returning: tuple[tuple[int, ...], ...]
    fresh: tuple[tuple[int, ...], ...]
    answer_tokens: int

    @classmethod
    def make(cls, returning: int, fresh: int, tokens: int, answer_tokens: int) -> Workload:
        """Prompts of `tokens` tokens each, always the same ones."""
        return cls(
            tuple(prompt_of(f"returning {at}", tokens) for at in range(returning)),
            tuple(prompt_of(f"fresh {at}", tokens) for at in range(fresh)),
            answer_tokens,
        )

    def ask(self, number: int) -> Ask:
        """The request of a number; equal numbers ask for the same."""
        turn, place = divmod(number, ROUND)
        name = f"drill-{number}"
        if place == ROUND - 1:
            prompt = self.fresh[turn % len(self.fresh)]
            return Ask(name, prompt, self.answer_tokens, salt=name)
        at = (turn * (ROUND - 1) + place) % len(self.returning)
        return Ask(name, self.returning[at], self.answer_tokens)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request and how it went. `sent_s` is of the monotonic clock."""

    ask: Ask
    phase: str
    sent_s: float
    answer: Answer | None
    failure: str = ""

    @property
    def returns(self) -> bool:
        return self.ask.salt is None


class RunningLoad:
    """Clients at work on a thread of their own, from `start` to `stop`."""

    def __init__(self, url: str, model: str, workload: Workload, clients: int) -> None:
        self._url = url
        self._model = model
        self._workload = workload
        self._clients = clients
        self._next = 0
        self._phase = ""
        self._samples: list[Sample] = []
        self._under_way = 0
        self._paused = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def start(self, phase: str) -> None:
        """Begin to ask."""
        self._phase = phase
        self._thread.start()

    def stop(self) -> None:
        """Wait for the last answers and end."""
        self._stopped = True
        self._thread.join()

    def enter(self, phase: str) -> None:
        """Count requests that are sent from now on for a phase."""
        self._phase = phase

    def pause(self, *, wait: bool = True) -> None:
        """Send nothing more, and wait for what is under way unless `wait` is off."""
        self._paused = True
        deadline_s = time.monotonic() + PHASE_S
        while wait and self._under_way:
            self._require_time(deadline_s, "the requests under way were answered")
            time.sleep(_POLL_S)

    def go_on(self) -> None:
        """Send again."""
        self._paused = False

    def samples(self, phase: str) -> list[Sample]:
        """The requests of a phase that have ended."""
        return [sample for sample in list(self._samples) if sample.phase == phase]

    def wait_for(self, phase: str, count: int) -> None:
        """Wait until so many requests of a phase have ended. Raises `ServerError`."""
        deadline_s = time.monotonic() + PHASE_S
        while len(self.samples(phase)) < count:
            self._require_time(deadline_s, f"{count} requests were answered")
            time.sleep(_POLL_S)

    def _require_time(self, deadline_s: float, what: str) -> None:
        if time.monotonic() > deadline_s:
            raise ServerError(f"it took more than {PHASE_S:.0f} s until {what}")

    def _run(self) -> None:
        asyncio.run(self._ask_on())

    async def _ask_on(self) -> None:
        async with Asker(self._url, self._model) as asker:
            await asyncio.gather(*(self._client(asker) for _ in range(self._clients)))

    async def _client(self, asker: Asker) -> None:
        while not self._stopped:
            if self._paused:
                await asyncio.sleep(_POLL_S)
                continue
            ask = self._workload.ask(self._next)
            self._next += 1
            self._under_way += 1
            sample = await _sample(asker, ask, self._phase)
            self._samples.append(sample)
            self._under_way -= 1
            if sample.answer is None:
                await asyncio.sleep(_AFTER_FAILURE_S)


async def _sample(asker: Asker, ask: Ask, phase: str) -> Sample:
    sent_s = time.monotonic()
    try:
        answer = await asker.answer(ask)
    except AnswerError as error:
        return Sample(ask, phase, sent_s, None, str(error))
    return Sample(ask, phase, sent_s, answer)


def burst(url: str, model: str, asks: Sequence[Ask], phase: str) -> list[Sample]:
    """Ask everything at once."""

    async def run() -> list[Sample]:
        async with Asker(url, model) as asker:
            return list(await asyncio.gather(*(_sample(asker, ask, phase) for ask in asks)))

    return asyncio.run(run())
