"""emberkv for vLLM: `EmberOffloadingSpec` for its OffloadingConnector, and `EmberConnector`."""

from emberkv.engines.vllm.spec import EmberOffloadingSpec

__all__ = ["EmberOffloadingSpec"]
