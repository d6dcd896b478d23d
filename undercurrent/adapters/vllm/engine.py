"""vLLM behind the engine contract: requests in, deltas out; activations leave by the ring.

The driver's side only: vLLM's engine core, and the capture in it, run in a process that vLLM starts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import multiprocessing
import os
import tempfile
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from undercurrent.adapters.base import EngineDelta, EngineInfo, EngineRequest
from undercurrent.adapters.checks import checked_request
from undercurrent.adapters.vllm.outline import Outline, info_of, outline_of
from undercurrent.adapters.vllm.params import sampling_params
from undercurrent.adapters.vllm.priority import NICE_ON_CPU, lower
from undercurrent.adapters.vllm.settings import DEFAULT_MAX_TAP_BYTES, CaptureSettings, additional_config
from undercurrent.adapters.vllm.version_check import check_vllm_version
from undercurrent.capture.ring import Ring
from undercurrent.errors import BadRequestError, CaptureError, ConfigError, EngineDeadError, EngineError
from undercurrent.spec import ExtractionPoint, ProbeSpec, probe_spec_to_dict

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

_DEFAULTS: Mapping[str, Any] = {
    "enforce_eager": True,
    "async_scheduling": False,
    "disable_log_stats": True,
    "enable_log_requests": False,
}
_SHUTDOWN_S = 10.0
_EXTENSION = "undercurrent.adapters.vllm.worker_extension.ProbingWorkerExtension"


class VLLMEngine:
    """Implements `adapters.base.Engine`.

    Args:
        model: folder or name of the model.
        engine_args: more fields of vLLM's AsyncEngineArgs.
        points: what requests may capture.
        open_points: `set_points` may say something else later.
        ring: where the captured rows go; needed when there are points, now or later.
        more_rings: where those of the further pipeline ranks go, one for each.
        max_tap_bytes: refuse to start when the tap buffers would need more.
        block_timeout_s: how long a point with `overflow: block` waits for the ring's reader.
        check_plans: verify the capture plan in every step; for tests.
        served_name: how the model is called in `info`; `model` by default.
        v1_runner: have vLLM use its V1 model runner unless the environment says otherwise; else vLLM chooses.
        allow_untested: start in a combination of modes that no test has run, too.
        nice: niceness of vLLM's own processes, so that aborts and records get their time first; by default 10 where
            the engine computes on the CPU, and 0 elsewhere.
    """

    def __init__(
        self,
        model: str,
        *,
        engine_args: Mapping[str, Any] | None = None,
        points: Sequence[ExtractionPoint] = (),
        open_points: bool = False,
        ring: Ring | None = None,
        more_rings: Sequence[Ring] = (),
        max_tap_bytes: int = DEFAULT_MAX_TAP_BYTES,
        block_timeout_s: float = 1.0,
        check_plans: bool = False,
        served_name: str | None = None,
        v1_runner: bool = False,
        allow_untested: bool = False,
        nice: int | None = None,
    ) -> None:
        self._captures = bool(points) or open_points
        if self._captures and ring is None:
            raise ConfigError("extraction points need a ring to write to")
        self._model = model
        self._name = served_name or model
        self._v1_runner = v1_runner
        self._nice = nice
        self._engine_args = dict(engine_args or {})
        self._points = tuple(points)
        self._ring = ring
        self._more_rings = tuple(more_rings)
        self._options = {
            "max_tap_bytes": max_tap_bytes,
            "block_timeout_s": block_timeout_s,
            "check_plans": check_plans,
            "open_points": open_points,
            "allow_untested": allow_untested,
        }
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._llm: AsyncLLM | None = None
        self._info: EngineInfo | None = None
        self._outputs = 0
        self._begun: set[str] = set()
        self._seeds_are_fatal = False

    @property
    def info(self) -> EngineInfo:
        """Facts about the running engine; valid after `start`."""
        if self._info is None:
            raise EngineDeadError("the engine has not started")
        return self._info

    @property
    def steps(self) -> int:
        """Scheduler steps so far, from the ring's header; outputs seen where nothing is captured."""
        return self._ring.stats().steps if self._ring is not None and self._captures else self._outputs

    @property
    def report(self) -> dict[str, Any]:
        """What the worker's self-check found, empty where nothing is captured."""
        if self._ring is None:
            return {}
        notes = [_note(ring.note) for ring in (self._ring, *self._more_rings)]
        # Any rank may be the one that cannot capture.
        return next((note for note in notes if "error" in note), notes[0])

    def outline(self) -> Outline:
        """Return how the engine would run, from its configuration alone; nothing is loaded.

        Raises:
            ConfigError: vLLM does not take its arguments.
            CaptureError: a point, or something that the engine is configured with, does not go with capture; by name.
        """
        check_vllm_version()
        try:
            return outline_of(self._config())
        finally:
            self._drop_settings()

    async def start(self) -> None:
        """Load the model and be ready to generate.

        Raises:
            ConfigError: vLLM does not take its arguments.
            CaptureError: a point, or something that the engine is configured with, does not go with capture; by name.
            EngineDeadError: the engine did not come up; its log says why.
        """
        version = check_vllm_version()
        if self._v1_runner:
            os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        from vllm.v1.engine.async_llm import AsyncLLM

        from undercurrent.adapters.vllm import compat
        from undercurrent.adapters.vllm.owned import own_engine_cores

        own_engine_cores()
        try:
            config = await asyncio.to_thread(self._config)
        except BaseException:
            self._drop_settings()
            raise
        others = {child.pid for child in multiprocessing.active_children()}
        try:
            # In a thread: it waits for the engine core, and this loop has other things to do meanwhile.
            self._llm = await asyncio.to_thread(AsyncLLM.from_vllm_config, config, disable_log_stats=True)
        except Exception as exc:
            # vLLM raises anything from here, mostly a RuntimeError that says nothing; the worker left its reason.
            self._drop_settings()
            reason = self.report.get("error")
            if reason:
                raise CaptureError(str(reason)) from exc
            raise EngineDeadError(f"vLLM did not start: {exc}") from exc
        self._lower_priority(child.pid for child in multiprocessing.active_children() if child.pid not in others)
        self._seeds_are_fatal = compat.seeds_stop_the_engine(config)
        self._info = await info_of(config, self._model, self._name, version)

    def _lower_priority(self, pids: Iterable[int | None]) -> None:
        from vllm.platforms import current_platform

        nice = self._nice if self._nice is not None else NICE_ON_CPU if current_platform.is_cpu() else 0
        if nice:
            lower([pid for pid in pids if pid is not None], nice)

    def _config(self) -> Any:  # noqa: ANN401 - a VllmConfig
        from vllm.engine.arg_utils import AsyncEngineArgs

        from undercurrent.adapters.vllm import compat

        values = {**_DEFAULTS, **self._engine_args, "model": self._model}
        if self._captures and self._ring is not None:
            self._folder = tempfile.TemporaryDirectory(prefix="undercurrent-")
            path = Path(self._folder.name) / "capture.json"
            settings = CaptureSettings(
                ring=self._ring.path,
                more_rings=tuple(ring.path for ring in self._more_rings),
                points=self._points,
                owner_pid=os.getpid(),
                **self._options,  # type: ignore[arg-type]
            )
            settings.write(path)
            values["additional_config"] = {
                **values.get("additional_config", {}),
                **additional_config(self._points, path),
            }
            if self._options["open_points"]:
                # It has the call by which points come and go.
                values["worker_extension_cls"] = _EXTENSION
        known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"unknown engine arguments: {', '.join(unknown)}")
        try:
            config = AsyncEngineArgs(**values).create_engine_config()
        except ValueError as exc:
            raise ConfigError(f"vLLM refuses its arguments: {_reason(exc)}") from exc
        if self._captures:
            compat.check_supported(
                config,
                v2_runner=config.use_v2_model_runner,
                allow_untested=bool(self._options["allow_untested"]),
            )
            ranks = config.parallel_config.pipeline_parallel_size
            if ranks != 1 + len(self._more_rings):
                raise CaptureError(
                    f"{ranks} pipeline ranks need {ranks} rings, and there are {1 + len(self._more_rings)}"
                )
            # The worker checks the same; here it is said before a process has started.
            compat.capture_points(config, self._points)
        return config

    async def set_points(self, points: Sequence[ExtractionPoint]) -> None:
        """Let requests order exactly these points from now on; streams that are open keep theirs.

        Args:
            points: names are unique.

        Raises:
            CaptureError: one of them cannot be captured, by name; the old ones stay.
            EngineDeadError: the engine is gone.
        """
        spec = probe_spec_to_dict(ProbeSpec(extraction_points=points))
        for reason in await self.collective_rpc("undercurrent_set_points", spec):
            if reason:
                raise CaptureError(reason)
        self._points = tuple(points)

    @property
    def tokenizer(self) -> Any:  # noqa: ANN401 - any tokenizer of vLLM
        """The model's tokenizer; valid after `start`."""
        return self._alive().get_tokenizer()

    async def check(self, request: EngineRequest) -> EngineRequest:
        """Return a request that can run, its prompt as token ids.

        Raises:
            BadRequestError: it cannot, and why.
            EngineDeadError: the engine is gone.
        """
        llm = self._alive()
        checked = await checked_request(
            request,
            llm.get_tokenizer().encode,
            vocab_size=llm.model_config.get_vocab_size(),
            max_model_len=self.info.max_model_len,
            points=self._points,
        )
        sampling_params(request)
        if request.sampling.seed is not None and request.sampling.temperature != 0 and self._seeds_are_fatal:
            raise BadRequestError(
                "a sampling seed stops vLLM on a CPU when a prefill is chunked: "
                "leave it out, set temperature 0, or start the engine with enable_chunked_prefill: false"
            )
        return checked

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """Generate. Every child ends with exactly one delta that has a `finish_reason`.

        Raises:
            BadRequestError: the engine refuses this request.
            EngineError: vLLM failed at this request alone.
            EngineDeadError: the engine is gone.
        """
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError as VLLMEngineDead
        from vllm.v1.engine.exceptions import EngineGenerateError

        llm = self._alive()
        params = sampling_params(request)
        token_ids = await _token_ids(llm, request)
        prompt = tokens_input(prompt_token_ids=list(token_ids))
        try:
            async for output in llm.generate(prompt, params, request.engine_id, priority=request.priority):
                self._outputs += 1
                self._begun.add(request.engine_id)
                for child in output.outputs:
                    yield EngineDelta(
                        index=child.index,
                        token_ids=tuple(child.token_ids),
                        text=child.text,
                        finish_reason=_finish_reason(child.finish_reason),
                        prompt_tokens=len(token_ids),
                        cached_tokens=output.num_cached_tokens or 0,
                    )
        except VLLMEngineDead as exc:
            raise EngineDeadError("vLLM's engine core died; its log says why") from exc
        except EngineGenerateError as exc:
            raise EngineError(f"vLLM failed at request {request.engine_id!r:.80}: {exc.__cause__ or exc}") from exc
        except (VLLMClientError, ValueError, TypeError) as exc:
            raise BadRequestError(str(exc)) from exc
        finally:
            self._begun.discard(request.engine_id)

    async def abort(self, engine_id: str, index: int | None = None) -> None:
        """Stop a request from the next scheduler step on; its iterator ends with `abort`. Unknown ids are nothing.

        Args:
            engine_id: the request.
            index: stop this child alone; nothing while the request has no output yet.
        """
        if self._llm is None or self._llm.errored:
            return
        if index is None:
            await self._llm.abort(engine_id)
        elif engine_id in self._begun:
            # Before the first output some children may be on their way to the engine core, which forgets the abort of a
            # request that it does not have yet and would run that child to its end.
            from undercurrent.adapters.vllm import compat

            child = compat.child_id(self._llm, engine_id, index)
            if child is not None:
                await self._llm.abort(child, internal=True)

    async def collective_rpc(self, method: Any, *args: object) -> list[Any]:  # noqa: ANN401 - vLLM's own signature
        """Call a method of the worker, or where vLLM allows it a function on it; for tests and diagnosis.

        Args:
            method: name, or a function whose first argument is the worker.
            args: its further arguments.
        """
        results: list[Any] = await self._alive().collective_rpc(method, args=args)
        return results

    async def close(self) -> None:
        """Stop the engine and every process that it started."""
        llm, self._llm = self._llm, None
        try:
            await self._stop(llm)
        finally:
            self._drop_settings()

    async def _stop(self, llm: AsyncLLM | None) -> None:
        if llm is not None:
            from undercurrent.adapters.vllm import compat

            await compat.quiet_before_shutdown(llm)
            await asyncio.to_thread(llm.shutdown, _SHUTDOWN_S)
            await compat.close_client(llm)

    def _alive(self) -> AsyncLLM:
        if self._llm is None or self._llm.errored:
            raise EngineDeadError("vLLM is not running")
        return self._llm

    def _drop_settings(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


async def _token_ids(llm: AsyncLLM, request: EngineRequest) -> tuple[int, ...]:
    """Return the token ids of a request's prompt, which one that was checked brings along."""
    if request.prompt_token_ids is not None:
        return request.prompt_token_ids
    # In a thread: a long prompt takes the tokenizer a while, and this loop has other things to do meanwhile.
    return tuple(await asyncio.to_thread(llm.get_tokenizer().encode, request.prompt))


def _reason(error: ValueError) -> str:
    """Return what vLLM's own checks say, without the frame that pydantic puts around it."""
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(str(one["msg"]).removeprefix("Value error, ") for one in error.errors(include_url=False))


def _finish_reason(reason: str | None) -> str | None:
    """Return vLLM's reason as the contract has it: an internal error is an end that nobody asked for, no completion."""
    return "abort" if reason == "error" else reason


def _note(text: str) -> dict[str, Any]:
    """Return what a worker left in its ring; a text that was cut there is an error's."""
    try:
        values: dict[str, Any] = json.loads(text or "{}")
    except ValueError:
        return {"error": text}
    return values
