"""Prompts and addresses that a user gives to `why`: what is none is said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberkv.app.prompts import TokenServer, chat_in, token_ids_in
from emberkv.errors import UsageError


@pytest.mark.parametrize("said", ["[" * 200_000, "no json", "{}", "[1.5]", "[-1]", f"[{10**22}]"])
def test_a_file_without_token_ids(tmp_path: Path, said: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(said)
    with pytest.raises(UsageError, match=r"tokens\.json"):
        token_ids_in(path)


def test_a_file_of_token_ids(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text("[0, 49151]")
    assert token_ids_in(path) == [0, 49151]


@pytest.mark.parametrize("said", ["[" * 200_000, "7", "{}"])
def test_a_file_without_a_chat(tmp_path: Path, said: str) -> None:
    path = tmp_path / "chat.json"
    path.write_text(said)
    with pytest.raises(UsageError, match=r"chat\.json"):
        chat_in(path)


@pytest.mark.parametrize(
    "url",
    [
        *("http://[::1", "http://[zz]:1", "http://localhost:abc", "http://localhost:99999"),
        *("http://127.0.0.1:9/\x01", "http://a b", "http://", "foo"),
    ],
)
def test_an_address_of_no_server(url: str) -> None:
    with pytest.raises(UsageError, match="--server is a URL like"):
        TokenServer(url, None)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1", "https://[::1]:1", "http://host"])
def test_an_address_of_a_server(url: str) -> None:
    TokenServer(url, None)
