"""The canary compares numbers, and no planted fault passes for the engine's own noise."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt
import pytest
import torch

from emberkv.core.canary import WRONG_DISTANCE, Canary, CanaryRule, Compared
from emberkv.domain.types import DISK, RAM, ChunkKey, Slot
from emberkv.errors import ConfigError
from emberkv.live.arena import Arena, ArenaGeometry, create_memory
from emberkv.live.canary import Comparer, KvType, Pair, distances, kv_type_of, values_of

TORCH_TYPES = {
    KvType.FLOAT32: torch.float32,
    KvType.FLOAT16: torch.float16,
    KvType.BFLOAT16: torch.bfloat16,
    KvType.FP8_E4M3: torch.float8_e4m3fn,
    KvType.FP8_E5M2: torch.float8_e5m2,
}
LAYERS = 4
VALUES = 512
NOISE_STEPS = 1.0

Raw = npt.NDArray[np.uint8]


def encoded(values: npt.NDArray[np.float32], kv_type: KvType) -> Raw:
    """Bytes as torch writes them: an encoder that is not ours."""
    tensor = torch.from_numpy(values).to(TORCH_TYPES[kv_type])
    found: Raw = tensor.view(torch.uint8).numpy().ravel()
    return found


def chunk(seed: int) -> npt.NDArray[np.float32]:
    """Values of a chunk, layer after layer."""
    return np.random.default_rng(seed).standard_normal(LAYERS * VALUES).astype(np.float32)


def noisy(values: npt.NDArray[np.float32], kv_type: KvType, seed: int) -> npt.NDArray[np.float32]:
    """The same, as another run of an engine computes it."""
    noise = np.random.default_rng(seed).standard_normal(len(values))
    return (values * (1 + NOISE_STEPS * kv_type.precision * noise)).astype(np.float32)


def apart(one: Raw, other: Raw, kv_type: KvType) -> tuple[float, ...]:
    return distances(memoryview(one), memoryview(other), kv_type, LAYERS)


@pytest.mark.parametrize("kv_type", KvType)
def test_every_bit_pattern_is_the_number_that_torch_reads(kv_type: KvType) -> None:
    if kv_type.value_bytes == 1:
        raw = np.arange(256, dtype=np.uint8)
    elif kv_type.value_bytes == 2:
        raw = np.arange(65536, dtype=np.uint16).view(np.uint8)
    else:
        raw = np.frombuffer(os.urandom(1 << 16), np.uint8).copy()
    theirs = torch.from_numpy(raw.copy()).view(TORCH_TYPES[kv_type]).float().numpy()
    np.testing.assert_array_equal(values_of(raw, kv_type), theirs)


@pytest.mark.parametrize("kv_type", KvType)
def test_a_distance_is_that_of_the_values(kv_type: KvType) -> None:
    one, other = encoded(chunk(1), kv_type), encoded(chunk(2), kv_type)
    found = apart(one, other, kv_type)
    read = [
        torch.from_numpy(each.copy()).view(TORCH_TYPES[kv_type]).double().view(LAYERS, -1)
        for each in (one, other)
    ]
    sizes = torch.maximum(read[0].norm(dim=1), read[1].norm(dim=1))
    assert found == pytest.approx(((read[0] - read[1]).norm(dim=1) / sizes).tolist())


@pytest.mark.parametrize("kv_type", KvType)
def test_equal_bytes_are_equal_whatever_they_mean(kv_type: KvType) -> None:
    raw = np.frombuffer(os.urandom(LAYERS * VALUES * kv_type.value_bytes), np.uint8)
    assert apart(raw, raw, kv_type) == (0.0,) * LAYERS


def test_what_is_no_number_is_infinitely_far() -> None:
    one = chunk(1)
    other = one.copy()
    other[0] = np.nan
    raw = [encoded(each, KvType.FLOAT32) for each in (one, other)]
    assert apart(*raw, KvType.FLOAT32) == (np.inf, 0.0, 0.0, 0.0)


def test_payloads_that_can_not_be_divided_are_refused() -> None:
    raw = np.zeros(10, np.uint8)
    with pytest.raises(ConfigError, match="equal parts"):
        distances(memoryview(raw), memoryview(raw), KvType.FLOAT32, 2)


@pytest.mark.parametrize(
    ("name", "kv_type"),
    [("torch.bfloat16", KvType.BFLOAT16), ("half", KvType.FLOAT16), ("fp8", KvType.FP8_E4M3),
     ("torch.float8_e4m3fn", KvType.FP8_E4M3), ("float8_e5m2", KvType.FP8_E5M2)],
)  # fmt: skip
def test_types_are_known_by_the_engines_names(name: str, kv_type: KvType) -> None:
    assert kv_type_of(name) is kv_type


def test_a_type_that_is_no_plain_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="fp8_ds_mla"):
        kv_type_of("fp8_ds_mla")


def taught(kv_type: KvType) -> Canary:
    """A canary that has learnt the noise of a type."""
    canary = Canary(CanaryRule(1.0, kv_type.precision))
    for seed in range(canary.rule.lessons):
        values = chunk(seed)
        raw = encoded(values, kv_type), encoded(noisy(values, kv_type, seed), kv_type)
        assert canary.judge([Compared(ChunkKey(b"k"), RAM, apart(*raw, kv_type))]) is None
    return canary


PLANTED = {
    "another chunk": lambda right: chunk(99),
    "one layer shifted": lambda right: np.roll(right, VALUES),
    "a stale generation in one layer": lambda right: np.concatenate(
        [right[:-VALUES], chunk(98)[-VALUES:]]
    ),
    "a wrong rank's part": lambda right: np.roll(right, 2 * VALUES),
    "another namespace": lambda right: right * 1.0 + 0.9 * chunk(97),
    "zeros": np.zeros_like,
}


@pytest.mark.parametrize("kv_type", KvType)
@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.parametrize("has_learnt", [True, False])
def test_planted_faults_disagree(fault: str, kv_type: KvType, has_learnt: bool) -> None:
    canary = taught(kv_type) if has_learnt else Canary(CanaryRule(1.0, kv_type.precision))
    right = chunk(1000)
    wrong = PLANTED[fault](right).astype(np.float32)
    raw = encoded(wrong, kv_type), encoded(noisy(right, kv_type, 5), kv_type)
    found = canary.judge([Compared(ChunkKey(b"key"), DISK, apart(*raw, kv_type))])
    assert found is not None
    assert found.origin == DISK
    assert "canary" in found.reason


@pytest.mark.parametrize("kv_type", KvType)
def test_noise_alone_never_disagrees(kv_type: KvType) -> None:
    canary = taught(kv_type)
    for seed in range(1000, 1300):
        values = chunk(seed)
        raw = encoded(values, kv_type), encoded(noisy(values, kv_type, seed), kv_type)
        assert canary.judge([Compared(ChunkKey(b"k"), RAM, apart(*raw, kv_type))]) is None


def test_learning_narrows_the_limit_and_never_widens_it_past_what_is_wrong() -> None:
    canary = Canary(CanaryRule(1.0, KvType.FLOAT32.precision, lessons=2))
    assert canary.limit == WRONG_DISTANCE
    canary.judge([Compared(ChunkKey(b"k"), RAM, (1e-6, 1e-3))] * 2)
    assert canary.limit == pytest.approx(4e-3)
    loose = Canary(CanaryRule(1.0, KvType.FLOAT32.precision, lessons=1))
    loose.judge([Compared(ChunkKey(b"k"), RAM, (0.4,))])
    assert loose.limit == WRONG_DISTANCE


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_the_share_is_kept_and_evenly_spread(share: float) -> None:
    canary = Canary(CanaryRule(share, 0.1))
    chosen = [canary.chooses() for _ in range(1000)]
    assert sum(chosen) == pytest.approx(1000 * share, abs=1)
    if share == 0.3:
        assert all(2 <= sum(chosen[at : at + 10]) <= 4 for at in range(0, 1000, 10))


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="share"):
        CanaryRule(1.5, 0.1)


def test_rows_are_compared_off_the_callers_thread() -> None:
    geometry = ArenaGeometry(4, LAYERS * VALUES * 4)
    fd = create_memory(geometry)
    arena = Arena(fd, geometry)
    os.close(fd)
    right, wrong = encoded(chunk(1), KvType.FLOAT32), encoded(chunk(2), KvType.FLOAT32)
    for slot, raw in enumerate((right, right, wrong)):
        arena.row(Slot(slot))[:] = raw.tobytes()
    comparer = Comparer(arena, KvType.FLOAT32, LAYERS)
    pairs = [
        Pair(ChunkKey(b"same"), RAM, Slot(0), Slot(1)),
        Pair(ChunkKey(b"other"), DISK, Slot(0), Slot(2)),
    ]
    comparer.submit(pairs)
    comparer.close()
    found = comparer.poll()
    assert [pair for pair, _ in found] == pairs
    assert found[0][1].distances == (0.0,) * LAYERS
    assert min(found[1][1].distances) > WRONG_DISTANCE
    assert Canary(CanaryRule(1.0, KvType.FLOAT32.precision)).judge([found[1][1]]) is not None
    arena.close()
