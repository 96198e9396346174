"""`EagerOffloadingSpec`: loads whatever is kept, also where computing it would be quicker.

For self-checks, which want every answer from its tier; `emberkv serve` never names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_offload.base import OffloadingManager

from emberkv.core.costs import ComputeCost, Piece
from emberkv.core.economy import Terms
from emberkv.core.limits import Limits
from emberkv.core.residents import Residents
from emberkv.core.retention import Quotas
from emberkv.core.stack import TierStack
from emberkv.engines.vllm.build import build_manager
from emberkv.engines.vllm.spec import EmberOffloadingSpec


class _Unmeasured(ComputeCost):
    """A cost that stays unknown: as long as it is, everything is worth loading."""

    def observe(self, pieces: Sequence[Piece], others: int, seconds: float) -> None:
        """Learn nothing."""


def eager_stack(
    tiers: Sequence[Residents], limits: Limits, terms: Terms, quotas: Quotas
) -> TierStack:
    """A stack that never finds computing quicker than loading."""
    stack = TierStack(tiers, limits, terms, quotas)
    stack.economy.compute = _Unmeasured(())
    return stack


class EagerOffloadingSpec(EmberOffloadingSpec):
    """Otherwise as the ordinary one."""

    def get_manager(self, **_: Any) -> OffloadingManager:
        return build_manager(
            self.open_driver(),
            self.settings,
            tokens_per_chunk=self.tokens_per_chunk,
            clock=self.clock,
            make_stack=eager_stack,
        )
