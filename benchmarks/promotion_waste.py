"""What is brought up from disk and then not used, in the demo's workload.

Plays the demo (SmolLM2, three documents that return from RAM, from disk and after kills) and reads
what it counted: tokens promoted in each phase, and how many of them a request loaded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import report

GOAL = 0.05
DEMO = Path(__file__).resolve().parents[1] / "demo" / "run.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="waste-") as made:
        facts = Path(made) / "facts.json"
        subprocess.run([sys.executable, DEMO, "--facts", facts], check=True)
        phases = json.loads(facts.read_text())
    promoted = sum(phase["promoted_tokens"] for phase in phases)
    used = sum(phase["promoted_and_used_tokens"] for phase in phases)
    waste = 1 - used / promoted if promoted else 0.0
    report.write(
        "promotion-waste",
        waste,
        f"of {promoted} tokens brought up from disk in the demo were not used",
        f"<= {GOAL}",
        met=waste <= GOAL and promoted > 0,
        samples={
            "promoted tokens": [float(phase["promoted_tokens"]) for phase in phases],
            "used tokens": [float(phase["promoted_and_used_tokens"]) for phase in phases],
        },
    )


if __name__ == "__main__":
    main()
