"""Run benchmarks and print a table of what they found.

Use: python benchmarks/run.py [NAME …]    (all of them without a name; `--list` names them)

The exit status is 0 even where a goal is missed, which the table says; it is 1 if a benchmark could
not be run to its end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import report
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
SCRIPTS = (
    "arena_copy",
    "lookup_cost",
    "waiting_cost",
    "scheduler_delay",
    "slab_io",
    "native_promotion",
    "engine_returns",
    "engine_vs_native",
    "no_reuse",
    "concurrent_no_reuse",
    "crash_kills",
    "fault_simulator",
    "slow_disk",
    "hung_disk",
    "crowded_ram",
    "mixed_lengths",
    "promotion_waste",
)


def written() -> dict[str, float]:
    """Result files and when they were written."""
    return {path.stem: path.stat().st_mtime for path in report.RESULTS_DIR.glob("*.json")}


def run_all(names: list[str]) -> tuple[list[str], list[str]]:
    """Run scripts one after the other; the claims written, and the scripts that failed."""
    before = written()
    failed = []
    for name in names:
        print(f"── {name}", flush=True)
        if subprocess.run([sys.executable, HERE / f"{name}.py"], check=False).returncode:
            failed.append(name)
    return [claim for claim, at in written().items() if before.get(claim) != at], failed


def table_of(claims: list[str]) -> Table:
    """Figures beside their goals."""
    table = Table("claim", "measured", "goal", "", title="Benchmarks")
    for claim in sorted(claims):
        result: dict[str, Any] = json.loads((report.RESULTS_DIR / f"{claim}.json").read_text())
        met = "met" if result["met"] else "[bold red]NOT MET"
        table.add_row(claim, f"{result['figure']:.3g} {result['unit']}", result["goal"], met)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a script, without .py")
    parser.add_argument("--list", action="store_true", help="name the benchmarks and run none")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(SCRIPTS))
        return 0
    unknown = sorted(set(arguments.names) - set(SCRIPTS))
    if unknown:
        parser.error(
            f"no benchmark of the name {', '.join(unknown)}; there are {', '.join(SCRIPTS)}"
        )
    claims, failed = run_all(arguments.names or list(SCRIPTS))
    console = Console()
    console.print(table_of(claims))
    missed = sum(
        not json.loads((report.RESULTS_DIR / f"{claim}.json").read_text())["met"]
        for claim in claims
    )
    console.print(f"{len(claims) - missed} of {len(claims)} goals met.")
    if failed:
        console.print(f"[bold red]Not run to the end: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
