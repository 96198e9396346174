"""vLLM's OffloadingManager in our words: keys and requests are translated, nothing is decided."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from emberkv.domain.hints import NO_HINTS, Hints, read_hints
from emberkv.domain.types import DISK, RAM, ChunkKey, RequestId, Slot
from emberkv.engines.vllm.metrics import stats_of
from emberkv.engines.vllm.slots import ArenaSlots
from emberkv.live.lookup import Lookup
from emberkv.live.manager import TierManager

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )

# Asked for every chunk of every waiting request: members of enums, as names, cost most of it.
_HIT, _RETRY = Lookup.HIT, Lookup.RETRY
_THEIR_HIT, _THEIR_RETRY, _THEIR_MISS = LookupResult.HIT, LookupResult.RETRY, LookupResult.MISS
_SOURCES = {RAM: CacheHitSource.HOST, DISK: CacheHitSource.DISK}


class _Chain:
    """The last chunk of a request that we were told of: its end token and key."""

    __slots__ = ("end_token", "key")

    def __init__(self) -> None:
        self.end_token = 0
        self.key: ChunkKey | None = None


class EmberOffloadingManager(OffloadingManager):
    """Runs on EngineCore's main thread. `close` releases what the spec opened for it."""

    def __init__(
        self, manager: TierManager, tokens_per_chunk: int, close: Callable[[], None]
    ) -> None:
        self.tiers = manager
        self._tokens_per_chunk = tokens_per_chunk
        self._close = close

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    def on_new_request(self, req_context: ReqContext, **_: Any) -> RequestOffloadingContext:
        self.tiers.begin(RequestId(req_context.req_id), self._hints(req_context))
        req_context.set_state(_Chain())
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext, **_: Any) -> None:
        self.tiers.finish(RequestId(req_context.req_id))

    def _hints(self, req_context: ReqContext) -> Hints:
        """What the request says of itself, in `kv_transfer_params: {"emberkv": {…}}`."""
        params = req_context.kv_transfer_params
        if not isinstance(params, Mapping) or "emberkv" not in params:
            return NO_HINTS
        read = read_hints(params["emberkv"])
        self.tiers.complaints.take(read.unusable)
        return read.hints

    # ── look up and load ─────────────────────────────────────────────────────────────────────

    def lookup(self, key: OffloadKey, req_context: ReqContext, **_: Any) -> LookupResult:
        answer = self.tiers.lookup(req_context.req_id, key)
        if answer is _HIT:
            return _THEIR_HIT
        return _THEIR_RETRY if answer is _RETRY else _THEIR_MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext, **_: Any) -> CacheHitSource:
        return _SOURCES[self.tiers.origin(RequestId(req_context.req_id), ChunkKey(key))]

    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext, **_: Any
    ) -> LoadStoreSpec:
        chunks = [ChunkKey(key) for key in keys]
        request = RequestId(req_context.req_id)
        slots = self.tiers.prepare_load(request, chunks)
        self._note_loaded(req_context, chunks)
        self._extend(req_context, chunks)
        return ArenaSlots(list(slots))

    def complete_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext, **_: Any
    ) -> None:
        self.tiers.complete_load(RequestId(req_context.req_id))

    def _note_loaded(self, req_context: ReqContext, chunks: list[ChunkKey]) -> None:
        """Note what a request's prompt gets from where, at its first admission."""
        request = RequestId(req_context.req_id)
        facts = self.tiers.facts(request)
        if facts is None or facts.preemptions:
            return
        facts.ram_tokens = facts.disk_tokens = 0
        for chunk in chunks:
            end = req_context.get_offload_key_position(OffloadKey(chunk)) or 0
            # The device may hold the beginning of the first chunk.
            tokens = end - max(end - self._tokens_per_chunk, facts.device_tokens)
            if self.tiers.origin(request, chunk) == DISK:
                facts.disk_tokens += tokens
            else:
                facts.ram_tokens += tokens

    # ── store ────────────────────────────────────────────────────────────────────────────────

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, **_: Any
    ) -> PrepareStoreOutput:
        chunks = [ChunkKey(key) for key in keys]
        first_end = req_context.get_offload_key_position(OffloadKey(chunks[0])) or 0
        begins_at = first_end - self._tokens_per_chunk
        chain = req_context.get_state(_Chain)
        known = chain is not None and chain.end_token == begins_at
        parent = chain.key if chain is not None and known and begins_at else None
        admitted: list[tuple[ChunkKey, Slot]] = []
        if known or begins_at <= 0:  # never keep a chunk without knowing what it follows
            request = RequestId(req_context.req_id)
            first = max(0, begins_at)
            admitted = self.tiers.prepare_store(request, chunks, parent, first) or []
        self._extend(req_context, chunks)
        return PrepareStoreOutput(
            keys_to_store=[OffloadKey(key) for key, _ in admitted],
            store_spec=ArenaSlots([slot for _, slot in admitted]),
            evicted_keys=[],
        )

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        **_: Any,
    ) -> None:
        chunks = {ChunkKey(key) for key in keys}
        self.tiers.complete_store(RequestId(req_context.req_id), chunks)

    def _extend(self, req_context: ReqContext, chunks: list[ChunkKey]) -> None:
        """Remember where the request's chain ends, to name the parent of what comes next."""
        chain = req_context.get_state(_Chain)
        if chain is not None:
            last = chunks[-1]
            chain.end_token = req_context.get_offload_key_position(OffloadKey(last)) or 0
            chain.key = last

    # ── steps ────────────────────────────────────────────────────────────────────────────────

    def on_schedule_end(self, context: ScheduleEndContext, **_: Any) -> None:
        self.tiers.step_end(
            [RequestId(request) for request in context.new_req_ids],
            [RequestId(request) for request in context.preempted_req_ids],
        )

    def reset_cache(self, **_: Any) -> None:
        self.tiers.reset()

    def take_events(self, **_: Any) -> Iterable[OffloadingEvent]:
        return ()

    def get_stats(self, **_: Any) -> OffloadingConnectorStats | None:
        samples = self.tiers.samples()
        return stats_of(samples) if samples else None

    def shutdown(self, **_: Any) -> None:
        self.tiers.shutdown()
        self._close()
