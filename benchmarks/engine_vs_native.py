"""Returns on a real engine, against vLLM's own tiers: never slower than 1.05 times theirs.

Two servers at once, asked in turns, one request at a time: emberkv, and vLLM's tiering manager with
its file tier, of which only the worker is replaced (its own refuses the CPU; see
`support.native_tier`). The same model, tier sizes and chunks of 32 tokens; both use direct I/O.
SmolLM2-135M in float32; a document of 4,096 tokens and a new question of 64; time to first token.
Three documents take turns, and RAM holds little more than one: a return comes from disk (128
chunks), and once the device cache is emptied, from RAM. Then both servers are restarted, and the
documents return from disk again. Every sample's source is read from vLLM's own counter.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

import report
from support.engines import (
    BLOCK_TOKENS,
    SPIN_S,
    EmberEngine,
    Engine,
    EngineSizes,
    NativeEngine,
    require,
    running,
)
from support.prompts import DOCUMENT_TOKENS, LEAD_TOKENS, PROMPT_TOKENS, prompt
from support.timing import ratio_of_medians, rounded

from demo.measures import Sources
from emberkv.testing.models import prepare_smollm2

CACHED = (LEAD_TOKENS + DOCUMENT_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS
REST = PROMPT_TOKENS - CACHED
SIZES = EngineSizes(device_blocks=160, max_tokens=4352)
DOCUMENTS = 3
GOAL = 1.05
FROM_DISK = Sources(disk=CACHED, computed=REST)
FROM_RAM = Sources(ram=CACHED, computed=REST)

Samples = dict[str, dict[str, list[float]]]


def fill(engine: Engine) -> None:
    """Have every document computed, and kept."""
    for at in range(DOCUMENTS):
        asked = engine.ask(prompt(f"document {at}", "first question"))
        require(engine, asked, Sources(computed=PROMPT_TOKENS), "first visit")


def visit(engine: Engine, turn: int, part: str, *, ram_too: bool) -> dict[str, float]:
    """One document returns from disk, and from RAM."""
    document = f"document {turn % DOCUMENTS}"
    engine.reset_device()
    asked = engine.ask(prompt(document, f"disk question {part} {turn}"))
    require(engine, asked, FROM_DISK, f"disk, {part}")
    found = {part: asked.first_token_s}
    if ram_too:
        engine.reset_device()
        asked = engine.ask(prompt(document, f"ram question {turn}"))
        require(engine, asked, FROM_RAM, "ram")
        found["ram"] = asked.first_token_s
    return found


def measure(
    engines: tuple[Engine, ...], samples: Samples, rounds: int, part: str, *, ram_too: bool
) -> None:
    """Visits in turns; the first round of `part` warms up."""
    chance = random.Random(part)
    for turn in range(rounds + 1):
        order = list(engines)
        chance.shuffle(order)
        for engine in order:
            time.sleep(SPIN_S)
            for name, sample in visit(engine, turn, part, ram_too=ram_too).items():
                if turn:
                    samples.setdefault(name, {}).setdefault(engine.name, []).append(sample)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", type=Path, help="on the disk to use (default: a new one)")
    arguments = parser.parse_args()
    model = prepare_smollm2()
    samples: Samples = {}
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="vs-native-") as made:
        directory = Path(made)
        engines = (
            EmberEngine(model, directory, SIZES),
            NativeEngine(model, directory, SIZES),
        )
        with running(*engines):
            for engine in engines:
                fill(engine)
            measure(engines, samples, arguments.rounds, "disk", ram_too=True)
        engines = (
            EmberEngine(model, directory, SIZES),
            NativeEngine(model, directory, SIZES),
        )
        with running(*engines):
            measure(engines, samples, arguments.rounds, "disk-after-restart", ram_too=False)
    for name, sides in samples.items():
        medians = {side: round(statistics.median(each), 4) for side, each in sides.items()}
        print(f"  {name}: {medians} s")
        ratio = ratio_of_medians(sides["emberkv"], sides["native"])
        report.write(
            f"{name}-return-vs-native",
            ratio,
            "x of the time to first token with vLLM's own tiers",
            f"<= {GOAL}",
            met=ratio <= GOAL,
            samples=rounded(sides, 5),
        )


if __name__ == "__main__":
    main()
