"""What a plan needs to know of a model, from its config.json alone: no weights, no torch, no network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undercurrent.capture.points import ELEMENT_BYTES
from undercurrent.errors import ConfigError
from undercurrent.spec import TensorType

CONFIG_NAME = "config.json"

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "num_heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model as its configuration describes it.

    Args:
        path: of the configuration.
        name: of its architecture.
        layers: decoder layers.
        width: hidden size.
        dtype: element type of what it computes.
        shapes: of one (token, layer) of the tensor types that have another shape than [width], where it has them.
    """

    path: Path
    name: str
    layers: int
    width: int
    dtype: str
    shapes: Mapping[str, tuple[int, ...]]


def read_model(model: str, dtype: str | None = None) -> ModelShape:
    """Return what a model's configuration says.

    Args:
        model: its folder, or its config.json.
        dtype: element type in which it will run, where that is not the one in its configuration.

    Raises:
        ConfigError: there is no such file, or a field is missing or wrong; the error names file and field.
    """
    given = Path(model).expanduser()
    path = given / CONFIG_NAME if given.is_dir() else given
    if not path.is_file():
        raise ConfigError(
            f"--model {model}: there is no {path if given.is_dir() else 'such file or folder'}; accepted: a model's "
            f"folder, or its {CONFIG_NAME} (nothing is downloaded)"
        )
    whole = _read(path)
    text = whole.get("text_config")
    config = {**whole, **text} if isinstance(text, dict) else whole
    said = dtype or config.get("dtype") or config.get("torch_dtype") or "float32"
    element = str(said).removeprefix("torch.")
    if element not in ELEMENT_BYTES:
        where = f"{path}: field 'dtype'" if dtype is None else "--dtype"
        accepted = f"{', '.join(ELEMENT_BYTES)}{'; --dtype names what it runs in' if dtype is None else ''}"
        raise ConfigError(f"{where}: {said!r}; accepted: {accepted}")
    names = config.get("architectures")
    return ModelShape(
        path=path,
        name=str(names[0]) if isinstance(names, list) and names else str(config.get("model_type", "a model")),
        layers=_whole(config, _LAYERS, path),
        width=_whole(config, _WIDTH, path),
        dtype=element,
        shapes=_shapes(config, path),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{path}: is no JSON: {exc}"[:300]) from exc
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: holds a {type(config).__name__}; accepted: an object, as a model's {CONFIG_NAME}")
    return config


def _whole(config: Mapping[str, Any], names: tuple[str, ...], path: Path) -> int:
    name = next((name for name in names if name in config), None)
    if name is None:
        raise ConfigError(f"{path}: has none of the fields {', '.join(names)}; accepted: a decoder's {CONFIG_NAME}")
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{path}: field {name!r}: {value!r:.40}; accepted: a whole number from 1")
    return value


def _shapes(config: Mapping[str, Any], path: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    if any(name in config for name in _HEADS):
        heads = _whole(config, _HEADS, path)
        named = config.get("num_key_value_heads") is not None
        kv_heads = _whole(config, ("num_key_value_heads",), path) if named else heads
        own = config.get("head_dim") is not None
        dim = _whole(config, ("head_dim",), path) if own else _whole(config, _WIDTH, path) // heads
        shapes[TensorType.KV.value] = (2, kv_heads, dim)
    if config.get("num_experts_per_tok") is not None:
        shapes[TensorType.ROUTER_TOPK.value] = (2, _whole(config, ("num_experts_per_tok",), path))
    return shapes
