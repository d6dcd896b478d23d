"""An engine without a model: scripted tokens, real frames in a real ring.

It implements the engine contract, writes what it "computes" through the same capture code as vLLM, and takes one step
every `step_s`. A prompt is bytes, a token is a byte; request `r` generates the letters of `generated_text(r, n)`, and
its activations are `activation(...)`: both known to a test without asking.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import zlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undercurrent.adapters.base import EngineDelta, EngineInfo, EngineRequest
from undercurrent.adapters.checks import with_token_id
from undercurrent.capture.plan import Batch
from undercurrent.capture.points import CapturePoint, TapGroup
from undercurrent.capture.ring import Ring
from undercurrent.capture.tracker import Tracker
from undercurrent.errors import BadRequestError, ConfigError, EngineDeadError
from undercurrent.spec import ExtractionPoint

KILLS, HANGS, BLOCKS = "kills its engine", "hangs its engine", "blocks its loop"
"""What a prompt says that does this to a `harmable` engine, after its first token."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
DEFAULT_TOKENS = 16


def generated_text(request_id: str, tokens: int, *, index: int = 0) -> str:
    """Return what a request generates, one letter per token."""
    start = zlib.crc32(f"{index}/{request_id}".encode())
    return "".join(LETTERS[(start + i) % len(LETTERS)] for i in range(tokens))


def activation(request_id: str, position: int, layer: int, width: int, *, index: int = 0) -> NDArray[np.float32]:
    """Return the activation of one (token, layer), float32 [width], different for any other request, place or layer."""
    seed = zlib.crc32(f"{index}/{request_id}".encode()) % 10_007
    phases = np.arange(width, dtype=np.float64) * 0.37 + (seed + position * 1.13 + layer * 2.71)
    return np.asarray(np.sin(phases), np.float32)


class ByteTokenizer:
    """What of a tokenizer an adapter uses."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the bytes of a text; there are no special tokens."""
        del add_special_tokens
        return list(text.encode())


@dataclass(slots=True)
class _Running:
    """One child in the batch."""

    request: EngineRequest
    request_id: str
    index: int
    engine_id: str
    prompt: bytes
    tokens: int
    deltas: asyncio.Queue[EngineDelta | Exception]
    computed: int = 0
    generated: int = 0
    reason: str | None = None
    beyond: int = 0

    @property
    def pending(self) -> int:
        """Positions that the next step computes."""
        return len(self.prompt) if self.computed == 0 else 1


class FakeEngine:
    """Implements `adapters.base.Engine`.

    Args:
        points: what requests may capture.
        open_points: `set_points` may say something else later.
        ring: where captured rows go; needed when there are points, now or later.
        layers: decoder layers.
        width: hidden size.
        step_s: time of one step, seconds.
        max_num_seqs: most requests in one step.
        max_model_len: most tokens of prompt plus generation.
        overrun: steps that a request computes beyond its last token, whose rows mean nothing: engines do so when its
            end is found while the next step runs.
        rows: .npy file of float32 [n, layers, width] that requests' activations are taken from, beginning anywhere in
            it, instead of `activation(...)`: for what depends on how values are spread.
        harmable: prompts with `KILLS`, `HANGS` or `BLOCKS` in them do what they say.
    """

    def __init__(
        self,
        *,
        points: Sequence[ExtractionPoint] = (),
        open_points: bool = False,
        ring: Ring | None = None,
        layers: int = 4,
        width: int = 16,
        step_s: float = 0.005,
        max_num_seqs: int = 64,
        max_model_len: int = 4096,
        overrun: int = 0,
        rows: str | None = None,
        harmable: bool = False,
    ) -> None:
        self._captures = bool(points) or open_points
        if self._captures and ring is None:
            raise ConfigError("extraction points need a ring to write to")
        self._layers, self._width = layers, width
        self._points = [self._capture_point(point) for point in points]
        self._ring = ring
        self._step_s = step_s
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._overrun = overrun
        self._harmable = harmable
        self._given = None if rows is None else np.load(rows)
        self._waiting: list[_Running] = []
        self._batch: list[_Running] = []
        self._steps = 0
        self._loop: asyncio.Task[None] | None = None
        self._tracker: Tracker | None = None
        self._buffers: dict[TapGroup, NDArray[np.uint8]] = {}

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine."""
        return EngineInfo(
            model="fake",
            model_fingerprint="fake",
            dtype="float32",
            layers=self._layers,
            width=self._width,
            max_model_len=self._max_model_len,
            versions={"fake": "1"},
        )

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._steps

    async def start(self) -> None:
        """Begin to take steps."""
        self._buffers = self._rows_of(self._points)
        if self._ring is not None and self._captures:
            self._tracker = Tracker(self._points, self._buffers, self._ring.writer())
        self._loop = asyncio.create_task(self._run())

    @property
    def tokenizer(self) -> ByteTokenizer:
        """A token is a byte."""
        return ByteTokenizer()

    async def set_points(self, points: Sequence[ExtractionPoint]) -> None:
        """Let requests order exactly these points from now on; streams that are open keep theirs.

        Raises:
            CaptureError: one of them cannot be captured, by name.
        """
        self._points = [self._capture_point(point) for point in points]
        if self._tracker is not None:
            known = {point.name: point for point in (*self._points, *self._tracker.used_points)}
            self._buffers = self._rows_of(known.values())
            self._tracker.set_points(tuple(known.values()), self._buffers)

    def _capture_point(self, point: ExtractionPoint) -> CapturePoint:
        point = with_token_id(point, self.tokenizer.encode)
        return CapturePoint.of(point, layers=self._layers, width=self._width, model_dtype="float32")

    def _rows_of(self, points: Iterable[CapturePoint]) -> dict[TapGroup, NDArray[np.uint8]]:
        rows = self._max_model_len + self._max_num_seqs
        return {p.group: np.zeros((rows, p.group.row_bytes), np.uint8) for p in points}

    async def check(self, request: EngineRequest) -> EngineRequest:
        """Return a request that can run, its prompt as token ids.

        Raises:
            BadRequestError: it cannot, and why.
        """
        prompt = _prompt(request)
        sampling = request.sampling
        if not prompt:
            raise BadRequestError("the prompt has no tokens")
        if sampling.temperature is not None and sampling.temperature < 0:
            raise BadRequestError(f"temperature is {sampling.temperature}; it must be at least 0")
        tokens = sampling.max_tokens or DEFAULT_TOKENS
        if len(prompt) + tokens > self._max_model_len:
            raise BadRequestError(
                f"{len(prompt)} prompt tokens and {tokens} to generate are more than the model's {self._max_model_len}"
            )
        known = {point.name for point in self._points}
        unknown = sorted(set(request.capture.points) - known) if request.capture else []
        if unknown:
            raise BadRequestError(f"unknown extraction points: {', '.join(unknown)}")
        return replace(request, prompt=None, prompt_token_ids=tuple(prompt))

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """Generate. Every child ends with exactly one delta that has a `finish_reason`."""
        deltas: asyncio.Queue[EngineDelta | Exception] = asyncio.Queue()
        request_id = request.capture.request_id if request.capture else request.engine_id
        children = [
            _Running(
                request=request,
                request_id=request_id,
                index=index,
                engine_id=f"{index}_{request.engine_id}",
                prompt=_prompt(request),
                tokens=request.sampling.max_tokens or DEFAULT_TOKENS,
                deltas=deltas,
            )
            for index in range(request.sampling.n)
        ]
        self._waiting += children
        left = len(children)
        while left:
            delta = await deltas.get()
            if isinstance(delta, Exception):
                raise delta
            left -= delta.finish_reason is not None
            yield delta

    async def abort(self, engine_id: str, index: int | None = None) -> None:
        """Stop a request, or one child of it, from the next step on."""
        for child in [*self._waiting, *self._batch]:
            if child.request.engine_id == engine_id and index in {None, child.index} and child.reason is None:
                child.reason = "abort"

    async def close(self) -> None:
        """Stop taking steps."""
        if self._loop is not None:
            self._loop.cancel()
            # It may have died before: whoever had a request was told.
            await asyncio.gather(self._loop, return_exceptions=True)
            self._loop = None

    async def _run(self) -> None:
        try:
            while True:
                await asyncio.sleep(self._step_s)
                self._admit()
                self._settle()
                if self._batch:
                    self._step()
                if self._harmable:
                    await self._suffer()
        except Exception as exc:
            for child in [*self._waiting, *self._batch]:
                child.deltas.put_nowait(EngineDeadError(f"the fake engine died: {exc}"))
            raise

    async def _suffer(self) -> None:
        """Let a prompt that runs do its harm."""
        prompts = [child.prompt.decode(errors="replace") for child in self._batch if child.generated]
        if any(KILLS in prompt for prompt in prompts):
            os.kill(os.getpid(), signal.SIGKILL)
        if any(HANGS in prompt for prompt in prompts):
            await asyncio.Event().wait()
        if any(BLOCKS in prompt for prompt in prompts):
            threading.Event().wait()

    def _admit(self) -> None:
        room = self._max_num_seqs - len(self._batch)
        for child in self._waiting[:room]:
            self._batch.append(child)
            capture = child.request.capture
            if self._tracker is not None and capture is not None and child.reason is None:
                order = capture.as_order()
                self._tracker.open(
                    child.engine_id, order, index=child.index, prompt_len=len(child.prompt), cached_prefix=0
                )
        del self._waiting[:room]

    def _settle(self) -> None:
        """End what has finished or was aborted since the last step."""
        for child in [c for c in self._batch if c.reason is not None]:
            if child.reason == "abort" and child.beyond == 0:
                child.deltas.put_nowait(self._delta(child, 0, "abort"))
            if child.beyond < self._overrun:
                child.beyond += 1
                continue
            self._batch.remove(child)
            if self._tracker is not None:
                self._tracker.close(child.engine_id)
        if self._tracker is not None and not self._batch:
            self._tracker.idle(self._steps)

    def _step(self) -> None:
        self._steps += 1
        self._capture()
        for child in self._batch:
            child.computed += child.pending
            child.generated += 1
            if child.reason is not None:
                continue
            if child.generated >= child.tokens:
                child.reason = "length"
            child.deltas.put_nowait(self._delta(child, 1, child.reason))

    def _capture(self) -> None:
        if self._tracker is None:
            return
        counts = [child.pending for child in self._batch]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        token_ids = np.concatenate([self._inputs(child) for child in self._batch]).astype(np.int32)
        for group, buffer in self._buffers.items():
            row = 0
            for child, count in zip(self._batch, counts, strict=True):
                for position in range(child.computed, child.computed + count):
                    values = [self._activation(child, position, layer) for layer in group.layers]
                    buffer[row] = np.frombuffer(np.concatenate(values).tobytes(), np.uint8)
                    row += 1
        batch = Batch(
            step=self._steps,
            rows=len(token_ids),
            engine_ids=[child.engine_id for child in self._batch],
            computed=np.array([child.computed for child in self._batch], np.int32),
            starts=starts,
            token_ids=token_ids,
        )
        self._tracker.step(batch)

    def _activation(self, child: _Running, position: int, layer: int) -> NDArray[np.float32]:
        if self._given is None:
            return activation(child.request_id, position, layer, self._width, index=child.index)
        start = zlib.crc32(f"{child.index}/{child.request_id}".encode())
        found: NDArray[np.float32] = self._given[(start + position) % len(self._given), layer]
        return found

    def _inputs(self, child: _Running) -> NDArray[Any]:
        if child.computed == 0:
            return np.frombuffer(child.prompt, np.uint8)
        return np.array([ord(generated_text(child.request_id, child.generated, index=child.index)[-1])])

    def _delta(self, child: _Running, tokens: int, reason: str | None) -> EngineDelta:
        text = generated_text(child.request_id, child.generated, index=child.index)[-1] if tokens else ""
        return EngineDelta(
            index=child.index,
            token_ids=tuple(text.encode()),
            text=text,
            finish_reason=reason,
            prompt_tokens=len(child.prompt),
        )


def _prompt(request: EngineRequest) -> bytes:
    if request.prompt_token_ids is not None:
        return bytes(token % 256 for token in request.prompt_token_ids)
    return (request.prompt or "").encode()
