"""An engine to examine: it runs requests at once, and everything that was captured of them is kept."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from undercurrent.adapters.base import CaptureOrder, EngineRequest
from undercurrent.adapters.vllm.engine import VLLMEngine
from undercurrent.capture.ring import Ring, RingStats
from undercurrent.cli.doctor.findings import Rows
from undercurrent.errors import CaptureError
from undercurrent.protocol.messages import Sampling
from undercurrent.spec import ExtractionPoint
from undercurrent.testing.ring_log import CapturedStream, RingLog

RING_BYTES = 256 << 20
_READ_S = 0.005
_CLOSE_S = 30.0

_Result = TypeVar("_Result")


class Patient:
    """See the module. It reads the ring while it runs, as a publisher would.

    Args:
        model: folder or name.
        points: to capture at.
        engine_args: of vLLM.
    """

    def __init__(self, model: str, points: Sequence[ExtractionPoint], engine_args: Mapping[str, Any]) -> None:
        self.points = tuple(points)
        self._ring = Ring.create(RING_BYTES)
        self._log = RingLog(self._ring.reader())
        self.engine = VLLMEngine(
            model,
            engine_args=engine_args,
            points=self.points,
            ring=self._ring,
            # A slow reader must not look like a fault of capture.
            block_timeout_s=_CLOSE_S,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="doctor", daemon=True)
        self._thread.start()
        self._runs = 0

    def __enter__(self) -> Patient:
        try:
            self._call(self.engine.start())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call(self.engine.close())
        finally:
            self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        self._loop.close()
        self._ring.close()

    def _call(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    @property
    def stats(self) -> RingStats:
        """Of the ring."""
        return self._ring.stats()

    def fusions(self) -> dict[str, int]:
        """Return how often each pattern of vLLM's compiler matched, in the first worker."""
        tables: list[dict[str, int]] = self._call(self.engine.collective_rpc("get_compilation_match_table"))
        return tables[0]

    def run(
        self, prompts: Mapping[str, Sequence[int]], *, max_tokens: int, captured: bool = True
    ) -> tuple[dict[str, tuple[int, ...]], float]:
        """Run requests at once; return each one's prompt and generated tokens, and how long all took, seconds.

        Args:
            prompts: token ids by name.
            max_tokens: that each generates.
            captured: at all points.
        """
        self._runs += 1
        names = tuple(point.name for point in self.points) if captured else ()

        async def one(name: str, prompt: Sequence[int]) -> tuple[int, ...]:
            identity = f"{name}.{self._runs}"
            order = CaptureOrder(request_id=identity, attempt=1, points=names, partition=0) if names else None
            request = EngineRequest(
                engine_id=identity,
                prompt_token_ids=tuple(prompt),
                sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
                capture=order,
                skip_prefix_cache=True,
            )
            tokens = [token async for delta in self.engine.submit(request) for token in delta.token_ids]
            return (*prompt, *tokens)

        async def every() -> list[tuple[int, ...]]:
            return await asyncio.gather(*(one(name, prompt) for name, prompt in prompts.items()))

        began = time.monotonic()
        future = asyncio.run_coroutine_threadsafe(every(), self._loop)
        while not future.done():
            self._log.read()
            time.sleep(_READ_S)
        took = time.monotonic() - began
        sequences = dict(zip(prompts, future.result(), strict=True))
        self._read_to_the_end()
        return sequences, took

    def rows(self, sequences: Mapping[str, tuple[int, ...]], point: str) -> list[Rows]:
        """Return what was captured of the last run at one point.

        Raises:
            CaptureError: a request has no stream, or its capture ended with an error.
        """
        return [self._rows(name, sequence, point) for name, sequence in sequences.items()]

    def _rows(self, name: str, sequence: tuple[int, ...], point: str) -> Rows:
        stream = self._log.streams.get((f"{name}.{self._runs}", 0, point))
        if stream is None or stream.closed is None or stream.closed.reason != "finished":
            reason = "nothing was captured" if stream is None or stream.closed is None else stream.closed.detail
            faults = "; ".join(fault.detail for fault in self._log.faults[-3:])
            raise CaptureError(f"request {name}, point {point}: {reason} {faults}".rstrip())
        return Rows(
            request=name,
            sequence=sequence,
            positions=tuple(stream.positions),
            token_ids=tuple(stream.token_ids),
            values=_values(stream),
            lost=sum(loss.rows for loss in stream.losses),
        )

    def forget(self) -> None:
        """Drop what was captured so far."""
        self._log.streams.clear()

    def _read_to_the_end(self) -> None:
        end = time.monotonic() + _CLOSE_S
        while not self._log.all_closed:
            self._log.read()
            if time.monotonic() > end:
                raise CaptureError("streams of finished requests stay open")
            time.sleep(_READ_S)


def _values(stream: CapturedStream) -> np.ndarray:
    if not stream.rows:
        return np.zeros((0, len(stream.opened.layers), stream.opened.width), np.float32)
    return np.stack(stream.rows).astype(np.float32)
