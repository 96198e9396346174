"""The keeper and a disk that hangs, fails, is missing, or belongs to another."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from keeper_processes import DEADLINE_S, NAMES, SLOTS, Process, Stage, gone, stage, until


def on_disk(engine: Process) -> None:
    """Bring the chunks to the disk."""
    engine.do("found")
    engine.do("store", names=NAMES, first_slot=0)
    down = {"ram_slot": 0, "disk_slot": 0, "up": False, "wait": True}
    assert engine.do("copy", transfer=1, names=NAMES, **down)["outcomes"] == ["ok"] * 6


def test_a_hung_read_blocks_no_call_and_no_write(play: Stage) -> None:
    play.with_disk().hanging_keeper()
    engine, _ = play.engine("a")
    on_disk(engine)
    play.shut("read")
    up = {"ram_slot": 10, "disk_slot": 0, "up": True, "wait": False}
    engine.do("copy", transfer=2, names=NAMES, **up)
    until(lambda: (s := play.status()) is not None and s.chunks_under_way == 6, "the read hangs")
    down = {"ram_slot": 0, "disk_slot": 20, "up": False, "wait": True}
    assert engine.do("copy", transfer=3, names=NAMES, **down)["outcomes"] == ["ok"] * 6
    assert engine.do("poll_for", seconds=0.5)["longest_call_s"] < DEADLINE_S / 10
    play.open("read")
    assert engine.do("results", transfer=2, count=6)["outcomes"] == ["ok"] * 6


def test_a_slot_that_a_hung_read_may_write_is_not_given_to_the_next_engine(play: Stage) -> None:
    play.with_disk().hanging_keeper()
    before, _ = play.engine("a")
    on_disk(before)
    play.shut("read")
    up = {"ram_slot": 10, "disk_slot": 0, "up": True, "wait": False}
    before.do("copy", transfer=2, names=NAMES, **up)
    until(lambda: (s := play.status()) is not None and s.chunks_under_way == 6, "the read hangs")
    before.kill()
    after, _ = play.engine("b")
    assert after.do("tier_event", name="down")["events"] == ["down:1:the disk does not answer"]
    held_back = set(range(10, 16))
    assert set(after.do("usable")["usable"]) == set(range(SLOTS)) - held_back
    play.open("read")
    after.do("tier_event", name="up")
    found = after.do("found")
    assert [slot for _, slot in found["found"]["0"]] == list(range(6))
    assert len(found["found"]["1"]) == 6
    assert set(found["usable"]) == set(range(SLOTS))


def test_a_hung_read_outlives_two_engines_and_their_disk(play: Stage) -> None:
    """The disk is opened anew for the second engine; no later one may get the slots either."""
    play.with_disk().hanging_keeper()
    first, _ = play.engine("a")
    on_disk(first)
    play.shut("read")
    up = {"ram_slot": 10, "disk_slot": 0, "up": True, "wait": False}
    first.do("copy", transfer=2, names=NAMES, **up)
    until(lambda: (s := play.status()) is not None and s.chunks_under_way == 6, "the read hangs")
    play.gate.with_suffix(".fail-reset").touch()
    assert not first.do("reset")["reset"]
    first.do("store", names=["new"], first_slot=20)  # for the keeper to have something to keep
    first.kill()
    for name in ("b", "c", "d"):
        engine, joined = play.engine(name)
        assert "the device refuses" in joined["disk_failure"]
        assert set(engine.do("usable")["usable"]) == set(range(SLOTS)) - set(range(10, 16))
        engine.do("store", names=["new"], first_slot=20)
        if name != "d":
            engine.kill()
    play.open("read")

    def all_usable() -> bool:
        engine.do("poll_for", seconds=0.1)
        return set(engine.do("usable")["usable"]) == set(range(SLOTS))

    until(all_usable, "all is given back")


def test_a_disk_that_does_not_open_in_time_is_left_out(play: Stage) -> None:
    play.with_disk().hanging_keeper()
    play.shut("open")
    engine, joined = play.engine("a")
    assert joined["slot_counts"] == [SLOTS]
    assert joined["disk_failure"] == "the disk tier did not open in time"
    engine.do("found")
    engine.do("store", names=NAMES, first_slot=0)
    down = {"ram_slot": 0, "disk_slot": 0, "up": False, "wait": True}
    assert engine.do("copy", transfer=1, names=NAMES, **down)["outcomes"] == ["shed"] * 6
    play.open("open")


def test_a_missing_directory_is_the_users_mistake(play: Stage) -> None:
    play.with_disk(root_dir=str(play.disk_dir / "nowhere"))
    engine = play.process()
    error = engine.fails("join", **play.join_arguments(["worker", "manager"], "a"))
    assert error.startswith("ConfigError")
    assert "does not exist" in error
    engine.kill()
    until(lambda: play.listeners() == [], "the keeper that could not help ends")


def test_a_keeper_without_an_engine_lets_others_use_the_disk(play: Stage, tmp_path: Path) -> None:
    engine, _ = play.with_disk().engine("a")
    on_disk(engine)
    engine.kill()
    until(lambda: (s := play.status()) is not None and s.disk == "off", "the disk is released")
    with stage(tmp_path / "elsewhere") as elsewhere:
        elsewhere.config, elsewhere.namespace = play.config, play.namespace
        other, joined = elsewhere.engine("x")
        assert len(other.do("found")["found"]["1"]) == 6
        other.do("close")
        gone(joined["keeper_pid"])
    again, _ = play.engine("b")
    found = again.do("found")["found"]
    assert (len(found["0"]), len(found["1"])) == (6, 6)


@pytest.mark.parametrize("refuse", [False, True])
def test_a_disk_in_use_is_left_out_or_refused_as_configured(play: Stage, refuse: bool) -> None:
    play.with_disk().engine("a")
    play.config["refuse_without_disk"] = refuse
    other = play.process()
    if refuse:
        error = other.fails("join", **play.join_arguments(["worker", "manager"], "b"))
        assert error.startswith("KeeperError")
        assert "in use by another engine" in error
    else:
        joined = play.join(other, ["worker", "manager"], "b")
        assert joined["slot_counts"] == [SLOTS]
        assert "in use by another engine" in joined["disk_failure"]


def test_a_reset_that_hangs_turns_the_disk_off_until_it_is_done(play: Stage) -> None:
    play.with_disk().hanging_keeper()
    engine, _ = play.engine("a")
    on_disk(engine)
    play.shut("reset")
    assert not engine.do("reset")["reset"]
    assert "in time" in engine.do("tier_event", name="down")["events"][0]
    up = {"ram_slot": 10, "disk_slot": 0, "up": True, "wait": True}
    assert engine.do("copy", transfer=2, names=NAMES, **up)["outcomes"] == ["shed"] * 6
    engine.do("forget_found")
    play.open("reset")
    engine.do("tier_event", name="up")
    assert engine.do("found")["found"]["1"] == []
    assert engine.do("copy", transfer=3, names=NAMES, **up)["outcomes"] == ["absent"] * 6


def test_a_reset_that_fails_is_owed_by_the_keeper_to_the_next_engine(play: Stage) -> None:
    play.with_disk().hanging_keeper()
    engine, _ = play.engine("a")
    on_disk(engine)
    fault = play.gate.with_suffix(".fail-reset")
    fault.touch()
    assert not engine.do("reset")["reset"]
    assert "the device refuses" in engine.do("tier_event", name="down")["events"][0]
    engine.do("store", names=["new"], first_slot=20)
    engine.kill()
    second, joined = play.engine("b")
    assert joined["slot_counts"] == [SLOTS]
    assert "the device refuses" in joined["disk_failure"]
    assert second.do("found")["found"]["0"] == []
    fault.unlink()
    second.kill()
    third, _ = play.engine("c")
    assert third.do("found")["found"]["1"] == []


def test_a_reset_owed_when_the_keeper_dies_is_made_by_the_next(play: Stage) -> None:
    keeper_pid = play.with_disk().hanging_keeper()
    engine, _ = play.engine("a")
    on_disk(engine)
    play.shut("reset")
    assert not engine.do("reset")["reset"]
    engine.do("forget_found")
    os.kill(keeper_pid, signal.SIGKILL)
    engine.do("tier_event", name="up")
    assert engine.do("found")["found"]["1"] == []


def test_copies_under_way_fail_once_when_the_keeper_dies(play: Stage) -> None:
    keeper_pid = play.with_disk().hanging_keeper()
    engine, _ = play.engine("a")
    engine.do("found")
    engine.do("store", names=NAMES, first_slot=0)
    play.shut("write")
    down = {"ram_slot": 0, "disk_slot": 0, "up": False, "wait": False}
    engine.do("copy", transfer=1, names=NAMES, **down)
    os.kill(keeper_pid, signal.SIGKILL)
    assert engine.do("results", transfer=1, count=6)["outcomes"] == ["failed"] * 6
    engine.do("tier_event", name="up")


def test_write_behind_goes_on_after_the_engines_death(play: Stage) -> None:
    keeper_pid = play.with_disk().hanging_keeper()
    engine, _ = play.engine("a")
    engine.do("found")
    engine.do("store", names=NAMES, first_slot=0)
    play.shut("write")
    down = {"ram_slot": 0, "disk_slot": 0, "up": False, "wait": False}
    engine.do("copy", transfer=1, names=NAMES, **down)
    until(lambda: (s := play.status()) is not None and s.chunks_under_way > 0, "a write hangs")
    engine.kill()
    play.open("write")
    until(lambda: (s := play.status()) is not None and s.chunks_under_way == 0, "it ends")
    os.kill(keeper_pid, signal.SIGKILL)
    gone(keeper_pid)
    after, _ = play.engine("b")
    assert len(after.do("found")["found"]["1"]) == 6
