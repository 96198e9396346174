"""Commands on other threads while an engine runs: nothing breaks on either side.

The stack audits itself and the manager raises what it would contain, so a command that gets in
between an answer and the load it promised shows up here.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from operated_engine import operations_on, prompt, serve
from scripted_engine import Engine, chain

from emberkv.domain.types import RequestId
from emberkv.errors import ControlError, UsageError
from emberkv.live.control.messages import GateName, PurgeScope
from emberkv.live.operations import Operations

REQUESTS = 150
EXPECTED = (UsageError, ControlError)


@pytest.fixture
def impatient_interpreter() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval_s)


def commands(operations: Operations, numbers: random.Random) -> list[Callable[[], object]]:
    tier = numbers.choice(["ram", "disk"])
    return [
        operations.status,
        lambda: operations.why_request(f"request-{numbers.randrange(REQUESTS)}-"),
        lambda: operations.why_prompt(prompt("xyz"[numbers.randrange(3)], 5), None),
        lambda: operations.set_gate(tier, numbers.choice(list(GateName))),
        lambda: operations.set_gate(tier, GateName.ON),
        lambda: operations.set_policy(tier, numbers.choice(["lru", "arc"])),
        lambda: operations.set_budget({"max_wait_s": numbers.choice([0.01, 30.0])}),
        lambda: operations.purge(PurgeScope.RAM),
        lambda: operations.purge(PurgeScope.DISK),
        lambda: operations.purge(PurgeScope.ALL),
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("impatient_interpreter")
def test_commands_and_an_engine_get_along(seed: int) -> None:
    engine = Engine()
    engine.driver.begin_reset = lambda: None  # type: ignore[method-assign]
    operations = operations_on(engine)
    over = threading.Event()
    faults: list[BaseException] = []
    carried_out = [0, 0]

    def operate(which: int) -> None:
        numbers = random.Random(f"{seed} {which}")
        while not over.is_set():
            try:
                numbers.choice(commands(operations, numbers))()
                carried_out[which] += 1
            except EXPECTED:
                continue
            except Exception as error:  # noqa: BLE001 - told on the test's own thread
                faults.append(error)
                return

    threads = [threading.Thread(target=operate, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    numbers = random.Random(seed)
    hits = 0
    try:
        for at in range(REQUESTS):
            keys = chain("xyz"[numbers.randrange(3)], numbers.randrange(1, 6))
            answers = serve(engine, RequestId(f"request-{at}-"), keys)
            hits += sum(answer.value == "hit" for answer in answers)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not faults
    assert engine.manager.serving
    assert min(carried_out) > 0
    assert hits > 0
    assert operations.status().requests_here == 0
