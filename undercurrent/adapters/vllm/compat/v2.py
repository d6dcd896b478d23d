"""The V2 model runner: the batch of a step lies in `execute_model_state` until its tokens are sampled."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from undercurrent.adapters.vllm.compat.host_copy import HostCopy
from undercurrent.adapters.vllm.compat.runner import Held
from undercurrent.adapters.vllm.compat.steps import After, Before, Spent, around
from undercurrent.capture.plan import Batch
from undercurrent.errors import CaptureError, VLLMIntrospectionError

_NEEDED = {
    "": (
        "adaptive_verification",
        "execute_model_state",
        "max_num_reqs",
        "max_num_tokens",
        "num_speculative_steps",
        "vocab_size",
    ),
    "input_buffers": ("input_ids", "positions"),
    "model_state": ("prepare_inputs",),
}


class RunnerV2(Held):
    """Implements `Runner`; arrays that V2 makes anew in every step are copied into ones that stay where they are.

    Args:
        runner: vLLM's model runner.

    Raises:
        VLLMIntrospectionError: it does not look like the one that this adapter knows.
        CaptureError: it runs in a way whose rows cannot be told apart.
    """

    def __init__(self, runner: Any) -> None:  # noqa: ANN401 - vLLM's model runner
        _check(runner)
        super().__init__(runner)
        self.max_rows: int = int(runner.max_num_tokens)
        self.vocab_size: int = int(runner.vocab_size)
        self._prompt_lens: dict[str, int] = {}
        self._ids: torch.Tensor = runner.input_buffers.input_ids
        self._positions: torch.Tensor = runner.input_buffers.positions
        self._host_ids = HostCopy(self._ids)
        self._host_positions = HostCopy(self._positions)
        # With drafts the host knows an upper bound alone, and the device the truth.
        self._exact = int(runner.num_speculative_steps) == 0
        slots = int(runner.max_num_reqs)
        self._batch = Batch(0, 0, [], np.zeros(slots, np.int32), np.zeros(slots + 1, np.int32), self._host_ids.array)

    def wrap_steps(self, before: Before, after: After, spent: Spent) -> None:
        """Call `before` and `after` around every step that is not a dummy run; neither may raise."""
        original = self._runner.execute_model
        captured = around(original, before, after, spent)

        @functools.wraps(original)
        def execute_model(
            scheduler_output: Any,  # noqa: ANN401 - vLLM's own signature
            intermediate_tensors: Any = None,  # noqa: ANN401
            dummy_run: bool = False,
            *args: Any,  # noqa: ANN401
            **kwargs: Any,  # noqa: ANN401
        ) -> Any:  # noqa: ANN401
            run = original if dummy_run else captured
            return run(scheduler_output, intermediate_tensors, dummy_run, *args, **kwargs)

        self._runner.execute_model = execute_model

    def new_requests(self, scheduler_output: Any) -> list[Any]:  # noqa: ANN401 - vLLM's SchedulerOutput
        """Return the requests that are scheduled for the first time; one that was preempted is none of them.

        V2 is told of a preempted request as of a new one, with the same prompt. One that comes again with another
        prompt is returned: it is a session whose input goes on, and no longer the request that was opened.
        """
        known = self._prompt_lens
        for name in scheduler_output.finished_req_ids:
            known.pop(name, None)
        fresh = []
        for request in scheduler_output.scheduled_new_reqs:
            if known.get(request.req_id) != request.prompt_len:
                fresh.append(request)
                known[request.req_id] = request.prompt_len
        return fresh

    def batch(self, step: int, rows: int) -> Batch:
        """Return the batch of the step that just ran.

        Args:
            step: its number.
            rows: tokens that the scheduler asked for.

        Raises:
            CaptureError: what the runner says does not fit together.
        """
        state = self._runner.execute_model_state
        if state is None:
            raise CaptureError("the model runner does not say what it ran")
        ran, batch = state.input_batch, self._batch
        count = len(ran.req_ids)
        if count != ran.num_reqs or ran.num_tokens != rows:
            raise CaptureError(
                f"{count} request ids and {ran.num_tokens} tokens stand in a batch of {ran.num_reqs} requests "
                f"and {rows} tokens"
            )
        if ran.input_ids.data_ptr() != self._ids.data_ptr() or ran.positions.data_ptr() != self._positions.data_ptr():
            raise CaptureError("the model read other token ids and positions than those of the runner's buffers")
        self._host_ids.bring(rows)
        batch.step, batch.rows, batch.engine_ids = step, rows, ran.req_ids
        batch.starts[: count + 1] = ran.query_start_loc_np[: count + 1]
        self._place(ran, count, rows)
        return batch

    def _place(self, ran: Any, count: int, rows: int) -> None:  # noqa: ANN401 - vLLM's InputBatch
        """Set the positions computed before the step, per slot.

        Raises:
            CaptureError: host and device contradict each other.
        """
        computed, told = self._batch.computed[:count], ran.num_computed_tokens_np
        if self._exact and not self._host_positions.on_host:
            computed[:] = told
            return
        self._host_positions.bring(rows)
        computed[:] = self._host_positions.array[self._batch.starts[:count]]
        if self._exact and not np.array_equal(computed, told):
            raise CaptureError("host and device disagree about the positions of a step")

    def dummy_run(self, token_ids: np.ndarray) -> None:
        """Run the model's forward pass on some token ids, without requests and without a KV cache.

        Args:
            token_ids: int32 [n].
        """
        with self._feed(token_ids):
            # As when memory is profiled: no graphs, no attention metadata.
            self._runner._dummy_run(len(token_ids), skip_attn=True, is_profile=True)  # noqa: SLF001
        # What it left is no step of any request.
        self._runner.execute_model_state = None

    @contextmanager
    def _feed(self, token_ids: np.ndarray) -> Iterator[None]:
        """Let a dummy run, which zeroes its inputs, compute on these token ids."""
        state = self._runner.model_state
        original = state.prepare_inputs

        def prepare_inputs(input_batch: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            given = torch.from_numpy(token_ids)
            input_batch.input_ids[: len(token_ids)].copy_(given)
            input_batch.positions[: len(token_ids)].copy_(torch.arange(len(token_ids)))
            return original(input_batch, *args, **kwargs)

        state.prepare_inputs = prepare_inputs
        try:
            yield
        finally:
            del state.prepare_inputs


def _check(runner: Any) -> None:  # noqa: ANN401 - vLLM's model runner
    """Refuse a model runner that does not look like vLLM's V2, or that runs in a way that is not understood."""
    missing = [
        f"{part}.{name}".lstrip(".")
        for part, names in _NEEDED.items()
        for name in names
        if not hasattr(getattr(runner, part, None) if part else runner, name)
    ]
    if missing:
        raise VLLMIntrospectionError(
            f"the model runner {type(runner).__name__} has no {', '.join(missing)}: "
            "it is not vLLM's V2 runner, or one of a version that this adapter does not know"
        )
    buffers = runner.input_buffers
    if (buffers.input_ids.dtype, buffers.positions.dtype) != (torch.int32, torch.int64):
        raise VLLMIntrospectionError("the model runner's token ids are not int32, or its positions not int64")
    if runner.adaptive_verification is not None:
        raise CaptureError("activations cannot be captured yet with: adaptive verification of drafts")
