"""A prompt that returns from RAM and from disk, on a real model, against its floor and recompute.

vLLM on the CPU, SmolLM2-135M in float32, blocks and chunks of 32 tokens; a document of 4,096 tokens
and a new question of 64, unaligned, over HTTP with streaming; always time to first token. The
device cache and the RAM tier hold little more than one document each, so by the time a document
comes back only the disk has it; then the device cache alone is emptied and RAM has it; then the
device itself has it. Each round also computes a document that nobody has seen, which is the
recompute sample and pushes the others out. Every sample's source is read from vLLM's own counter,
and a disk sample counts only if the keeper read that many bytes from the device.

Floor of RAM: the same prompt in the device cache, and one memcpy of its bytes. Floor of disk: the
same prompt in the device cache, and fio reading as many bytes directly.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import report
from support.engines import BLOCK_TOKENS, EmberEngine, EngineSizes, require, running
from support.floors import FioFloor, MemcpyFloor
from support.prompts import DOCUMENT_TOKENS, LEAD_TOKENS, PROMPT_TOKENS, prompt
from support.timing import ratio_of_medians, rounded

from demo.measures import Sources
from emberkv.testing.models import prepare_smollm2

CHUNK_BYTES = 30 * (48 << 10)
CHUNKS = (LEAD_TOKENS + DOCUMENT_TOKENS) // BLOCK_TOKENS
CACHED = CHUNKS * BLOCK_TOKENS
REST = PROMPT_TOKENS - CACHED
SIZES = EngineSizes(device_blocks=160, max_tokens=4352)
PAUSE_S = 2.0
"""Before each of the two reads: a disk may owe the writes before it."""

SETTLED_AFTER = 2  # rounds until a document is on disk only
GOALS = {
    "return-from-ram": ("ram", "ram floor", 1.10, 30.0),
    "return-from-disk": ("disk", "disk floor", 1.25, 20.0),
}


class Rounds:
    """The server, its documents and the floors, one round after the other."""

    def __init__(self, engine: EmberEngine, directory: Path) -> None:
        self._engine = engine
        self._memcpy = MemcpyFloor(CHUNKS * CHUNK_BYTES)
        self._fio = FioFloor(directory, CHUNKS, CHUNK_BYTES)
        self._fresh = 0

    def compute_fresh(self) -> float:
        """A document that nobody has seen; done when the disk has it too."""
        document = f"document {self._fresh}"
        self._fresh += 1
        asked = self._engine.ask(prompt(document, "first question"))
        require(self._engine, asked, Sources(computed=PROMPT_TOKENS), "recompute")
        self._engine.settle()
        return asked.first_token_s

    def run(self, turn: int) -> dict[str, float]:
        """Seconds to first token of each side, and the floors' parts."""
        samples = {"recompute": self.compute_fresh()}
        reads = [self._from_disk, self._fio_reads]
        for read in reads if turn % 2 else reversed(reads):
            time.sleep(PAUSE_S)
            read(turn, samples)
        self._from_ram(turn, samples)
        samples["memcpy"] = self._memcpy.measure_s()
        samples["ram floor"] = samples["device"] + samples["memcpy"]
        samples["disk floor"] = samples["device"] + samples["fio"]
        return samples

    def _fio_reads(self, turn: int, samples: dict[str, float]) -> None:
        samples["fio"] = self._fio.measure_s()

    def _from_disk(self, turn: int, samples: dict[str, float]) -> None:
        engine = self._engine
        engine.reset_device()
        read_bytes = engine.device_bytes_read()
        asked = engine.ask(prompt(f"document {turn}", f"second question {turn}"))
        require(engine, asked, Sources(disk=CACHED, computed=REST), "return from disk")
        if engine.device_bytes_read() - read_bytes < CHUNKS * CHUNK_BYTES:
            raise SystemExit("the bytes did not come from the device")
        samples["disk"] = asked.first_token_s
        samples["disk: wait"], samples["disk: load"] = engine.last_times()

    def _from_ram(self, turn: int, samples: dict[str, float]) -> None:
        engine, document = self._engine, f"document {turn}"
        engine.reset_device()
        asked = engine.ask(prompt(document, f"third question {turn}"))
        require(engine, asked, Sources(ram=CACHED, computed=REST), "return from RAM")
        samples["ram"] = asked.first_token_s
        samples["ram: load"] = engine.last_times()[1]
        asked = engine.ask(prompt(document, f"fourth question {turn}"))
        require(engine, asked, Sources(device=CACHED, computed=REST), "device cache")
        samples["device"] = asked.first_token_s


def write_reports(samples: dict[str, list[float]]) -> None:
    """Two figures per tier: against the floor, and against recompute."""
    for claim, (side, floor, most, least) in GOALS.items():
        over = ratio_of_medians(samples[side], samples[floor])
        report.write(
            f"{claim}-vs-floor",
            over,
            f"x of the floor (device-cached + {'memcpy' if side == 'ram' else 'fio'})",
            f"<= {most:.2f}",
            met=over <= most,
            samples=rounded({name: samples[name] for name in (side, floor)}, 5),
        )
        faster = ratio_of_medians(samples["recompute"], samples[side])
        report.write(
            f"{claim}-vs-recompute",
            faster,
            "x faster than recompute",
            f">= {least:.0f}",
            met=faster >= least,
            samples=rounded({name: samples[name] for name in (side, "recompute")}, 5),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="after one to warm up")
    parser.add_argument("--directory", type=Path, help="on the disk to use (default: a new one)")
    arguments = parser.parse_args()
    model = prepare_smollm2()
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="returns-") as made:
        engine = EmberEngine(model, Path(made), SIZES)
        with running(engine):
            rounds = Rounds(engine, Path(made))
            for _ in range(SETTLED_AFTER):
                rounds.compute_fresh()
            for turn in range(1 + arguments.rounds):
                for name, sample in rounds.run(turn).items():
                    if turn:
                        samples.setdefault(name, []).append(sample)
    for name, each in samples.items():
        print(f"  {name}: {statistics.median(each):.4f} s")
    write_reports(samples)


if __name__ == "__main__":
    main()
