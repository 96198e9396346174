"""A stand-in for vLLM's server, as far as clients see it; also run as a program, to be ended."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Answers each prompt with its own last tokens, counted on; prompts that hold 666 with 500."""

    protocol_version = "HTTP/1.0"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(json.dumps({"data": [{"id": "stand-in", "max_model_len": 512}]}))
        else:
            self._send("{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if 666 in body["prompt"]:
            self._send("no", status=500)
        elif body.get("stream"):
            self._stream(body)
        else:
            said = [None, *({str(token): {"logprob": -0.5}} for token in body["prompt"][1:])]
            self._send(json.dumps({"choices": [{"prompt_logprobs": said}]}))

    def _stream(self, body: dict[str, Any]) -> None:
        events = []
        count = 3 if 13 in body["prompt"] else body["max_tokens"]  # 13 cuts answers short
        for at in range(count):
            token = f"token_id:{body['prompt'][-1] + at + 1}"
            said = {
                "tokens": [token],
                "token_logprobs": [-0.25],
                "top_logprobs": [{token: -0.25, "token_id:7": -2.0}],
            }
            events.append(json.dumps({"choices": [{"text": "x", "logprobs": said}]}))
        if 99 in body["prompt"]:
            events[-1] = json.dumps({"error": "the engine is dead"})
        self._send("".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]))

    def _send(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def scripted_server() -> Iterator[str]:
    """A running server's address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
