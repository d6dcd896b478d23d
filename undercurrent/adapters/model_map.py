"""Where in a model of torch the captured tensors are: a module, and what is read of it.

Decoder layers, their attention and MLP blocks, and the final norm are found by their structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from undercurrent.errors import CaptureError

WHOLE, FIRST, SUM, BESIDE = "tensor", "h", "h + r", "h, r"
"""What is read of a module's output or of its named inputs: a tensor; the first of a tuple; the sum of the first two in
their own type, or the first alone where the second is None; the first two side by side in one row."""

_ATTENTION = ("self_attn", "attn", "attention", "self_attention")
_MLP = ("mlp", "block_sparse_moe", "feed_forward", "ffn")
_FINAL_NORM = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor of a layer is read.

    Args:
        module: the module that has it.
        at: `WHOLE`, `FIRST`, `SUM` or `BESIDE`.
        inputs: names of arguments of its `forward`, read in place of its output, before it runs.
    """

    module: nn.Module
    at: str = FIRST
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelMap:
    """The parts of a model whose outputs are captured.

    Args:
        layers: decoder layers, in order.
        final_norm: the norm after the last one.
    """

    layers: tuple[nn.Module, ...]
    final_norm: nn.Module

    @classmethod
    def of(cls, model: nn.Module, layers: int) -> ModelMap:
        """Return the parts of a text model.

        Args:
            model: as loaded.
            layers: decoder layers that its configuration says it has.

        Raises:
            CaptureError: they cannot be told apart without guessing.
        """
        found = [
            (name, parent, child)
            for name, parent in model.named_modules()
            for child in parent.children()
            if isinstance(child, nn.ModuleList) and len(child) == layers
        ]
        found = [(name, parent, child) for name, parent, child in found if _child(parent, _FINAL_NORM) is not None]
        if len(found) != 1:
            where = ", ".join(name or "the model" for name, _, _ in found) or "none"
            raise CaptureError(
                f"{type(model).__name__}: a list of {layers} layers beside a final norm is needed once; found: {where}"
            )
        _, parent, child = found[0]
        norm = _child(parent, _FINAL_NORM)
        if norm is None:
            raise CaptureError(f"{type(model).__name__} has no final norm")
        return cls(tuple(child), norm)

    def module(self, tensor_type: str, layer: int) -> nn.Module:
        """Return the module whose output is a tensor type of a layer.

        Args:
            tensor_type: `residual_stream`, `attn_out`, `mlp_out` or `final_norm`.
            layer: 0-based; ignored for the final norm.

        Raises:
            CaptureError: the layer has no such part, or the tensor is no module's output.
        """
        if tensor_type == "final_norm":
            return self.final_norm
        module = self.layers[layer]
        if tensor_type == "residual_stream":
            return module
        part = {"attn_out": self.attention, "mlp_out": self.mlp}.get(tensor_type, lambda _: None)(layer)
        if part is None:
            raise CaptureError(f"layer {layer} ({type(module).__name__}) has no part that gives {tensor_type}")
        return part

    def source(self, tensor_type: str, layer: int) -> Source:
        """Return where a tensor type of a layer is read; for `residual_stream` as far as it is known without a run.

        Args:
            tensor_type: as in `module`.
            layer: 0-based; ignored for the final norm.

        Raises:
            CaptureError: the layer has no such part.
        """
        at = WHOLE if tensor_type == "residual_stream" else FIRST
        return Source(self.module(tensor_type, layer), at)

    def attention(self, layer: int) -> nn.Module | None:
        """Return the attention block of a layer, None where it has none under a known name."""
        return _child(self.layers[layer], _ATTENTION)

    def mlp(self, layer: int) -> nn.Module | None:
        """Return the MLP or the experts of a layer, None where it has none under a known name."""
        return _child(self.layers[layer], _MLP)


def _child(module: nn.Module, names: Sequence[str]) -> nn.Module | None:
    children = dict(module.named_children())
    return next((children[name] for name in names if name in children), None)
