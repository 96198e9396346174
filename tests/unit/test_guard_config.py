"""The key `guard`: what is accepted, what is refused in which words, and budgets of a baseline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emberkv import config as configuration
from emberkv.config import Config
from emberkv.core.guard import GuardConfig, Limit, Return, Signal
from emberkv.errors import ConfigError, UsageError
from emberkv.live.guard import guard_rules, make_guard
from emberkv.observe.baseline import (
    Baseline,
    Latencies,
    LengthClass,
    Quantiles,
    ServerFacts,
    class_bound,
    class_name,
    quantiles,
    read_baseline,
    write_baseline,
)


def parsed(guard: object, **others: object) -> Config:
    return configuration.parse({"cpu_bytes_to_use": 1 << 30, "guard": guard, **others})


def rules(guard: object, **others: object) -> GuardConfig:
    found = guard_rules(parsed(guard, **others))
    assert found is not None
    return found


def latencies(count: int, p99_s: float) -> Latencies:
    found = Quantiles(count=count, p50_s=p99_s / 4, p95_s=p99_s / 2, p99_s=p99_s)
    return Latencies(requests=count, first_token=found, inter_token=found, end_to_end=found)


def baseline(classes: dict[int | None, Latencies], overall: Latencies) -> Baseline:
    return Baseline(
        recorded_at="2026-01-01T00:00:00Z",
        command="emberkv baseline",
        how="workload",
        server=ServerFacts(url="http://127.0.0.1:8000", model="m"),
        overall=overall,
        classes=tuple(
            LengthClass(up_to_tokens=bound, latencies=each) for bound, each in classes.items()
        ),
    )


def written(tmp_path: Path, content: Baseline) -> str:
    path = tmp_path / "baseline.json"
    write_baseline(path, content)
    return str(path)


def test_without_the_key_no_guard_runs() -> None:
    config = configuration.parse({"cpu_bytes_to_use": 1 << 30})
    assert config.guard is None
    assert make_guard(config, 2) is None


def test_seconds_are_enough_and_the_rest_has_defaults() -> None:
    found = rules({"budgets": {"ttft_p99": 2, "promotion_wait_p99": 0.25}})
    assert [(each.signal, each.single_s) for each in found.budgets] == [
        (Signal.FIRST_TOKEN, 2.0),
        (Signal.PROMOTION_WAIT, 0.25),
    ]
    assert found == GuardConfig(budgets=found.budgets)


def test_every_key_is_read() -> None:
    given = {
        "budgets": {"itl_p99": 0.1},
        "window_s": 30,
        "min_samples": 50,
        "return": "by_hand",
        "cooldown_s": 60,
        "max_cooldown_s": 600,
        "trial_shares": [0.1, 0.3, 0.6],
        "trial_samples": 20,
        "patience_s": 120,
    }
    found = rules(given)
    assert set(given) == set(configuration.config_guard.GUARD_KEYS)
    assert found == GuardConfig(
        budgets=found.budgets,
        window_s=30.0,
        min_samples=50,
        returns=Return.BY_HAND,
        cooldown_s=60.0,
        max_cooldown_s=600.0,
        trial_shares=(0.1, 0.3, 0.6),
        trial_samples=20,
        patience_s=120.0,
    )


@pytest.mark.parametrize(
    ("guard", "said"),
    [
        (True, "guard must be an object"),
        ([], "guard must be an object"),
        ({}, "budgets of the guard must name at least one of ttft_p99"),
        ({"budgets": {}}, "at least one"),
        ({"budgets": {"ttft": 1}}, "unknown signal 'ttft' in budgets; did you mean 'ttft_p99'?"),
        ({"budgets": {"ttft_p99": 0}}, "ttft_p99 must be a number of seconds, or a multiple"),
        ({"budgets": {"ttft_p99": True}}, "got True"),
        ({"budgets": {"ttft_p99": "1.05"}}, "got '1.05'"),
        ({"budgets": {"ttft_p99": "0.5x"}}, "1x or more"),
        ({"budgets": {"ttft_p99": "1.05x"}}, "name one in baseline, or give seconds"),
        ({"budgets": {"promotion_wait_p99": "2x"}}, "recorded without tiers"),
        ({"budgets": {"ttft_p99": 1}, "windw_s": 1}, "did you mean 'window_s'?"),
        ({"budgets": {"ttft_p99": 1}, "baseline": "x"}, "in the key beside guard"),
        ({"budgets": {"ttft_p99": 1}, "window_s": 1}, "window_s must be a number of seconds, 5"),
        ({"budgets": {"ttft_p99": 1}, "window_s": "60"}, "window_s"),
        ({"budgets": {"ttft_p99": 1}, "min_samples": 1.5}, "min_samples of the guard"),
        ({"budgets": {"ttft_p99": 1}, "return": "never"}, "return can't be 'never'"),
        ({"budgets": {"ttft_p99": 1}, "trial_shares": 0.1}, "must be a list of shares"),
        ({"budgets": {"ttft_p99": 1}, "trial_shares": ["a"]}, "list of numbers, got 'a'"),
        ({"budgets": {"ttft_p99": 1}, "trial_shares": [0.5, 0.1]}, "must rise"),
        ({"budgets": {"ttft_p99": 1}, "max_cooldown_s": 10}, "must not be less"),
    ],
)
def test_what_can_not_be_used_is_refused_in_one_line(guard: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(guard)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_budgets_of_a_baseline_are_by_class_where_it_has_enough(tmp_path: Path) -> None:
    classes = {256: latencies(100, 0.2), 1024: latencies(99, 0.5), 4096: latencies(500, 2.0)}
    path = written(tmp_path, baseline(classes, latencies(699, 1.5)))
    found = rules({"budgets": {"ttft_p99": "1.05x", "itl_p99": 0.3}}, baseline=path)
    by_signal = {each.signal: each.limits for each in found.budgets}
    assert by_signal[Signal.INTER_TOKEN] == (Limit(None, 0.3),)
    limits = by_signal[Signal.FIRST_TOKEN]
    assert [limit.up_to_tokens for limit in limits] == [256, 4096]
    assert [limit.seconds for limit in limits] == pytest.approx([0.21, 2.1])


def test_a_baseline_without_classes_gives_one_budget(tmp_path: Path) -> None:
    path = written(tmp_path, baseline({}, latencies(400, 1.0)))
    (budget,) = rules({"budgets": {"ttft_p99": "2x"}}, baseline=path).budgets
    assert budget.limits == (Limit(None, 2.0),)


@pytest.mark.parametrize("classes", [{}, {256: latencies(30, 1.0)}])
def test_a_baseline_that_says_too_little_is_refused(
    tmp_path: Path, classes: dict[int | None, Latencies]
) -> None:
    path = written(tmp_path, baseline(classes, latencies(30, 1.0)))
    with pytest.raises(ConfigError, match="needs 100 samples"):
        rules({"budgets": {"ttft_p99": "2x"}}, baseline=path)


def test_a_baseline_reads_back_as_written(tmp_path: Path) -> None:
    content = baseline({256: latencies(100, 0.2), None: latencies(3, 9.0)}, latencies(103, 1.0))
    assert read_baseline(Path(written(tmp_path, content))) == content
    assert [each.name for each in tmp_path.iterdir()] == ["baseline.json"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version 2, and this emberkv reads version 1"),
        ({"overall": None}, "is no baseline of emberkv"),
        ({"more": 1}, "unknown field `more`"),
        ({"version": "x"}, "is no baseline"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = Path(written(tmp_path, baseline({}, latencies(1, 1.0))))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UsageError, match=said):
        read_baseline(path)


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff\xfe", b'{"version": 1', b"{}"])
def test_files_that_are_no_json_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(UsageError, match="no baseline of emberkv"):
        read_baseline(path)


def test_a_missing_file_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_baseline(tmp_path / "none.json")
    with pytest.raises(UsageError, match="can't write"):
        write_baseline(tmp_path / "no" / "b.json", baseline({}, latencies(1, 1.0)))


def test_quantiles_are_values_that_occurred() -> None:
    found = quantiles([float(value) for value in range(200, 0, -1)])
    assert found == Quantiles(count=200, p50_s=100.0, p95_s=190.0, p99_s=198.0)
    assert quantiles([3.0]) == Quantiles(count=1, p50_s=3.0, p95_s=3.0, p99_s=3.0)
    assert quantiles([]) is None


def test_classes_of_context_length_double() -> None:
    assert [class_bound(tokens) for tokens in (1, 128, 129, 256, 257, 262_144)] == [
        128,
        128,
        256,
        256,
        512,
        262_144,
    ]
    assert class_bound(262_145) is None
    assert [class_name(bound) for bound in (128, 512, None)] == [
        "up to 128",
        "257-512",
        "over 262144",
    ]
