"""A deterministic fault simulator: the production code in a world where everything goes wrong.

    engine model ─► TierManager ─► TierStack        production
         │               │
    worker model      KeeperClient ─► keeper's parts ─► disk model
         └── arena rows, real bytes ──┘                 production, but for threads and sockets

A world is drawn from a seed: small tiers, so that everything collides, and a temper. Each step one
thing happens, and then every rule is tested. What an engine loads is compared byte by byte with
what was computed. Same seed, same run.

    simulate(seed=1, steps=200_000)
    python -m emberkv.testing.fault_simulator --seed 1 --steps 200000
"""

from emberkv.testing.fault_simulator.run import Report, SimulationError, simulate

__all__ = ["Report", "SimulationError", "simulate"]
