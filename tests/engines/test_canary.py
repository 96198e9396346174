"""The canary on the real engine: a tier that lies is found without one wrong answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from lying_server import FAULTY_SPEC, LAYERS, Bench, options_for

from emberkv.app.agreement import Verdict
from emberkv.app.own_server import OwnServer
from emberkv.app.selfcheck import Row, Source
from emberkv.drills.faults import MixUp, Operation
from emberkv.drills.plan import PLAN_VARIABLE, Plan, PlannedFault, write_plan
from emberkv.live.control.client import ControlClient
from emberkv.live.control.messages import ServerStatus, StatusRequest
from emberkv.testing.models import make_random_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A server whose every request with a hit is compared."""
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setenv("EMBERKV_STRICT", "1")
    directory = tmp_path_factory.mktemp("canary")
    model = make_random_model(directory / "model", layers=LAYERS)
    plan_path = directory / "plan.json"
    write_plan(plan_path, Plan(layers=LAYERS))
    options = options_for(model, canary=1.0)
    environment = {PLAN_VARIABLE: str(plan_path)}
    with OwnServer(options, directory, spec=FAULTY_SPEC, environment=environment) as server:
        yield Bench(server, plan_path)
    patch.undo()


def status(bench: Bench) -> ServerStatus:
    with ControlClient(bench.server.instance) as client:
        return client.ask(StatusRequest(), ServerStatus)


def canary_facts(bench: Bench) -> Any:
    return status(bench).facts["canary"]


def no_answer_differs(rows: list[Row]) -> bool:
    return all(row.comparison.verdict is not Verdict.DIFFERENT for row in rows)


def test_a_tier_that_lies_is_taken_out_and_no_answer_is_wrong(bench: Bench) -> None:
    bench.push_out()
    assert no_answer_differs(bench.rows(Source.DISK))
    sound = canary_facts(bench)
    assert sound["compared_chunks"] > 0
    assert sound["disagreements"] == []
    bench.push_out()
    bench.plant(Plan((PlannedFault(Operation.READ, mix_up=MixUp.OTHER_CHUNK),)))
    assert no_answer_differs(bench.rows(Source.DISK))
    bench.server.wait_until(lambda: canary_facts(bench)["disagreements"], "the canary disagreed")
    after = status(bench)
    ram, disk = after.tiers
    assert (ram.gate, disk.gate) == ("on", "off")
    assert "from what the engine computes" in str(after.facts["canary"])
    assert no_answer_differs(bench.rows(Source.DISK))
