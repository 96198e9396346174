"""Turns: commands of other threads run between passes, and never in one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from emberkv.errors import ControlError, UsageError
from emberkv.live.control.turns import Turns


def in_background(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []

    def run() -> None:
        try:
            results.append(call())
        except (ControlError, UsageError) as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def wait_for_one(turns: Turns) -> None:
    """Until a call waits for the end of the pass."""
    while not turns._waiting:
        threading.Event().wait(0.001)


def test_between_passes_a_command_runs_at_once_on_its_own_thread() -> None:
    turns = Turns()
    assert turns.between_passes(threading.get_ident) == threading.get_ident()


def test_during_a_pass_it_runs_at_its_end() -> None:
    turns = Turns()
    turns.begin_pass()
    thread, results = in_background(lambda: turns.between_passes(threading.get_ident))
    wait_for_one(turns)
    assert results == []
    turns.end_pass()
    thread.join()
    assert results == [threading.get_ident()]  # the scheduler's thread


def test_reading_needs_no_end_of_a_pass() -> None:
    turns = Turns()
    turns.begin_pass()
    thread, results = in_background(lambda: turns.beside(lambda: 7))
    thread.join()
    assert results == [7]


def test_what_a_command_raises_is_its_own_and_not_the_schedulers() -> None:
    turns = Turns()

    def fail() -> None:
        raise UsageError("no")

    turns.begin_pass()
    thread, results = in_background(lambda: turns.between_passes(fail))
    wait_for_one(turns)
    turns.end_pass()
    thread.join()
    assert isinstance(results[0], UsageError)


def test_a_pass_that_does_not_end_is_not_waited_for_and_the_command_not_run_later() -> None:
    turns = Turns()
    ran: list[int] = []
    turns.begin_pass()
    with pytest.raises(ControlError, match="busy"):
        turns.between_passes(lambda: ran.append(1), timeout_s=0.01)
    turns.end_pass()
    assert ran == []


def test_a_lock_that_is_held_is_not_waited_for() -> None:
    turns = Turns()
    with turns.lock:
        thread, results = in_background(lambda: turns.beside(lambda: 1, timeout_s=0.01))
        thread.join()
    assert isinstance(results[0], ControlError)
