"""Where in a model of torch the captured tensors are: a module, and what is read of it.

Modules are found by structure: in the model's text part, where it has several, the one list that is as long as the
configuration says, beside a final norm, all of it on the hidden size. What cannot be told apart is refused by name.
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
_MIXERS = (*_ATTENTION, "mixer", "mamba", "linear_attn", "short_conv", "conv", "temporal_block", "mamba_mixer")
_MLP = ("mlp", "block_sparse_moe", "feed_forward", "ffn", "moe")
_FINAL_NORM = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f", "embedding_norm")

_TEXT_PART = ("get_language_model", "get_decoder")
"""Methods by which vLLM's and transformers' multimodal models name the part that generates text."""


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
    def of(cls, model: nn.Module, layers: int, width: int) -> ModelMap:
        """Return the parts of a model that generates text.

        Args:
            model: as loaded.
            layers: decoder layers that its configuration says it has.
            width: its hidden size.

        Raises:
            CaptureError: they cannot be told apart without guessing.
        """
        text = _text_part(model)
        beside = [
            (name, child, norm)
            for name, parent in text.named_modules()
            for child in parent.children()
            if isinstance(child, nn.ModuleList) and len(child) == layers
            for norm in [_child(parent, _FINAL_NORM)]
            if norm is not None
        ]
        found = [part for part in beside if _works_on(part[1], part[2], width)]
        if len(found) != 1:
            where = ", ".join(name or "the model" for name, *_ in found) or "none"
            raise CaptureError(
                f"{type(model).__name__}: a list of {layers} layers of width {width} beside a final norm is needed "
                f"once; found: {where}"
            )
        _, blocks, norm = found[0]
        return cls(tuple(blocks), norm)

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
        """Return where a tensor type of a layer is read.

        Of `residual_stream` and `layer_input` no more is known without a run than which module it is.

        Args:
            tensor_type: as in `module`, or `layer_input`.
            layer: 0-based; ignored for the final norm.

        Raises:
            CaptureError: the layer has no such part.
        """
        if tensor_type == "layer_input":
            return Source(self.layers[layer], FIRST, ("hidden_states", "residual"))
        at = WHOLE if tensor_type == "residual_stream" else FIRST
        return Source(self.module(tensor_type, layer), at)

    def attention(self, layer: int) -> nn.Module | None:
        """Return the attention block of a layer, None where it has none under a known name."""
        return _child(self.layers[layer], _ATTENTION)

    def mlp(self, layer: int) -> nn.Module | None:
        """Return the MLP or the experts of a layer, None where it has none under a known name."""
        return _child(self.layers[layer], _MLP)

    def mixers(self, layer: int) -> list[nn.Module]:
        """Return the blocks of a layer that mix tokens, attention or other: they need what an engine keeps of a text.

        Args:
            layer: 0-based.
        """
        return [child for name, child in self.layers[layer].named_children() if name in _MIXERS]


def _text_part(model: nn.Module) -> nn.Module:
    for name in _TEXT_PART:
        method = getattr(model, name, None)
        try:
            part = method() if callable(method) else None
        except NotImplementedError as exc:
            raise CaptureError(f"{type(model).__name__} does not say which part of it generates text: {exc}") from exc
        if isinstance(part, nn.Module):
            return part
    return model


def _works_on(blocks: nn.ModuleList, norm: nn.Module, width: int) -> bool:
    """Whether some layers and a norm are of a width; parts that another process holds have no parameters here."""
    sizes = {parameter.shape[-1] for parameter in norm.parameters(recurse=False)}
    here = [block for block in blocks if any(True for _ in block.parameters())]
    return sizes <= {width} and all(any(width in p.shape for p in block.parameters()) for block in here)


def _child(module: nn.Module, names: Sequence[str]) -> nn.Module | None:
    children = dict(module.named_children())
    return next((children[name] for name in names if name in children), None)
