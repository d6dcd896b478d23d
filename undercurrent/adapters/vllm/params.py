"""A request of ours as vLLM's sampling parameters; its capture order travels inside them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from undercurrent.adapters.base import EngineRequest
from undercurrent.adapters.vllm.settings import CONFIG_KEY
from undercurrent.errors import BadRequestError
from undercurrent.protocol.messages import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams


def sampling_params(request: EngineRequest) -> SamplingParams:
    """Return what vLLM needs to sample for a request.

    Raises:
        BadRequestError: vLLM refuses a parameter.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    given = {
        field.name: getattr(sampling, field.name)
        for field in dataclasses.fields(Sampling)
        if getattr(sampling, field.name) not in {None, ()}
    }
    for name in ("stop", "stop_token_ids"):
        if name in given:
            given[name] = list(given[name])
    if request.capture is not None and request.capture.points:
        order = request.capture.as_order(engine_id=request.engine_id, n=sampling.n)
        given["extra_args"] = {CONFIG_KEY: order.to_json()}
    try:
        return SamplingParams(
            **given,
            output_kind=RequestOutputKind.DELTA,
            skip_reading_prefix_cache=request.skip_prefix_cache or None,
        )
    except (VLLMClientError, ValueError, TypeError) as exc:
        raise BadRequestError(f"bad sampling parameters: {exc}") from exc
