"""The demo's verdicts: each wrong outcome fails, and only a true tie excuses another answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from demo.client import Answer, Candidate
from demo.measures import Sources
from demo.play import EXIT_FAILED, verdict
from demo.screen import Screen
from demo.verdicts import (
    TIE_LOGPROB,
    Agreement,
    Phase,
    Source,
    Turn,
    compare,
    quantile,
)


def answer(tokens: list[int], gap: float = 1.0) -> Answer:
    """Tokens, each the best of two: the second best is the next number, `gap` less likely."""
    candidates = [(Candidate(t, -0.5), Candidate(t + 1, -0.5 - gap)) for t in tokens]
    return Answer("text", tokens, candidates, first_token_s=0.1, total_s=1.0, prompt_tokens=2101)


SERVED = {
    Source.COMPUTED: Sources(computed=2101),
    Source.DEVICE: Sources(device=2080, computed=21),
    Source.RAM: Sources(ram=2080, computed=21),
    Source.DISK: Sources(disk=2080, computed=21),
}


def phase_of(source: Source) -> Phase:
    got = SERVED[source]
    turn = Turn("harbour", 2090, answer([1, 2]), answer([1, 2]), got, got, got)
    return Phase("a phase", source, [turn])


@pytest.mark.parametrize("source", Source)
def test_a_phase_served_from_where_it_should_be_passes(source: Source) -> None:
    assert phase_of(source).problems() == []


@pytest.mark.parametrize("source", Source)
@pytest.mark.parametrize("wanted", Source)
def test_a_phase_served_from_elsewhere_fails(source: Source, wanted: Source) -> None:
    phase = replace(phase_of(source), source=wanted)
    assert bool(phase.problems()) == (source is not wanted)


@pytest.mark.parametrize("source", [Source.DEVICE, Source.RAM, Source.DISK])
def test_a_part_of_the_prefix_is_not_enough(source: Source) -> None:
    phase = phase_of(source)
    phase.turns[0].known_tokens = 2080 + 64
    assert phase.problems()


def test_a_little_from_another_tier_fails_the_phase() -> None:
    phase = phase_of(Source.DISK)
    mixed = Sources(ram=32, disk=2048, computed=21)
    phase.turns[0].engine = phase.turns[0].ember = phase.turns[0].logged = mixed
    phase.turns[0].known_tokens = 2048
    assert phase.problems()


def test_witnesses_that_disagree_fail_the_phase() -> None:
    for witness in ("engine", "ember", "logged"):
        phase = phase_of(Source.RAM)
        setattr(phase.turns[0], witness, Sources(ram=2112, computed=-11))
        assert any("disagree" in problem for problem in phase.problems())


def test_a_request_without_a_log_line_fails_the_phase() -> None:
    phase = phase_of(Source.RAM)
    phase.turns[0].logged = None
    assert any("request log" in problem for problem in phase.problems())


def test_what_a_phase_requires_beyond_its_turns_counts() -> None:
    phase = phase_of(Source.DISK)
    phase.require(True, "not said")
    assert phase.problems() == []
    phase.require(False, "the bytes did not come from the device")
    assert phase.problems() == ["the bytes did not come from the device"]


def test_a_phase_in_which_nothing_was_asked_fails() -> None:
    assert Phase("empty", Source.RAM).problems()


def test_equal_answers_are_equal() -> None:
    assert compare(answer([1, 2, 3]), answer([1, 2, 3])).agreement is Agreement.EQUAL


def test_another_token_is_excused_at_a_tie_only() -> None:
    near, far = TIE_LOGPROB / 2, TIE_LOGPROB * 2
    tied = compare(answer([1, 3, 9]), answer([1, 2, 3], gap=near))
    assert (tied.agreement, tied.position) == (Agreement.TIE, 1)
    assert tied.gap == pytest.approx(near)
    assert compare(answer([1, 3]), answer([1, 2], gap=far)).agreement is Agreement.DIFFERENT


def test_a_tie_excuses_only_the_two_best_tokens() -> None:
    other = compare(answer([1, 7]), answer([1, 2], gap=TIE_LOGPROB / 2))
    assert other.agreement is Agreement.DIFFERENT


def test_a_later_tie_does_not_excuse_an_earlier_difference() -> None:
    baseline = answer([1, 2, 3])
    baseline.candidates[2] = (Candidate(3, -0.5), Candidate(4, -0.5))
    assert compare(answer([1, 3, 4]), baseline).agreement is Agreement.DIFFERENT


def test_a_shorter_answer_is_another_answer() -> None:
    assert compare(answer([1]), answer([1, 2])).agreement is Agreement.DIFFERENT


def test_another_answer_fails_the_phase_and_a_tie_does_not() -> None:
    phase = phase_of(Source.RAM)
    phase.turns[0].answer = answer([1, 3])
    assert any("another answer" in problem for problem in phase.problems())
    phase.turns[0].baseline = answer([1, 2], gap=0.0)
    assert phase.problems() == []


def test_the_exit_status_is_0_only_if_every_phase_is_right(
    capsys: pytest.CaptureFixture[str],
) -> None:
    phases = [phase_of(source) for source in Source]
    assert verdict(phases, Screen()) == 0
    assert "every phase was served from the tier it should" in capsys.readouterr().out
    phases[2].failures.append("the keeper did not outlive the server")
    assert verdict(phases, Screen()) == EXIT_FAILED
    assert "the keeper did not outlive the server" in capsys.readouterr().out


def test_a_tie_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    phase = phase_of(Source.RAM)
    phase.turns[0].answer = answer([1, 3])
    phase.turns[0].baseline = answer([1, 2], gap=0.0)
    assert verdict([phase], Screen()) == 0
    assert "from token 1 on another answer, at a tie" in capsys.readouterr().out


def test_quantiles_are_values_that_were_measured() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([3.0, 1.0, 2.0], 0.95) == 3.0
    assert quantile([5.0], 0.5) == 5.0
    assert quantile([float(n) for n in range(1, 101)], 0.95) == 95.0
