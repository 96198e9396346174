"""The drills: one fault each, made, met, and taken away again while the load runs.

    baseline ─► fault (the load goes on, a phase long) ─► recovery

A drill passes if every request was answered, as computed, without waiting for a tier longer than
the promise says, and the tier stayed out or came back as it should. A fault that no chunk met
shows nothing, and fails its drill. The cost is p99 of time to first token in the fault's phase over
that of the same requests without tiers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from emberkv.app.drilling.load import Sample
from emberkv.app.drilling.scene import Row, Scene, burst_of
from emberkv.app.own_server import ServerError
from emberkv.domain.types import Outcome
from emberkv.drills.faults import Operation
from emberkv.drills.plan import NOTHING, Plan, PlannedFault
from emberkv.drills.slab_bytes import damage_slabs
from emberkv.errors import WorldError

BYPASS_S: Final = 2.0
"""A tier that hangs is out within this time."""

RETURN_S: Final = 10.0
"""A tier that has recovered is back within this time, or within two rounds of the load."""

READY_S: Final = 60.0
"""Before anything goes wrong the tier is waited for longer: the drill before may still tell."""

HUNG_SHARE: Final = 0.05
"""Of what computing everything takes, a request may lose this to a tier that does nothing."""

SLOW_SHARE: Final = 1.05
"""A tier that makes progress may be waited for as long as the whole stays below this."""

LONGEST_HANG_S: Final = 5.0
STEP_S: Final = 3600.0
REUSED_SHARE: Final = 0.8

_CHUNKS: Final = "emberkv:chunks_total"
_FAILURES: Final = "emberkv:copy_failures_total"


@dataclass(frozen=True, slots=True)
class Drill:
    """One fault and how it is run. `about` is for people."""

    name: str
    about: str
    run: Callable[[Scene, str], Row]
    needs_disk: bool = True


class _Findings:
    """What speaks against a drill, and what is worth saying beside."""

    def __init__(self) -> None:
        self.against: list[str] = []
        self.beside: list[str] = []

    def require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.against.append(otherwise)

    def row(self, drill: str, samples: Sequence[Sample], p99_ratio: float | None) -> Row:
        parts = [*self.against, *self.beside, f"p99 of {len(samples)} requests"]
        return Row(drill, not self.against, "; ".join(parts), p99_ratio)


def _baseline(scene: Scene, name: str) -> None:
    """The load as it is before anything goes wrong; the tier must be of use to it.

    Raises `ServerError` if it is not: nothing could be shown.
    """
    phase = f"{name}: baseline"
    _phase(scene, phase)
    tiers = ["disk"] if scene.has_disk else ["ram"]
    if scene.wait_until_loaded(phase, tiers, READY_S) is None:
        said = _reasons(scene, scene.load.samples(phase))
        raise ServerError(f"{tiers[0]} served nothing before anything went wrong: {said}")


def _reasons(scene: Scene, samples: Sequence[Sample]) -> str:
    """Why returning prompts did not get more from tiers, each reason with its number."""
    reasons = Counter(
        str(scene.facts(each)["why_not_more"])
        for each in samples
        if each.returns and each.answer is not None
    )
    return ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())


def _phase(scene: Scene, name: str) -> list[Sample]:
    """The load's next requests, as many as a phase has."""
    scene.load.enter(name)
    scene.load.go_on()
    scene.load.wait_for(name, scene.requests)
    return scene.load.samples(name)


def _returned(scene: Scene, findings: _Findings, phase: str, tiers: Sequence[str]) -> None:
    """Require that tiers serve again in a phase that has just begun."""
    took_s = scene.wait_until_loaded(phase, tiers, RETURN_S)
    place = " and ".join(tiers)
    if took_s is None:
        why = _reasons(scene, scene.load.samples(phase))
        findings.against.append(f"{place} served nothing in {RETURN_S:.0f} s after recovery: {why}")
    else:
        findings.beside.append(f"{place} served again after {took_s:.1f} s")


def _storage_drill(
    scene: Scene, name: str, faults: Sequence[PlannedFault], share: float
) -> tuple[_Findings, list[Sample]]:
    """Let the disk go wrong for a phase of the load, and recover; both phases are judged."""
    findings = _Findings()
    _baseline(scene, name)
    met = scene.chunks_met()
    scene.suffer(Plan(tuple(faults)))
    samples = _phase(scene, f"{name}: fault")
    findings.require(scene.chunks_met() > met, "the fault met no chunk")
    scene.suffer(NOTHING)
    recovery = f"{name}: recovery"
    scene.load.enter(recovery)
    _returned(scene, findings, recovery, ["disk"])
    findings.against += scene.problems([*samples, *scene.load.samples(recovery)])
    findings.against += scene.late(samples, share)
    return findings, samples


def _cache_loss(scene: Scene, name: str) -> Row:
    """Everything kept is lost while the server is down."""
    findings = _Findings()
    _baseline(scene, name)
    scene.lose_disk()
    samples = _phase(scene, f"{name}: fault")
    first = next(sample for sample in samples if sample.returns)
    findings.require(
        first.answer is None or not scene.loaded(first, "ram", "disk"), "nothing was lost"
    )
    recovery = f"{name}: recovery"
    scene.load.enter(recovery)
    _returned(scene, findings, recovery, ["ram", "disk"] if scene.has_disk else ["ram"])
    findings.against += scene.problems([*samples, *scene.load.samples(recovery)])
    findings.against += scene.late(samples, SLOW_SHARE)
    return findings.row(name, samples, scene.p99_ratio(samples))


def _ram_emptied(scene: Scene, name: str) -> Row:
    """RAM is empty, the disk is not: prompts come back from there."""
    findings = _Findings()
    _baseline(scene, name)
    scene.empty_ram()
    samples = _phase(scene, f"{name}: fault")
    from_disk = sum(scene.loaded(each, "disk") for each in samples if each.answer is not None)
    findings.require(from_disk > 0, f"nothing came from disk: {_reasons(scene, samples)}")
    findings.beside.append(f"{from_disk} tokens from disk")
    findings.against += scene.problems(samples)
    findings.against += scene.late(samples, SLOW_SHARE)
    return findings.row(name, samples, scene.p99_ratio(samples))


def _full_disk(scene: Scene, name: str) -> Row:
    """Nothing can be written: what was there still serves, and writes begin again afterwards."""
    full = PlannedFault(Operation.WRITE, outcome=Outcome.FULL.value)
    findings, samples = _storage_drill(scene, name, [full], SLOW_SHARE)
    labels = {"tier": "disk", "event": "written_behind"}
    before = scene.count(_CHUNKS, labels)
    _phase(scene, f"{name}: writes")
    findings.require(scene.count(_CHUNKS, labels) > before, "nothing was written after recovery")
    return findings.row(name, samples, scene.p99_ratio(samples))


def _slow_disk(scene: Scene, name: str) -> Row:
    """Each call takes as long as it takes to compute a prompt."""
    assert scene.yardstick is not None
    latency_s = scene.yardstick.median_s
    slow = [PlannedFault(each, latency_s=latency_s) for each in Operation]
    findings, samples = _storage_drill(scene, name, slow, SLOW_SHARE)
    findings.beside.insert(0, f"{latency_s:.2f} s added to each call")
    return findings.row(name, samples, scene.p99_ratio(samples))


def _hung_disk(scene: Scene, name: str) -> Row:
    """No call returns, for a phase of the load and some seconds at least."""
    findings = _Findings()
    _baseline(scene, name)
    met = scene.chunks_met()
    scene.suffer(Plan(tuple(PlannedFault(each, hangs=True) for each in Operation)))
    began_s = time.monotonic()
    phase = f"{name}: fault"
    samples = _phase(scene, phase)
    while time.monotonic() - began_s < LONGEST_HANG_S:
        scene.load.wait_for(phase, len(samples) + 1)
        samples = scene.load.samples(phase)
    findings.require(scene.chunks_met() > met, "the fault met no chunk")
    findings.against += scene.late(samples, HUNG_SHARE)
    late = [sample for sample in samples if sample.sent_s > began_s + BYPASS_S]
    if scene.late(late, 0.0):
        findings.against.append(f"requests still wait for it {BYPASS_S:.0f} s after it hangs")
    scene.suffer(NOTHING)
    recovery = f"{name}: recovery"
    scene.load.enter(recovery)
    _returned(scene, findings, recovery, ["disk"])
    findings.against += scene.problems([*samples, *scene.load.samples(recovery)])
    return findings.row(name, samples, scene.p99_ratio(samples))


def _io_errors(scene: Scene, name: str) -> Row:
    """Every read and write ends with an error of the device."""
    failing = [PlannedFault(each, outcome=Outcome.FAILED.value) for each in Operation]
    findings, samples = _storage_drill(scene, name, failing, SLOW_SHARE)
    return findings.row(name, samples, scene.p99_ratio(samples))


def _corrupted_slots(scene: Scene, name: str) -> Row:
    """A bit of every chunk on disk is flipped, in the files themselves."""
    findings = _Findings()
    _baseline(scene, name)
    labels = {"kind": Outcome.CORRUPT.value, "source": "disk"}
    before = scene.count(_FAILURES, labels)
    assert scene.server.disk is not None
    damaged = damage_slabs(scene.server.disk)
    samples = _phase(scene, f"{name}: fault")
    seen = round(scene.count(_FAILURES, labels) - before)
    findings.require(seen > 0, "no damaged chunk was read")
    findings.beside.append(f"{damaged} chunks damaged, {seen} read and refused")
    recovery = f"{name}: recovery"
    scene.load.enter(recovery)
    _returned(scene, findings, recovery, ["disk"])
    findings.against += scene.problems([*samples, *scene.load.samples(recovery)])
    findings.against += scene.late(samples, SLOW_SHARE)
    return findings.row(name, samples, scene.p99_ratio(samples))


def _kill_and_restart(scene: Scene, name: str) -> Row:
    """SIGKILL in the middle of the load: what the kill cuts off is asked again."""
    findings = _Findings()
    _baseline(scene, name)
    scene.load.enter(f"{name}: cut off")
    scene.load.wait_for(f"{name}: cut off", 1)
    scene.kill()
    cut_off = scene.load.samples(f"{name}: cut off")
    samples = _phase(scene, f"{name}: fault")
    again = scene.burst(
        [replace(each.ask, name=f"again-{each.ask.name}") for each in cut_off if not each.answer],
        f"{name}: again",
    )
    kept = sum(scene.loaded(each, "ram", "disk") for each in _first_returns(samples))
    findings.require(kept > 0, f"nothing was kept: {_reasons(scene, samples)}")
    findings.beside.append(f"{kept} tokens kept")
    findings.beside.append(f"{len(again)} requests cut off and asked again")
    findings.against += scene.problems([*samples, *again])
    findings.against += scene.late(samples, SLOW_SHARE)
    return findings.row(name, samples, scene.p99_ratio(samples))


def _first_returns(samples: Sequence[Sample]) -> list[Sample]:
    """Each returning prompt's first answer: what it got from tiers was there before."""
    found: dict[tuple[int, ...], Sample] = {}
    for sample in samples:
        if sample.returns and sample.answer is not None:
            found.setdefault(sample.ask.prompt, sample)
    return list(found.values())


def _promotion_burst(scene: Scene, name: str) -> Row:
    """After a long idle time every returning prompt is asked for at once."""
    assert scene.yardstick is not None
    findings = _Findings()
    scene.load.pause()
    scene.settle()
    scene.suffer(Plan(clock_offset_s=STEP_S))
    labels = {"tier": "ram", "event": "promoted"}
    before = scene.count(_CHUNKS, labels)
    asks = [replace(ask, name=f"{name}-{ask.name}") for ask in burst_of(scene.workload)]
    samples = scene.burst(asks, name)
    promoted = scene.count(_CHUNKS, labels) - before
    answered = [sample for sample in samples if sample.answer is not None]
    loaded = sum(scene.loaded(sample, "device", "ram", "disk") for sample in answered)
    kept = len(asks) * scene.shape.whole_tokens
    fits = min(kept, scene.ram_tokens())
    findings.beside.append(f"{loaded} of {kept} tokens reused, {promoted:.0f} chunks read")
    findings.require(
        loaded >= REUSED_SHARE * fits, f"less than {REUSED_SHARE:.0%} of what fits was reused"
    )
    findings.require(
        promoted * scene.shape.chunk_tokens <= kept, "chunks were read from disk more than once"
    )
    findings.against += scene.problems(samples)
    scene.suffer(NOTHING)
    ratio = scene.p99_ratio(samples, scene.yardstick.burst_first_token_s)
    scene.load.go_on()
    return findings.row(name, samples, ratio)


def _clock_step(scene: Scene, name: str) -> Row:
    """The scheduler's clock jumps an hour ahead under load, and back again."""
    assert scene.yardstick is not None
    findings = _Findings()
    _baseline(scene, name)
    phase = f"{name}: fault"
    scene.load.enter(phase)
    for offset_s in (STEP_S, 0.0):
        scene.suffer(Plan(clock_offset_s=offset_s))
        scene.load.wait_for(phase, len(scene.load.samples(phase)) + scene.requests // 2)
    samples = scene.load.samples(phase)
    # What the server logs is of the clock that jumps; the client's is not.
    limit_s = 3 * max(scene.yardstick.first_token_s) + 1.0
    slow = [each for each in samples if each.answer and each.answer.first_token_s > limit_s]
    findings.require(not slow, f"{len(slow)} first tokens took more than {limit_s:.1f} s")
    recovery = f"{name}: recovery"
    scene.load.enter(recovery)
    _returned(scene, findings, recovery, ["disk"] if scene.has_disk else ["ram"])
    findings.against += scene.problems([*samples, *scene.load.samples(recovery)])
    return findings.row(name, samples, scene.p99_ratio(samples))


def run(drill: Drill, scene: Scene) -> Row:
    """Run a drill; a server that does not live through it is a failure of the drill."""
    try:
        return drill.run(scene, drill.name)
    except WorldError as error:
        return Row(drill.name, passed=False, detail=str(error).splitlines()[0], p99_ratio=None)
    finally:
        scene.mend()


DRILLS: Final = (
    Drill("io-errors", "reads and writes fail", _io_errors),
    Drill("full-disk", "nothing can be written", _full_disk),
    Drill("slow-disk", "every call takes long", _slow_disk),
    Drill("hung-disk", "no call returns", _hung_disk),
    Drill("corrupted-slots", "a bit of every chunk on disk is flipped", _corrupted_slots),
    Drill("clock-step", "the clock jumps ahead and back", _clock_step, needs_disk=False),
    Drill("promotion-burst", "everything returns at once after an hour", _promotion_burst),
    Drill("ram-emptied", "RAM is empty, the disk is not", _ram_emptied),
    Drill("kill-and-restart", "the server is killed under load", _kill_and_restart, False),
    Drill("cache-loss", "everything kept is lost", _cache_loss, needs_disk=False),
)
"""In the order in which they are run: those that restart the server come last."""
