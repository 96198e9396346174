"""The keeper against deaths: real processes, killed in every order; no engine needed."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from keeper_processes import NAMES, Stage, gone, holders_of, is_running, until

from emberkv.live.keeper.status import find_keepers


def nothing_left(play: Stage, inode: int, shm_before: set[str]) -> None:
    """No process holds the memory, nobody listens, no file of ours has appeared."""
    until(lambda: not holders_of(inode), "the memory is free")
    until(lambda: not play.listeners(), "nobody listens")
    new = set(os.listdir("/dev/shm")) - shm_before
    assert {name for name in new if "ember" in name} == set()  # others may use the place too


@contextmanager
def memory_of(joined: dict[str, Any]) -> Iterator[int]:
    """A descriptor of an arena's memory, which is then held by this process too."""
    for entry in Path(f"/proc/{joined['keeper_pid']}/fd").iterdir():
        if entry.stat().st_ino == joined["inode"] and "memfd:emberkv-arena" in str(
            entry.readlink()
        ):
            fd = os.open(entry, os.O_RDONLY)
            try:
                yield fd
            finally:
                os.close(fd)
            return
    raise AssertionError("the keeper does not hold the memory")


# ── the plain way ────────────────────────────────────────────────────────────────────────────────


def test_a_clean_stop_ends_the_keeper_and_frees_the_memory(play: Stage) -> None:
    shm_before = set(os.listdir("/dev/shm"))
    engine, joined = play.engine("a")
    engine.do("found")
    engine.do("store", names=NAMES, first_slot=0)
    engine.do("close")
    gone(joined["keeper_pid"])
    engine.kill()
    nothing_left(play, joined["inode"], shm_before)


def test_the_keeper_leaves_its_starters_process_tree_and_is_named(play: Stage) -> None:
    engine, joined = play.engine("a")
    stat = Path(f"/proc/{joined['keeper_pid']}/stat").read_text()
    parent, _, session = stat.rpartition(")")[2].split()[1:4]
    assert int(parent) != engine.pid
    assert int(session) != os.getsid(engine.pid)
    assert "(emberkv-keeper)" in stat


def test_manager_learns_the_namespace_from_its_workers(play: Stage) -> None:
    _, joined = play.engine("a")
    assert joined["namespace"] == play.namespace


def test_workers_and_manager_in_processes_of_their_own_share_one_memory(play: Stage) -> None:
    workers = [play.process(), play.process()]
    inodes = {play.join(w, ["worker"], "a", rank=r)["inode"] for r, w in enumerate(workers)}
    manager = play.process()
    inodes.add(play.join(manager, ["manager"], "a", worker_count=2)["inode"])
    assert len(inodes) == 1
    manager.do("found")
    workers[1].kill()
    manager.do("store", names=NAMES, first_slot=0)


def test_a_manager_waits_for_its_workers(play: Stage) -> None:
    manager = play.process()
    error = manager.fails(
        "join", **play.join_arguments(["manager"], "a", worker_count=1, timeout_s=0.5)
    )
    assert error.startswith("KeeperError")
    assert "workers" in error


def test_both_sides_must_ask_for_the_same(play: Stage) -> None:
    worker, manager = play.process(), play.process()
    play.join(worker, ["worker"], "a")
    play.config["slot_count"] += 1
    error = manager.fails("join", **play.join_arguments(["manager"], "a"))
    assert error == "ConfigError: manager and workers ask for different slot_count"
    play.config["slot_count"] -= 1
    play.namespace = {"model": "m", "dtype": "bfloat16"}
    error = manager.fails("join", **play.join_arguments(["manager"], "a"))
    assert error == "ConfigError: manager and workers differ in the namespace's dtype"


def test_memory_that_cannot_be_had_is_said_at_start(play: Stage) -> None:
    play.config |= {"slot_count": 1 << 20, "chunk_bytes": 1 << 30}
    error = play.process().fails("join", **play.join_arguments(["worker"], "a"))
    assert error.startswith("KeeperError: the RAM tier of ")
    assert "does not fit" in error
    until(lambda: play.listeners() == [], "the keeper that could not help ends")


def test_a_large_arena_is_joined_at_once_and_populated_behind(play: Stage) -> None:
    play.config |= {"slot_count": 1536, "chunk_bytes": 1 << 20}
    engine, joined = play.engine("a")
    first = engine.do("found", populated=False)["usable"]
    assert len(first) < 1536  # the join has not waited for the rest
    engine.do("store", names=NAMES, first_slot=0)
    assert len(engine.do("found")["usable"]) == 1536
    assert is_running(joined["keeper_pid"])


# ── takeover ─────────────────────────────────────────────────────────────────────────────────────


def test_a_restarted_engine_finds_its_chunks_verified(play: Stage) -> None:
    before, joined = play.engine("a")
    before.do("found")
    before.do("store", names=NAMES, first_slot=3)
    before.kill()
    after, again = play.engine("b")
    assert (again["keeper_pid"], again["inode"]) == (joined["keeper_pid"], joined["inode"])
    assert after.do("found")["found"]["0"] == [[name, 3 + at] for at, name in enumerate(NAMES)]
    assert after.do("holds", names=NAMES, first_slot=3)["same"] == [True] * 6


def test_unsealed_half_written_and_altered_rows_are_not_taken_over(play: Stage) -> None:
    before, _ = play.engine("a")
    before.do("found")
    before.do("store", names=NAMES, first_slot=0)
    before.do("store", names=["half"], first_slot=10, ready=False)
    before.do("store", names=["rewritten"], first_slot=1, ready=False)
    before.do("tamper", slot=4)
    before.kill()
    after, _ = play.engine("b")
    kept = [[name, at] for at, name in enumerate(NAMES) if at not in (1, 4)]
    assert after.do("found")["found"]["0"] == kept


def test_another_namespace_gets_fresh_memory(play: Stage) -> None:
    before, joined = play.engine("a")
    before.do("found")
    before.do("store", names=NAMES, first_slot=0)
    before.kill()
    play.namespace = {"model": "m", "dtype": "bfloat16"}
    with memory_of(joined) as fd:
        assert os.fstat(fd).st_blocks > 0
        after, again = play.engine("b")
        assert os.fstat(fd).st_blocks == 0
    assert again["inode"] != joined["inode"]
    assert after.do("found")["found"]["0"] == []
    assert after.do("holds", names=NAMES, first_slot=0)["same"] == [False] * 6


def test_another_geometry_gets_fresh_memory(play: Stage) -> None:
    before, joined = play.engine("a")
    before.do("found")
    before.do("store", names=NAMES, first_slot=0)
    before.kill()
    play.config["slot_count"] += 1
    after, again = play.engine("b")
    assert again["inode"] != joined["inode"]
    assert after.do("found")["found"]["0"] == []


def test_after_a_reset_nothing_is_taken_over(play: Stage) -> None:
    before, _ = play.with_disk().engine("a")
    before.do("found")
    before.do("store", names=NAMES, first_slot=0)
    down = {"ram_slot": 0, "disk_slot": 0, "up": False, "wait": True}
    assert before.do("copy", transfer=1, names=NAMES, **down)["outcomes"] == ["ok"] * 6
    assert before.do("reset")["reset"]
    before.kill()
    after, joined = play.engine("b")
    assert after.do("found")["found"] == {"0": [], "1": []}
    os.kill(joined["keeper_pid"], signal.SIGKILL)
    after.kill()
    again, _ = play.engine("c")
    assert again.do("found")["found"] == {"0": [], "1": []}


@pytest.mark.parametrize("killed", ["engine", "engine and keeper", "keeper, then engine"])
def test_what_follows_a_reset_is_for_no_other_engine(play: Stage, killed: str) -> None:
    """Its weights may not be those that its namespace names, and that the next one has loaded."""
    before, joined = play.with_disk().engine("a")
    before.do("found")
    assert before.do("reset")["reset"]
    if killed == "keeper, then engine":
        os.kill(joined["keeper_pid"], signal.SIGKILL)
        before.do("tier_event", name="up")
    store_and_copy_down(before)
    if killed == "engine and keeper":
        os.kill(joined["keeper_pid"], signal.SIGKILL)
    before.kill()
    after, _ = play.engine("b")
    assert after.do("found")["found"] == {"0": [], "1": []}
    store_and_copy_down(after)  # and that one's are for the next
    after.kill()
    again, _ = play.engine("c")
    found = again.do("found")["found"]
    assert [len(found[level]) for level in "01"] == [len(NAMES)] * 2


def store_and_copy_down(engine: Any) -> None:
    engine.do("store", names=NAMES, first_slot=0)
    down = {"ram_slot": 0, "disk_slot": 0, "up": False, "wait": True}
    assert engine.do("copy", transfer=1, names=NAMES, **down)["outcomes"] == ["ok"] * len(NAMES)


def test_a_worker_that_lives_on_keeps_the_next_engine_from_the_memory(play: Stage) -> None:
    worker, manager = play.process(), play.process()
    play.join(worker, ["worker"], "a")
    joined = play.join(manager, ["manager"], "a")
    manager.kill()
    _, other = play.engine("b")
    assert other["instance"] != play.instance
    assert other["inode"] != joined["inode"]


# ── how long memory is kept ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("keep_s", [0.0, 0.3])
def test_memory_goes_when_its_time_is_over(play: Stage, keep_s: float) -> None:
    shm_before = set(os.listdir("/dev/shm"))
    play.config["keep_s"] = keep_s
    engine, joined = play.engine("a")
    engine.do("found")
    engine.do("store", names=NAMES, first_slot=0)
    engine.kill()
    gone(joined["keeper_pid"])
    nothing_left(play, joined["inode"], shm_before)


def test_an_arena_with_nothing_in_it_is_not_kept(play: Stage) -> None:
    engine, joined = play.engine("a")
    engine.kill()
    gone(joined["keeper_pid"])


@pytest.mark.parametrize("order", list(itertools.permutations(("manager", "worker", "keeper"))))
def test_whoever_is_killed_in_whatever_order_nothing_is_left(
    play: Stage, order: tuple[str, ...]
) -> None:
    shm_before = set(os.listdir("/dev/shm"))
    play.with_disk().config["keep_s"] = 0.2
    worker, manager = play.process(), play.process()
    play.join(worker, ["worker"], "a")
    joined = play.join(manager, ["manager"], "a", worker_count=1)
    manager.do("found")
    manager.do("store", names=NAMES, first_slot=0)
    down = {"ram_slot": 0, "disk_slot": 0, "up": False, "wait": False}
    manager.do("copy", transfer=1, names=NAMES, **down)
    for victim in order:
        if victim == "keeper":
            status = play.status()
            if status is not None:
                os.kill(status.pid, signal.SIGKILL)
                gone(status.pid)
        else:
            {"manager": manager, "worker": worker}[victim].kill()
    nothing_left(play, joined["inode"], shm_before)


def test_all_killed_at_once_leave_nothing(play: Stage) -> None:
    shm_before = set(os.listdir("/dev/shm"))
    worker, manager = play.process(), play.process()
    play.join(worker, ["worker"], "a")
    joined = play.join(manager, ["manager"], "a", worker_count=1)
    for pid in (joined["keeper_pid"], manager.pid, worker.pid):
        os.kill(pid, signal.SIGKILL)
    manager.kill()
    worker.kill()
    nothing_left(play, joined["inode"], shm_before)


# ── two engines ──────────────────────────────────────────────────────────────────────────────────


def test_a_second_live_engine_gets_a_keeper_of_its_own(play: Stage) -> None:
    _, first = play.engine("a")
    worker, manager = play.process(), play.process()
    play.join(worker, ["worker"], "b")
    second = play.join(manager, ["manager"], "b", worker_count=1)
    assert first["instance"] == play.instance
    assert second["instance"].startswith(f"{play.instance}-")
    assert second["inode"] != first["inode"]
    assert sorted(play.listeners()) == sorted([first["instance"], second["instance"]])
    manager.do("found")
    manager.do("store", names=NAMES, first_slot=0)
    manager.kill()
    worker.kill()
    gone(second["keeper_pid"])  # nobody would look for it, so it keeps nothing


def test_a_second_engine_stays_together_if_the_first_ends_meanwhile(play: Stage) -> None:
    first, joined = play.engine("a")
    first.do("found")
    first.do("store", names=NAMES, first_slot=0)
    worker, manager = play.process(), play.process()
    own = play.join(worker, ["worker"], "b")
    first.kill()
    second = play.join(manager, ["manager"], "b", worker_count=1)
    assert second["inode"] == own["inode"] != joined["inode"]


def test_one_engine_id_twice_is_the_users_mistake(play: Stage) -> None:
    play.engine("a")
    error = play.process().fails("join", **play.join_arguments(["worker"], "a"))
    assert error.startswith("ConfigError")
    assert "engine_id" in error


# ── the keeper dies ──────────────────────────────────────────────────────────────────────────────


def test_a_killed_keeper_is_replaced_and_the_disk_comes_back(play: Stage) -> None:
    worker, manager = play.process(), play.process()
    play.with_disk()
    play.join(worker, ["worker"], "a")
    joined = play.join(manager, ["manager"], "a", worker_count=1)
    manager.do("found")
    manager.do("store", names=NAMES, first_slot=0)
    down = {"ram_slot": 0, "disk_slot": 4, "up": False, "wait": True}
    assert manager.do("copy", transfer=1, names=NAMES, **down)["outcomes"] == ["ok"] * 6
    manager.do("forget_found")
    os.kill(joined["keeper_pid"], signal.SIGKILL)
    seen = manager.do("tier_event", name="up")
    assert [event.split(":")[0] for event in seen["events"]] == ["down", "up"]
    assert seen["keeper_pid"] != joined["keeper_pid"]
    found = manager.do("found")["found"]
    assert found == {"0": [], "1": [[name, 4 + at] for at, name in enumerate(NAMES)]}
    up = {"ram_slot": 10, "disk_slot": 4, "up": True, "wait": True}
    assert manager.do("copy", transfer=2, names=NAMES, **up)["outcomes"] == ["ok"] * 6
    assert manager.do("holds", names=NAMES, first_slot=10)["same"] == [True] * 6
    worker.do("attached")
    # And what was in RAM before the death is still there for a restarted engine.
    manager.kill()
    worker.kill()
    after, again = play.engine("b")
    assert again["inode"] == joined["inode"]
    assert after.do("found")["found"]["0"] == [[name, at] for at, name in enumerate(NAMES)]


def test_sigterm_ends_a_keeper_after_its_writes(play: Stage) -> None:
    engine, joined = play.with_disk().engine("a")
    engine.do("found")
    engine.do("store", names=NAMES, first_slot=0)
    down = {"ram_slot": 0, "disk_slot": 0, "up": False, "wait": False}
    engine.do("copy", transfer=1, names=NAMES, **down)
    os.kill(joined["keeper_pid"], signal.SIGTERM)
    gone(joined["keeper_pid"])
    engine.kill()
    after, _ = play.engine("b")
    assert len(after.do("found")["found"]["1"]) == 6


# ── who is there ─────────────────────────────────────────────────────────────────────────────────


def test_keepers_can_be_found_with_their_status(play: Stage) -> None:
    engine, joined = play.with_disk().engine("a")
    engine.do("found")
    engine.do("store", names=NAMES, first_slot=0)
    (info,) = [k for k in find_keepers() if k.instance == play.instance]
    assert info.status is not None
    assert info.status.pid == joined["keeper_pid"]
    assert dict(info.status.namespace) == play.namespace
    assert info.status.ready_chunks == 6
    assert {(holder.role, holder.pid) for holder in info.status.holders} == {
        ("worker", engine.pid),
        ("manager", engine.pid),
    }
    assert info.status.disk == "up"
    assert info.status.seconds_left is None
    engine.kill()
    until(lambda: (s := play.status()) is not None and not s.holders, "the engine is gone")
    status = play.status()
    assert status is not None
    assert status.seconds_left is not None
    assert 0 < status.seconds_left <= 600
