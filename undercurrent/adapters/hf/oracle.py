"""What `transformers` computes for a whole sequence at once: the truth that captured tensors are compared with.

Slow and simple on purpose: one forward pass, no cache, eager attention. Conventions are the project's own: layer l of
the residual stream is the output of decoder block l, before the final norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from undercurrent.adapters.hf.beside import choice, experts_of
from undercurrent.adapters.model_map import ModelMap

Float32 = npt.NDArray[np.float32]

_OF_LAYERS = ("residual_stream", "attn_out", "mlp_out")


class HFOracle:
    """A model of `transformers` with its hidden tensors laid open.

    Args:
        folder: of the model.
        dtype: to compute in.
    """

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        kind = AutoModelForCausalLM
        if type(AutoConfig.from_pretrained(folder)) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            kind = AutoModelForImageTextToText
        self._model = kind.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager")
        self._model.eval()
        text = self._model.config.get_text_config(decoder=True)
        self._layers = text.num_hidden_layers
        self._parts = ModelMap.of(self._model, self._layers, text.hidden_size)

    def activations(self, token_ids: Sequence[int]) -> dict[str, Float32]:
        """Return every tensor type for one sequence, float32 [tokens, layers, width]; `final_norm` has one layer.

        Values are NaN where a layer has no such part, such as the attention of a state-space layer.

        Args:
            token_ids: the sequence.
        """
        seen: dict[tuple[str, int], Float32] = {}
        handles = [
            module.register_forward_hook(_keep(seen, tensor_type, layer))
            for (tensor_type, layer), module in self._modules().items()
        ]
        handles += [
            block.register_forward_pre_hook(_keep_input(seen, layer), with_kwargs=True)
            for layer, block in enumerate(self._parts.layers)
        ]
        self._run(token_ids, handles)
        none = np.full_like(seen["residual_stream", 0], np.nan)
        out = {t: np.stack([seen.get((t, n), none) for n in range(self._layers)], axis=1) for t in _OF_LAYERS}
        entering = np.stack([seen["layer_input", n] for n in range(self._layers)], axis=1)
        return out | {"final_norm": seen["final_norm", 0][:, None, :], "layer_input": entering}

    def _modules(self) -> dict[tuple[str, int], nn.Module]:
        found = {("final_norm", 0): self._parts.final_norm}
        for layer, block in enumerate(self._parts.layers):
            parts = {"attn_out": self._parts.attention(layer), "mlp_out": self._parts.mlp(layer)}
            of_layer = {"residual_stream": block, **parts}
            found |= {(name, layer): module for name, module in of_layer.items() if module is not None}
        return found

    def keys_values(self, token_ids: Sequence[int]) -> Float32:
        """Return what each layer adds to its cache, float32 [tokens, layers, 2, kv_heads, head_dim].

        Args:
            token_ids: the sequence.
        """
        seen: dict[int, Float32] = {}
        cache = DynamicCache()
        update = cache.update

        def keep(keys: torch.Tensor, values: torch.Tensor, layer: int, *rest: object, **further: object) -> object:
            # [1, kv_heads, tokens, head_dim] each; kept here, where no sliding window has cut them yet.
            seen[layer] = torch.stack((keys[0], values[0])).permute(2, 0, 1, 3).float().numpy().copy()
            return update(keys, values, layer, *rest, **further)

        cache.update = keep
        with torch.inference_mode():
            self._model(torch.tensor([list(token_ids)]), past_key_values=cache, use_cache=True)
        return np.stack([seen[layer] for layer in range(self._layers)], axis=1)

    def router_topk(self, token_ids: Sequence[int]) -> dict[int, Float32]:
        """Return expert ids and weights by layer, float32 [tokens, 2, k], as the experts are called with them.

        Args:
            token_ids: the sequence.
        """
        seen: dict[int, Float32] = {}

        def keep(layer: int) -> Any:  # noqa: ANN401 - a torch hook
            def hook(_module: Any, args: Any, kwargs: Any) -> None:  # noqa: ANN401
                pair = choice(args, kwargs)
                if pair is not None:
                    seen[layer] = torch.stack([part.float() for part in pair], dim=1).numpy()

            return hook

        handles = [
            experts.register_forward_pre_hook(keep(layer), with_kwargs=True)
            for layer in range(self._layers)
            if (experts := experts_of(self._parts, layer)) is not None
        ]
        self._run(token_ids, handles)
        return seen

    def _run(self, token_ids: Sequence[int], handles: Iterable[RemovableHandle]) -> None:
        """Run the model over a sequence under hooks, which are gone afterwards."""
        try:
            with torch.inference_mode():
                self._model(torch.tensor([list(token_ids)]), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()


def _keep_input(seen: dict[tuple[str, int], Float32], layer: int) -> Any:  # noqa: ANN401 - a torch hook
    def hook(_module: Any, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        seen["layer_input", layer] = hidden.detach()[0].float().numpy().copy()

    return hook


def _keep(seen: dict[tuple[str, int], Float32], tensor_type: str, layer: int) -> Any:  # noqa: ANN401 - a torch hook
    def hook(_module: Any, _args: Any, output: Any) -> None:  # noqa: ANN401
        first = output[0] if isinstance(output, tuple) else output
        seen[tensor_type, layer] = first.detach()[0].float().numpy().copy()

    return hook
