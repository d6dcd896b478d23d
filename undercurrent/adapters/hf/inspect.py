"""What can be captured of a model, read from its configuration: it is built without weights, on the meta device.

Module names are those of `transformers`; vLLM's own models have the same parts, most of them under the same names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from undercurrent.adapters.model_map import ModelMap
from undercurrent.capture.points import ELEMENT_BYTES
from undercurrent.errors import CaptureError, ConfigError
from undercurrent.spec import TensorType

TESTED = ("gemma", "gemma2", "gpt2", "llama", "qwen2")
"""Model types that the tests capture from; others of the same make are read the same way."""

MEANINGS: Mapping[TensorType, str] = {
    TensorType.RESIDUAL_STREAM: "the layer's output: the residual stream after its attention and MLP were added",
    TensorType.ATTN_OUT: "output of the layer's attention, as its module returns it, before it is added",
    TensorType.MLP_OUT: "output of the layer's MLP, as its module returns it, before it is added",
    TensorType.FINAL_NORM: "output of the norm after the last layer; addressed as one layer past the last",
    TensorType.KV: "the token's own keys and values as its attention is given them, [2, kv_heads, head_dim]",
    TensorType.LAYER_INPUT: "what enters the layer: the residual stream before it; of layer 0 the embedding",
    TensorType.ROUTER_TOPK: "ids of the token's experts, then their weights, [2, k]",
}
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# A record carries, beside the values, each token's position and id: int32 both.
_BYTES_BESIDE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """One tensor type as some layers have it.

    Args:
        tensor_type: which.
        layers: that have it, as a point names them; none where it is not captured.
        module: that gives it, `{layer}` standing for the number; empty where the model has none.
    """

    tensor_type: TensorType
    layers: tuple[int, ...]
    module: str

    @property
    def meaning(self) -> str:
        """What the values are."""
        return MEANINGS[self.tensor_type]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What an extraction point has to fit.

    Args:
        model: folder or name.
        architecture: class of `transformers`.
        model_type: its family.
        layers: decoder layers.
        width: elements of one (token, layer).
        dtype: element type that its configuration names.
        parameters: how many it has.
        tensors: tensor types, in the order of `TensorType`.
    """

    model: str
    architecture: str
    model_type: str
    layers: int
    width: int
    dtype: str
    parameters: int
    tensors: tuple[TensorFacts, ...]

    @property
    def tested(self) -> bool:
        """Whether the tests capture from models of this family."""
        return self.model_type in TESTED

    def bytes_per_token(self, layers: Sequence[int]) -> int:
        """Return the bytes of a record for each token: the values of some layers, position and token id.

        Raises:
            ConfigError: the model has no such layer.
            CaptureError: elements of the model's type are not captured.
        """
        beyond = [layer for layer in layers if not 0 <= layer <= self.layers]
        if beyond:
            raise ConfigError(
                f"layer {beyond[0]}: the model has layers 0 to {self.layers - 1}, final_norm {self.layers}"
            )
        if self.dtype not in ELEMENT_BYTES:
            raise CaptureError(f"elements of type {self.dtype} are not captured; accepted: {', '.join(ELEMENT_BYTES)}")
        return len(layers) * self.width * ELEMENT_BYTES[self.dtype] + _BYTES_BESIDE


def inspect_model(model: str) -> ModelFacts:
    """Return what can be captured of a model; no weights are read.

    Args:
        model: folder, or name on a hub.

    Raises:
        ConfigError: there is no such model, or its configuration cannot be read.
        CaptureError: it is no decoder-only language model whose parts are known.
    """
    config = read_config(model)
    try:
        with torch.device("meta"):
            built: nn.Module = AutoModelForCausalLM.from_config(config)
    except Exception as exc:  # a configuration of anybody's, and a constructor of any of some hundred families
        raise CaptureError(f"{model}: {_line(exc)}") from exc
    layers, width, dtype = shape_of(config, model)
    try:
        parts = ModelMap.of(built, layers, width)
    except CaptureError as exc:
        raise CaptureError(f"{model}: {exc}") from exc
    return ModelFacts(
        model=model,
        architecture=type(built).__name__,
        model_type=str(config.model_type),
        layers=layers,
        width=width,
        dtype=dtype,
        parameters=sum(parameter.numel() for parameter in built.parameters()),
        tensors=tuple(_tensors(built, parts)),
    )


def read_config(model: str) -> Any:  # noqa: ANN401 - a configuration of transformers
    """Return a model's configuration.

    Raises:
        ConfigError: there is no such model, or its configuration cannot be read.
    """
    folder = Path(model).expanduser()
    if model and folder.is_dir():
        _check_folder(folder)
    elif not _NAME.fullmatch(model) or folder.exists():
        raise ConfigError(f"{model}: is no folder; accepted: a folder with config.json, or a name like org/model")
    try:
        return AutoConfig.from_pretrained(str(folder) if folder.is_dir() else model)
    except Exception as exc:  # whatever the hub's client, the network and a stranger's file lead to
        raise ConfigError(f"{model}: its configuration cannot be read: {_line(exc)}") from exc


def shape_of(config: Any, model: str) -> tuple[int, int, str]:  # noqa: ANN401 - a configuration of transformers
    """Return layers, width and NumPy name of the element type that a configuration names.

    Raises:
        CaptureError: it does not say how many layers there are, or how wide they are.
    """
    text = config.get_text_config()
    layers, width = (getattr(text, name, None) for name in ("num_hidden_layers", "hidden_size"))
    if not isinstance(layers, int) or not isinstance(width, int) or layers < 1 or width < 1:
        raise CaptureError(f"{model}: {type(config).__name__} names no number of layers and no hidden size")
    dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.float32
    return layers, width, str(dtype).removeprefix("torch.")


def _check_folder(folder: Path) -> None:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}; a model is a folder with config.json") from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{path}: is no JSON: {_line(exc)}") from exc
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: holds a {type(config).__name__}; accepted: an object")


def _tensors(model: nn.Module, parts: ModelMap) -> list[TensorFacts]:
    names = {module: name for name, module in model.named_modules()}
    tensors: list[TensorFacts] = []
    for tensor_type in TensorType:
        if tensor_type is TensorType.FINAL_NORM:
            by_name = {names[parts.final_norm]: [len(parts.layers)]}
        else:
            by_name = _by_name(tensor_type, parts, names)
        tensors += [
            TensorFacts(tensor_type=tensor_type, layers=tuple(layers), module=name) for name, layers in by_name.items()
        ] or [TensorFacts(tensor_type=tensor_type, layers=(), module="")]
    return tensors


def _by_name(tensor_type: TensorType, parts: ModelMap, names: Mapping[nn.Module, str]) -> dict[str, list[int]]:
    """Return the layers that have a tensor type, by the name of the module: those of a hybrid model are not alike."""
    found: dict[str, list[int]] = {}
    for layer, block in enumerate(parts.layers):
        module = _module(tensor_type, parts, layer)
        if module is None:
            continue
        prefix, part = names[block].removesuffix(f".{layer}"), names[module].removeprefix(names[block])
        found.setdefault(f"{prefix}.{{layer}}{part}", []).append(layer)
    return found


def _module(tensor_type: TensorType, parts: ModelMap, layer: int) -> nn.Module | None:
    """Return the module that a tensor type of a layer belongs to, None where this layer has no such part."""
    block = parts.layers[layer]
    match tensor_type:
        case TensorType.RESIDUAL_STREAM | TensorType.LAYER_INPUT:
            return block
        case TensorType.ATTN_OUT | TensorType.KV:
            return parts.attention(layer)
        case TensorType.ROUTER_TOPK:
            return getattr(parts.mlp(layer), "experts", None)
        case _:
            return parts.mlp(layer)


def _line(exc: BaseException) -> str:
    return " ".join(f"{type(exc).__name__}: {exc}".split())[:300]
