"""One world: an engine, its manager, a keeper and a disk, and what befalls them, by one seed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from emberkv.core.audit import AuditedStack
from emberkv.core.check import check
from emberkv.core.gates import DRAINING, OPEN, SHUT, Gate
from emberkv.core.residents import Residents
from emberkv.core.stack import TierStack
from emberkv.domain.types import RAM, Level, Slot
from emberkv.live.arena import READY, ArenaGeometry
from emberkv.live.keeper.joining import Joined
from emberkv.live.keeper.messages import Attached, DiskSettings, Hello, KeeperConfig, Role
from emberkv.live.manager import TierManager
from emberkv.observe.requests import RequestFacts
from emberkv.policy.eviction import EVICTION_POLICIES
from emberkv.testing.fault_simulator.disk import DiskModel, flipped
from emberkv.testing.fault_simulator.engine import MAX_REQUESTS, Engine
from emberkv.testing.fault_simulator.keeper import KeeperModel
from emberkv.testing.fault_simulator.quick_check import require_rules
from emberkv.testing.fault_simulator.setting import (
    CHUNK_BYTES,
    MAX_WAIT_S,
    Fault,
    Seen,
    Setting,
    WorldPlan,
)
from emberkv.testing.fault_simulator.wire import SimulatedClient
from emberkv.testing.fault_simulator.witness import DecisionLog, WitnessedStack

MAX_DRAIN_STEPS: Final = 2000
FULL_CHECK_STEPS: Final = 32
"""Of so many steps that changed something one is tested by the full check too."""

NAMESPACE: Final = (("model", "simulated"),)


class World:
    """Plays one seed. `step` makes one thing happen and then tests everything that must hold."""

    def __init__(
        self, plan: WorldPlan, seen: Seen, stack_class: type[TierStack] = TierStack
    ) -> None:
        self.plan = plan
        self.log = DecisionLog()
        self.setting = Setting(plan, seen)
        self.seen = seen
        self._epoch = self._lives = 0
        self._loaded_chunks = 0
        self._fresh_at_s = 0.0
        bases = (WitnessedStack, AuditedStack) if plan.audited else (WitnessedStack,)
        self._stack_class = type(
            "SimulatedStack", (*bases, stack_class), {"log": self.log, "seen": seen}
        )
        self._checked = -1
        self._steps_checked = 0
        self.disk = self._new_disk()
        self.keeper = KeeperModel(self.setting, self.disk)
        self._hello = Hello(
            Role.MANAGER,
            "engine",
            1,
            0,
            KeeperConfig(
                plan.slot_counts[RAM],
                CHUNK_BYTES,
                disk=None if self.disk is None else DiskSettings("disk", 1),
            ),
            NAMESPACE,
        )
        self._start_engine()

    @property
    def digest(self) -> str:
        return self.log.digest

    @property
    def tail(self) -> list[str]:
        return list(self.log.tail)

    @property
    def loaded_chunks(self) -> int:
        """Chunks that engines have read, and that were what they should be."""
        return self._loaded_chunks + self.engine.loaded_chunks

    # ── steps ────────────────────────────────────────────────────────────────────────────────

    def step(self) -> None:
        """One thing happens, and everything that must hold is tested."""
        pick = self.setting.chance.random()
        if pick < 0.42:
            self.engine.step()
        elif pick < 0.55:
            self._arrivals()
        elif pick < 0.95:
            self._time_passes()
        else:
            self._trouble()
        self.rules_hold()

    def rules_hold(self) -> None:
        """Every rule that can be read off the present state."""
        stack = self.stack
        if self._checked != stack.changes:
            self._checked = stack.changes
            self._steps_checked += 1
            fully = self._steps_checked % FULL_CHECK_STEPS == 0
            require_rules(stack, self.setting.clock(), fully=fully)
            stack.agrees(self.setting.clock())

    def _arrivals(self) -> None:
        engine = self.engine
        count = 1
        if self.setting.strikes(Fault.BURST, 0.03):
            count = MAX_REQUESTS
        while count and len(engine.requests) < MAX_REQUESTS:
            engine.arrive()
            count -= 1

    def _time_passes(self) -> None:
        setting = self.setting
        if setting.strikes(Fault.CLOCK_JUMPS, 0.005):
            setting.clock.now_s += setting.chance.choice((1.5, 10.0, 3600.0))
        elif not setting.strikes(Fault.CLOCK_STANDS, 0.05):
            setting.clock.now_s += setting.chance.choice((0.001, 0.02, 0.02, 0.1, 0.4))
        self.keeper.loop.advance()
        self._join_new_keeper()

    def _trouble(self) -> None:
        setting = self.setting
        if self.stack.transfers.open_copies() and setting.chance.random() < 0.3:
            self._strike_copies()
        elif setting.chance.random() < 0.4:
            self.engine.abort()
        elif self.disk is not None and setting.chance.random() < 0.3 * setting.plan.trouble:
            self.disk.damage()
        elif setting.strikes(Fault.DEVICE_RESET, 0.1):
            self.engine.reset_device()
        elif setting.strikes(Fault.GATE_MOVED, 0.1):
            self._operate()
        elif setting.strikes(Fault.KEEPER_DIES, 0.15):
            self._kill_keeper()
        elif setting.strikes(Fault.RESET, 0.2):
            self._reset()
            if setting.strikes(Fault.KILLED, 0.2):
                self._restart(keeps_ram=True)
        elif setting.strikes(Fault.KILLED, 0.3):
            self._restart(keeps_ram=True)
            if setting.strikes(Fault.RESET, 0.1):  # before the engine has done anything
                self._time_passes()
                self._reset()
        elif setting.strikes(Fault.ALL_KILLED, 0.1):
            self._restart(keeps_ram=False)
        elif setting.strikes(Fault.STOPPED, 0.1):
            self.engine.manager.shutdown()
            self._restart(keeps_ram=False)

    def _strike_copies(self) -> None:
        """Something ends an epoch or a process while copies are under way."""
        if self.setting.strikes(Fault.RESET, 0.3):
            self._reset()
            if self.setting.strikes(Fault.KILLED, 0.3):
                self._restart(keeps_ram=True)
        elif self.setting.strikes(Fault.KILLED, 0.3):
            self._restart(keeps_ram=True)

    def _operate(self) -> None:
        """An operator, or a guard, does something to a tier."""
        chance, stack = self.setting.chance, self.stack
        level = Level(chance.randrange(len(stack.tiers)))
        stack.set_gate(level, chance.choice((OPEN, OPEN, DRAINING, SHUT, Gate(0.5))))
        if chance.random() < 0.3:
            self.seen.note(Fault.TIER_EMPTIED)
            stack.empty(level)
        if chance.random() < 0.3:
            self.seen.note(Fault.POLICY_CHANGED)
            policy = EVICTION_POLICIES[chance.choice(sorted(EVICTION_POLICIES))]
            stack.set_policy(level, policy(stack.tiers[level].slot_count))

    # ── lives of the engine ──────────────────────────────────────────────────────────────────

    def _new_disk(self) -> DiskModel | None:
        if len(self.plan.slot_counts) == 1:
            return None
        return DiskModel(self.setting, self.plan.slot_counts[1])

    def _start_engine(self) -> None:
        self._lives += 1
        self.log.note(f"life {self._lives}")
        keeper, setting = self.keeper, self.setting
        keeper.move_in(self._hello, None)
        self._await(lambda: keeper.is_ready)
        tenancy = keeper.tenancy
        assert tenancy is not None
        answer = Attached(1, NAMESPACE, tenancy.slot_counts, tenancy.taken_over, None)
        joined = Joined(keeper.attach(), answer, os.dup(tenancy.arena.fd), "simulated", [])
        self.client = SimulatedClient(
            setting, self._hello, joined, self._wait_for_reset, self._wait_for_keeper
        )
        self.stack: WitnessedStack = self._stack_class(
            [
                Residents(count, CHUNK_BYTES, EVICTION_POLICIES[name](count))
                for count, name in zip(self.client.slot_counts, self.plan.policies, strict=False)
            ],
            self.plan.limits,
            self.plan.terms,
            self.plan.quotas,
        )
        self._checked = -1
        manager = TierManager(self.stack, self.client, setting.clock, self._finished, strict=True)
        self.engine = Engine(setting, manager, self.client.arena, self._epoch)

    def _finished(self, facts: RequestFacts) -> None:
        self.seen.note(facts.miss_reason)

    def _restart(self, *, keeps_ram: bool) -> None:
        """The engine's processes end at once, and another engine comes."""
        self.engine.count_events()
        self._loaded_chunks += self.engine.loaded_chunks
        if keeps_ram and self.keeper.alive and self._keeper_knows_what_is_owed():
            self.keeper.detach()
            self._age(self.setting.chance.choice((0.0, 0.02, 0.2, 5.0)))
            self._flip_ram()
        else:
            if self.keeper.alive:
                self.keeper.die()
            if self.disk is not None and self.disk.owes_reset:
                self.disk = self._new_disk()  # of another namespace, with nothing in it
            self.keeper = KeeperModel(self.setting, self.disk)
        self.client.close(clean=False)
        self._start_engine()

    def _keeper_knows_what_is_owed(self) -> bool:
        """Whether a reset that did not succeed will be made up for by this keeper.

        If not, whoever resets has been told so, and must not come back with the same namespace.
        """
        tenancy = self.keeper.tenancy
        known = tenancy is not None and tenancy.disk is not None and tenancy.disk.reset_owed
        return self.disk is None or not self.disk.owes_reset or known

    def _flip_ram(self) -> None:
        tenancy = self.keeper.tenancy
        assert tenancy is not None
        arena = tenancy.arena
        sealed = [
            Slot(slot)
            for slot in range(ArenaGeometry(arena.geometry.slot_count, CHUNK_BYTES).slot_count)
            if arena.headers["state"][slot] == READY
            and arena.headers["sealed"][slot] == arena.headers["generation"][slot]
        ]
        if sealed and self.setting.strikes(Fault.RAM_BITS_FLIP, 0.3):
            row = arena.row(self.setting.chance.choice(sealed))
            row[:] = flipped(bytes(row), self.setting.chance.randrange(8 * CHUNK_BYTES))

    # ── the keeper ───────────────────────────────────────────────────────────────────────────

    def _kill_keeper(self) -> None:
        if self.keeper.alive:
            self.keeper.die()
            self._fresh_at_s = self.setting.clock() + self.setting.chance.choice((0.05, 1.0, 8.0))

    def _join_new_keeper(self, *, at_once: bool = False) -> None:
        """Bring the new keeper that the client looks for, once it is there."""
        search = self.client.rejoining
        if search is None or search.stopped:
            return
        if self.setting.clock() < self._fresh_at_s and not at_once:
            return
        hello = search.hello
        keeper = self.keeper
        if not keeper.alive:
            keeper = self.keeper = KeeperModel(self.setting, self.disk)
            keeper.move_in(hello, search.memory_fd)
        if self.setting.strikes(Fault.KEEPER_DIES_TWICE, 0.05):
            self._kill_keeper()
            return
        if not keeper.is_ready:
            return
        tenancy = keeper.tenancy
        assert tenancy is not None
        answer = Attached(1, NAMESPACE, tenancy.slot_counts, tenancy.taken_over, None)
        search.end(Joined(keeper.attach(), answer, os.dup(tenancy.arena.fd), "simulated", []))

    def _reset(self) -> None:
        self._epoch += 1
        if self.client.rejoining is not None:
            self.seen.note(Fault.RESET_WITHOUT_KEEPER)
        self.log.note(f"epoch {self._epoch}")
        if self.disk is not None:
            self.disk.owes_reset = True
        self.engine.reset(self._epoch)

    def _wait_for_reset(self, timeout_s: float) -> None:
        """What happens while the manager waits for the disk's reset."""
        if self.setting.strikes(Fault.RESET_LATE, 0.15):
            self.setting.clock.now_s += timeout_s + 0.01
        elif self.setting.strikes(Fault.KEEPER_DIES, 0.08):
            self._kill_keeper()
        else:
            self._age(0.05)

    def _wait_for_keeper(self, timeout_s: float) -> None:
        """What happens while a reset waits for a new keeper."""
        if self.setting.chance.random() < 0.5:
            self.setting.clock.now_s += timeout_s
            return
        for _ in range(100):
            self._join_new_keeper(at_once=True)
            self._age(0.02)

    def _age(self, seconds: float) -> None:
        self.setting.clock.now_s += self.setting.chance.random() * seconds
        self.keeper.loop.advance()

    def _await(self, reached: Callable[[], bool]) -> None:
        for _ in range(1000):
            if reached():
                return
            self._age(0.1)
        raise AssertionError("the keeper is never ready")

    # ── the end ──────────────────────────────────────────────────────────────────────────────

    def finish(self) -> None:
        """Let everything end: nobody waits for ever, and nothing is left over."""
        self.setting.quiet = True
        self._let_requests_end(self.setting.clock() + 20 * MAX_WAIT_S)
        self._kill_keeper()  # what hangs is ended by nothing else
        for _ in range(MAX_DRAIN_STEPS):
            self._time_passes()
            self.engine.step()
            self.rules_hold()
            attached = self.keeper.alive and self.client.rejoining is None
            if attached and not self.stack.transfers.open_copies(stale=None):
                break
        for _ in range(100):  # longer than any fence
            self.setting.clock.now_s += 0.5
            self.keeper.loop.advance()
            self.engine.step()
        self._nothing_is_left()
        self.engine.count_events()

    def _let_requests_end(self, deadline_s: float) -> None:
        while not self.engine.is_idle:
            now_s = self.setting.clock()
            assert now_s < deadline_s, f"{self.engine.requests[0]} never ends"
            self._time_passes()
            self.engine.step()
            self.rules_hold()

    def _nothing_is_left(self) -> None:
        stack = self.stack
        check(stack, self.setting.clock())
        stack.agrees(self.setting.clock())
        for level, tier in enumerate(stack.tiers):
            assert not tier.pinned_count, f"tier {level}: something is pinned for ever"
            assert not tier.held, f"tier {level}: slots are held for ever: {tier.held}"
        assert not list(stack.promotions.leases()), "a lease that never ends"
        assert not stack.open_visits(), "a visit that never ends"
        assert not stack.transfers.open_copies(stale=None), "a copy that never ends"
        assert not stack.pending_stores(), "a store that never ends"
        assert not stack.loads_under_way(), "a load that never ends"

    def close(self) -> None:
        """Let go of the memory."""
        if self.keeper.alive:
            self.keeper.die()
        self.client.close(clean=False)
