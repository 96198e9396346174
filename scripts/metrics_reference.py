"""Write `docs/reference/metrics.md` from the metric table of `emberkv.observe.metrics`.

Use: .venv/bin/python scripts/metrics_reference.py [--check]

With `--check` nothing is written; the exit status is 1 if the page is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from emberkv.core.counts import Event
from emberkv.core.guard import Cause
from emberkv.domain.types import TIER_NAMES, Outcome
from emberkv.observe.metrics import METRICS, Kind, Metric
from emberkv.observe.requests import MissReason

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "metrics.md"

LABEL_VALUES = {
    "tier": TIER_NAMES,
    "event": tuple(event.value for event in Event),
    "cause": tuple(cause.value for cause in Cause),
    "reason": tuple(reason.value for reason in MissReason),
    "kind": tuple(outcome.value for outcome in Outcome if outcome is not Outcome.OK),
}
OTHER_LABELS = {
    "source": "where from: a tier (copies); `device`, a tier or `computed` (prompt tokens)",
    "target": "where to: a tier",
    "direction": "`store` (device to RAM) or `load` (RAM to device)",
}

HEAD = """\
# Metrics

Made by `scripts/metrics_reference.py` from `emberkv.observe.metrics`.

They are on the `/metrics` page of the server, with vLLM's labels `model_name` and `engine` beside
those below. A counter's name ends in `_total` there; a histogram has `_bucket`, `_sum` and
`_count`. What to make of them: [read the metrics](../howto/read-the-metrics.md).
"""


def page() -> str:
    """The whole page."""
    lines = [HEAD, "| metric | kind | labels | meaning |", "|---|---|---|---|"]
    lines += [_row(metric) for metric in METRICS]
    lines += ["", "## Labels", "", "| label | values |", "|---|---|"]
    for label in sorted({label for metric in METRICS for label in metric.labels}):
        lines.append(f"| `{label}` | {_values(label)} |")
    return "\n".join(lines) + "\n"


def _row(metric: Metric) -> str:
    name = metric.name + ("_total" if metric.kind is Kind.COUNTER else "")
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{name}` | {metric.kind.value} | {labels} | {metric.documentation} |"


def _values(label: str) -> str:
    if label in OTHER_LABELS:
        return OTHER_LABELS[label]
    return ", ".join(f"`{value}`" for value in LABEL_VALUES[label])


def main(arguments: Sequence[str]) -> int:
    if "--check" in arguments:
        current = PAGE.read_text(encoding="utf-8") == page()
        if not current:
            print("docs/reference/metrics.md: run scripts/metrics_reference.py", file=sys.stderr)
        return int(not current)
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
