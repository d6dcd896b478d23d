"""The reader of vLLM's private names, beside `owned`. It is tested on the versions of `version_check`.

`install` wraps one method of vLLM's worker class; the rest is done on the worker's instance, after its model is loaded.
`runner_for` chooses what says which rows a step had: `v1` or `v2`, behind the one interface of `runner`. `config` reads
an engine's configuration and names what capture does not support in it.
"""

from __future__ import annotations

from typing import Any

from undercurrent.adapters.vllm.compat.client import child_id, close_client, quiet_before_shutdown
from undercurrent.adapters.vllm.compat.config import (
    capture_points,
    check_supported,
    combination_of,
    features_of,
    model_shape,
    seeds_stop_the_engine,
    whole_group,
)
from undercurrent.adapters.vllm.compat.graphs import graph_sizes, has_cuda_graphs, in_graph, uncompiled
from undercurrent.adapters.vllm.compat.parts import parts_of, row_shapes
from undercurrent.adapters.vllm.compat.ranks import (
    Rank,
    attention_kernels,
    check_stage,
    owned_layers,
    rank_here,
    tensor_ranks,
    told_by_tensor_ranks,
)
from undercurrent.adapters.vllm.compat.requests import finished_ids, lora_of, order_of, slot_of
from undercurrent.adapters.vllm.compat.runner import Runner
from undercurrent.adapters.vllm.compat.server import (
    check_server,
    computes_on_cpu,
    engine_place,
    engine_processes,
    served_model,
)
from undercurrent.adapters.vllm.compat.v1 import RunnerV1
from undercurrent.adapters.vllm.compat.v2 import RunnerV2
from undercurrent.adapters.vllm.compat.worker import answer_calls, install, keep_runtime, runtime_of, watch_weights

__all__ = [
    "Rank",
    "Runner",
    "RunnerV1",
    "RunnerV2",
    "answer_calls",
    "attention_kernels",
    "capture_points",
    "check_server",
    "check_stage",
    "check_supported",
    "child_id",
    "close_client",
    "combination_of",
    "computes_on_cpu",
    "engine_place",
    "engine_processes",
    "features_of",
    "finished_ids",
    "graph_sizes",
    "has_cuda_graphs",
    "in_graph",
    "install",
    "keep_runtime",
    "lora_of",
    "model_shape",
    "order_of",
    "owned_layers",
    "parts_of",
    "quiet_before_shutdown",
    "rank_here",
    "row_shapes",
    "runner_for",
    "runtime_of",
    "seeds_stop_the_engine",
    "served_model",
    "slot_of",
    "tensor_ranks",
    "told_by_tensor_ranks",
    "uncompiled",
    "watch_weights",
    "whole_group",
]


def runner_for(worker: Any) -> Runner:  # noqa: ANN401 - a vLLM worker
    """Return what reads the steps of a worker whose model is loaded.

    Args:
        worker: of vLLM.

    Raises:
        VLLMIntrospectionError: its model runner does not look like one that this adapter knows.
    """
    made = RunnerV2 if worker.use_v2_model_runner else RunnerV1
    return made(worker.model_runner)
