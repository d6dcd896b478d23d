"""Which of an engine's workers this process is, and what its ranks agree on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import PPMissingLayer

from undercurrent.adapters.model_map import ModelMap
from undercurrent.errors import CaptureError
from undercurrent.spec import TensorType


@dataclass(frozen=True, slots=True)
class Rank:
    """One worker of an engine.

    Args:
        pipeline: its stage.
        publishes: it is the first of the tensor-parallel ranks of that stage, which all compute the same values.
    """

    pipeline: int = 0
    publishes: bool = True


def rank_here() -> Rank:
    """Return which worker this process is; valid once vLLM has initialised its device."""
    return Rank(get_pp_group().rank_in_group, get_tp_group().rank_in_group == 0)


def owned_layers(config: VllmConfig) -> tuple[range, ...]:
    """Return the decoder layers of each pipeline stage.

    Args:
        config: of the engine.
    """
    layers = config.model_config.get_total_num_hidden_layers()
    ranks = config.parallel_config.pipeline_parallel_size
    return tuple(range(*get_pp_indices(layers, rank, ranks)) for rank in range(ranks))


def check_stage(parts: ModelMap, config: VllmConfig) -> None:
    """Refuse a model whose layers are not where its configuration puts them.

    Args:
        parts: of the model in this process.
        config: of the engine.

    Raises:
        CaptureError: it says which are.
    """
    if config.parallel_config.pipeline_parallel_size == 1:
        return
    here = [layer for layer, module in enumerate(parts.layers) if not isinstance(module, PPMissingLayer)]
    expected, group = owned_layers(config)[rank_here().pipeline], get_pp_group()
    if here != list(expected):
        raise CaptureError(f"pipeline stage {group.rank_in_group} has layers {here}, not {list(expected)}")
    # Some models make the norm on every stage; only the last one runs it.
    if group.is_last_rank and isinstance(parts.final_norm, PPMissingLayer):
        raise CaptureError(f"pipeline stage {group.rank_in_group}, the last one, has no final norm")


def stage_layers(config: VllmConfig, kind: TensorType) -> range:
    """Return the layers of this process that a tensor type may be read of; the final norm is the last stage's.

    Args:
        config: of the engine.
        kind: which tensor.
    """
    layers = config.model_config.get_total_num_hidden_layers()
    if kind is TensorType.FINAL_NORM:
        return range(layers, layers + get_pp_group().is_last_rank)
    return owned_layers(config)[rank_here().pipeline]


def tensor_ranks() -> int:
    """Return how many ranks share each layer of this process."""
    return int(get_tp_group().world_size)


def told_by_tensor_ranks(mine: object) -> list[object]:
    """Return what each tensor-parallel rank of this stage says, in their order; all of them must ask.

    Args:
        mine: what this one says; it is pickled, among processes of one engine.
    """
    group = get_tp_group()
    told: list[object] = [None] * group.world_size
    torch.distributed.all_gather_object(told, mine, group=group.cpu_group)
    return told


def attention_kernels(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that read its KV cache or state, below the projections around them."""
    return [module for module in model.modules() if isinstance(module, AttentionLayerBase)]
