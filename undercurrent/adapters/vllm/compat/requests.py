"""What a scheduler's output says of the requests that came and went."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def finished_ids(scheduler_output: Any) -> Collection[str]:  # noqa: ANN401 - vLLM's SchedulerOutput
    """Return the requests that ended since the last step, in a step without tokens too."""
    ids: Collection[str] = scheduler_output.finished_req_ids
    return ids


def order_of(new_request: Any, key: str) -> object:  # noqa: ANN401 - vLLM's NewRequestData
    """Return the raw order of a new request, None where it has none."""
    params = new_request.sampling_params
    extra = params.extra_args if params is not None else None
    return extra.get(key) if isinstance(extra, Mapping) else None


def slot_of(new_request: Any, key: str) -> int:  # noqa: ANN401 - vLLM's NewRequestData
    """Return where an API server tells the length of a new request, -1 where none does."""
    slot = order_of(new_request, key)
    return slot if isinstance(slot, int) and not isinstance(slot, bool) and 0 <= slot < 1 << 46 else -1


def lora_of(new_request: Any) -> str:  # noqa: ANN401 - vLLM's NewRequestData
    """Return the name of a new request's LoRA adapter, empty for none."""
    return "" if new_request.lora_request is None else str(new_request.lora_request.lora_name)
