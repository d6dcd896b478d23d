"""Tiny models with random weights and a byte-level tokenizer of our own: real architectures, made in a moment.

    folder = build_tiny_model("llama", tmp_path / "llama")      # a folder that transformers and vLLM load

Weights are drawn wide enough that layers differ and nothing is near zero: a parity test on the usual initialisation
would also pass with two layers swapped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from undercurrent.testing.byte_tokenizer import byte_tokenizer
from undercurrent.testing.tiny_families import EOS_ID, FAMILIES, VOCAB_SIZE, Shape, configuration

__all__ = ["EOS_ID", "FAMILIES", "VOCAB_SIZE", "build_tiny_model"]


_CALLED = {"phimoe": "PhiMoEForCausalLM"}
"""Architectures as published models call them, where transformers calls its own class otherwise."""

_SCORES = {"q_proj", "k_proj", "qkv_proj", "query_key_value", "c_attn"}
_ADDED = {"o_proj", "down_proj", "out_proj", "c_proj", "dense", "dense_4h_to_h"}
_NORMS_BEFORE_ADDING = {"gemma2", "gemma3_text", "exaone4", "olmo2"}
_LAST_NORMS = {"post_attention_layernorm", "post_feedforward_layernorm"}


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
        family: one of `FAMILIES`.
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
                _draw(name, weights, values)
            if not values.model_type.startswith("gemma"):
                # Large beside what the layers add, so that rounding does not grow from one to the next; Gemma scales.
                model.get_input_embeddings().weight.normal_(0.0, 0.5 if values.tie_word_embeddings else 1.0)
            if not values.tie_word_embeddings:
                _prefer_text(model)
            experts = getattr(values, "num_local_experts", None) or getattr(values, "num_experts", None)
            if experts and experts <= width:
                _settle_experts(model, experts)
    model.generation_config.eos_token_id = EOS_ID
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    if family in _CALLED:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [_CALLED[family]]}))
    marks = dict.fromkeys(("eos_token", "pad_token"), "<eos>")
    byte_tokenizer(max_len, after=("<eos>",), **marks).save_pretrained(folder)
    return folder


def _model(config: PretrainedConfig) -> Any:  # noqa: ANN401 - a model of transformers
    kind = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    return kind.from_config(config)


def _draw(name: str, weights: nn.Parameter, config: PretrainedConfig) -> None:
    """Draw one tensor so that activations keep their size from layer to layer, and rounding does not grow either.

    Args:
        name: of the tensor.
        weights: to fill.
        config: of the model.
    """
    part = name.removesuffix(".weight").rsplit(".", 1)[-1]
    around_zero = config.model_type.startswith("gemma")
    if weights.dim() > 1:
        # Attention that is nearly one-hot would turn rounding into another choice.
        weights.normal_(0.0, (0.5 if part in _SCORES | _ADDED else 1.0) / weights.shape[-1] ** 0.5)
    elif name.endswith("bias"):
        weights.normal_(0.0, 0.1)
    else:
        weights.uniform_(0.5, 1.5)
        if config.model_type in _NORMS_BEFORE_ADDING and part in _LAST_NORMS:
            weights.mul_(0.25)
        # The norms of this family scale by 1 + their weight.
        weights.sub_(1.0 if around_zero else 0.0)


def _prefer_text(model: Any) -> None:  # noqa: ANN401 - a model of transformers
    """Let greedy generation mostly choose printable ASCII: tests of stop strings need texts."""
    unlikely = [token for token in range(VOCAB_SIZE) if not 32 <= token < 127]
    model.get_output_embeddings().weight[unlikely] *= 0.25


def _settle_experts(model: Any, experts: int) -> None:  # noqa: ANN401 - a model of transformers
    """Let as many elements of the stream as there are experts choose them: set by a token, changed by no layer.

    Else rounding would now and then pick another expert, and two right engines would differ in whole rows.

    Args:
        model: its weights are drawn.
        experts: of each layer.
    """
    embedding = model.get_input_embeddings().weight
    order = torch.stack([torch.randperm(experts) for _ in embedding])
    embedding[:, :experts] = order - (experts - 1) / 2
    for name, weights in model.named_parameters():
        part = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if part in {"gate", "router"}:
            weights.zero_()
            weights[:, :experts] = torch.eye(experts)
        elif part in {"o_proj", "down_proj", "out_proj"}:
            weights[..., :experts, :] = 0.0
        elif "norm" in name and weights.shape == embedding.shape[1:]:
            weights[:experts] = 0.0 if name.endswith("bias") else 1.0
