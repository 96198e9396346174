"""A scripted engine whose manager is served on a control socket, as the command line meets it."""

from __future__ import annotations

from collections.abc import Sequence

from scripted_engine import Engine, chain

from emberkv.domain.namespace import Namespace
from emberkv.domain.types import DISK, RAM, ChunkKey, RequestId
from emberkv.live.control.server import ControlServer, start_control
from emberkv.live.lookup import Lookup
from emberkv.live.operations import About, Operations

CHUNK_TOKENS = 10


def hashed(tokens: Sequence[int], cache_salt: str | None) -> list[ChunkKey]:
    """Chunks named as `chain` names them: by the prompt's first token."""
    name = "xyz"[tokens[0]] if tokens else "x"
    return chain(name + (cache_salt or ""), len(tokens) // CHUNK_TOKENS)


def prompt(name: str, chunks: int, more_tokens: int = 0) -> list[int]:
    """Token ids for which `hashed` gives a chain of that name."""
    return ["xyz".index(name)] * (chunks * CHUNK_TOKENS + more_tokens)


def operations_on(
    engine: Engine,
    instance: str = "blue",
    *,
    root_dir: str | None = None,
    namespace: Namespace | None = None,
) -> Operations:
    """The commands on an engine's manager."""
    about = About(
        instance,
        CHUNK_TOKENS,
        namespace=namespace or Namespace.of({"model.name": "tiny"}),
        root_dir=root_dir,
        keeper_pid=lambda: 4711,
        hash_prompt=hashed,
    )
    engine.manager.fates.policies.update({RAM: "lru", DISK: "lru"})
    return Operations(engine.manager, about, lambda: engine.now_s)


def served(operations: Operations) -> ControlServer:
    """The commands on a socket; to be closed."""
    server = start_control(operations)
    assert server is not None
    return server


def serve(engine: Engine, request: RequestId, keys: Sequence[ChunkKey]) -> list[Lookup]:
    """A whole request, as an engine with our connector does it: asked, loaded, computed, over."""
    manager = engine.manager
    facts = manager.begin(request)
    facts.external_id = f"client-{request}"
    manager.describe(request, len(keys) * CHUNK_TOKENS + 3, lambda: keys)
    answers = engine.ask(request, keys)
    while Lookup.RETRY in answers:
        engine.step()
        engine.driver.end()
        answers = engine.ask(request, keys)
    hits = [key for key, answer in zip(keys, answers, strict=False) if answer is Lookup.HIT]
    if hits:
        manager.prepare_load(request, hits)
        levels = [manager.origin(request, key) for key in hits]
        facts.ram_tokens = levels.count(RAM) * CHUNK_TOKENS
        facts.disk_tokens = levels.count(DISK) * CHUNK_TOKENS
        engine.step()
        manager.complete_load(request)
    rest = keys[len(hits) :]
    if rest:
        admitted = manager.prepare_store(request, rest, hits[-1] if hits else None) or []
        manager.complete_store(request, [key for key, _ in admitted])
    engine.step()
    engine.driver.end()
    engine.step()
    manager.finish(request)
    return answers
