"""Tiny models with random weights and a byte-level tokenizer of our own: real architectures, made in a moment.

    folder = build_tiny_model("llama", tmp_path / "llama")      # a folder that transformers and vLLM load

Weights are drawn wide enough that layers differ and nothing is near zero: a parity test on the usual initialisation
would also pass with two layers swapped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from undercurrent.testing.byte_tokenizer import byte_tokenizer
from undercurrent.testing.tiny_families import EOS_ID, FAMILIES, VOCAB_SIZE, Shape, configuration

__all__ = ["EOS_ID", "FAMILIES", "VOCAB_SIZE", "build_tiny_model"]


_SCORES = ("q_proj", "k_proj", "qkv_proj", "query_key_value", "c_attn")


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
    values = configuration(family, Shape(layers, width, max_len), **config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(values)
        with torch.no_grad():
            for name, weights in model.named_parameters():
                _draw(name, weights, around_zero=values.model_type.startswith("gemma"))
    model.generation_config.eos_token_id = EOS_ID
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    marks = dict.fromkeys(("eos_token", "pad_token"), "<eos>")
    byte_tokenizer(max_len, after=("<eos>",), **marks).save_pretrained(folder)
    return folder


def _model(config: PretrainedConfig) -> Any:  # noqa: ANN401 - a model of transformers
    kind = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    return kind.from_config(config)


def _draw(name: str, weights: nn.Parameter, *, around_zero: bool) -> None:
    """Draw one tensor so that activations keep their size from layer to layer, and rounding does not grow either.

    Args:
        name: of the tensor.
        weights: to fill.
        around_zero: a norm of this family scales by 1 + its weight.
    """
    if weights.dim() > 1:
        # Attention that is nearly one-hot would turn rounding into another choice.
        gain = 0.5 if any(part in name for part in _SCORES) else 1.0
        weights.normal_(0.0, gain / weights.shape[-1] ** 0.5)
    elif name.endswith("bias"):
        weights.normal_(0.0, 0.1)
    else:
        weights.uniform_(0.5, 1.5).sub_(1.0 if around_zero else 0.0)
