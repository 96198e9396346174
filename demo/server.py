"""The demo's servers: those of `emberkv.app.own_server`, with the demo's client and environment."""

from __future__ import annotations

import os
from pathlib import Path

from demo.client import Client
from emberkv.app.own_server import (
    ServerError,
    ServerProcess,
    end_processes,
    find_keeper,
    free_port,
    kill_keeper,
)

__all__ = ["Server", "ServerError", "end_processes", "find_keeper", "free_port", "kill_keeper"]


class Server(ServerProcess):
    """One server's processes and a client to ask it."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        super().__init__(command, port, log, _environment)
        self.client = Client(self.url)


def _environment() -> dict[str, str]:
    """The user's, without network look-ups, and with the least KV space that vLLM takes."""
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
