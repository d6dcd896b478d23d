"""The layout of a V1 step, read from vLLM's model runner: which requests, how many rows of each, how far they were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from undercurrent.errors import VLLMIntrospectionError

__all__ = [
    "StepBatchMetadata",
    "VLLMIntrospectionError",
    "check_introspection_compatible",
    "extract_step_batch_metadata",
]

_NEEDED = {
    "input_batch": ("req_ids", "num_reqs", "num_computed_tokens_cpu", "vocab_size"),
    "query_start_loc": ("np",),
    "input_ids": ("np",),
}


@dataclass(frozen=True, slots=True)
class StepBatchMetadata:
    """One step, in the order in which its rows stand.

    Args:
        req_ids: requests that have rows in it.
        num_scheduled_tokens: rows of each.
        num_computed_tokens_before_step: positions of each that were computed before.

    Raises:
        VLLMIntrospectionError: the three do not fit together.
    """

    req_ids: tuple[str, ...]
    num_scheduled_tokens: tuple[int, ...]
    num_computed_tokens_before_step: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("req_ids", "num_scheduled_tokens", "num_computed_tokens_before_step"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        counts = (len(self.num_scheduled_tokens), len(self.num_computed_tokens_before_step))
        if counts != (len(self.req_ids), len(self.req_ids)):
            raise VLLMIntrospectionError(
                f"{len(self.req_ids)} requests with {counts[0]} row counts and {counts[1]} positions"
            )
        if any(n < 0 for n in (*self.num_scheduled_tokens, *self.num_computed_tokens_before_step)):
            raise VLLMIntrospectionError("a step with a negative number of rows or positions")


def check_introspection_compatible(model_runner: Any) -> None:  # noqa: ANN401 - vLLM's model runner
    """Refuse a model runner that does not look like the one this version was made for.

    Args:
        model_runner: of a worker whose model is loaded.

    Raises:
        VLLMIntrospectionError: it names what is missing.
    """
    missing = [
        f"{part}.{name}"
        for part, names in _NEEDED.items()
        for name in names
        if not hasattr(getattr(model_runner, part, None), name)
    ]
    if not hasattr(model_runner, "max_num_tokens"):
        missing.append("max_num_tokens")
    if missing:
        raise VLLMIntrospectionError(
            f"the model runner {type(model_runner).__name__} has no {', '.join(missing)}: "
            "it is not vLLM's V1 runner, or one of a version that this adapter does not know"
        )


def extract_step_batch_metadata(model_runner: Any, scheduler_output: Any) -> StepBatchMetadata:  # noqa: ANN401 - vLLM's
    """Return the layout of the step that a model runner is about to run or has just run.

    Args:
        model_runner: its persistent batch is in row-slot order.
        scheduler_output: says which requests have rows in this step.

    Raises:
        VLLMIntrospectionError: one of them has another shape than expected, or they contradict each other.
    """
    try:
        batch = model_runner.input_batch
        scheduled = dict(scheduler_output.num_scheduled_tokens)
        slots = [(n, request_id) for n, request_id in enumerate(batch.req_ids) if scheduled.get(request_id, 0) > 0]
        computed = [int(batch.num_computed_tokens_cpu[n]) for n, _ in slots]
    except (AttributeError, TypeError, IndexError) as exc:
        raise VLLMIntrospectionError(f"the model runner's batch has another shape than expected: {exc}") from exc
    absent = scheduled.keys() - {request_id for _, request_id in slots}
    if any(scheduled[request_id] > 0 for request_id in absent):
        raise VLLMIntrospectionError(f"{len(absent)} scheduled requests stand in no slot of the model runner's batch")
    ids = tuple(request_id for _, request_id in slots)
    return StepBatchMetadata(ids, tuple(scheduled[request_id] for request_id in ids), tuple(computed))
