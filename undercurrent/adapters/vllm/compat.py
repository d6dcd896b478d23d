"""The reader of vLLM's private names, beside `owned`. It is tested on the versions of `version_check`.

`install` wraps one method of vLLM's worker class; the rest is done on the worker's instance, after its model is loaded.
`RunnerV1` says what the rows of a step are. `refusals` names what capture does not support.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from vllm.config import CompilationMode, VllmConfig
from vllm.v1.worker import gpu_worker

from undercurrent.adapters.vllm.introspection import check_introspection_compatible
from undercurrent.adapters.vllm.settings import settings_of
from undercurrent.capture.plan import Batch
from undercurrent.capture.points import CapturePoint
from undercurrent.errors import CaptureError, VLLMIntrospectionError
from undercurrent.spec import ExtractionPoint

logger = logging.getLogger(__name__)

_INSTALLED = "_undercurrent_installed"
_RUNTIME = "_undercurrent_capture"
_TERM_S = 5.0


def install() -> None:
    """Wrap `Worker.load_model` once, so that an engine that asks for capture gets its taps when its model is there."""
    worker_class = gpu_worker.Worker
    original = worker_class.load_model
    if getattr(original, _INSTALLED, False):
        return

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's own signature
        if settings_of(self.vllm_config.additional_config) is None:
            return original(self, *args, **kwargs)
        from undercurrent.adapters.vllm.runtime import attach

        finish = attach(self)
        result = original(self, *args, **kwargs)
        finish()
        return result

    setattr(load_model, _INSTALLED, True)
    worker_class.load_model = load_model


def runtime_of(worker: Any) -> Any:  # noqa: ANN401 - a vLLM worker
    """Return what `keep_runtime` kept on a worker, or None."""
    return getattr(worker, _RUNTIME, None)


def keep_runtime(worker: Any, runtime: object) -> None:  # noqa: ANN401 - a vLLM worker
    """Keep the capture runtime as long as its worker lives."""
    setattr(worker, _RUNTIME, runtime)


def refusals(config: VllmConfig, *, v2_runner: bool) -> list[str]:
    """Return what this configuration asks for that capture does not support yet, by name.

    Args:
        config: of the engine.
        v2_runner: whether the engine uses the V2 model runner.
    """
    model, parallel, scheduler = config.model_config, config.parallel_config, config.scheduler_config
    checks = {
        "the V2 model runner (set VLLM_USE_V2_MODEL_RUNNER=0)": v2_runner,
        "torch.compile and CUDA graphs (set enforce_eager)": (
            config.compilation_config.mode not in {None, CompilationMode.NONE} or not model.enforce_eager
        ),
        "async_scheduling (set it to false)": bool(scheduler.async_scheduling),
        "speculative decoding": config.speculative_config is not None,
        "tensor parallelism": parallel.tensor_parallel_size > 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "micro-batching": parallel.use_ubatching,
        "sequence-parallel MoE": parallel.use_sequence_parallel_moe,
        "pooling models": model.runner_type != "generate",
        "encoder-decoder models": model.is_encoder_decoder,
        "diffusion models": model.is_diffusion,
        "multimodal models": model.is_multimodal_model,
        "prompt embeddings": model.enable_prompt_embeds,
        "kv_sharing_fast_prefill": config.cache_config.kv_sharing_fast_prefill,
        "KV transfer": config.kv_transfer_config is not None,
        "encoder-cache transfer": config.ec_transfer_config is not None,
    }
    return [name for name, asked in checks.items() if asked]


def check_supported(config: VllmConfig, *, v2_runner: bool) -> None:
    """Refuse a configuration that capture does not support.

    Raises:
        CaptureError: it names every reason.
    """
    reasons = refusals(config, v2_runner=v2_runner)
    if reasons:
        raise CaptureError(f"activations cannot be captured yet with: {'; '.join(reasons)}")


def model_shape(config: VllmConfig) -> tuple[int, int, str]:
    """Return decoder layers, hidden size and the NumPy name of the element type of an engine's model."""
    model = config.model_config
    return (
        model.get_total_num_hidden_layers(),
        model.get_hidden_size(),
        str(model.dtype).removeprefix("torch."),
    )


def capture_points(config: VllmConfig, points: Sequence[ExtractionPoint]) -> tuple[CapturePoint, ...]:
    """Return a spec's points as they are captured on an engine's model.

    Args:
        config: of the engine.
        points: from the spec.

    Raises:
        CaptureError: one of them cannot be captured, by name.
    """
    layers, width, dtype = model_shape(config)
    return tuple(CapturePoint.of(point, layers=layers, width=width, model_dtype=dtype) for point in points)


class RunnerV1:
    """The V1 model runner: which rows the step that just ran had, and which requests came and went with it.

    Args:
        runner: vLLM's model runner.

    Raises:
        VLLMIntrospectionError: it does not look like the one that this adapter knows.
    """

    def __init__(self, runner: Any) -> None:  # noqa: ANN401 - vLLM's model runner
        self._runner = runner
        self._batch: Batch | None = None
        check_introspection_compatible(runner)
        arrays = (runner.query_start_loc.np, runner.input_ids.np, runner.input_batch.num_computed_tokens_cpu)
        self.max_rows: int = int(runner.max_num_tokens)
        self.vocab_size: int = int(runner.input_batch.vocab_size)
        if any(not isinstance(a, np.ndarray) or a.dtype != np.int32 for a in arrays):
            raise VLLMIntrospectionError("the model runner's arrays are not int32")

    @property
    def model(self) -> Any:  # noqa: ANN401 - a torch module
        """The loaded model."""
        return self._runner.get_model()

    @property
    def device_type(self) -> str:
        """Where the model runs, as torch calls it."""
        return str(self._runner.device.type)

    def wrap_execute_model(
        self, before: Callable[[Any], None], after: Callable[[Any], None], spent: Callable[[int], None]
    ) -> None:
        """Call `before` and `after` around every step; neither may raise.

        Args:
            before: gets the scheduler's output before the batch is changed.
            after: gets it when the forward pass has run and the batch still is this step's.
            spent: gets the CPU time of this thread that both took, nanoseconds.
        """
        original = self._runner.execute_model

        @functools.wraps(original)
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            began = time.thread_time_ns()
            before(scheduler_output)
            prepared = time.thread_time_ns()
            result = original(scheduler_output, *args, **kwargs)
            ran = time.thread_time_ns()
            after(scheduler_output)
            spent(time.thread_time_ns() - ran + prepared - began)
            return result

        self._runner.execute_model = execute_model

    def batch(self, step: int, rows: int) -> Batch:
        """Return the batch of the step that just ran.

        Args:
            step: its number.
            rows: tokens that the scheduler asked for.

        Raises:
            CaptureError: what the runner says does not fit together.
        """
        runner, batch = self._runner, self._batch
        input_batch = runner.input_batch
        ids, computed = input_batch.req_ids, input_batch.num_computed_tokens_cpu
        starts, token_ids = runner.query_start_loc.np, runner.input_ids.np
        if len(ids) != input_batch.num_reqs:
            raise CaptureError(f"{len(ids)} request ids stand in a batch of {input_batch.num_reqs} requests")
        if (
            batch is None
            or batch.computed is not computed
            or batch.starts is not starts
            or batch.token_ids is not token_ids
        ):
            self._batch = batch = Batch(step, rows, ids, computed, starts, token_ids)
        batch.step, batch.rows, batch.engine_ids = step, rows, ids
        return batch

    def dummy_run(self, token_ids: np.ndarray) -> None:
        """Run the model's forward pass on some token ids, without requests and without a KV cache.

        Args:
            token_ids: int32 [n].
        """
        ids = self._runner.input_ids
        ids.np[: len(token_ids)] = token_ids
        ids.copy_to_gpu(len(token_ids))
        # No graphs and no LoRA: what is checked is the plain module.
        self._runner._dummy_run(len(token_ids))  # noqa: SLF001 - compat is where private names are read


def child_id(llm: Any, engine_id: str, index: int) -> str | None:  # noqa: ANN401 - an AsyncLLM
    """Return vLLM's own id of one child of a request, None where that child is not in the engine.

    Args:
        llm: the engine.
        engine_id: id under which the request was submitted; vLLM adds a random part, and the child's index.
        index: of the child.
    """
    processor = llm.output_processor
    for name in processor.external_req_ids.get(engine_id, ()):
        state = processor.request_states.get(name)
        if state is not None and state.request_index == index:
            return str(name)
    return None


async def quiet_before_shutdown(llm: Any) -> None:  # noqa: ANN401 - an AsyncLLM
    """Stop listening to an idle engine core, whose end would else be logged as its death.

    Args:
        llm: about to be shut down; with requests in flight nothing is done, they must hear of it.
    """
    if llm.output_handler is not None and llm.get_num_unfinished_requests() == 0:
        llm.output_handler.cancel()
        await asyncio.gather(llm.output_handler, return_exceptions=True)


async def close_client(llm: Any) -> None:  # noqa: ANN401 - an AsyncLLM
    """End the tasks of a vLLM client that was shut down, and the messaging context that it leaves open.

    Args:
        llm: shut down already; on the loop that it ran on.
    """
    client = llm.engine_core
    resources = client.resources
    tasks = [task for task in (llm.output_handler, resources.output_queue_task) if task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    # The sockets are closed, so this returns at once; if vLLM left one open it would wait for ever: not on this thread.
    thread = threading.Thread(target=resources.ctx.term, name="zmq-term", daemon=True)
    thread.start()
    await asyncio.to_thread(thread.join, _TERM_S)
    if thread.is_alive():
        logger.warning("vLLM left a socket open; its messaging context stays")


def seeds_stop_the_engine(config: VllmConfig) -> bool:
    """Whether a sampling seed can stop this engine.

    On a CPU the V1 runner rewinds a seeded generator after each chunk of a prefill, which a CPU generator cannot do:
    the engine core dies with `CPU Generator does not use offset`.
    """
    return config.device_config.device_type == "cpu" and bool(config.scheduler_config.enable_chunked_prefill)


def new_requests(scheduler_output: Any) -> list[Any]:  # noqa: ANN401 - vLLM's SchedulerOutput
    """Return the requests that are scheduled for the first time."""
    requests: list[Any] = scheduler_output.scheduled_new_reqs
    return requests


def order_of(new_request: Any, key: str) -> object:  # noqa: ANN401 - vLLM's NewRequestData
    """Return the raw order of a new request, None where it has none."""
    params = new_request.sampling_params
    extra = params.extra_args if params is not None else None
    return extra.get(key) if isinstance(extra, Mapping) else None


def lora_of(new_request: Any) -> str:  # noqa: ANN401 - vLLM's NewRequestData
    """Return the name of a new request's LoRA adapter, empty for none."""
    return "" if new_request.lora_request is None else str(new_request.lora_request.lora_name)
