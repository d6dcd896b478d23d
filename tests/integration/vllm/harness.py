"""A running vLLM engine with capture, driven from plain tests; and what was read from its ring."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undercurrent.adapters.base import CaptureOrder, EngineDelta, EngineRequest
from undercurrent.adapters.vllm.engine import VLLMEngine
from undercurrent.capture.ring import Ring
from undercurrent.protocol.messages import Sampling
from undercurrent.spec import ExtractionPoint
from undercurrent.testing.ring_log import RingLog

LAYERS, WIDTH, MAX_LEN = 4, 64, 256
DEADLINE_S = 240


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
    point("generated", "residual_stream", (2,), "generated[*]"),
    point("strided", "mlp_out", (1, 3), "prompt[2:50]", stride=3),
)
TENSOR_TYPES = {p.name: p.tensor_type.value for p in POINTS}


@dataclass
class Run:
    """One finished request."""

    prompt: tuple[int, ...]
    deltas: list[EngineDelta]

    @property
    def sequence(self) -> list[int]:
        return [*self.prompt, *(t for d in self.deltas if d.index == 0 for t in d.token_ids)]


class Harness:
    """See the module.

    Args:
        model: folder of the model.
        engine_args: of vLLM.
        points: that requests may capture.
        options: further arguments of `VLLMEngine`.
    """

    def __init__(self, model: Path, points: Sequence[ExtractionPoint] = POINTS, **engine_args: Any) -> None:
        self.model = model
        self.ring = Ring.create(64 << 20)
        self._log = RingLog(self.ring.reader())
        self.streams, self.faults, self.read = self._log.streams, self._log.faults, self._log.read
        self.engine = VLLMEngine(
            str(model),
            engine_args={"dtype": "float32", "max_model_len": MAX_LEN, "block_size": 32, **engine_args},
            points=points,
            ring=self.ring,
            check_plans=True,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DEADLINE_S)

    def start(self) -> Harness:
        self.call(self.engine.start())
        return self

    def close(self) -> None:
        self.call(self.engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        self.ring.close()

    def request(
        self, name: str, prompt: Sequence[int], points: Sequence[str] | None = None, **sampling: Any
    ) -> EngineRequest:
        skip = sampling.pop("skip_prefix_cache", True)
        values = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling}
        names = tuple(TENSOR_TYPES) if points is None else tuple(points)
        order = CaptureOrder(request_id=name, attempt=1, points=names, partition=0) if names else None
        return EngineRequest(
            engine_id=f"{name}:1",
            prompt_token_ids=tuple(prompt),
            sampling=Sampling(**values),
            capture=order,
            skip_prefix_cache=skip,
        )

    def run(self, requests: Sequence[EngineRequest]) -> dict[str, Run]:
        """Run requests at once, then read the ring until all of their streams are closed."""

        async def one(request: EngineRequest) -> Run:
            deltas = [delta async for delta in self.engine.submit(request)]
            return Run(request.prompt_token_ids or (), deltas)

        async def every() -> list[Run]:
            return await asyncio.gather(*(one(request) for request in requests))

        runs = self.call(every())
        self.read_until(lambda: self._log.all_closed)
        return {r.engine_id.removesuffix(":1"): run for r, run in zip(requests, runs, strict=True)}

    def read_until(self, done: Any, deadline_s: float = 30) -> None:
        """Read the ring until something holds; the engine writes on in its own time."""
        import time

        end = time.monotonic() + deadline_s
        while True:
            self.read()
            if done():
                return
            assert time.monotonic() < end, "the ring did not show what was waited for"
            threading.Event().wait(0.005)

    def on_worker(self, function: Any, *args: object) -> Any:
        """Run a function in the worker; its first argument is the worker."""
        return self.call(self.engine.collective_rpc(function, *args))[0]


def start_all(harnesses: Sequence[Harness]) -> None:
    """Start some engines side by side: most of a start is waiting."""
    with ThreadPoolExecutor(len(harnesses)) as pool:
        list(pool.map(Harness.start, harnesses))
