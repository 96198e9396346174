"""What crashes and flipped bits do: kills counted by where they fell, flips by what they hit.

Not a measurement of speed: the figures are counts, and the goals are that no harm was done. The
tests in `tests/faults/test_kills.py` and `tests/faults/test_bit_flips.py` hold the same for fewer.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

import report

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from bit_flips import FlipClass, flip_everything
from kills import run_kills

SLAB_WRITE_GOAL = 0.2
HEADER_UPDATE_GOAL = 0.1


def kill(count: int, seed: int) -> None:
    """Write how many kills fell where. A kill that did harm ends the script with its number."""
    with tempfile.TemporaryDirectory(prefix="crash-kills-") as made:
        tally = run_kills(Path(made), count, seed)
    slab_goal, header_goal = SLAB_WRITE_GOAL * count, HEADER_UPDATE_GOAL * count
    table = tally.as_json()
    samples = {name: [float(each)] for name, each in table["by place"].items()}
    for name in ("acknowledged slots checked", "slots under way", "payloads served and compared"):
        samples[name] = [float(table[name])]
    samples["from outside"] = [float(table["by means"].get("outside", 0))]
    report.write(
        "crash-kills",
        tally.kills,
        "kills; wrong bytes served 0, acknowledged chunks lost 0",
        ">= 1000",
        met=tally.kills >= 1000,
        samples=samples | {"seed": [float(seed)]},
    )
    for claim, found, goal in (
        ("crash-kills-in-slab-write", tally.in_slab_write, slab_goal),
        ("crash-kills-in-header-update", tally.in_header_update, header_goal),
    ):
        report.write(
            claim,
            found,
            f"kills of {count}",
            f">= {goal:.0f}",
            met=found >= goal,
            samples=samples,
        )


def flip(seed: int) -> None:
    """Write how many flipped bits were noticed, of those that could have changed what is served."""
    with tempfile.TemporaryDirectory(prefix="bit-flips-") as made:
        classes = flip_everything(Path(made), seed)
    wrong = [line for each in classes for line in each.wrong]
    for line in wrong[:20]:
        print(f"  {line}")
    detected = sum(each.detected for each in classes)
    share = 100 * detected / (detected + len(wrong))
    report.write(
        "bit-flips",
        share,
        "% detected of the flips that could change what is served",
        "100",
        met=not wrong,
        samples={each.name: counts(each) for each in classes},
    )


def counts(found: FlipClass) -> list[float]:
    """Flips, of them detected, harmless, wrong."""
    return [float(n) for n in (found.flips, found.detected, found.harmless, len(found.wrong))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, help="(default: another one each time)")
    arguments = parser.parse_args()
    seed = arguments.seed
    if seed is None:
        seed = random.SystemRandom().randrange(1 << 32)
    print(f"  seed {seed}")
    kill(arguments.kills, seed)
    flip(seed)


if __name__ == "__main__":
    main()
