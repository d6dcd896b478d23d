"""Configurations of tiny models: one for every way in which a decoder carries its residual stream, and then some.

Sliding windows are short and of two kinds of layers, experts are few and routed by two, rotary positions cover a part
of a head where the family does so: what sets a family apart is there, small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PretrainedConfig

EOS_ID = 256
"""Id of the end-of-text token; ids below are bytes."""

VOCAB_SIZE = 320
"""Rows of the embedding: 257 tokens, padded."""

_WINDOW = 24


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a tiny model is.

    Args:
        layers: decoder layers.
        width: hidden size, a multiple of 64.
        max_len: most tokens of prompt plus generation.
    """

    layers: int
    width: int
    max_len: int

    @property
    def heads(self) -> int:
        """Attention heads, of 32 elements each."""
        return self.width // 32

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return max(1, self.width // 64)

    def alternating(self, first: str, second: str) -> list[str]:
        """Return the kinds of layers of a model with two."""
        return [second if layer % 2 else first for layer in range(self.layers)]


def _marks() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }


def _rotary(shape: Shape) -> dict[str, Any]:
    """Return what all families with rotary positions are told."""
    return {
        **_marks(),
        "hidden_size": shape.width,
        "intermediate_size": 2 * shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.max_len,
    }


def _windows(shape: Shape) -> dict[str, Any]:
    # A short window: every second layer sees less than the whole of any prompt worth testing.
    kinds = shape.alternating("sliding_attention", "full_attention")
    return {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": _WINDOW, "layer_types": kinds}


def _experts(name: str) -> dict[str, Any]:
    return {name: 4, "num_experts_per_tok": 2}


def _gpt2(shape: Shape) -> dict[str, Any]:
    return {
        **_marks(),
        "bos_token_id": EOS_ID,
        "n_embd": shape.width,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_positions": shape.max_len,
        "tie_word_embeddings": True,
    }


def _falcon(shape: Shape) -> dict[str, Any]:
    values = _rotary(shape)
    del values["intermediate_size"], values["num_key_value_heads"]
    return {**values, "tie_word_embeddings": True}


def _mamba(shape: Shape) -> dict[str, Any]:
    return {
        **_marks(),
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "state_size": 16,
        "tie_word_embeddings": True,
    }


def _jamba(shape: Shape) -> dict[str, Any]:
    """Attention in every second layer, experts in every second as well, but not in the same ones."""
    every_second = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 0}
    return {**_rotary(shape), **_experts("num_experts"), **every_second, "mamba_d_state": 16}


def _lfm2(shape: Shape) -> dict[str, Any]:
    """Attention in every second layer, a short convolution in the others."""
    kinds = shape.alternating("conv", "full_attention")
    # Published models name these, transformers' own class does not.
    convolution = {"conv_dim": shape.width, "conv_dim_out": shape.width, "conv_L_cache": 3, "block_dim": shape.width}
    convolution |= {"block_ff_dim": 2 * shape.width, "block_auto_adjust_ff_dim": False}
    return {**_rotary(shape), **convolution, "layer_types": kinds, "tie_word_embeddings": True}


def _smolvlm(shape: Shape) -> dict[str, Any]:
    """As below, without positions of more than one dimension."""
    vision = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.width,
        "intermediate_size": 2 * shape.width,
        "num_attention_heads": shape.heads,
        "image_size": 64,
        "patch_size": 16,
    }
    text = {"model_type": "llama", **_rotary(shape)}
    return {
        "text_config": text,
        "vision_config": vision,
        "image_token_id": 260,
        "scale_factor": 2,
        **_marks(),
        "pad_token_id": EOS_ID,
    }


def _qwen2_5_vl(shape: Shape) -> dict[str, Any]:
    """The vision tower is as deep and as wide as the text part: only the model itself says which is which."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
    vision = {
        "depth": shape.layers,
        "hidden_size": shape.width,
        "out_hidden_size": shape.width,
        "intermediate_size": 2 * shape.width,
        "num_heads": shape.heads,
        "fullatt_block_indexes": [shape.layers - 1],
    }
    text = {**_rotary(shape), "rope_parameters": rope}
    marks = {"image_token_id": 260, "video_token_id": 261, "vision_start_token_id": 262, "vision_end_token_id": 263}
    return {"text_config": text, "vision_config": vision, **marks, "tie_word_embeddings": False}


_Values = Callable[[Shape], dict[str, Any]]

_FAMILIES: Mapping[str, tuple[str, _Values]] = {
    "llama": ("llama", _rotary),
    "gpt2": ("gpt2", _gpt2),
    "qwen2": ("qwen2", _rotary),
    "qwen3": ("qwen3", lambda shape: {**_rotary(shape), "head_dim": 32}),
    "gemma": ("gemma", lambda shape: {**_rotary(shape), "head_dim": 32}),
    "gemma2": ("gemma2", lambda shape: {**_rotary(shape), **_windows(shape), "tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", lambda shape: {**_rotary(shape), **_windows(shape), "tie_word_embeddings": True}),
    "mixtral": ("mixtral", lambda shape: {**_rotary(shape), **_experts("num_local_experts")}),
    "qwen2_moe": (
        "qwen2_moe",
        lambda shape: {
            **_rotary(shape),
            **_experts("num_experts"),
            "moe_intermediate_size": shape.width,
            "shared_expert_intermediate_size": shape.width,
        },
    ),
    "phi3": ("phi3", _rotary),
    "olmo2": ("olmo2", _rotary),
    "cohere": ("cohere", lambda shape: {**_rotary(shape), "tie_word_embeddings": True}),
    "exaone4": (
        "exaone4",
        lambda shape: {
            **_rotary(shape),
            "sliding_window": _WINDOW,
            "layer_types": shape.alternating("sliding_attention", "full_attention"),
        },
    ),
    "stablelm": ("stablelm", _rotary),
    "phimoe": (
        "phimoe",
        # As the published models have it; an engine may take these biases for granted.
        lambda shape: {
            **_rotary(shape),
            **_experts("num_local_experts"),
            "attention_bias": True,
            "lm_head_bias": True,
        },
    ),
    "falcon": ("falcon", _falcon),
    "gpt_neox": ("gpt_neox", lambda shape: {k: v for k, v in _rotary(shape).items() if k != "num_key_value_heads"}),
    "mamba": ("mamba", _mamba),
    "jamba": ("jamba", _jamba),
    "lfm2": ("lfm2", _lfm2),
    "smolvlm": ("smolvlm", _smolvlm),
    "qwen2_5_vl": ("qwen2_5_vl", _qwen2_5_vl),
}

FAMILIES = tuple(_FAMILIES)
"""Names of all families."""


def configuration(family: str, shape: Shape, **fields: Any) -> PretrainedConfig:  # noqa: ANN401 - of the family
    """Return the configuration of a tiny model.

    Args:
        family: one of `FAMILIES`.
        shape: how large it is.
        fields: whatever else the family's configuration takes.
    """
    model_type, values = _FAMILIES[family]
    made: PretrainedConfig = AutoConfig.for_model(model_type, **{**values(shape), **fields})
    return made
