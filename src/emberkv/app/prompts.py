"""A prompt's token ids, as the running server itself would make them."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from emberkv.errors import ControlError, UsageError

ANSWER_S: Final = 30.0
CHAT_KEYS: Final = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
)
"""What of a chat request decides on its tokens."""

KEY_VARIABLES: Final = ("VLLM_API_KEY", "OPENAI_API_KEY")


_TOKEN_IDS: Final = 1 << 32


def _is_address(url: str) -> bool:
    """Whether a URL names a server, with a port that there can be."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    named = parts.scheme in ("http", "https") and bool(parts.hostname)
    return named and url.isprintable() and " " not in url and port != 0


class TokenServer:
    """The HTTP server in front of the engine; sends nothing anywhere else."""

    def __init__(self, url: str, model: str | None) -> None:
        """`model` is the name under which the server serves it; without one its first is taken.

        Raises `UsageError` for a URL that is none.
        """
        self._url = url.rstrip("/").removesuffix("/v1")
        if not _is_address(self._url):
            raise UsageError(f"--server is a URL like http://127.0.0.1:8000, got '{url}'")
        self._model = model

    def tokens_of_text(self, prompt: str, *, special_tokens: bool) -> list[int]:
        """The token ids of a completion's prompt. Raises `UsageError` and `ControlError`."""
        return self._tokenize({"prompt": prompt, "add_special_tokens": special_tokens})

    def tokens_of_chat(self, request: Mapping[str, Any]) -> list[int]:
        """The token ids of a chat request. Raises `UsageError` and `ControlError`."""
        return self._tokenize({key: request[key] for key in CHAT_KEYS if key in request})

    def _tokenize(self, body: Mapping[str, Any]) -> list[int]:
        self._require_no_adapter()
        answer = self._ask("/tokenize", {**body, **({"model": self._model} if self._model else {})})
        tokens = answer.get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise ControlError(f"{self._url}/tokenize gives no token ids")
        return tokens

    def _require_no_adapter(self) -> None:
        """An adapter's name and path are in every hash, and the engine does not tell the path."""
        cards = self._ask("/v1/models", None).get("data") or []
        for card in cards:
            if card.get("id") == self._model and card.get("parent"):
                raise UsageError(
                    f"{self._model} is a LoRA adapter, for which a dry run can't be made; ask "
                    "about a request that was there instead: emberkv why REQUEST_ID"
                )

    def _ask(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            said = _reason(error.read(2000).decode(errors="replace"))
            raise UsageError(f"{self._url}{path} answers {error.code}: {said}") from error
        except (OSError, ValueError) as error:
            raise ControlError(f"{self._url}{path} does not answer: {error}") from error
        return answer if isinstance(answer, dict) else {}


def _reason(text: str) -> str:
    """What a server says of an error, without its wrapping."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text


def chat_in(path: Path) -> dict[str, Any]:
    """A chat request from a file: its JSON body, or its list of messages alone.

    Raises `UsageError`.
    """
    said = _json_in(path)
    request = {"messages": said} if isinstance(said, list) else said
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        raise UsageError(f"{path} holds no chat: a list of messages, or an object with 'messages'")
    return request


def token_ids_in(path: Path) -> list[int]:
    """Token ids from a file that holds a JSON list of them. Raises `UsageError`."""
    said = _json_in(path)
    if not isinstance(said, list) or not all(
        type(token) is int and 0 <= token < _TOKEN_IDS for token in said
    ):
        raise UsageError(f"{path} holds no token ids: a JSON list of whole numbers")
    return said


def text_in(path: Path) -> str:
    """A prompt from a file, as it stands. Raises `UsageError`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} can't be read as text: {error}") from error


def _json_in(path: Path) -> Any:
    try:
        return json.loads(text_in(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}") from error
