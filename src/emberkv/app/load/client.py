"""Asks a server for streamed completions, many at a time, and times every token."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final, Self

from emberkv.app.metrics_page import Page
from emberkv.errors import UsageError, WorldError

if TYPE_CHECKING:
    import httpx

CONNECT_S: Final = 10.0
_DONE: Final = "[DONE]"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request felt. `error` says why it failed; its times then count for nothing."""

    prompt_tokens: int
    first_token_s: float = 0.0
    gaps_s: tuple[float, ...] = ()  # between one part of the answer and the next
    total_s: float = 0.0
    answer_tokens: int = 0
    error: str | None = None


def http_library() -> Any:
    """The HTTP library. Raises `UsageError` where it is not installed."""
    try:
        import httpx
    except ImportError as error:
        raise UsageError("this needs httpx: pip install 'emberkv[load]'") from error
    return httpx


def server_url(text: str) -> str:
    """A server's address without path. Raises `UsageError` for what is none."""
    httpx = http_library()
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, ValueError) as error:
        raise UsageError(f"'{text}' is no address of a server: {error}") from error
    has_port = url.port is None or 0 < url.port < 1 << 16
    if url.scheme not in {"http", "https"} or not url.host or not has_port:
        raise UsageError(f"'{text}' is no address of a server; write it like http://127.0.0.1:8000")
    return str(url.copy_with(path="/", query=None, fragment=None)).rstrip("/")


def is_loopback(url: str) -> bool:
    """Whether a server is on this machine, by its address."""
    host = http_library().URL(url).host
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class Client:
    """Talks to one server; an async context manager."""

    def __init__(self, url: str, timeout_s: float) -> None:
        library = http_library()
        # trust_env off: a proxy of the user's would be measured instead.
        self._http = library.AsyncClient(
            base_url=url,
            timeout=library.Timeout(timeout_s, connect=CONNECT_S),
            limits=library.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )
        self._errors: tuple[type[Exception], ...] = (library.HTTPError, library.InvalidURL)
        self.url = url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def page(self) -> Page:
        """The server's metrics. Raises `WorldError`."""
        return Page((await self._get("/metrics")).text)

    async def facts(self, path: str) -> dict[str, Any]:
        """A page of JSON; nothing where there is no such page. Raises `WorldError`."""
        response = await self._get(path, missing_is_fine=True)
        try:
            found = response.json() if response.is_success else {}
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    async def complete(self, model: str, prompt: Sequence[int], answer_tokens: int) -> Answer:
        """One streamed, greedy completion of exactly `answer_tokens`; a failure is in the answer.

        Times are from sending the request; the first part of the answer ends time to first token.
        """
        body = json.dumps(
            {
                "model": model,
                "prompt": list(prompt),
                "max_tokens": answer_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        headers = {"Content-Type": "application/json"}
        times_s: list[float] = []
        tokens = 0
        began_s = time.perf_counter()
        try:
            async with self._http.stream(
                "POST", "/v1/completions", content=body, headers=headers
            ) as response:
                if not response.is_success:
                    said = (await response.aread()).decode(errors="replace")
                    return Answer(len(prompt), error=f"{response.status_code}: {_message(said)}")
                async for event in _events(response):
                    if "error" in event:
                        return Answer(len(prompt), error=_message(json.dumps(event)))
                    if event.get("choices"):
                        times_s.append(time.perf_counter() - began_s)
                    if event.get("usage"):
                        tokens = int(event["usage"]["completion_tokens"])
        except self._errors as error:
            return Answer(len(prompt), error=type(error).__name__)
        except (ValueError, KeyError, TypeError, AttributeError):
            return Answer(len(prompt), error="the stream can't be read")
        if not times_s or tokens != answer_tokens:
            return Answer(len(prompt), error=f"{tokens} of {answer_tokens} tokens came")
        gaps_s = tuple(b - a for a, b in itertools.pairwise(times_s))
        total_s = time.perf_counter() - began_s
        return Answer(len(prompt), times_s[0], gaps_s, total_s, tokens)

    async def _get(self, path: str, *, missing_is_fine: bool = False) -> httpx.Response:
        try:
            response: httpx.Response = await self._http.get(path)
        except self._errors as error:
            said = str(error) or type(error).__name__
            raise WorldError(f"{self.url} does not answer: {said}") from error
        if not (response.is_success or missing_is_fine):
            raise WorldError(f"{self.url}{path} answers {response.status_code}")
        return response


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, up to its end."""
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != _DONE:
            yield json.loads(data)


def _message(said: str) -> str:
    """The message of an error that was answered, in one short line."""
    try:
        found = json.loads(said)
        said = str(found["error"]["message"])
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(said.split())[:160]
