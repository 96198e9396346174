"""The keeper: who is attached, who may be, and when it ends.

Hello ─► waits for the engine before to be gone, for the namespace, for memory, for the disk
      └► Attached, or Refused with a reason
last holder gone ─► `keep_s` for a new engine, then the process ends; after Bye at once
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from typing import Final

import msgspec

from emberkv.domain.namespace import Namespace
from emberkv.errors import EmberError, KeeperError, UsageError
from emberkv.live.keeper.channel import MAX_FRAME_BYTES, Channel, require_same_user
from emberkv.live.keeper.disk import OpenStorage
from emberkv.live.keeper.loop import Loop
from emberkv.live.keeper.messages import (
    Attached,
    Bye,
    Hello,
    Holder,
    Message,
    PopulatedSlots,
    Refusal,
    Refused,
    ResetTiers,
    Role,
    Seal,
    Status,
    StatusRequest,
    Submit,
    ToKeeper,
    decode_for_keeper,
    encode,
)
from emberkv.live.keeper.tenancy import Household, Tenancy, require_arena

MAX_STRANGERS_BYTES: Final = 1 << 20
"""Of one message from who is not attached, and of what may wait for such a one to read it."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the keeper waits for what."""

    predecessor_s: float = 3.0
    """For the engine before to close its sockets; then it counts as a second live engine."""

    disk_s: float = 30.0
    """For the disk to open; then the engine starts without."""

    first_hello_s: float = 60.0
    """For anyone to attach at all."""

    settle_s: float = 10.0
    """For what an engine left queued, before its successor hears that the disk is down."""

    drain_s: float = 10.0
    """For write-behinds under way, after a clean stop or a SIGTERM."""


@dataclass(eq=False, slots=True)
class _Peer:
    channel: Channel
    since_s: float
    hello: Hello | None = None
    memory_fd: int | None = None
    inside: bool = False  # counts as one of the engine's processes
    attached: bool = False  # and has been told so


class Keeper:
    """Serves one instance on a listening socket until it has nothing left to keep."""

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        instance: str,
        open_storage: OpenStorage,
        patience: Patience | None = None,
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._instance = instance
        self._patience = patience or Patience()
        self._house = Household(
            loop, open_storage, self._settle, self._tell_workers, self._patience.settle_s
        )
        self._tenancy: Tenancy | None = None
        self._peers: list[_Peer] = []
        self._turned_away: set[str] = set()
        self._ending = False
        self._drained = False
        self._began_s = loop.now_s()
        self._ends_at_s: float | None = None
        listener.setblocking(False)
        listener.listen()  # again: what a peer is told of this end is the last caller's process
        loop.watch(listener.fileno(), self._accept)
        self._end_after(self._patience.first_hello_s)

    # ── sockets ──────────────────────────────────────────────────────────────────────────────

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        try:
            require_same_user(sock)
        except KeeperError as error:
            _log.warning("%s", error)
            sock.close()
            return
        peer = _Peer(Channel(sock, takes_descriptors=True), self._loop.now_s())
        peer.channel.max_frame_bytes = MAX_STRANGERS_BYTES
        self._peers.append(peer)
        self._loop.watch(peer.channel, lambda: self._ready(peer))

    def _ready(self, peer: _Peer) -> None:
        channel = peer.channel
        channel.flush()
        for frame in channel.receive():
            try:
                self._require_reader(peer)
                self._hear(peer, decode_for_keeper(frame))
            except (msgspec.MsgspecError, KeeperError) as error:
                _log.warning("a message that is none: %s", error)
                channel.close()
                break
        self._after_sending(peer)

    @staticmethod
    def _require_reader(peer: _Peer) -> None:
        """Raise `KeeperError` for who asks without reading what it is answered."""
        if not peer.attached and peer.channel.unsent_bytes > MAX_STRANGERS_BYTES:
            raise KeeperError("a peer asks on and reads no answer")

    def _after_sending(self, peer: _Peer) -> None:
        channel = peer.channel
        if channel.closed:
            self._gone(peer)
        else:
            writing = channel.unsent_bytes > 0
            self._loop.expect_writable(channel, lambda: self._ready(peer), writing=writing)

    def _send(self, peer: _Peer, message: Message, descriptor: int | None = None) -> None:
        peer.channel.send(encode(message), descriptor)
        self._after_sending(peer)

    def _deliver(self, peer: _Peer, frame: bytes) -> None:
        peer.channel.send(frame)
        self._after_sending(peer)

    def _gone(self, peer: _Peer) -> None:
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        self._loop.forget(peer.channel)
        peer.channel.close()
        if peer.memory_fd is not None:
            os.close(peer.memory_fd)
        self._if_left_alone()
        self._settle()

    # ── messages ─────────────────────────────────────────────────────────────────────────────

    def _hear(self, peer: _Peer, message: ToKeeper) -> None:
        tenancy = self._tenancy
        match message:
            case Hello() if peer.hello is not None:
                raise KeeperError("a second Hello")
            case Hello():
                peer.hello = message
                if peer.memory_fd is not None:  # of a Hello that was turned down
                    os.close(peer.memory_fd)
                peer.memory_fd = peer.channel.take_descriptor()
                peer.since_s = self._loop.now_s()
                self._loop.call_later(self._patience.predecessor_s, self._settle)
                self._settle()
            case StatusRequest():
                self._send(peer, self._status())
            case _ if tenancy is None or not self._is_manager(peer):
                _log.warning("ignored from a peer that is no manager: %s", type(message).__name__)
            case Submit():
                tenancy.submit(message.copies)
            case Seal():
                tenancy.seal(message.slots)
            case ResetTiers():
                tenancy.reset(message.number, renewed=message.renewed)
            case Bye():
                self._begin_to_end()

    @staticmethod
    def _is_manager(peer: _Peer) -> bool:
        return peer.attached and peer.hello is not None and peer.hello.role is Role.MANAGER

    # ── who may be here ──────────────────────────────────────────────────────────────────────

    def _insiders(self) -> list[tuple[_Peer, Hello]]:
        return [(p, p.hello) for p in self._peers if p.inside and p.hello is not None]

    def _settle(self) -> None:
        """Answer every Hello whose turn has come."""
        for peer in list(self._peers):
            hello = peer.hello
            if hello is None or peer.attached or peer.channel.closed:
                continue
            try:
                answer = self._consider(peer, hello)
            except EmberError as error:
                kind = Refusal.CONFIG if isinstance(error, UsageError) else Refusal.WORLD
                answer = Refused(kind, str(error))
            except Exception as error:
                _log.exception("a Hello that nothing can be made of")  # others still wait
                answer = Refused(Refusal.WORLD, str(error))
            if isinstance(answer, Refused):
                _log.info("turned away: %s", answer.reason)
                peer.hello, peer.inside = None, False
                self._send(peer, answer)
                self._loop.post(self._if_left_alone)
            elif answer is not None:
                self._attach(peer, hello, answer)

    def _consider(self, peer: _Peer, hello: Hello) -> Tenancy | Refused | None:
        """The tenancy that a peer may join now, why it may not, or None: not yet."""
        if self._ending:
            return Refused(Refusal.ENDING, "the keeper is ending")
        if not peer.inside:
            answer = self._consider_entry(peer, hello)
            if not peer.inside:
                return answer
        tenancy = self._tenancy
        if tenancy is None or hello.role is Role.WORKER:
            return tenancy
        return self._consider_manager(hello, tenancy)

    def _consider_entry(self, peer: _Peer, hello: Hello) -> Refused | None:
        """Let a peer into the present tenancy, or a new one; or say why not, or None: not yet."""
        insiders = self._insiders()
        is_late = self._loop.now_s() - peer.since_s >= self._patience.predecessor_s
        if hello.engine_id in self._turned_away or (
            is_late and any(other.engine_id != hello.engine_id for _, other in insiders)
        ):
            self._turned_away.add(hello.engine_id)
            pids = ", ".join(str(other.pid) for _, other in insiders) or "gone by now"
            return Refused(
                Refusal.SECOND_ENGINE,
                f"another engine (process {pids}) has the keeper of instance '{self._instance}'",
            )
        if any(_is_in_the_way(hello, other) for _, other in insiders):
            return _twice(hello) if is_late else None
        if not insiders or peer.memory_fd is not None:
            if hello.namespace is None or (hello.rejoins and peer.memory_fd is None):
                return None  # its workers, or its manager with the memory, come first
            self._move_in(peer, hello)
        if self._tenancy is not None:
            difference = _difference(hello, self._tenancy)
            if difference:
                return Refused(Refusal.CONFIG, difference)
            peer.inside = True
        return None

    def _consider_manager(self, hello: Hello, tenancy: Tenancy) -> Tenancy | Refused | None:
        workers = sum(other.role is Role.WORKER for _, other in self._insiders())
        if workers < hello.worker_count or not tenancy.is_ready:
            return None
        if tenancy.memory_failure is not None and not tenancy.populated_slots:
            return Refused(Refusal.WORLD, tenancy.memory_failure)
        disk = tenancy.disk
        if disk is not None and not disk.slot_count and not hello.rejoins:
            if disk.is_users_mistake:
                return Refused(Refusal.CONFIG, disk.failure)
            if hello.config.refuse_without_disk:
                return Refused(Refusal.WORLD, disk.failure)
        return tenancy

    def _move_in(self, peer: _Peer, hello: Hello) -> None:
        """Make room for an engine: what is kept, if it may have it, or new."""
        if peer.memory_fd is not None:
            require_arena(peer.memory_fd, hello.config)
        before = self._tenancy
        self._ends_at_s = None
        if before is not None:
            if peer.memory_fd is None and before.succeed(hello):
                _log.info("engine %s takes the arena over", hello.engine_id)
                self._give_disk_time(before)
                return
            self._tenancy = None
            before.end(keep_memory=_is_same(peer.memory_fd, before.arena.fd))
        self._tenancy = Tenancy(self._house, hello, peer.memory_fd)
        self._give_disk_time(self._tenancy)

    def _give_disk_time(self, tenancy: Tenancy) -> None:
        self._loop.call_later(self._patience.disk_s, tenancy.give_up_opening)

    def _attach(self, peer: _Peer, hello: Hello, tenancy: Tenancy) -> None:
        peer.attached = True
        peer.channel.max_frame_bytes = MAX_FRAME_BYTES
        disk = tenancy.disk
        failure = disk.failure if disk is not None and not disk.slot_count else None
        answer = Attached(
            os.getpid(),
            tenancy.namespace.fields,
            tenancy.slot_counts,
            tenancy.taken_over,
            failure if hello.role is Role.MANAGER else None,
        )
        self._send(peer, answer, tenancy.arena.fd)
        if hello.role is Role.MANAGER:
            tenancy.attach(lambda frame: self._deliver(peer, frame))
        else:
            self._send(peer, PopulatedSlots(0, tenancy.populated_slots))

    def _tell_workers(self, message: Message) -> None:
        for peer in list(self._peers):
            if peer.attached and peer.hello is not None and peer.hello.role is Role.WORKER:
                self._send(peer, message)

    # ── the end ──────────────────────────────────────────────────────────────────────────────

    def _if_left_alone(self) -> None:
        """If the last holder is gone: keep what is worth it, for as long as was asked for."""
        tenancy = self._tenancy
        if self._insiders():
            return
        if self._ending:
            self._end_if_over()
        elif self._ends_at_s is not None:
            pass  # is alone already
        elif tenancy is not None and tenancy.config.keep_s > 0 and tenancy.ready_chunks:
            self._end_after(tenancy.config.keep_s)
            if tenancy.disk is not None:
                tenancy.disk.when_idle(self._release_disk)
        else:
            self._loop.stop()

    def _release_disk(self) -> None:
        """Let others use the disk while nobody is served from it."""
        if self._tenancy is not None and self._tenancy.disk is not None and not self._insiders():
            self._tenancy.disk.close()

    def _end_after(self, delay_s: float) -> None:
        ends_at_s = self._ends_at_s = self._loop.now_s() + delay_s

        def end() -> None:
            if self._ends_at_s == ends_at_s and not self._insiders():
                self._loop.stop()

        self._loop.call_later(delay_s, end)

    def terminate(self) -> None:
        """End soon, whoever is attached: write what was asked for, for a bounded time."""
        for peer in list(self._peers):
            self._ready(peer)  # what was sent before the signal counts
        self._begin_to_end(at_once=True)

    def _begin_to_end(self, *, at_once: bool = False) -> None:
        self._ending = True
        self._settle()
        disk = None if self._tenancy is None else self._tenancy.disk

        def drained() -> None:
            self._drained = True
            if at_once:
                self._loop.stop()
            self._end_if_over()

        self._loop.call_later(self._patience.drain_s, drained)
        if disk is None:
            drained()
        else:
            disk.when_idle(drained)

    def _end_if_over(self) -> None:
        if self._drained and not self._insiders():
            self._loop.stop()

    def close(self) -> None:
        """Let go of memory, storage and address."""
        if self._tenancy is not None:
            self._tenancy.end()
        self._listener.close()

    def _status(self) -> Status:
        tenancy, now_s = self._tenancy, self._loop.now_s()
        insiders = self._insiders()
        ends_at_s = None if insiders else self._ends_at_s
        disk = None if tenancy is None else tenancy.disk
        return Status(
            pid=os.getpid(),
            instance=self._instance,
            namespace=() if tenancy is None else tenancy.namespace.fields,
            arena_bytes=0 if tenancy is None else tenancy.arena.geometry.total_bytes,
            ready_chunks=0 if tenancy is None else tenancy.ready_chunks,
            holders=tuple(Holder(h.role, h.pid, h.rank) for _, h in insiders),
            age_s=now_s - self._began_s,
            seconds_left=None if ends_at_s is None else max(0.0, ends_at_s - now_s),
            disk="none" if disk is None else disk.state.value,
            chunks_under_way=0 if disk is None else disk.chunks_under_way,
        )


def _is_in_the_way(hello: Hello, other: Hello) -> bool:
    """Whether an insider must be gone before a peer can enter: another engine, or its double."""
    if other.engine_id != hello.engine_id:
        return True
    return (other.role, other.rank) == (hello.role, hello.rank)


def _twice(hello: Hello) -> Refused:
    return Refused(
        Refusal.CONFIG,
        f"the {hello.role} {hello.rank} of engine_id '{hello.engine_id}' is attached already; "
        "give every engine an engine_id of its own",
    )


def _difference(hello: Hello, tenancy: Tenancy) -> str | None:
    """How what a peer asks for differs from what its engine's other side asked for.

    Who brings no namespace takes the other side's, and with it all but the arena's geometry.
    """
    names: tuple[str, ...] = ("slot_count", "chunk_bytes")
    if hello.namespace is not None:
        names = hello.config.__struct_fields__
        fields = tenancy.namespace.differences(Namespace(hello.namespace))
        if fields:
            return f"manager and workers differ in the namespace's {', '.join(fields)}"
    differing = [n for n in names if getattr(hello.config, n) != getattr(tenancy.config, n)]
    return f"manager and workers ask for different {', '.join(differing)}" if differing else None


def _is_same(one_fd: int | None, other_fd: int) -> bool:
    return one_fd is not None and os.path.samestat(os.fstat(one_fd), os.fstat(other_fd))
