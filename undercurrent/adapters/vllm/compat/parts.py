"""Where vLLM's layers hold what is no output of a block: keys and values, and the choice of experts.

Nothing of a paged cache is read: keys and values are what the attention layer is given, the experts what its router
returns to whatever multiplies with them. A layer of another make is refused by name, since what it is given may not be
rotated, whole, or used at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.v1.attention.backend import AttentionType

from undercurrent.adapters.model_map import BESIDE, ModelMap, Source
from undercurrent.errors import CaptureError

# Backends that are given keys which the model has rotated; some others rotate them while they write their cache.
_BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN")
_ROTATING_PASSES = ("fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache", "fuse_rope_kvcache_cat_mla")
# Routers whose `select_experts` is the last word: others replace the model's choice or add experts to it.
_ROUTERS = (CPURouter, CustomRoutingRouter, FusedTopKBiasRouter, FusedTopKRouter, GroupedTopKRouter)
_CHOICE = "_undercurrent_choice"
_COMPARED_EXPERTS = ("mixtral", "qwen2_moe")
_COMPILED = "no test compares it in a compiled model (set enforce_eager)"
_SCALED = ("residual_stream", "layer_input", "attn_out", "mlp_out")


def row_shapes(config: VllmConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of one (token, layer) of `kv` and `router_topk`, as far as the model and its setup have them.

    Args:
        config: of the engine.
    """
    return {
        kind: shape
        for kind, (shape, reasons) in (("kv", _kv(config)), ("router_topk", _router_topk(config)))
        if not reasons
    }


def why_not(config: VllmConfig, kind: str) -> str:
    """Return why a tensor type is not captured in this setup, empty where it is.

    Args:
        config: of the engine.
        kind: `kv` or `router_topk`.
    """
    _, reasons = _kv(config) if kind == "kv" else _router_topk(config)
    return "; ".join(reasons)


def is_compiled(config: VllmConfig) -> bool:
    """Whether vLLM compiles the model."""
    return config.compilation_config.mode not in {None, CompilationMode.NONE}


def _kv(config: VllmConfig) -> tuple[tuple[int, ...], list[str]]:
    model, passes = config.model_config, config.compilation_config.pass_config
    heads, size = model.get_total_num_kv_heads(), model.get_head_size()
    reasons = {
        "multi-head latent attention keeps no keys and values of its heads": model.use_mla,
        "the model has no attention": model.is_attention_free,
        "with tensor parallelism each rank has heads of its own": config.parallel_config.tensor_parallel_size > 1,
        "its values are of another size than its keys": getattr(model.hf_text_config, "v_head_dim", size) != size,
        "keys are rotated while the cache is written": any(getattr(passes, name, False) for name in _ROTATING_PASSES),
    }
    return (2, heads, size), [reason for reason, holds in reasons.items() if holds]


def _router_topk(config: VllmConfig) -> tuple[tuple[int, ...], list[str]]:
    model, parallel = config.model_config, config.parallel_config
    count = model.get_num_experts_per_tok() if model.get_num_experts() > 0 else 0
    reasons = {
        "the model has no experts": count < 1,
        f"no test compares the choice of experts of a {model.hf_text_config.model_type}": (
            count > 0 and model.hf_text_config.model_type not in _COMPARED_EXPERTS
        ),
        "with tensor parallelism no test compares it": parallel.tensor_parallel_size > 1,
        _COMPILED: is_compiled(config),
        "with data parallelism a router may see the tokens of other ranks": parallel.data_parallel_size > 1,
        "with expert load balancing the ids are those of replicas": parallel.enable_eplb,
    }
    return (2, count), [reason for reason, holds in reasons.items() if holds]


@dataclass(frozen=True, slots=True)
class VLLMParts(ModelMap):
    """The parts of a model of vLLM.

    Args:
        shapes: of `kv` and `router_topk`, as `row_shapes` gives them.
    """

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def source(self, tensor_type: str, layer: int) -> Source:
        """Return where a tensor type of a layer is read.

        Args:
            tensor_type: any.
            layer: 0-based; ignored for the final norm.

        Raises:
            CaptureError: the layer has no such part, or none that is understood.
        """
        if tensor_type in _SCALED and _scales_its_stream(self.layers[layer]):
            raise CaptureError(
                f"layer {layer} ({type(self.layers[layer]).__name__}): {tensor_type} is not captured in float16, in "
                "which this model divides its residual stream by a factor; use bfloat16"
            )
        if tensor_type not in {"kv", "router_topk"}:
            # Not `super()`: a dataclass with slots is another class than the one that this function was made in.
            return ModelMap.source(self, tensor_type, layer)
        block = self.layers[layer]
        name = f"layer {layer} ({type(block).__name__})"
        shape = self.shapes.get(tensor_type)
        if shape is None:
            raise CaptureError(f"{name}: tensor_type {tensor_type} is not captured of this model")
        read = _attention if tensor_type == "kv" else _choice
        return read(block, shape, name)


def _scales_its_stream(block: nn.Module) -> bool:
    """Whether a layer divides its stream so that it does not overflow; norms do not tell, so no self-check would."""
    in_float16 = any(parameter.dtype is torch.float16 for parameter in block.parameters())
    return in_float16 and hasattr(block, "routed_scaling_factor")


def parts_of(model: nn.Module, config: VllmConfig) -> VLLMParts:
    """Return the parts of a loaded model.

    Args:
        model: as loaded.
        config: of its engine.

    Raises:
        CaptureError: they cannot be told apart without guessing.
    """
    shape = config.model_config
    found = ModelMap.of(model, shape.get_total_num_hidden_layers(), shape.get_hidden_size())
    return VLLMParts(found.layers, found.final_norm, row_shapes(config))


def _attention(block: nn.Module, shape: tuple[int, ...], name: str) -> Source:
    layers = [module for module in block.modules() if isinstance(module, AttentionLayerBase)]
    if len(layers) != 1:
        found = ", ".join(type(module).__name__ for module in layers) or "none"
        raise CaptureError(f"{name}: kv is read from its one attention layer; found: {found}")
    (layer,) = layers
    kind = type(layer).__name__
    if not isinstance(layer, Attention) or type(layer).forward is not Attention.forward:
        raise CaptureError(f"{name}: kv is not read from an attention layer of type {kind}")
    backend = layer.attn_backend.get_name()
    reasons = {
        f"its attention is {layer.attn_type}": layer.attn_type != AttentionType.DECODER,
        f"it uses the keys and values of {layer.kv_sharing_target_layer_name}": (
            layer.kv_sharing_target_layer_name is not None
        ),
        f"the attention backend {backend} may be given keys that are not rotated yet": backend not in _BACKENDS,
        f"it has {layer.num_kv_heads} heads of {layer.head_size} and {layer.head_size_v}, not {shape[1:]}": (
            (2, layer.num_kv_heads, layer.head_size) != shape or layer.head_size_v != layer.head_size
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise CaptureError(f"{name}: kv is not captured: {reason}")
    return Source(layer, BESIDE, ("key", "value"))


class Choice(nn.Module):  # type: ignore[misc]
    """Where a tap reads what a router has chosen: it is called with that, and does nothing."""

    def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Take a choice.

        Args:
            ids: of experts, [tokens, k].
            weights: of their outputs, [tokens, k].
        """


def _choice(block: nn.Module, shape: tuple[int, ...], name: str) -> Source:
    runners = [module for module in block.modules() if isinstance(module, MoERunner)]
    if len(runners) != 1:
        raise CaptureError(f"{name}: router_topk is read from its one set of experts; found: {len(runners)}")
    (runner,) = runners
    router = runner.router
    kind = type(router).__name__
    reasons = {
        f"a router of type {kind}": type(router) not in _ROUTERS,
        "a kernel that chooses the experts itself": runner.is_monolithic,
        "experts whose tokens are gathered from several ranks": runner.do_naive_dispatch_combine,
        "ids of the experts' replicas": router.eplb_state is not None,
    }
    for reason, holds in reasons.items():
        if holds:
            raise CaptureError(f"{name}: router_topk is not captured of {reason}")
    if router.top_k != shape[1]:
        raise CaptureError(f"{name}: router_topk has {router.top_k} experts a token, not {shape[1]}")
    return Source(_choice_of(router), BESIDE, ("ids", "weights"))


def _choice_of(router: Any) -> Choice:  # noqa: ANN401 - a router of vLLM
    """Return the module through which a router's choices go; the first call puts it there."""
    choice = getattr(router, _CHOICE, None)
    if isinstance(choice, Choice):
        return choice
    choice = Choice()
    select: Callable[..., tuple[torch.Tensor, torch.Tensor]] = router.select_experts

    @functools.wraps(select)
    def select_experts(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401 - vLLM's own
        weights, ids = select(*args, **kwargs)
        choice(ids=ids, weights=weights)
        return weights, ids

    router.select_experts = select_experts
    setattr(router, _CHOICE, choice)
    return choice
