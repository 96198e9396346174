"""A real server whose tiers can be made to lie, and the self-check's prompts to ask it."""

from __future__ import annotations

from pathlib import Path

from emberkv.app.asking import Ask, ask_each, served_model
from emberkv.app.launch import ServeOptions
from emberkv.app.own_server import OwnServer
from emberkv.app.selfcheck import Prompt, Row, SelfCheck, Source, prompt_of
from emberkv.drills.faults import MixUp
from emberkv.drills.plan import Plan, is_followed, write_plan

BLOCK_TOKENS = 32
LAYERS = 4
FLAGS = (
    *("--dtype", "float32", "--max-model-len", "1536", "--enforce-eager"),
    *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", "64"),
)
RAM_BYTES = 8 << 20
FAULTY_SPEC = ("EagerDrillSpec", "emberkv.drills.spec")
FILLER_TOKENS = 1400
FILLERS = 4
"""Enough of them to push everything out of RAM and of the device's blocks."""

DEVICE_FILLERS = 2


def options_for(model: Path, canary: float | None = None) -> ServeOptions:
    return ServeOptions(
        model=str(model),
        ram_bytes=RAM_BYTES,
        disk=Path("replaced"),
        disk_bytes=256 << 20,
        canary=canary,
        vllm_arguments=FLAGS,
    )


def check_of(server: OwnServer) -> SelfCheck:
    return SelfCheck(server, BLOCK_TOKENS, BLOCK_TOKENS, 512, lambda what: None)


class Bench:
    """A drill's server with the self-check's prompts in its tiers."""

    def __init__(self, server: OwnServer, plan_path: Path) -> None:
        self.server = server
        self._plan_path = plan_path
        self.check = check_of(server)
        self.prompts: list[Prompt] = self.check.measure()
        self.model = served_model(server.url).name
        self._asked = 0
        cold = list(self.check.cold_and_device(self.prompts))
        assert all(row.agrees for row in cold)
        self.check.settle(self.prompts)

    def plant(self, plan: Plan) -> None:
        whole = Plan(plan.faults, loads=plan.loads, layers=LAYERS, ranks=2 if _ranks(plan) else 1)
        write_plan(self._plan_path, whole)
        self.server.wait_until(lambda: is_followed(self._plan_path), "the plan was followed")

    def push_out(self) -> None:
        """Leave nothing in RAM or on the device but fillers."""
        self._fill(FILLERS)

    def overwrite_device(self) -> None:
        """Leave no block of the device with bytes that may be wanted; RAM keeps what it has."""
        self._fill(DEVICE_FILLERS)

    def _fill(self, count: int) -> None:
        for _ in range(count):
            self._asked += 1
            prompt = prompt_of(f"filler {self._asked}", FILLER_TOKENS)
            ask_each(self.server.url, self.model, [Ask(f"filler-{self._asked}", prompt, 1)])
        self.server.reset_device()

    def rows(self, source: Source) -> list[Row]:
        return list(self.check.rows(self.prompts, source))


def _ranks(plan: Plan) -> bool:
    return any(fault.mix_up is MixUp.WRONG_RANK for fault in plan.faults)
