"""What a server is asked, what is read from its answers, and the load that asks without pause."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from scripted_server import scripted_server

from emberkv.app.asking import (
    Answer,
    AnswerError,
    Ask,
    Asker,
    LoggedRequests,
    ask_each,
    force,
    served_model,
)
from emberkv.app.drilling.load import ROUND, RunningLoad, Workload, burst
from emberkv.app.drilling.scene import percentile
from emberkv.observe.request_log import line_of
from emberkv.observe.requests import RequestFacts

MODEL = "stand-in"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_server() as address:
        yield address


def test_answers_come_in_the_order_of_the_requests(url: str) -> None:
    asks = [Ask(f"a-{at}", (1, at), 2) for at in (10, 20, 30)]
    for at_once in (False, True):
        answers = ask_each(url, MODEL, asks, at_once=at_once)
        assert [answer.tokens for answer in answers] == [[11, 12], [21, 22], [31, 32]]
        assert answers[0].candidates[0] == {11: -0.25, 7: -2.0}
        assert all(0 < answer.first_token_s <= answer.total_s for answer in answers)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [((666,), "500"), ((99,), "engine is dead"), ((13,), "3 tokens came back, not 5")],
)
def test_what_is_no_answer_is_an_error(url: str, prompt: tuple[int, ...], message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        ask_each(url, MODEL, [Ask("a", prompt, 5)])


def test_a_server_that_is_gone_is_an_error() -> None:
    with pytest.raises(AnswerError, match="did not answer"):
        ask_each("http://127.0.0.1:9", MODEL, [Ask("a", (1,), 1)])
    with pytest.raises(AnswerError, match="does not say"):
        served_model("http://127.0.0.1:9")


def test_forced_are_the_last_positions_of_the_prompt(url: str) -> None:
    assert force(url, MODEL, Ask("a", (1, 2, 3), 1), [8, 9]) == [{8: -0.5}, {9: -0.5}]


def test_the_model_is_the_servers_own_word(url: str) -> None:
    model = served_model(url)
    assert (model.name, model.max_tokens) == (MODEL, 512)


def test_the_request_log_is_read_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = LoggedRequests(path)
    assert log.find("check-1") is None
    line = line_of(RequestFacts("x", external_id="cmpl-check-1-0", ram_tokens=64)) + "\n"
    path.write_text(line[:20])
    assert log.find("check-1") is None  # not whole yet
    with path.open("a") as more:
        more.write(line[20:] + line.replace("check-1-0", "check-11-0").replace("64", "32"))
    found, other = log.find("check-1"), log.find("check-11")
    assert found is not None
    assert other is not None
    assert (found["ram_tokens"], other["ram_tokens"]) == (64, 32)


WORKLOAD = Workload.make(returning=4, fresh=3, tokens=5, answer_tokens=2)


def test_one_of_three_requests_is_fresh_and_the_others_come_round_evenly() -> None:
    asks = [WORKLOAD.ask(number) for number in range(24)]
    fresh = [ask for ask in asks if ask.salt is not None]
    assert len(fresh) == 24 / ROUND
    assert len({ask.salt for ask in fresh}) == len(fresh)
    returning = [ask.prompt for ask in asks if ask.salt is None]
    assert set(Counter(returning).values()) == {4}
    assert all(one != other for one, other in pairwise(returning))
    assert Workload.make(returning=4, fresh=3, tokens=5, answer_tokens=2) == WORKLOAD


def test_a_load_asks_until_it_is_stopped_and_counts_by_phase(url: str) -> None:
    load = RunningLoad(url, MODEL, WORKLOAD, 2)
    load.start("one")
    load.wait_for("one", 5)
    load.pause()
    load.enter("two")
    paused = len(load.samples("one"))
    load.go_on()
    load.wait_for("two", 5)
    load.stop()
    assert len(load.samples("one")) == paused
    samples = [*load.samples("one"), *load.samples("two")]
    assert all(sample.answer is not None for sample in samples)
    assert len({sample.ask.name for sample in samples}) == len(samples)


def test_a_request_that_fails_is_a_sample_that_says_why(url: str) -> None:
    good, bad = burst(url, MODEL, [Ask("a", (1,), 1), Ask("b", (666,), 1)], "burst")
    assert isinstance(good.answer, Answer)
    assert bad.answer is None
    assert "500" in bad.failure


def test_an_asker_closes_what_it_opened(url: str) -> None:
    async def run() -> list[int]:
        async with Asker(url, MODEL) as asker:
            return (await asker.answer(Ask("a", (4,), 1))).tokens

    assert asyncio.run(run()) == [5]


def test_a_percentile_is_the_nearest_rank() -> None:
    values = list(range(1, 101))
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert percentile([3.0], 0.99) == 3.0
