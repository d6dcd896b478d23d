"""Tiny models with random weights and a byte-level tokenizer of our own: real architectures, made in a moment.

    folder = build_tiny_model("llama", tmp_path / "llama")      # a folder that transformers and vLLM load

Weights are drawn wide enough that layers differ and nothing is near zero: a parity test on the usual initialisation
would also pass with two layers swapped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
)

from undercurrent.testing.byte_tokenizer import byte_tokenizer

EOS_ID = 256
"""Id of the end-of-text token; ids below are bytes."""

VOCAB_SIZE = 320
"""Rows of the embedding: 257 tokens, padded."""


def _rotary(layers: int, width: int, max_len: int) -> dict[str, Any]:
    """Return what all families with rotary positions are told."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
        "num_key_value_heads": max(1, width // 64),
        "max_position_embeddings": max_len,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "tie_word_embeddings": False,
    }


def _llama(layers: int, width: int, max_len: int) -> PretrainedConfig:
    return LlamaConfig(**_rotary(layers, width, max_len))


def _qwen2(layers: int, width: int, max_len: int) -> PretrainedConfig:
    return Qwen2Config(**_rotary(layers, width, max_len))


def _gemma(layers: int, width: int, max_len: int) -> PretrainedConfig:
    return GemmaConfig(**_rotary(layers, width, max_len), head_dim=32)


def _gemma2(layers: int, width: int, max_len: int) -> PretrainedConfig:
    # A short window: every second layer sees less than the whole of any prompt worth testing.
    return Gemma2Config(**_rotary(layers, width, max_len), head_dim=32, query_pre_attn_scalar=32, sliding_window=24)


def _mixtral(layers: int, width: int, max_len: int) -> PretrainedConfig:
    return MixtralConfig(
        **_rotary(layers, width, max_len), num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    )


def _qwen2_moe(layers: int, width: int, max_len: int) -> PretrainedConfig:
    # Three of six experts, whose weights do not add up to one.
    return Qwen2MoeConfig(
        **_rotary(layers, width, max_len),
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=width,
        shared_expert_intermediate_size=width,
        norm_topk_prob=False,
    )


def _gpt2(layers: int, width: int, max_len: int) -> PretrainedConfig:
    return GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=width,
        n_layer=layers,
        n_head=width // 32,
        n_positions=max_len,
        bos_token_id=EOS_ID,
        eos_token_id=EOS_ID,
    )


_FAMILIES: Mapping[str, Callable[[int, int, int], PretrainedConfig]] = {
    "llama": _llama,
    "gpt2": _gpt2,
    "qwen2": _qwen2,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
}


def build_tiny_model(
    family: str,
    folder: Path,
    *,
    layers: int = 4,
    width: int = 64,
    max_len: int = 512,
    seed: int = 0,
    dtype: str = "float32",
    **config: Any,  # noqa: ANN401 - whatever the family's configuration takes
) -> Path:
    """Write a model of random weights with its tokenizer; return its folder.

    Args:
        family: `llama`, `gpt2`, `qwen2`, `gemma`, `gemma2`, `mixtral` or `qwen2_moe`.
        folder: to write to.
        layers: decoder layers.
        width: hidden size, a multiple of 64.
        max_len: most tokens of prompt plus generation.
        seed: of the weights.
        dtype: name of the weights' element type.
        config: further fields of the configuration.
    """
    values = _FAMILIES[family](layers, width, max_len)
    for key, value in config.items():
        setattr(values, key, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(values)
        with torch.no_grad():
            for name, weights in model.named_parameters():
                if weights.dim() > 1:
                    weights.normal_(0.0, 1.0 / weights.shape[-1] ** 0.5)
                elif name.endswith("bias"):
                    weights.normal_(0.0, 0.1)
                else:
                    weights.uniform_(0.5, 1.5)
    model.generation_config.eos_token_id = EOS_ID
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    marks = dict.fromkeys(("eos_token", "pad_token"), "<eos>")
    byte_tokenizer(max_len, after=("<eos>",), **marks).save_pretrained(folder)
    return folder
