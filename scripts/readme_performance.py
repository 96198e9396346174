"""Write the README's performance section from `benchmarks/results/*.json`.

Use: .venv/bin/python scripts/readme_performance.py [--check]

With `--check` nothing is written; the exit status is 1 if the section is out of date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- performance: made by scripts/readme_performance.py -->"
END = "<!-- performance: end -->"


def read_results(directory: Path) -> list[dict[str, Any]]:
    """Every result file, by name."""
    return [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]


def section(results: Sequence[Mapping[str, Any]]) -> str:
    """The text between the markers: what was measured where, met or not."""
    if not results:
        return "Nothing has been measured yet: `make bench`."
    lines = ["| claim | measured | goal | |", "|---|---|---|---|"]
    lines += [_row(result) for result in results]
    missed = sum(not result["met"] for result in results)
    places = sorted({f"{result['machine']}" for result in results})
    lines += ["", f"{len(results) - missed} of {len(results)} goals met. Measured on:", ""]
    lines += [f"- {place}" for place in places]
    return "\n".join(lines)


def _row(result: Mapping[str, Any]) -> str:
    measured = f"{result['figure']:.3g} {result['unit']}"
    met = "met" if result["met"] else "**not met**"
    name = str(result["claim"])
    return f"| [{name}](benchmarks/results/{name}.json) | {measured} | {result['goal']} | {met} |"


def with_section(readme: str, text: str) -> str:
    """The README with another performance section. Raises `ValueError` without the markers."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("the README has no markers for its performance section")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main(arguments: Sequence[str]) -> int:
    current = README.read_text(encoding="utf-8")
    wanted = with_section(current, section(read_results(RESULTS)))
    if "--check" in arguments:
        if current != wanted:
            print("README.md: run scripts/readme_performance.py", file=sys.stderr)
        return int(current != wanted)
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
