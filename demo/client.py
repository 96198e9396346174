"""Asks an OpenAI-compatible server for completions, streaming, and times the first token."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

ANSWER_TOKENS: Final = 32
MODEL_NAME: Final = "smollm2"
_TIMEOUT: Final = httpx.Timeout(120.0, connect=5.0)


class AnswerError(Exception):
    """The server did not answer a request as asked."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token and the logarithm of its probability."""

    token: int
    logprob: float


@dataclass(slots=True)
class Answer:
    """What came back. `candidates`: the two most likely tokens of each position, best first."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    candidates: list[tuple[Candidate, ...]] = field(default_factory=list)
    first_token_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens: int = 0

    @property
    def first_line(self) -> str:
        """The answer as a reader would take it: up to the end of its first line."""
        return self.text.strip().split("\n")[0].strip()


class Client:
    """One connection to a server on this machine; one request at a time."""

    def __init__(self, url: str) -> None:
        # trust_env off: a proxy of the user's has no business between here and loopback.
        self._http = httpx.Client(base_url=url, timeout=_TIMEOUT, trust_env=False)

    def complete(self, prompt: str, request_id: str, max_tokens: int = ANSWER_TOKENS) -> Answer:
        """A greedy answer of exactly `max_tokens` tokens. Raises `AnswerError`."""
        body = request_body(prompt, max_tokens)
        answer = Answer()
        began_s = time.perf_counter()
        try:
            with self._http.stream(
                "POST", "/v1/completions", json=body, headers={"X-Request-Id": request_id}
            ) as response:
                if response.status_code != httpx.codes.OK:
                    raise AnswerError(f"{response.status_code}: {response.read().decode()[:300]}")
                for event in _events(response.iter_lines()):
                    _take(event, answer, began_s)
        except httpx.HTTPError as error:
            raise AnswerError(f"the server did not answer: {error!r}") from error
        answer.total_s = time.perf_counter() - began_s
        if len(answer.tokens) != max_tokens or not answer.prompt_tokens:
            raise AnswerError(f"{len(answer.tokens)} tokens came back instead of {max_tokens}")
        return answer

    def metrics(self) -> str:
        """The server's metrics page. Raises `AnswerError`."""
        try:
            return self._http.get("/metrics").raise_for_status().text
        except httpx.HTTPError as error:
            raise AnswerError(f"no metrics: {error!r}") from error

    def healthy(self) -> bool:
        """Whether the server says that it is ready."""
        try:
            return self._http.get("/health").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        self._http.close()


def request_body(prompt: str, max_tokens: int) -> dict[str, Any]:
    """Greedy, streamed, with the two best tokens of each position and the usage at the end."""
    return {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise AnswerError(str(event["error"]))
            yield event


def _take(event: dict[str, Any], answer: Answer, began_s: float) -> None:
    """Add one event of the stream to an answer."""
    if event.get("usage"):
        answer.prompt_tokens = event["usage"]["prompt_tokens"]
    for choice in event["choices"]:
        logprobs = choice.get("logprobs")
        if not logprobs or not logprobs["tokens"]:
            continue
        if not answer.tokens:
            answer.first_token_s = time.perf_counter() - began_s
        answer.text += choice["text"]
        answer.tokens += [_token_id(token) for token in logprobs["tokens"]]
        for best in logprobs["top_logprobs"]:
            found = [Candidate(_token_id(token), logprob) for token, logprob in best.items()]
            found.sort(key=lambda candidate: -candidate.logprob)
            answer.candidates.append(tuple(found[:2]))


def _token_id(name: str) -> int:
    """`token_id:123`, as the server writes tokens when asked for ids."""
    return int(name.removeprefix("token_id:"))
