"""Millions of steps of the fault simulator: production code in a world where everything fails.

Every rule is tested at every step, and every chunk that an engine loads is compared with what was
computed for it. A broken rule ends the run with the seed and the step that show it again.
"""

from __future__ import annotations

import argparse
import logging
import time

import report

from emberkv.testing.fault_simulator import Report, SimulationError, simulate

GOAL_STEPS = 10_000_000


def run(seed: int, steps: int) -> tuple[Report, float]:
    """Play so many steps; what was seen, and steps per second."""
    began_s = time.perf_counter()
    try:
        seen = simulate(seed, steps)
    except SimulationError as error:
        raise SystemExit(str(error)) from error
    return seen, steps / (time.perf_counter() - began_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=GOAL_STEPS)
    parser.add_argument("--seed", type=int, default=0, help="of the first world")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    seen, rate = run(arguments.seed, arguments.steps)
    print(f"  {seen.steps} steps in {seen.worlds} worlds, {rate:.0f} a second")
    print(f"  {seen.loaded_chunks} chunks loaded, 0 wrong; digest {seen.digest}")
    samples = {f"faults: {name}": [float(count)] for name, count in seen.faults.items()}
    samples["chunks loaded and compared"] = [float(seen.loaded_chunks)]
    samples["wrong bytes served"] = [0.0]
    samples["steps per second"] = [round(rate, 1)]
    report.write(
        "fault-simulator-steps",
        seen.steps,
        "steps without a broken rule or a wrong byte",
        f">= {GOAL_STEPS}",
        met=seen.steps >= GOAL_STEPS,
        samples=samples,
    )


if __name__ == "__main__":
    main()
