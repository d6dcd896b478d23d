"""An engine of the kind hf with its ring, and requests to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from undercurrent.adapters.base import CaptureOrder, EngineDelta, EngineRequest
from undercurrent.adapters.hf import HFEngine
from undercurrent.capture.ring import Ring
from undercurrent.protocol.messages import Sampling
from undercurrent.spec import ExtractionPoint
from undercurrent.testing.ring_log import RingLog

LAYERS, WIDTH, MAX_LEN = 4, 64, 160
FAMILIES = ("llama", "gpt2", "qwen2", "gemma", "gemma2")


def point(name: str, tensor_type: str, layers: Sequence[int], position: str = "*", **fields: Any) -> ExtractionPoint:
    return ExtractionPoint(
        name=name, layers=layers, tensor_type=tensor_type, position=position, execution_mode="async", **fields
    )


ALL = tuple(range(LAYERS))
POINTS = (
    point("residual", "residual_stream", ALL),
    point("attention", "attn_out", ALL),
    point("mlp", "mlp_out", ALL),
    point("norm", "final_norm", (LAYERS,)),
    point("entering", "layer_input", ALL),
    point("generated", "residual_stream", (2,), "generated[*]"),
    point("strided", "mlp_out", (3, 1), "prompt[2:50]", stride=3),
)
EVERYWHERE = tuple(p.name for p in POINTS[:5])


class Bench:
    """A running engine and its ring."""

    def __init__(self, engine: HFEngine, log: RingLog, ring: Ring) -> None:
        self.engine = engine
        self.log = log
        self.ring = ring

    def request(
        self, name: str, prompt: Sequence[int] | str, points: Sequence[str] = EVERYWHERE, **sampling: Any
    ) -> EngineRequest:
        order = CaptureOrder(request_id=name, attempt=1, points=tuple(points), partition=0) if points else None
        given: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": tuple(prompt)}
        values = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling}
        return EngineRequest(engine_id=f"{name}#1", sampling=Sampling(**values), capture=order, **given)

    async def deltas(self, request: EngineRequest) -> list[EngineDelta]:
        checked = await self.engine.check(request)
        return [delta async for delta in self.engine.submit(checked)]

    async def run(self, *requests: EngineRequest) -> list[list[EngineDelta]]:
        """Run requests at once, and read the ring: every stream is closed before its request's last delta."""
        found = await asyncio.gather(*(self.deltas(request) for request in requests))
        self.log.read()
        assert self.log.all_closed
        return list(found)


@contextlib.asynccontextmanager
async def bench_of(model: Path, points: Sequence[ExtractionPoint] = POINTS, ring_bytes: int = 16 << 20, **options: Any):
    ring = Ring.create(ring_bytes)
    args = {"dtype": "float32", "max_model_len": MAX_LEN, **options.pop("engine_args", {})}
    engine = HFEngine(str(model), engine_args=args, points=points, ring=ring, check_plans=True, **options)
    log = RingLog(ring.reader())
    try:
        await engine.start()
        yield Bench(engine, log, ring)
    finally:
        await engine.close()
        ring.close()
