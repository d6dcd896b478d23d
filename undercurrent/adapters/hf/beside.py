"""What of a model is no vector of the hidden size: keys and values, and the choice of experts.

A token's keys and values are what each attention gives its cache, after the rotary embedding; its experts and their
weights are what the experts are called with. Which layers have them, and of which shape, one token shows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from undercurrent.adapters.hf.model import LoadedModel
from undercurrent.adapters.model_map import ModelMap
from undercurrent.errors import CaptureError

logger = logging.getLogger(__name__)

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Beside:
    """The shapes of one token, by tensor type and layer.

    Args:
        layers: of `kv` and `router_topk`, the shape in each layer that has one.
    """

    layers: Mapping[str, Mapping[int, tuple[int, ...]]] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor type that has the same one in every layer that has it."""
        return {
            kind: next(iter(found.values())) for kind, found in self.layers.items() if len(set(found.values())) == 1
        }

    def check(self, tensor_type: str, layer: int) -> None:
        """Refuse a layer without a tensor type.

        Raises:
            CaptureError: it has none.
        """
        if tensor_type in self.layers and layer not in self.layers[tensor_type]:
            raise CaptureError(f"layer {layer} has no {tensor_type}")


def look(loaded: LoadedModel, parts: ModelMap) -> Beside:
    """Run one token, and return what it showed.

    Args:
        loaded: the model.
        parts: of it.
    """
    seen: dict[str, dict[int, tuple[int, ...]]] = {"kv": {}, "router_topk": {}}

    def note_kv(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if keys.shape == values.shape and keys.dim() == 4 and keys.shape[0] == 1:
            seen["kv"][layer] = (2, keys.shape[1], keys.shape[3])

    def note_choice(layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401 - of any experts
            pair = choice(args, kwargs)
            if pair is not None:
                seen["router_topk"][layer] = (2, pair[0].shape[1])

        return hook

    cache = loaded.new_cache()
    watch(cache, note_kv)
    hooks = [
        experts.register_forward_pre_hook(note_choice(layer), with_kwargs=True)
        for layer in range(len(parts.layers))
        if (experts := experts_of(parts, layer)) is not None
    ]
    try:
        loaded.forward([0], cache)
    # Whatever a model does that has no such cache: it has no keys and values for us then.
    except Exception as exc:
        logger.info("no keys, values or experts are captured of this model: %s", exc)
        return Beside()
    finally:
        for one in hooks:
            one.remove()
    return Beside({kind: found for kind, found in seen.items() if found})


def experts_of(parts: ModelMap, layer: int) -> nn.Module | None:
    """Return the experts of a layer, None where it has none under a known name."""
    found = getattr(parts.mlp(layer), "experts", None)
    return found if isinstance(found, nn.Module) else None


def choice(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Pair | None:
    """Return ids and weights [tokens, k] among what experts are called with, None where they cannot be told apart."""
    flat = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.dim() == 2]
    ids = [value for value in flat if not value.is_floating_point()]
    weights = [value for value in flat if value.is_floating_point() and ids and value.shape == ids[0].shape]
    return (ids[0], weights[0]) if len(ids) == len(weights) == 1 else None


def watch(cache: Any, take: Callable[[int, torch.Tensor, torch.Tensor], None]) -> None:  # noqa: ANN401 - a DynamicCache
    """Call `take` with (layer, keys, values), each [1, heads, tokens, head_dim], whenever a layer gives them its cache.

    Args:
        cache: of one request.
        take: may not raise.
    """
    update = cache.update

    def noting(
        key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *rest: object, **further: object
    ) -> object:
        take(layer_idx, key_states, value_states)
        return update(key_states, value_states, layer_idx, *rest, **further)

    cache.update = noting


def unwatch(cache: Any) -> None:  # noqa: ANN401 - a DynamicCache
    """Undo `watch`."""
    cache.__dict__.pop("update", None)
