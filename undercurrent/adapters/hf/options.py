"""The arguments of the engine that runs `transformers`: what they are, and what becomes of those meant for vLLM."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from undercurrent.errors import ConfigError

logger = logging.getLogger(__name__)

_DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "float": "float32",
    "float16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
}

VLLM_ONLY = frozenset(
    {
        "async_scheduling",
        "block_size",
        "disable_log_stats",
        "enable_chunked_prefill",
        "enable_log_requests",
        "enable_prefix_caching",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "num_gpu_blocks_override",
    }
)
"""Arguments of vLLM that say how it does its work and not what comes of it: they are ignored, and the log says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HFOptions:
    """How a model of `transformers` is run.

    Args:
        dtype: element type; `auto` is the one that the model was saved in.
        device: where it runs; `auto` is the first GPU, or else the CPU.
        max_model_len: most tokens of prompt plus generation; the model's own limit by default.
        max_num_seqs: most requests in one step.
        max_num_batched_tokens: most tokens in one step; longer prompts are computed in several.
        attn_implementation: of `transformers`; its own choice by default.
        revision: of a model that is given by name.
        trust_remote_code: run code that comes with the model.
        threads: threads of torch that compute; its own choice by default.
    """

    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 512
    attn_implementation: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    threads: int | None = None

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> Self:
        """Return the options that engine arguments name.

        Args:
            args: fields of this class, or of vLLM's arguments those in `VLLM_ONLY`.

        Raises:
            ConfigError: one is unknown or wrong; it says which are accepted.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(args) - known - VLLM_ONLY)
        if unknown:
            raise ConfigError(
                f"unknown engine arguments of the kind hf: {', '.join(unknown)}; accepted: {', '.join(sorted(known))}"
            )
        ignored = sorted(set(args) & VLLM_ONLY)
        if ignored:
            logger.info("engine arguments that mean something to vLLM alone are ignored: %s", ", ".join(ignored))
        values = {name: value for name, value in args.items() if name in known}
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "threads"):
            if values.get(name) is not None:
                _whole(name, values[name])
        dtype = str(values.get("dtype", "auto")).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ConfigError(f"engine argument dtype is {dtype!r:.40}; accepted: {', '.join(sorted(_DTYPES))}")
        return cls(**{**values, "dtype": _DTYPES[dtype]})


def _whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"engine argument {name} is {value!r:.40}; it must be a whole number from 1")
