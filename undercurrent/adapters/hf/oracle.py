"""What `transformers` computes for a whole sequence at once: the truth that captured tensors are compared with.

Slow and simple on purpose: one forward pass, no cache, eager attention. Conventions are the project's own: layer l of
the residual stream is the output of decoder block l, before the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

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
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager"
        )
        self._model.eval()
        self._layers = self._model.config.get_text_config(decoder=True).num_hidden_layers
        self._parts = ModelMap.of(self._model, self._layers)

    def activations(self, token_ids: Sequence[int]) -> dict[str, Float32]:
        """Return every tensor type for one sequence, float32 [tokens, layers, width]; `final_norm` has one layer.

        Args:
            token_ids: the sequence.
        """
        seen: dict[tuple[str, int], Float32] = {}
        wanted = [(tensor_type, layer) for tensor_type in _OF_LAYERS for layer in range(self._layers)]
        handles = [
            self._parts.module(tensor_type, layer).register_forward_hook(_keep(seen, tensor_type, layer))
            for tensor_type, layer in (*wanted, ("final_norm", 0))
        ]
        try:
            with torch.inference_mode():
                self._model(torch.tensor([list(token_ids)]), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        out = {t: np.stack([seen[t, n] for n in range(self._layers)], axis=1) for t in _OF_LAYERS}
        return out | {"final_norm": seen["final_norm", 0][:, None, :]}


def _keep(seen: dict[tuple[str, int], Float32], tensor_type: str, layer: int) -> Any:  # noqa: ANN401 - a torch hook
    def hook(_module: Any, _args: Any, output: Any) -> None:  # noqa: ANN401
        first = output[0] if isinstance(output, tuple) else output
        seen[tensor_type, layer] = first.detach()[0].float().numpy().copy()

    return hook
