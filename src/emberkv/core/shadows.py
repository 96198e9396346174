"""Shadows: spare rows of RAM to which a canary request writes what a tier keeps already.

    open          the kept chunks are pinned: they are what the computed ones are held against
    offered       each of them that the engine is about to store gets a spare row
    written       both rows can be compared: kept, pinned; spare, held
    compared      pin and spare row are given back
    ended         nothing more will be offered: what was not, is unpinned

A chunk without a spare row is not compared, and nothing is evicted to get one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from emberkv.core.residents import Resident, Residents
from emberkv.domain.types import RAM, ChunkKey, Level, RequestId, Slot


@dataclass(frozen=True, slots=True, eq=False)
class Shadow:
    """A kept chunk, the tier it came from, and the spare row for what is computed instead."""

    kept: Resident
    origin: Level
    spare: Slot

    @property
    def key(self) -> ChunkKey:
        return self.kept.key


@dataclass(slots=True)
class _Watched:
    """What one request is compared with."""

    waiting: dict[ChunkKey, tuple[Resident, Level]]
    writing: dict[ChunkKey, Shadow] = field(default_factory=dict)
    has_ended: bool = False


class Shadows:
    """All canary requests under way.

    Without spare rows to `use`, nothing is ever compared.
    """

    def __init__(self, ram: Residents) -> None:
        self._ram = ram
        self._reserve: Callable[[int], Sequence[Slot]] = lambda _: ()
        self._release: Callable[[Sequence[Slot]], None] = lambda _: None
        self._watched: dict[RequestId, _Watched] = {}
        self._comparing: set[Shadow] = set()

    def use(
        self,
        reserve: Callable[[int], Sequence[Slot]],
        release: Callable[[Sequence[Slot]], None],
    ) -> None:
        """`reserve` takes up to so many spare rows out of use; `release` gives them back."""
        self._reserve = reserve
        self._release = release

    def pinned(self) -> list[ChunkKey]:
        """For checks: the kept chunks that are pinned, once per pin."""
        waiting = [key for each in self._watched.values() for key in each.waiting]
        writing = [key for each in self._watched.values() for key in each.writing]
        return [*waiting, *writing, *(shadow.key for shadow in self._comparing)]

    def __contains__(self, request: RequestId) -> bool:
        return request in self._watched

    def open(
        self, request: RequestId, kept: Sequence[Resident], origins: Mapping[ChunkKey, Level]
    ) -> None:
        """Pin the READY chunks that the request would have been served, and computes instead."""
        self._ram.pin_run(kept)
        self._watched[request] = _Watched(
            {resident.key: (resident, origins.get(resident.key, RAM)) for resident in kept}
        )

    def offered(self, request: RequestId, keys: Sequence[ChunkKey]) -> list[Shadow]:
        """Spare rows for offered chunks that are kept, in their order, as far as there are any."""
        watched = self._watched.get(request)
        if watched is None:
            return []
        wanted = [key for key in keys if key in watched.waiting]
        spares = self._reserve(len(wanted)) if wanted else ()
        shadows = [
            Shadow(*watched.waiting.pop(key), spare)
            for key, spare in zip(wanted, spares, strict=False)
        ]
        watched.writing.update((shadow.key, shadow) for shadow in shadows)
        return shadows

    def written(self, request: RequestId, keys: Collection[ChunkKey]) -> list[Shadow]:
        """The engine has written these chunks; those with a spare row can be compared now."""
        watched = self._watched.get(request)
        if watched is None:
            return []
        done = [watched.writing.pop(key) for key in keys if key in watched.writing]
        self._comparing.update(done)
        if watched.has_ended and not watched.writing:
            del self._watched[request]
        return done

    def compared(self, shadow: Shadow) -> None:
        """A comparison has ended; also after a reset, which has taken the pin."""
        if shadow in self._comparing:
            self._comparing.remove(shadow)
            self._ram.unpin_run([shadow.kept])
        self._release([shadow.spare])

    def ended(self, request: RequestId) -> None:
        """The request is over; rows that are still being written are waited for."""
        watched = self._watched.get(request)
        if watched is None:
            return
        self._ram.unpin_run([resident for resident, _ in watched.waiting.values()])
        watched.waiting.clear()
        watched.has_ended = True
        if not watched.writing:
            del self._watched[request]

    def clear(self) -> list[Slot]:
        """Forget everything: the tier's residents, and their pins, are gone.

        Returns spare rows that the engine may still write to, for the caller to release when it
        does not any more. Rows being compared are released by `compared`.
        """
        fenced = [
            shadow.spare for each in self._watched.values() for shadow in each.writing.values()
        ]
        self._watched.clear()
        self._comparing.clear()
        return fenced
