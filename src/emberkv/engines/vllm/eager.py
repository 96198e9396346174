"""`EagerOffloadingSpec`: loads whatever is kept, however slow, also where computing is quicker.

For self-checks, which want every answer from its tier; `emberkv serve` never names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from emberkv.core.costs import ComputeCost, Piece
from emberkv.core.economy import Terms
from emberkv.core.limits import Limits
from emberkv.core.residents import Residents
from emberkv.core.retention import Quotas
from emberkv.core.stack import TierStack
from emberkv.engines.vllm.spec import EmberOffloadingSpec


class _Unmeasured(ComputeCost):
    """A cost that stays unknown: as long as it is, everything is worth loading."""

    def observe(self, pieces: Sequence[Piece], others: int, seconds: float) -> None:
        """Learn nothing."""


class EagerStack(TierStack):
    """A stack that never finds computing quicker than loading, and waits for a tier that stalls."""

    def __init__(
        self, tiers: Sequence[Residents], limits: Limits, terms: Terms, quotas: Quotas
    ) -> None:
        patient = replace(limits, max_stall_s=max(limits.max_stall_s, limits.max_wait_s))
        super().__init__(tiers, patient, terms, quotas)
        self.economy.compute = _Unmeasured(())


class EagerOffloadingSpec(EmberOffloadingSpec):
    """Otherwise as the ordinary one."""

    make_stack = EagerStack
