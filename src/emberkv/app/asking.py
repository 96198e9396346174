"""Asks a server for completions by token ids: greedy, streamed, with log-probabilities."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import httpx

from emberkv.errors import WorldError

CANDIDATES: Final = 5
"""Likeliest tokens named at each position."""

_TIMEOUT: Final = httpx.Timeout(600.0, connect=10.0)
_TOKEN: Final = "token_id:"

Candidates = tuple[Mapping[int, float], ...]
"""At each position, the log-probability of the likeliest tokens and of the one that was taken."""


class AnswerError(WorldError):
    """A server did not answer a request as asked."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. With a `salt` of its own it is computed, whatever any cache holds."""

    name: str
    prompt: tuple[int, ...]
    answer_tokens: int
    salt: str | None = None


@dataclass(slots=True)
class Answer:
    """What came back, and when. Times are from the request's sending, in seconds."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    candidates: list[dict[int, float]] = field(default_factory=list)
    first_token_s: float = 0.0
    total_s: float = 0.0


class Asker:
    """A client of one server, for one event loop; use it in an `async with` block."""

    def __init__(self, url: str, model: str) -> None:
        # trust_env off: a proxy of the user's has no business between here and loopback.
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=_TIMEOUT,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
        self._model = model

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def answer(self, ask: Ask) -> Answer:
        """A greedy answer of exactly the tokens asked for. Raises `AnswerError`."""
        answer = Answer(ask)
        began_s = time.perf_counter()
        try:
            async with self._http.stream(
                "POST",
                "/v1/completions",
                json=self._body(ask) | {"stream": True, "logprobs": CANDIDATES},
                headers={"X-Request-Id": ask.name},
            ) as response:
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode(errors="replace")
                    raise AnswerError(f"{ask.name}: {response.status_code}: {text[:300]}")
                async for event in _events(response.aiter_lines()):
                    _take(event, answer, began_s)
        except httpx.HTTPError as error:
            raise AnswerError(f"{ask.name}: the server did not answer: {error!r}") from error
        answer.total_s = time.perf_counter() - began_s
        if len(answer.tokens) != ask.answer_tokens:
            raise AnswerError(
                f"{ask.name}: {len(answer.tokens)} tokens came back, not {ask.answer_tokens}"
            )
        return answer

    async def forced(self, ask: Ask, tokens: Sequence[int]) -> list[dict[int, float]]:
        """What the engine, computing everything, thinks of given tokens in place of an answer.

        A request for log-probabilities of a prompt is never served from a cache.
        """
        whole = Ask(ask.name, (*ask.prompt, *tokens), 1, ask.salt)
        body = self._body(whole) | {"prompt_logprobs": CANDIDATES}
        try:
            response = await self._http.post(
                "/v1/completions", json=body, headers={"X-Request-Id": ask.name}
            )
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise AnswerError(f"{ask.name}: {error!r}") from error
        positions = response.json()["choices"][0]["prompt_logprobs"][-len(tokens) :]
        return [
            {int(token): float(said["logprob"]) for token, said in position.items()}
            for position in positions
        ]

    def _body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(ask.prompt),
            "max_tokens": ask.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
        }
        return body if ask.salt is None else body | {"cache_salt": ask.salt}


@dataclass(frozen=True, slots=True)
class Model:
    """What a server says of what it serves."""

    name: str
    max_tokens: int


def served_model(url: str) -> Model:
    """The model of a server. Raises `AnswerError`."""
    try:
        response = httpx.get(f"{url}/v1/models", timeout=60, trust_env=False).raise_for_status()
        found = response.json()["data"][0]
        return Model(found["id"], int(found["max_model_len"]))
    except (httpx.HTTPError, KeyError, IndexError) as error:
        raise AnswerError(f"the server does not say what it serves: {error!r}") from error


def ask_each(url: str, model: str, asks: Sequence[Ask], *, at_once: bool = False) -> list[Answer]:
    """Answers in the order of the requests, asked one after the other or all at once."""

    async def run() -> list[Answer]:
        async with Asker(url, model) as asker:
            if at_once:
                return list(await asyncio.gather(*map(asker.answer, asks)))
            return [await asker.answer(ask) for ask in asks]

    return asyncio.run(run())


def force(url: str, model: str, ask: Ask, tokens: Sequence[int]) -> list[dict[int, float]]:
    """See `Asker.forced`."""

    async def run() -> list[dict[int, float]]:
        async with Asker(url, model) as asker:
            return await asker.forced(ask, tokens)

    return asyncio.run(run())


class LoggedRequests:
    """A server's request log, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self._lines: dict[str, dict[str, Any]] = {}

    def find(self, name: str) -> dict[str, Any] | None:
        """The line of a request, by the name that it was asked with; None while there is none."""
        if name not in self._lines:
            self._read()
        return self._lines.get(name)

    def _read(self) -> None:
        try:
            with self._path.open("rb") as log:
                log.seek(self._read_bytes)
                text = log.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            facts = json.loads(line)
            external = str(facts["external_id"] or "")
            # The server puts its own marks around the name: cmpl-NAME-0.
            self._lines[external.removeprefix("cmpl-").rpartition("-")[0]] = facts


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    async for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise AnswerError(str(event["error"])[:300])
            yield event


def _take(event: dict[str, Any], answer: Answer, began_s: float) -> None:
    """Add one event of the stream to an answer."""
    for choice in event["choices"]:
        said = choice.get("logprobs")
        if not said or not said["tokens"]:
            continue
        if not answer.tokens:
            answer.first_token_s = time.perf_counter() - began_s
        tokens = [int(token.removeprefix(_TOKEN)) for token in said["tokens"]]
        answer.tokens += tokens
        for token, logprob, best in zip(
            tokens, said["token_logprobs"], said["top_logprobs"], strict=True
        ):
            named = {int(name.removeprefix(_TOKEN)): float(each) for name, each in best.items()}
            answer.candidates.append(named | {token: float(logprob)})
