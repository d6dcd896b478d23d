"""`transformers` behind the engine contract: for laptops without vLLM, and as the reference for what vLLM captures.

The driver's side, on an event loop; the model runs on a thread of its own (`service`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from undercurrent.adapters.base import EngineDelta, EngineInfo, EngineRequest
from undercurrent.adapters.checks import checked_request
from undercurrent.adapters.fingerprint import model_fingerprint
from undercurrent.adapters.hf.capture import DEFAULT_MAX_TAP_BYTES, HFCapture
from undercurrent.adapters.hf.model import LoadedModel
from undercurrent.adapters.hf.options import HFOptions
from undercurrent.adapters.hf.running import Mailbox, Running
from undercurrent.adapters.hf.sampling import check_sampling
from undercurrent.adapters.hf.service import Parts, Service
from undercurrent.capture.ring import Ring
from undercurrent.errors import CaptureError, ConfigError, EngineDeadError
from undercurrent.spec import ExtractionPoint

_CLOSE_S = 20.0


class HFEngine:
    """Implements `adapters.base.Engine` and `OpenEngine`.

    Args:
        model: folder or name of the model.
        engine_args: fields of `HFOptions`.
        points: what requests may capture.
        open_points: `set_points` may say something else later.
        ring: where the captured rows go; needed when there are points, now or later.
        max_tap_bytes: refuse to start when the buffers of the points would need more.
        block_timeout_s: how long a point with `overflow: block` waits for the ring's reader.
        check_plans: verify the capture plan in every step; for tests.
        served_name: how the model is called in `info`; `model` by default.
        after_step: called on the model's thread when a step's rows are in the ring and its tokens are not chosen yet.
    """

    def __init__(
        self,
        model: str,
        *,
        engine_args: Mapping[str, Any] | None = None,
        points: Sequence[ExtractionPoint] = (),
        open_points: bool = False,
        ring: Ring | None = None,
        max_tap_bytes: int = DEFAULT_MAX_TAP_BYTES,
        block_timeout_s: float = 1.0,
        check_plans: bool = False,
        served_name: str | None = None,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        self._captures = bool(points) or open_points
        if self._captures and ring is None:
            raise ConfigError("extraction points need a ring to write to")
        self._model = model
        self._name = served_name or model
        self._options = HFOptions.of(engine_args or {})
        self._points = tuple(points)
        self._ring = ring
        self._capture_options: dict[str, Any] = {
            "max_tap_bytes": max_tap_bytes,
            "block_timeout_s": block_timeout_s,
            "check_plans": check_plans,
        }
        self._service = Service(self._build, self._options, after_step)
        self._parts: Parts | None = None
        self._info: EngineInfo | None = None

    @property
    def info(self) -> EngineInfo:
        """Facts about the running engine; valid after `start`."""
        if self._info is None:
            raise EngineDeadError("the engine has not started")
        return self._info

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._service.steps

    @property
    def tokenizer(self) -> Any:  # noqa: ANN401 - the model's own
        """The model's tokenizer; valid after `start`."""
        return self._alive().loaded.tokenizer

    async def start(self) -> None:
        """Load the model and be ready to generate.

        Raises:
            ConfigError: it is asked for more than the model can.
            CaptureError: a point cannot be captured on this model, by name.
            EngineDeadError: the model cannot be loaded.
        """
        parts = await asyncio.wrap_future(self._service.start())
        folder = Path(self._model)
        fingerprint = await asyncio.to_thread(model_fingerprint, folder) if folder.is_dir() else ""
        loaded = parts.loaded
        self._info = EngineInfo(
            model=self._name,
            model_fingerprint=fingerprint,
            dtype=loaded.dtype,
            layers=loaded.layers,
            width=loaded.width,
            max_model_len=loaded.max_model_len,
            versions={"transformers": version("transformers"), "torch": version("torch")},
            row_shapes=parts.capture.row_shapes if parts.capture is not None else {},
        )
        self._parts = parts

    def _build(self) -> Parts:
        """Load everything; on the model's thread."""
        loaded = LoadedModel.load(self._model, self._options)
        if not self._captures or self._ring is None:
            return Parts(loaded, None)
        options = self._options
        capture = HFCapture(
            loaded,
            self._ring,
            self._points,
            max_rows=options.max_num_batched_tokens,
            max_seqs=options.max_num_seqs,
            **self._capture_options,
        )
        return Parts(loaded, capture)

    async def set_points(self, points: Sequence[ExtractionPoint]) -> None:
        """Let requests order exactly these points from now on; streams that are open keep theirs.

        Args:
            points: names are unique.

        Raises:
            CaptureError: one of them cannot be captured, by name; the old ones stay.
            EngineDeadError: the engine is gone.
        """
        capture = self._alive().capture
        if capture is None:
            raise CaptureError("this engine was started without a ring to capture to")
        wanted = tuple(points)
        await asyncio.wrap_future(self._service.call(lambda: capture.set_points(wanted)))
        self._points = wanted

    async def check(self, request: EngineRequest) -> EngineRequest:
        """Return a request that can run, its prompt as token ids.

        Raises:
            BadRequestError: it cannot, and why.
            EngineDeadError: the engine is gone.
        """
        loaded = self._alive().loaded
        checked = await checked_request(
            request,
            loaded.encode,
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            points=self._points,
        )
        check_sampling(request.sampling, loaded.vocab_size)
        return checked

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """Generate. Every child ends with exactly one delta that has a `finish_reason`. Closing it stops the request.

        Args:
            request: from `check`.

        Raises:
            BadRequestError: one with the same id runs.
            EngineDeadError: the engine is gone.
        """
        loaded, mailbox = self._alive().loaded, Mailbox()
        if request.prompt_token_ids is None:
            request = await self.check(request)
        children = [
            Running(
                request,
                index,
                decode=loaded.decode,
                eos=loaded.eos,
                max_model_len=loaded.max_model_len,
                mailbox=mailbox,
            )
            for index in range(request.sampling.n)
        ]
        self._service.add(request.engine_id, children)
        left = len(children)
        try:
            while left:
                delta = await mailbox.get()
                left -= delta.finish_reason is not None
                yield delta
        finally:
            if left:
                self.abort_now(request.engine_id)

    async def abort(self, engine_id: str, index: int | None = None) -> None:
        """Stop a request, or one child of it, before its next forward pass; it ends with `abort`.

        Args:
            engine_id: the request; an unknown one is nothing.
            index: stop this child alone.
        """
        self.abort_now(engine_id, index)

    def abort_now(self, engine_id: str, index: int | None = None) -> None:
        """Do what `abort` does; from any thread, `after_step` included."""
        self._service.abort(engine_id, index)

    async def close(self) -> None:
        """Stop the model's thread and give the model back; requests that run end with `EngineDeadError`."""
        await asyncio.to_thread(self._service.stop, _CLOSE_S)
        self._parts = None

    def _alive(self) -> Parts:
        self._service.check_alive()
        if self._parts is None:
            raise EngineDeadError("the engine has not started")
        return self._parts
