"""The keeper of a drill's server: the ordinary one, on a storage that goes wrong as planned."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from emberkv.live.keeper.__main__ import main

if TYPE_CHECKING:
    from emberkv.live.keeper.disk import OpenStorage

MODULE: Final = "emberkv.drills.keeper"


def load() -> OpenStorage:
    """What opens a slab and follows the plan. Raises `ConfigError` outside a drill."""
    from emberkv.domain.namespace import Namespace
    from emberkv.drills.faults import FaultyStorage
    from emberkv.drills.plan import FollowedPlan, follow, plan_path
    from emberkv.drills.slab_bytes import ForeignChunks
    from emberkv.live.keeper.disk import open_slab
    from emberkv.live.keeper.messages import DiskSettings
    from emberkv.tiers.base import SlotStorage

    path = plan_path()

    def open_storage(settings: DiskSettings, namespace: Namespace, chunk_bytes: int) -> SlotStorage:
        plan = FollowedPlan(path).now()
        foreign = None if plan.foreign_slab is None else ForeignChunks(Path(plan.foreign_slab))
        slab = open_slab(settings, namespace, chunk_bytes)
        storage = FaultyStorage(slab, foreign=foreign)
        threading.Thread(target=follow, args=(storage, path), name="faults", daemon=True).start()
        return storage

    return open_storage


if __name__ == "__main__":
    main(load)
