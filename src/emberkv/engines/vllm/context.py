"""vLLM's configuration for code that vLLM does not hand it to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm.config import get_current_vllm_config_or_none

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_shown: list[VllmConfig] = []


@contextmanager
def vllm_config_in_sight(vllm_config: VllmConfig) -> Iterator[None]:
    """Let `find_vllm_config` see a configuration for the time of a block, in this process."""
    _shown.append(vllm_config)
    try:
        yield
    finally:
        _shown.pop()


def find_vllm_config() -> VllmConfig | None:
    """The configuration our connector shows, else the one vLLM itself has set, else None."""
    return _shown[-1] if _shown else get_current_vllm_config_or_none()
