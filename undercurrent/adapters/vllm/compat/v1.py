"""The V1 model runner: the persistent batch that it keeps is the batch of the step that just ran."""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from undercurrent.adapters.vllm.compat.drafts import Ends, drafted, rows_kept
from undercurrent.adapters.vllm.compat.host_copy import HostCopy
from undercurrent.adapters.vllm.compat.runner import Held
from undercurrent.adapters.vllm.compat.steps import After, Before, Spent, around
from undercurrent.adapters.vllm.introspection import check_introspection_compatible
from undercurrent.capture.plan import Batch
from undercurrent.errors import CaptureError, VLLMIntrospectionError

_VALID_TOKENS = 3
"""Where `_bookkeeping_sync` returns the tokens that came out, per slot."""


class RunnerV1(Held):
    """The V1 model runner: which rows the step that just ran had, and which requests came and went with it.

    Args:
        runner: vLLM's model runner.

    Raises:
        VLLMIntrospectionError: it does not look like the one that this adapter knows.
    """

    def __init__(self, runner: Any) -> None:  # noqa: ANN401 - vLLM's model runner
        super().__init__(runner)
        self._batch: Batch | None = None
        self._speculates = getattr(runner, "speculative_config", None) is not None
        self._sampled: tuple[Any, Any] | None = None
        check_introspection_compatible(runner)
        arrays = (runner.query_start_loc.np, runner.input_ids.np, runner.input_batch.num_computed_tokens_cpu)
        self.max_rows: int = int(runner.max_num_tokens)
        self.vocab_size: int = int(runner.input_batch.vocab_size)
        self._max_model_len = int(runner.max_model_len) if self._speculates else 0
        if any(not isinstance(a, np.ndarray) or a.dtype != np.int32 for a in arrays):
            raise VLLMIntrospectionError("the model runner's arrays are not int32")
        # With asynchronous scheduling the tokens of the last step are put in on the device, and only there.
        on_host = getattr(runner, "device", torch.device("cpu")).type == "cpu"
        self._ids = None if on_host else HostCopy(runner.input_ids.gpu)

    def wrap_steps(self, before: Before, after: After, spent: Spent) -> None:
        """Call `before` and `after` around every step; neither may raise."""
        runner = self._runner
        if not self._speculates:
            runner.execute_model = around(runner.execute_model, before, after, spent)
            return

        # Which rows are real is known when the tokens are sampled; the next drafts are made after that.
        def ran(scheduler_output: Any) -> None:  # noqa: ANN401 - vLLM's SchedulerOutput
            if runner.execute_model_state is None:
                after(scheduler_output)

        bookkeeping = runner._bookkeeping_sync  # noqa: SLF001 - compat is where private names are read

        @functools.wraps(bookkeeping)
        def sampled(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's own signature
            result = bookkeeping(scheduler_output, *args, **kwargs)
            began = time.thread_time_ns()
            self._sampled = scheduler_output, result
            after(scheduler_output)
            self._sampled = None
            spent(time.thread_time_ns() - began)
            return result

        runner.execute_model = around(runner.execute_model, before, ran, spent)
        runner._bookkeeping_sync = sampled  # noqa: SLF001

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
        if self._ids is not None:
            self._ids.bring(rows)
            token_ids = self._ids.array
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
        batch.kept = self._rows_kept(batch) if self._speculates else None
        return batch

    def _rows_kept(self, batch: Batch) -> npt.NDArray[np.int32] | None:
        """Return how many rows of each slot are real, None where no slot had drafts.

        Raises:
            CaptureError: what was sampled does not fit the drafts.
        """
        if self._sampled is None:
            raise CaptureError("a step with speculation was read before its tokens were sampled")
        scheduler_output, result = self._sampled
        drafts = drafted(scheduler_output)
        count = len(batch.engine_ids)
        if not drafts:
            return None
        # Read here, where an error ends the capture of this step alone.
        sampled = result[_VALID_TOKENS]
        if len(sampled) != count:
            raise CaptureError(f"tokens of {len(sampled)} requests were sampled in a batch of {count}")
        kept = np.diff(batch.starts[: count + 1])
        for slot, name in enumerate(batch.engine_ids):
            if name in drafts:
                ends = Ends.of(self._runner.requests[name], self._max_model_len)
                rows, computed = int(kept[slot]), int(batch.computed[slot])
                kept[slot] = rows_kept(rows, len(drafts[name]), computed, sampled[slot], ends)
        return kept

    def dummy_run(self, token_ids: np.ndarray) -> None:
        """Run the model's forward pass on some token ids, without requests and without a KV cache.

        Args:
            token_ids: int32 [n].
        """
        ids = self._runner.input_ids
        ids.np[: len(token_ids)] = token_ids
        ids.copy_to_gpu(len(token_ids))
        if self._runner.supports_mm_inputs:
            # Such a model is run on embeddings, which a dummy run leaves as the last step left them.
            rows = slice(len(token_ids))
            self._runner.inputs_embeds.gpu[rows].copy_(self.model.embed_input_ids(ids.gpu[rows]))
        # Through the graph of this size, once vLLM has captured one; without a LoRA adapter.
        self._runner._dummy_run(len(token_ids))  # noqa: SLF001 - compat is where private names are read
