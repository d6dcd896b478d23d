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

from undercurrent.errors import CaptureError

Float32 = npt.NDArray[np.float32]

_PARTS = {"attn_out": ("self_attn", "attn"), "mlp_out": ("mlp", "block_sparse_moe")}


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
        body = self._model.base_model
        self._layers = list(getattr(body, "layers", None) or getattr(body, "h", None) or ())
        norm = getattr(body, "norm", None) or getattr(body, "ln_f", None)
        if not self._layers or norm is None:
            raise CaptureError(f"{type(self._model).__name__}: no decoder layers or no final norm under a known name")
        self._norm: torch.nn.Module = norm

    def activations(self, token_ids: Sequence[int]) -> dict[str, Float32]:
        """Return every tensor type for one sequence, float32 [tokens, layers, width]; `final_norm` has one layer.

        Args:
            token_ids: the sequence.
        """
        seen: dict[tuple[str, int], Float32] = {}
        handles = [self._norm.register_forward_hook(_keep(seen, "final_norm", 0))]
        for layer, module in enumerate(self._layers):
            handles.append(module.register_forward_hook(_keep(seen, "residual_stream", layer)))
            for tensor_type, names in _PARTS.items():
                part = next(getattr(module, name) for name in names if hasattr(module, name))
                handles.append(part.register_forward_hook(_keep(seen, tensor_type, layer)))
        try:
            with torch.inference_mode():
                self._model(torch.tensor([list(token_ids)]), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        count = len(self._layers)
        out = {t: np.stack([seen[t, n] for n in range(count)], axis=1) for t in ("residual_stream", *_PARTS)}
        return out | {"final_norm": seen["final_norm", 0][:, None, :]}


def _keep(seen: dict[tuple[str, int], Float32], tensor_type: str, layer: int) -> Any:  # noqa: ANN401 - a torch hook
    def hook(_module: Any, _args: Any, output: Any) -> None:  # noqa: ANN401
        first = output[0] if isinstance(output, tuple) else output
        seen[tensor_type, layer] = first.detach()[0].float().numpy().copy()

    return hook
