"""Our log lines beside vLLM's: same handlers, same level, unless the user has set their own."""

from __future__ import annotations

import logging


def show_beside_vllm() -> None:
    """Give the `emberkv` logger what vLLM's has, once vLLM has set its own up."""
    ours, theirs = logging.getLogger("emberkv"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = False
