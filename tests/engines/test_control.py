"""Every control command through the command line, on a real server, while it is under load."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from real_server import BLOCK_TOKENS, PROMPT_TOKENS, Answered, RealServer, document

from emberkv.live.control import address
from emberkv.testing.models import make_random_model

pytestmark = pytest.mark.engine

WHOLE = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server whose RAM holds three documents, and whose disk holds five."""
    directory = tmp_path_factory.mktemp("control")
    make_random_model(directory / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMBERKV_STRICT", "1")
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        server = RealServer(
            directory / "model",
            directory,
            f"control-{directory.name}",
            ram="4MiB",
            disk_size="7MiB",
        )
        server.start()
        yield server
        server.end()


def run(*arguments: str | Path, status: int = 0) -> str:
    """Run the command line in a process of its own; returns what it printed."""
    code = "import sys; from emberkv.app.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], check=False, capture_output=True, text=True
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if not status else done.stdout + done.stderr


def facts(*arguments: str | Path) -> Any:
    return json.loads(run(*arguments, "--json"))


def dry_run(server: RealServer, prompt: list[int], *more: str) -> Any:
    file = server.directory / "tokens.json"
    file.write_text(json.dumps(prompt))
    return facts("why", "--token-ids", file, "-i", server.instance, *more)


def tokens_in(explanation: Any, *places: str) -> int:
    """Tokens that are, or were, of use in some places."""
    chunks = sum(
        each["end"] - each["first"]
        for each in explanation["stretches"]
        if each["usable"] and each["place"] in places
    )
    return int(chunks) * BLOCK_TOKENS


def agrees(explanation: Any, answered: Answered) -> bool:
    """Whether a dry run told what a request then got; the device's part comes from RAM too."""
    told = tokens_in(explanation, "ram", "disk", "coming")
    sources = answered.sources
    return told == sources.ram + sources.disk + sources.device


def fill(server: RealServer, seeds: range) -> None:
    for seed in seeds:
        server.ask(document(seed))


class Load:
    """Short prompts without end, on a thread of its own; counts what was answered.

    While `stores` is off it pushes nothing out of the tiers.
    """

    def __init__(self, server: RealServer) -> None:
        self._url = server.server.url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answered = 0
        self.failed: list[str] = []
        self.stores = True

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=120, trust_env=False) as client:
            while not self._stop.is_set():
                prompt = document(10_000 + self.answered, 200)
                body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 16}
                body |= {"ignore_eos": True}
                if not self.stores:
                    body["kv_transfer_params"] = {"emberkv": {"no_store": True}}
                response = client.post("/v1/completions", json=body)
                if response.status_code == 200:
                    self.answered += 1
                else:
                    self.failed.append(response.text)


def test_why_tells_what_happened_to_a_request(server: RealServer) -> None:
    first = server.ask(document(0))
    told = facts("why", first.request_id, "-i", server.instance)
    assert told["stretches"][0]["reason"] == "never_seen"
    assert told["request"]["stored_chunks"] == WHOLE // BLOCK_TOKENS
    fill(server, range(1, 3))  # the device cache holds less than two documents

    told = dry_run(server, document(0))
    again = server.ask(document(0))
    assert agrees(told, again)
    told = facts("why", again.request_id, "-i", server.instance)
    assert told["request"]["ram_tokens"] == again.sources.ram > 0
    assert tokens_in(told, "ram") == again.sources.ram
    assert "are no whole chunk of 32 and are always computed" in told["summary"]

    longer = document(0)[: 20 * BLOCK_TOKENS] + document(77)[:600]
    told = dry_run(server, longer)
    assert [each["place"] for each in told["stretches"]] == ["ram", "nowhere"]
    assert agrees(told, server.ask(longer))

    fill(server, range(3, 12))  # out of RAM and out of the disk tier
    told = dry_run(server, document(0))
    assert told["stretches"][0]["reason"] == "evicted"
    assert "evicted from disk by lru" in told["summary"]
    evicted = server.ask(document(0))
    assert evicted.sources.computed == PROMPT_TOKENS
    told = facts("why", evicted.request_id, "-i", server.instance)
    assert "evicted from disk by lru" in told["summary"]

    assert "no request 'nobody'" in run("why", "nobody", "-i", server.instance, status=2)


def test_a_text_and_a_chat_are_named_as_the_server_names_them(server: RealServer) -> None:
    url = server.server.url
    text = " ".join(f"word {n}" for n in range(300))
    body = {"model": "tiny", "prompt": text, "max_tokens": 1}
    server.http.post("/v1/completions", json=body).raise_for_status()
    told = facts("why", "--prompt", text, "--server", url, "-i", server.instance)
    assert told["stretches"][0]["place"] in ("ram", "disk")
    assert len(told["stretches"]) == 1

    chat = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    salted = chat | {"cache_salt": "a salt"}
    server.http.post("/v1/chat/completions", json=salted).raise_for_status()
    file = server.directory / "chat.json"
    file.write_text(json.dumps(salted))
    told = facts("why", "--messages", file, "--server", url, "-i", server.instance)
    assert [each["place"] in ("ram", "disk") for each in told["stretches"]] == [True]
    file.write_text(json.dumps(chat))
    told = facts("why", "--messages", file, "--server", url, "-i", server.instance)
    assert told["stretches"][0]["place"] == "nowhere"


def test_every_command_works_under_load(server: RealServer) -> None:
    name = server.instance
    with Load(server) as load:
        (status,) = facts("status", name)
        assert status["serving"]
        assert [tier["name"] for tier in status["tiers"]] == ["ram", "disk"]
        assert "hits" in run("top", name, "--once")
        run("control", "-i", name, "policy", "ram", "arc")
        run("control", "-i", name, "budget", "max_wait_s=3")
        (status,) = facts("status", name)
        assert status["tiers"][0]["eviction_policy"] == "arc"
        assert status["limits"]["max_wait_s"] == 3
        run("control", "-i", name, "policy", "ram", "lru")  # as the other tests expect it
        load.stores = False  # from here on it is told what the tiers hold
        _shut_and_open(server)
        _purge(server)
        answered = load.answered
    assert load.failed == []
    assert answered > 0


def _shut_and_open(server: RealServer) -> None:
    """RAM shut: nothing is served or stored. Drained: nothing is stored. Open: all as before."""
    name = server.instance
    fill(server, range(20, 22))
    run("control", "-i", name, "tier", "ram", "off")
    assert dry_run(server, document(20))["stretches"][0]["reason"] == "shut"
    shut = server.ask(document(20))
    assert shut.sources.ram == shut.sources.disk == 0
    told = facts("why", shut.request_id, "-i", name)
    if shut.sources.computed == PROMPT_TOKENS:
        assert told["stretches"][0]["reason"] == "tier_shut"
    run("control", "-i", name, "tier", "ram", "drain")
    server.ask(document(30))
    told = dry_run(server, document(30))
    assert told["stretches"][0]["reason"] == "refused_by_gate"
    run("control", "-i", name, "tier", "ram", "on")
    (status,) = facts("status", name)
    assert [tier["gate"] for tier in status["tiers"]] == ["on", "on"]


def _purge(server: RealServer) -> None:
    name = server.instance
    fill(server, range(40, 42))
    server.wait_until_settled()
    run("control", "-i", name, "purge", "ram")
    told = dry_run(server, document(41))
    assert told["stretches"][0]["place"] == "disk"
    server.ask(document(42))
    run("control", "-i", name, "purge", "disk")
    assert dry_run(server, document(42))["stretches"][0]["place"] == "ram"
    run("control", "-i", name, "purge")
    assert dry_run(server, document(42))["stretches"][0]["reason"] == "purge"
    answered = server.ask(document(42))
    assert answered.sources.ram == answered.sources.disk == 0


def test_a_killed_server_leaves_a_socket_that_the_next_look_removes(server: RealServer) -> None:
    """Last in this module: it ends the server."""
    path = address.runtime_dirs()[0] / f"{server.instance}.sock"
    assert path.exists()
    server.kill()
    assert server.instance not in [each["instance"] for each in facts("status")]
    assert not path.exists()
    server.start()
    (status,) = facts("status", server.instance)
    assert status["serving"]
