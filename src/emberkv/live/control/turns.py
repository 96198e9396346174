"""Whose turn it is with the manager: the scheduler's thread's, or for one short call another's.

The engine is idle between requests, so a command can't wait for its next step; and while the
engine is in a pass, from a step's first look-up to its end, nothing that was answered as a hit may
go. So a command runs at once between passes, and at the end of the pass during one:

    scheduler   │ lookup … lookup  prepare_load  step_end │          │ lookup …
    commands    │        (wait)                        run│ run, run │  (wait)

Look-ups take no lock; the first of a step says that a pass begins, and that takes it once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoTurnError
from functools import partial
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

from emberkv.errors import ControlError

TURN_S: Final = 5.0

P = ParamSpec("P")
R = TypeVar("R")


class Shared(Protocol):
    """Something that two threads call in turns, and that a defect of ours turns off."""

    serving: bool

    @property
    def turns(self) -> Turns: ...

    def give_up(self, error: Exception) -> None:
        """Turn off for good; an error of ours must not become the engine's."""
        ...


S = TypeVar("S", bound=Shared)


def exclusive(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method wait until no other thread is inside; for calls of some length."""

    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.turns.lock:
            return method(self, *args, **kwargs)

    call.__doc__ = method.__doc__
    return call


def contained(
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], R | None]:
    """Make a method exclusive, answer None once it is off, and turn it off if it raises."""

    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        with self.turns.lock:
            if not self.serving:
                return None
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self.give_up(error)
                return None

    call.__doc__ = method.__doc__
    return call


class Turns:
    """One lock, and the calls that wait for the end of a pass."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._in_pass = False
        self._waiting: deque[tuple[Future[None], Callable[[], None]]] = deque()

    def begin_pass(self) -> None:
        """The scheduler's first look-up of a step: from here on nothing may go."""
        with self.lock:
            self._in_pass = True

    def end_pass(self) -> None:
        """The scheduler's step ends, or there will be no more: whoever waited has its turn."""
        with self.lock:
            self._in_pass = False
            while self._waiting:
                future, call = self._waiting.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    call()
                except BaseException as error:  # the caller's, who waits for it
                    future.set_exception(error)
                else:
                    future.set_result(None)

    def between_passes(self, call: Callable[[], R], timeout_s: float = TURN_S) -> R:
        """Make a short call while no pass is under way, on this thread or the scheduler's.

        Raises what the call raises, `ControlError` if there is no turn in time.
        """
        results: list[R] = []
        future: Future[None] = Future()
        if not self.lock.acquire(timeout=timeout_s):
            raise ControlError(_BUSY)
        try:
            if not self._in_pass:
                return call()
            self._waiting.append((future, partial(_keep, call, results)))
        finally:
            self.lock.release()
        try:
            future.result(timeout_s)
        except NoTurnError:
            if future.cancel():
                raise ControlError(_BUSY) from None
            future.result()  # it runs just now
        return results[0]

    def beside(self, call: Callable[[], R], timeout_s: float = TURN_S) -> R:
        """Make a short call that only reads, also during a pass; look-ups go on beside it.

        Raises `ControlError` if there is no turn in time.
        """
        if not self.lock.acquire(timeout=timeout_s):
            raise ControlError(_BUSY)
        try:
            return call()
        finally:
            self.lock.release()


def _keep(call: Callable[[], R], results: list[R]) -> None:
    results.append(call())


_BUSY: Final = "the engine gave no turn in time: it is busy in one step, or hangs; try again"
