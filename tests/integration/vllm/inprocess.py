"""A vLLM engine in the test's own process, stepped by hand: it starts in about two seconds once vLLM is imported.

    with Capturing(folder, points) as engine:
        runs = engine.run([Ask("a", prompt), Ask("b", other, after=3, max_tokens=20)])
        runs["a"].streams["residual"].positions

Only what needs processes of its own, such as parallel workers, a server, or a kill, needs the slow `Harness`.
"""

from __future__ import annotations

import gc
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import MAX_LEN, POINTS

from undercurrent.adapters.vllm.settings import CONFIG_KEY, CaptureSettings, additional_config
from undercurrent.capture.points import Order
from undercurrent.capture.ring import Ring
from undercurrent.spec import ExtractionPoint
from undercurrent.testing.ring_log import CapturedStream, RingLog

MAX_STEPS = 20_000


@dataclass(frozen=True)
class Ask:
    """A request to run.

    Args:
        name: its id, of the engine as of the order.
        prompt: token ids.
        points: it is captured at; all by default, none for an empty tuple.
        after: steps of the run before it is added.
        abort_after: steps of the run after which it is aborted.
        attempt: of the order.
        params: fields of vLLM's SamplingParams.
        extra: further arguments of `LLMEngine.add_request`, such as a LoRA request; `prompt_extra` holds fields of the
            prompt, such as a cache salt.
        order: other fields of the order.
    """

    name: str
    prompt: Sequence[int]
    points: Sequence[str] | None = None
    after: int = 0
    abort_after: int | None = None
    attempt: int = 1
    params: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    order: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Ran:
    """What became of it.

    Args:
        prompt: token ids.
        token_ids: generated ones, per child.
        streams: what was captured, by point, of child 0.
        children: the same, per child.
        finish_reasons: per child.
        text: generated, per child.
    """

    prompt: tuple[int, ...]
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    streams: dict[str, CapturedStream] = field(default_factory=dict)
    children: dict[int, dict[str, CapturedStream]] = field(default_factory=dict)
    finish_reasons: dict[int, str | None] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)

    @property
    def sequence(self) -> list[int]:
        return [*self.prompt, *self.token_ids.get(0, [])]


class Capturing:
    """See the module.

    Args:
        model: folder.
        points: that requests may capture.
        settings: further fields of the capture settings.
        environment: variables that hold while the engine lives.
        ring_bytes: capacity of the ring.
        capture: whether the engine is asked to capture at all.
        engine_args: of vLLM's EngineArgs.
    """

    def __init__(
        self,
        model: Path | str,
        points: Sequence[ExtractionPoint] = POINTS,
        *,
        settings: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        ring_bytes: int = 64 << 20,
        capture: bool = True,
        **engine_args: Any,
    ) -> None:
        self.points = tuple(points)
        self.ring = Ring.create(ring_bytes)
        self.log = RingLog(self.ring.reader())
        self._model = str(model)
        self._capture = capture
        self._settings = {"check_plans": True, **(settings or {})}
        self._environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            **(environment or {}),
        }
        self._args = {
            "dtype": "float32",
            "max_model_len": MAX_LEN,
            "block_size": 32,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 48,
            "num_gpu_blocks_override": 64,
            "enforce_eager": True,
            "async_scheduling": False,
            "enable_prefix_caching": False,
            "distributed_executor_backend": "uni",
            "disable_log_stats": True,
            **engine_args,
        }
        self._before: dict[str, str | None] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="capturing-")
        self.engine: Any = None

    def __enter__(self) -> Capturing:
        self._before = {key: os.environ.get(key) for key in self._environment}
        os.environ.update(self._environment)
        try:
            with warnings.catch_warnings():
                # vLLM's own start warns; ours must not.
                warnings.simplefilter("ignore")
                self.engine = self._start()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> Any:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        path = Path(self._folder.name) / "capture.json"
        CaptureSettings(ring=self.ring.path, points=self.points, **self._settings).write(path)
        with_taps = {**self._args, "additional_config": additional_config(self.points, path)}
        if not self._capture:
            del with_taps["additional_config"]
        return LLMEngine.from_engine_args(EngineArgs(model=self._model, **with_taps))

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine and give its memory back, so that the next one finds a clean process."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.engine_core.shutdown()
            del engine
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
        gc.collect()
        self.ring.close()
        self._folder.cleanup()
        for key, value in self._before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value

    @property
    def worker(self) -> Any:
        """vLLM's worker, in this process."""
        return self.engine.model_executor.driver_worker.worker

    def add(self, ask: Ask) -> None:
        """Add a request to the engine."""
        from vllm import SamplingParams

        names = tuple(p.name for p in self.points) if ask.points is None else tuple(ask.points)
        values = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **ask.params}
        if names:
            order = Order(
                request_id=ask.name,
                attempt=ask.attempt,
                points=names,
                partition=0,
                n=values.get("n", 1),
                engine_id=ask.name,
                **ask.order,
            )
            values["extra_args"] = {CONFIG_KEY: order.to_json(), **values.get("extra_args", {})}
        extra = dict(ask.extra)
        prompt = {"prompt_token_ids": list(ask.prompt), **extra.pop("prompt_extra", {})}
        self.engine.add_request(ask.name, prompt, SamplingParams(**values), **extra)

    def run(self, asks: Sequence[Ask], *, each_step: Callable[[int], None] | None = None) -> dict[str, Ran]:
        """Run requests to their ends, then two idle steps; return what became of them.

        Args:
            asks: the requests; names are unique.
            each_step: called after every step with its number, from 1.
        """
        runs = {ask.name: Ran(tuple(ask.prompt)) for ask in asks}
        waiting, step = list(asks), 0
        while waiting or self.engine.has_unfinished_requests():
            for ask in [a for a in waiting if a.after <= step]:
                waiting.remove(ask)
                self.add(ask)
            for ask in asks:
                if ask.abort_after == step:
                    self.engine.abort_request([ask.name])
            step += 1
            assert step < MAX_STEPS, "the engine does not come to an end"
            for output in self.engine.step():
                self._note(runs[output.request_id], output)
            self.log.read()
            if each_step is not None:
                each_step(step)
        self.settle()
        for name, run in runs.items():
            for (request_id, index, point), stream in self.log.streams.items():
                if request_id == name:
                    run.children.setdefault(index, {})[point] = stream
            run.streams = run.children.get(0, {})
        return runs

    def settle(self) -> None:
        """Let the worker hear of the requests that have ended; it is told with the next step."""
        for _ in range(2):
            self.engine.step()
            # An engine core without requests sends its worker nothing: what it would send with the next step.
            core = self.engine.engine_core.engine_core
            if core.scheduler.finished_req_ids:
                core.model_executor.execute_model(core.scheduler.schedule())
        self.log.read()

    @staticmethod
    def _note(run: Ran, output: Any) -> None:
        for child in output.outputs:
            run.token_ids[child.index] = list(child.token_ids)
            run.text[child.index] = child.text
            if child.finish_reason is not None:
                run.finish_reasons[child.index] = child.finish_reason
