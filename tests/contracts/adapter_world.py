"""The engine adapters that a contract is kept by, each with a probe that listens, and how to run a request."""

from __future__ import annotations

import asyncio
import dataclasses
import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from undercurrent.adapters.base import EngineAdapter
from undercurrent.core import Probe, ProbeResult
from undercurrent.spec import ExtractionPoint

LAYERS, WIDTH, MAX_LEN = 4, 64, 256
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def hf(folder) -> EngineAdapter:
    from undercurrent.adapters.hf import HFEngineAdapter

    adapter = HFEngineAdapter()
    adapter.load_model(str(folder), dtype="float32", max_model_len=MAX_LEN)
    return adapter


def vllm(folder) -> EngineAdapter:
    pytest.importorskip("vllm")
    with warnings.catch_warnings():
        # vLLM's own imports warn; ours must not.
        warnings.simplefilter("ignore")
        import vllm.v1.engine.async_llm  # noqa: F401

    from undercurrent.adapters.vllm import VLLMEngineAdapter

    adapter = VLLMEngineAdapter()
    adapter.load_model(
        str(folder), dtype="float32", max_model_len=MAX_LEN, block_size=32, max_num_seqs=8, num_gpu_blocks_override=40
    )
    return adapter


ADAPTERS = {"hf": hf, "vllm": vllm}
LATE_TOKENS = {"hf": 0, "vllm": 2}
"""Tokens that may come after the one whose record made a probe ask for an abort."""


VLLM_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


@dataclass
class World:
    """One adapter and one router for all tests; what probes say is written down by request."""

    kind: str
    adapter: Any
    records: dict[tuple[str, str], list[Any]] = field(default_factory=lambda: defaultdict(list))
    says: dict[str, Any] = field(default_factory=dict)
    results: dict[str, dict[str, ProbeResult]] = field(default_factory=dict)
    router: Any = None
    registry: Any = None

    def run(self, request_id, points, prompt="a prompt", **kwargs) -> str:
        self.adapter.register_extraction(request_id, points)
        try:
            return self.adapter.generate(request_id, prompt, {"max_tokens": 6, **GREEDY, **kwargs}, self.router)
        finally:
            self.adapter.unregister_extraction(request_id)

    def stream(self, request_id, points, prompt="a prompt", **kwargs) -> list[Any]:
        async def inside():
            made = {"max_tokens": 6, **GREEDY, **kwargs}
            return [chunk async for chunk in self.adapter.stream(request_id, prompt, made, self.router)]

        self.adapter.register_extraction(request_id, points)
        return asyncio.run(inside())

    def places(self, request_id, point="p"):
        return [(record.token_pos, record.layer) for record in self.records[request_id, point]]


def listening(world: World) -> type[Probe]:
    class Listening(Probe):
        def on_activation(self, record):
            # The tensor is valid only during this call.
            kept = dataclasses.replace(record, tensor=np.asarray(record.tensor).copy())
            world.records[record.request_id, record.extraction_point_name].append(kept)
            says = world.says.get(record.request_id)
            return says(record) if says else None

        def on_end(self, ctx):
            seen = len(world.records[self.request_id, self.extraction_point_name])
            return ProbeResult(self.request_id, self.extraction_point_name, f"saw {seen}")

    return Listening


def point(name="p", layers=(0, 2), tensor_type="residual_stream", position="*", **fields) -> ExtractionPoint:
    return ExtractionPoint(
        name=name, layers=layers, tensor_type=tensor_type, position=position, probe_type="listening", **fields
    )


def three_letters(world):
    """Return a prompt and three letters of its continuation, a token each."""
    for number in range(20):
        prompt = f"{number} prompts"
        pieces = [chunk.text for chunk in world.stream(f"letters-{number}", [], prompt, max_tokens=60)]
        text = "".join(pieces)
        for at in range(5, 50):
            three = pieces[at : at + 3]
            if all(len(x) == 1 and x.isascii() and x.isprintable() for x in three) and text.count("".join(three)) == 1:
                return prompt, "".join(three)
    raise AssertionError("no continuation has three letters in a row")
