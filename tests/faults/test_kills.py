"""Processes killed at any moment of real slab and arena writes, and what the next one finds.

EMBERKV_KILLS        how many kills (default 50)
EMBERKV_KILLS_SEED   the run's seed (default: another one each time; it is printed)
EMBERKV_KILL         play only the history of the kill of this number again
EMBERKV_KILLS_JSON   a file for the table of kills by where they fell
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from kill_defects import PLANTED
from kills import HISTORY_KILLS, OUTSIDE, HarmError, Killer, killer, run_kills

KILLS = int(os.environ.get("EMBERKV_KILLS") or 50)
SLAB_WRITE_SHARE = 0.2
HEADER_UPDATE_SHARE = 0.1
OUTSIDE_SHARE = 0.25


def seed() -> int:
    return int(os.environ.get("EMBERKV_KILLS_SEED") or random.SystemRandom().randrange(1 << 32))


def play_all(made: Killer, histories: int) -> None:
    for history in range(histories):
        made.play(history)


@pytest.mark.timeout(60 + KILLS)
def test_nothing_wrong_is_served_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    number = os.environ.get("EMBERKV_KILL")
    if number:
        with killer(tmp_path, seed()) as made:
            made.play(int(number) // HISTORY_KILLS)
        return
    tally = run_kills(tmp_path, KILLS, seed())
    table = json.dumps(tally.as_json(), indent=2)
    print(table)
    path = os.environ.get("EMBERKV_KILLS_JSON")
    if path:
        Path(path).write_text(table + "\n")
    assert tally.kills == KILLS
    assert tally.in_slab_write >= SLAB_WRITE_SHARE * KILLS, table
    assert tally.in_header_update >= HEADER_UPDATE_SHARE * KILLS, table
    assert tally.means[OUTSIDE] >= OUTSIDE_SHARE * KILLS, table
    assert tally.acknowledged > KILLS, table


@pytest.mark.parametrize("defect", PLANTED)
def test_a_planted_defect_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    PLANTED[defect](monkeypatch.setattr)
    with killer(tmp_path, 1, defect=defect) as made:
        with pytest.raises(HarmError, match=r"(slot|row) \d+ (serves|offers|has lost)") as caught:
            play_all(made, histories=40)
        assert made.tally.kills < 200
    assert "EMBERKV_KILLS_SEED=1 EMBERKV_KILL=" in str(caught.value)
