"""emberkv for vLLM: `EmberOffloadingSpec` for its OffloadingConnector, and `EmberConnector`.

The spec is imported when it is asked for, so that what needs no engine (`compat`) stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emberkv.engines.vllm.spec import EmberOffloadingSpec

__all__ = ["EmberOffloadingSpec"]


def __getattr__(name: str) -> object:
    if name == "EmberOffloadingSpec":
        from emberkv.engines.vllm.spec import EmberOffloadingSpec

        return EmberOffloadingSpec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
