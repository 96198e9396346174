"""The demo's client against a server that speaks OpenAI's stream of events over real HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from demo.client import AnswerError, Candidate, Client


class Handler(BaseHTTPRequestHandler):
    """Answers `max_tokens` tokens numbered from 0, or what the prompt orders."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"] == "refuse":
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b'{"error": "no"}')
            return
        self.send_response(200)
        self.end_headers()
        count = body["max_tokens"] - (body["prompt"] == "stop early")
        for token in range(count):
            self._send(event(token))
        if body["prompt"] == "fail":
            self._send({"error": {"message": "broken"}})
        self._send({"choices": [], "usage": {"prompt_tokens": 7}})
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())


def event(token: int) -> dict[str, Any]:
    best = {f"token_id:{token + 1}": -2.0, f"token_id:{token}": -0.5}
    logprobs = {"tokens": [f"token_id:{token}"], "top_logprobs": [best]}
    return {"choices": [{"text": f" {token}\n", "logprobs": logprobs}]}


@pytest.fixture
def client() -> Iterator[Client]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        client = Client(f"http://127.0.0.1:{server.server_port}")
        yield client
        client.close()
        server.shutdown()
        thread.join()


def test_an_answer_is_put_together_from_its_events(client: Client) -> None:
    answer = client.complete("a question", "id-1", max_tokens=3)
    assert answer.tokens == [0, 1, 2]
    assert answer.first_line == "0"
    assert answer.candidates[2] == (Candidate(2, -0.5), Candidate(3, -2.0))
    assert answer.prompt_tokens == 7
    assert 0 < answer.first_token_s <= answer.total_s


@pytest.mark.parametrize(
    ("prompt", "said"),
    [("refuse", "400"), ("fail", "broken"), ("stop early", "2 tokens came back instead of 3")],
)
def test_what_is_no_whole_answer_is_an_error(client: Client, prompt: str, said: str) -> None:
    with pytest.raises(AnswerError, match=said):
        client.complete(prompt, "id-1", max_tokens=3)


def test_health_is_true_only_of_a_server_that_is_there(client: Client) -> None:
    assert client.healthy()
    nobody = Client("http://127.0.0.1:9")
    assert not nobody.healthy()
    nobody.close()
    with pytest.raises(AnswerError):
        client.metrics()
