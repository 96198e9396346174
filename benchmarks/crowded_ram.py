"""More wanted from disk than RAM can stage: a long prompt, sixteen at once, a burst of 64.

Each scene is played on emberkv and on vLLM's own tiers, with a RAM tier that is too small for it.
Everyone must be answered; what fits into RAM must be reused; and no chunk may be read twice for one
wait. A request that is not answered within a minute counts as unanswered.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import report
from support.engines import (
    BLOCK_TOKENS,
    EmberEngine,
    Engine,
    EngineSizes,
    NativeEngine,
    running,
)
from support.prompts import tokens
from support.traffic import Timed, send

from demo.measures import Page, engine_sources
from emberkv.testing.models import make_random_model

PATIENCE_S = 60.0
GOAL_REUSED = 0.8
CHUNK_BYTES = 2 * 6 * 2 * 32 * 4 * BLOCK_TOKENS


@dataclass(frozen=True)
class Scene:
    """So many prompts of so many tokens at once, and the RAM that they have to share."""

    name: str
    prompts: int
    prompt_tokens: int
    ram_mib: int

    @property
    def wanted_tokens(self) -> int:
        """Tokens that could come from disk: whole chunks, never a prompt's last token."""
        return self.prompts * ((self.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS)

    @property
    def fitting_tokens(self) -> int:
        """What RAM can hold of it at once."""
        slots = (self.ram_mib << 20) // (-(-CHUNK_BYTES // 4096) * 4096 + 128)
        return min(self.wanted_tokens, slots * BLOCK_TOKENS)


SCENES = (
    Scene("prefix-larger-than-ram", 1, 7000, 12),
    Scene("sixteen-waiting", 16, 1500, 32),
    Scene("burst-of-64", 64, 700, 64),
)


def settled(engine: Engine, before: Page, scene: Scene) -> Page:
    """The metrics once nothing moves any more, or patience is over."""
    page = engine.page()
    deadline_s = time.monotonic() + 10.0
    while time.monotonic() < deadline_s:
        if page.finished_requests - before.finished_requests >= scene.prompts:
            break
        time.sleep(0.2)
        page = engine.page()
    return page


def play(engine: Engine, scene: Scene) -> tuple[int, int, float, float]:
    """Requests answered, tokens reused, chunks read, and the longest time to first token."""
    prompts = [tokens(f"{scene.name} {at}", scene.prompt_tokens) for at in range(scene.prompts)]
    for prompt in prompts:
        engine.ask(prompt)
    time.sleep(3.0)  # write-behinds
    for at in range(4):  # others take the place in RAM and on the device
        engine.ask(tokens(f"{scene.name} filler {at}", 7000))
    time.sleep(3.0)
    before = engine.page()
    requests = [Timed(f"{scene.name}-{at}", 0.0, prompt) for at, prompt in enumerate(prompts)]
    replies = send(engine.server.url, requests, timeout_s=PATIENCE_S)
    after = settled(engine, before, scene)
    sources = engine_sources(before, after, scene.prompts * scene.prompt_tokens)
    read = after.promoted_chunks() - before.promoted_chunks()
    answered = sum(not each.error for each in replies)
    longest_s = max(each.first_token_s or each.total_s for each in replies)
    return answered, sources.disk + sources.ram, read, longest_s


def write_report(scene: Scene, found: dict[str, tuple[int, int, float, float]]) -> None:
    answered, reused, read, longest_s = found["emberkv"]
    share = reused / scene.fitting_tokens
    chunks = scene.wanted_tokens // BLOCK_TOKENS
    native = found["native"]
    met = answered == scene.prompts and share >= GOAL_REUSED and read <= chunks
    report.write(
        f"crowded-{scene.name}",
        share,
        f"of what fits into RAM is reused; {answered} of {scene.prompts} answered, "
        f"{read:.0f} chunks read of {chunks}, the last first token after {longest_s:.1f} s; "
        f"vLLM's own tiers: {native[1] / scene.fitting_tokens:.2f}, {native[0]} answered, "
        f"{native[3]:.1f} s",
        f">= {GOAL_REUSED}, everyone answered, no chunk read twice",
        met=met,
        samples={side: list(map(float, each)) for side, each in found.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, help="on the disk to use (default: a new one)")
    arguments = parser.parse_args()
    os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "1"
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="crowded-") as made:
        directory = Path(made)
        model = make_random_model(
            directory / "model", hidden_size=192, layers=6, heads=6, kv_heads=2, head_dim=32
        )
        for scene in SCENES:
            sizes = EngineSizes(
                device_blocks=300, max_tokens=8192, ram_mib=scene.ram_mib, disk_mib=1024
            )
            found: dict[str, tuple[int, int, float, float]] = {}
            for make in (EmberEngine, NativeEngine):
                place = directory / f"{scene.name}-{make.__name__}"
                place.mkdir()
                engine = make(model, place, sizes)
                with running(engine):
                    found[engine.name] = play(engine, scene)
            write_report(scene, found)


if __name__ == "__main__":
    main()
