"""What enters a decoder layer: which of its arguments, found by comparing them with what the layer before left.

A layer is given h alone or h and a residual r, and r may be a leftover. What the stream is after the layer before has
been decided by then; here the model runs once more, and the arguments, alone or added up, are compared with it bit for
bit. Layer 0 is given the embedding, and no residual.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from undercurrent.adapters.model_map import FIRST, SUM, ModelMap
from undercurrent.adapters.vllm.residual import quiet_attention
from undercurrent.errors import CaptureError


def decide_inputs(
    run: Callable[[], None], parts: ModelMap, streams: Mapping[int, str], layers: Sequence[int]
) -> dict[int, str]:
    """Return what of its named inputs the stream is that enters each of some layers: `FIRST` or `SUM`.

    Args:
        run: runs the model eagerly on some rows.
        parts: of the model.
        streams: what of its output the stream is, of the layer before each of them.
        layers: 0-based.

    Raises:
        CaptureError: one of them is given something else; it names the layer and its class.
    """
    if not layers:
        return {}
    watched = {layer: _Watched(parts, layer, streams.get(layer - 1)) for layer in sorted(set(layers))}
    try:
        with torch.inference_mode(), quiet_attention(parts):
            run()
    finally:
        for one in watched.values():
            one.remove()
    return {layer: one.decision() for layer, one in watched.items()}


class _Watched:
    """One layer, what it is given in a run, and what the layer before it left.

    Args:
        parts: of the model.
        layer: 0-based.
        stream: what of its output the layer before it leaves.
    """

    def __init__(self, parts: ModelMap, layer: int, stream: str | None) -> None:
        module = parts.layers[layer]
        self._layer, self._stream = layer, stream
        self._name = f"layer {layer} ({type(module).__name__})"
        self._names = parts.source("layer_input", layer).inputs
        self._given: list[torch.Tensor | None] = []
        self._left: torch.Tensor | None = None
        self._hooks = [module.register_forward_pre_hook(self._enter, with_kwargs=True)]
        if layer:
            self._hooks.append(parts.layers[layer - 1].register_forward_hook(self._leave))

    def remove(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401 - any layer's arguments
        values = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        given = [values.get(name) for name in self._names]
        # Fused norms write into what they are given.
        self._given = [value.clone() if isinstance(value, torch.Tensor) else None for value in given]

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> None:  # noqa: ANN401 - any layer's output
        first = output[0] if isinstance(output, tuple) else output
        self._left = first + output[1] if self._stream == SUM else first.clone()

    def decision(self) -> str:
        """Return what of its arguments is the stream that enters.

        Raises:
            CaptureError: that cannot be told.
        """
        hidden, residual = self._given or (None, None)
        if hidden is None:
            raise CaptureError(f"{self._name}: layer_input is its argument {self._names[0]}, which it was not given")
        if self._layer == 0:
            if residual is not None:
                raise CaptureError(f"{self._name} is the first, and was given a residual")
            return FIRST
        left = self._left
        if left is None:
            raise CaptureError(
                f"{self._name}: layer_input of the first layer of a pipeline stage cannot be checked; residual_stream "
                f"of layer {self._layer - 1} is the same"
            )
        alone = torch.equal(hidden, left)
        added = residual is not None and residual.shape == hidden.shape and torch.equal(hidden + residual, left)
        if alone == added:
            raise CaptureError(f"{self._name}: cannot tell which of its arguments is the residual stream")
        return FIRST if alone else SUM
