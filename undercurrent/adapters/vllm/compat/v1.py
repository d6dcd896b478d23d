"""The V1 model runner: the persistent batch that it keeps is the batch of the step that just ran."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from undercurrent.adapters.vllm.introspection import check_introspection_compatible
from undercurrent.capture.plan import Batch
from undercurrent.errors import CaptureError, VLLMIntrospectionError


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

    def wrap_steps(
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

    def new_requests(self, scheduler_output: Any) -> list[Any]:  # noqa: ANN401 - vLLM's SchedulerOutput
        """Return the requests that are scheduled for the first time; one that was preempted is none of them."""
        requests: list[Any] = scheduler_output.scheduled_new_reqs
        return requests

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
