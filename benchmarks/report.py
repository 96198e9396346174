"""One result file per claim: what was measured, where, and by which command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

RESULTS_DIR = Path(__file__).parent / "results"

Samples = Sequence[float] | Mapping[str, Sequence[float]]


def machine() -> str:
    """Processor, cores, memory and kernel of this machine, in one line."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, Linux {platform.release()}"


def commit() -> str:
    """The commit measured, with a plus if files of the package differ from it."""
    root = Path(__file__).parent.parent

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "benchmarks/*.py")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def command() -> str:
    """The command line that runs this benchmark again."""
    script = Path(sys.argv[0])
    return shlex.join(["python", f"benchmarks/{script.name}", *sys.argv[1:]])


def write(
    claim: str,
    figure: float,
    unit: str,
    goal: str,
    *,
    met: bool,
    samples: Samples,
) -> Path:
    """Write `results/<claim>.json` and print its line; the path written.

    `figure` is the number the goal is about, `samples` every measurement behind it.
    """
    RESULTS_DIR.mkdir(exist_ok=True)
    path = RESULTS_DIR / f"{claim}.json"
    result = {
        "claim": claim,
        "figure": round(figure, 4),
        "unit": unit,
        "goal": goal,
        "met": met,
        "samples": samples,
        "machine": machine(),
        "commit": commit(),
        "command": command(),
    }
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{claim}: {figure:.3g} {unit} (goal {goal}): {'met' if met else 'NOT MET'}")
    return path
