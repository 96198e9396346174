"""One structured line per ended request, to the log and optionally to a JSONL file."""

from __future__ import annotations

import json
import logging
import logging.handlers
import queue
from pathlib import Path

from emberkv.errors import ConfigError
from emberkv.observe.requests import RequestFacts

logger = logging.getLogger("emberkv.requests")


def line_of(facts: RequestFacts) -> str:
    """A request's facts as one line of JSON."""
    return json.dumps(
        {
            "request": facts.request,
            "external_id": facts.external_id,
            "prompt_tokens": facts.prompt_tokens,
            "device_tokens": facts.device_tokens,
            "ram_tokens": facts.ram_tokens,
            "disk_tokens": facts.disk_tokens,
            "computed_tokens": facts.computed_tokens,
            "stored_chunks": facts.stored_chunks,
            "wait_s": round(facts.wait_s, 6),
            "held_s": round(facts.held_s, 6),
            "load_s": round(facts.load_s, 6),
            "first_token_s": None if facts.first_token_s is None else round(facts.first_token_s, 6),
            "output_tokens": facts.output_tokens,
            "longest_gap_s": round(facts.longest_gap_s, 6),
            "why_not_more": facts.miss_reason.value,
            "preemptions": facts.preemptions,
        }
    )


class RequestLog:
    """Writes lines without ever blocking its caller: the file is written by a thread of its own."""

    def __init__(self, path: Path | None) -> None:
        self._listener: logging.handlers.QueueListener | None = None
        self._file: logging.FileHandler | None = None
        self._sink: logging.Logger | None = None
        if path is None:
            return
        try:
            self._file = logging.FileHandler(path, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"request_log: can't write {path}: {error.strerror}") from error
        lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        self._sink = logging.getLogger(f"emberkv.requests.{path}")
        self._sink.setLevel(logging.INFO)
        self._sink.propagate = False
        self._sink.addHandler(logging.handlers.QueueHandler(lines))
        self._listener = logging.handlers.QueueListener(lines, self._file)
        self._listener.start()

    def write(self, facts: RequestFacts) -> None:
        """Log one ended request."""
        line = line_of(facts)
        logger.info("%s", line)
        if self._sink is not None:
            self._sink.info(line)

    def close(self) -> None:
        """Write out what is queued."""
        if self._listener is not None:
            self._listener.stop()
            self._listener = None
        if self._file is not None:
            self._file.close()
            self._file = None
