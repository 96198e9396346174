"""The worker of a rig: vLLM's connector on its worker side, over a model that computes nothing."""

from __future__ import annotations

from typing import Any

from fake_model import DeviceMemory, Text, mix, next_token
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput


class _Running:
    """What the worker knows of one request."""

    def __init__(self, text: Text, blocks: list[int]) -> None:
        self.text = text
        self.blocks = blocks
        self.known_tokens = len(text.tokens)


class FakeWorker:
    """The worker side of an engine, in the order of vLLM's own model runner."""

    def __init__(self, connector: Any, memory: DeviceMemory) -> None:
        self.connector = connector
        self.memory = memory
        self.weights = 1
        self._running: dict[str, _Running] = {}
        connector.register_kv_caches(memory.kv_caches)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Carry out one scheduled step."""
        metadata = output.kv_connector_metadata
        self.connector.handle_preemptions(metadata)
        self._update(output)
        self.connector.bind_connector_metadata(metadata)
        assert not output.has_sync_kv_loads
        names = list(output.num_scheduled_tokens)
        first = self._first_positions(output)
        sampled = [
            self._forward(name, first[name], output.num_scheduled_tokens[name]) for name in names
        ]
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        result = self.connector.get_transfer_results(output.finished_req_ids)
        transfers = KVConnectorOutput(
            finished_sending=result.finished_sending,
            finished_recving=result.finished_recving,
            kv_connector_stats=self.connector.get_kv_connector_stats(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )
        self.connector.clear_connector_metadata()
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=transfers,
        )

    def _update(self, output: SchedulerOutput) -> None:
        for name in output.finished_req_ids:
            self._running.pop(name, None)
        for new in output.scheduled_new_reqs:
            text = self.text_of(new)
            self._running[new.req_id] = _Running(text, list(new.block_ids[0]))
        cached = output.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            running = self._running[name]
            if name in cached.all_token_ids:
                tokens = list(cached.all_token_ids[name])
                old = running.text
                running.text = Text(
                    tokens, self._seeded(old.seed_parts), old.seed_parts, old.images
                )
                running.known_tokens = len(tokens)
            blocks = cached.new_block_ids[at]
            if name in cached.resumed_req_ids:
                assert blocks is not None
                running.blocks = list(blocks[0])
            elif blocks is not None:
                running.blocks += blocks[0]

    def text_of(self, request: Any) -> Text:
        """A request's prompt, with everything that its KV depends on."""
        adapter = "" if request.lora_request is None else request.lora_request.lora_name
        arguments = request.sampling_params.extra_args or {}
        parts = (adapter, arguments.get("salt") or "")
        images = {
            position: hash(image.identifier) & 0xFFFF_FFFF
            for image in request.mm_features
            for position in range(
                image.mm_position.offset, image.mm_position.offset + image.mm_position.length
            )
        }
        return Text(list(request.prompt_token_ids), self._seeded(parts), parts, images)

    def _seeded(self, parts: tuple[str, ...]) -> int:
        seed = self.weights
        for byte in "\0".join(parts).encode():
            seed = mix(seed, byte)
        return seed

    @staticmethod
    def _first_positions(output: SchedulerOutput) -> dict[str, int]:
        first = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        first.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return first

    def _forward(self, name: str, first: int, count: int) -> list[int]:
        """Check what is built on, compute `count` more positions, and sample if all is read."""
        running = self._running[name]
        end = first + count
        right = running.text.kv_until(end)
        if first:
            found = self.memory.read(running.blocks, 0, first)
            wrong = (found != [right[:first]]).any(axis=0).nonzero()[0]
            assert not len(wrong), (
                f"{name}: KV of {len(wrong)} of {first} positions is wrong, first {wrong[0]}"
            )
            assert int(found[0][-1]) == right[first - 1]
        self.memory.write(running.blocks, first, right[first:end])
        if end < running.known_tokens:
            return []
        running.known_tokens = end + 1
        return [next_token(right[end - 1])]
