"""Forward hooks that copy what modules of a model compute into the rows of a step.

One buffer [max rows, layers, width] per tap group, so that all layers of a token stand side by side. A step is several
forward passes, one per request, each of which fills rows of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.hooks import RemovableHandle

from undercurrent.adapters.hf.beside import Pair, choice, experts_of, unwatch, watch
from undercurrent.adapters.model_map import ModelMap
from undercurrent.capture.points import TapGroup
from undercurrent.errors import CaptureError


class HookSet:
    """All hooks of a model. Between `arm` and `disarm` they copy; nothing that goes wrong leaves a forward pass.

    Args:
        groups: what to capture.
        parts: where the modules are.
        max_rows: most rows of a step.
        known: buffers of groups that have one already; those of other groups are made.

    Raises:
        CaptureError: the model lacks a part.
    """

    def __init__(
        self,
        groups: Sequence[TapGroup],
        parts: ModelMap,
        *,
        max_rows: int,
        known: Mapping[TapGroup, torch.Tensor],
    ) -> None:
        modules = [
            (group, index, source(parts, group.tensor_type, layer))
            for group in groups
            if group.tensor_type != "kv"
            for index, layer in enumerate(group.layers)
        ]
        self.buffers = {
            group: known[group]
            if group in known
            # On the host, wherever the model runs: that is where the ring is.
            else torch.zeros((max_rows, len(group.layers), group.width), dtype=getattr(torch, group.dtype))
            for group in groups
        }
        self._first = self._count = 0
        self._fired = 0
        self._error: Exception | None = None
        self._of_cache: dict[int, list[torch.Tensor]] = {}
        for group in groups:
            for index, layer in enumerate(group.layers) if group.tensor_type == "kv" else ():
                self._of_cache.setdefault(layer, []).append(self.buffers[group][:, index, :])
        self._expected = len(modules) + sum(map(len, self._of_cache.values()))
        self._hooks = [
            self._register(module, group.tensor_type, self.buffers[group][:, index, :])
            for group, index, module in modules
        ]

    def rows_as_bytes(self) -> dict[TapGroup, npt.NDArray[np.uint8]]:
        """Return a view of each group's buffer, uint8 [max rows, row bytes]."""
        return {
            group: buffer.view(torch.uint8).reshape(buffer.shape[0], -1).numpy()
            for group, buffer in self.buffers.items()
        }

    def arm(self, first: int, count: int, cache: Any = None) -> None:  # noqa: ANN401 - of transformers
        """Let the hooks copy in the next forward pass.

        Args:
            first: row of its first token.
            count: tokens that it computes.
            cache: that it fills; keys and values are read as they are given to it.
        """
        if self._of_cache and cache is not None:
            watch(cache, self._take_kv)
        self._first, self._count = first, count
        self._fired, self._error = 0, None

    def disarm(self, cache: Any = None) -> str | None:  # noqa: ANN401 - of transformers
        """Let the hooks do nothing until the next `arm`; return what went wrong since the last one, if anything did.

        Args:
            cache: the same as in `arm`.
        """
        self._count = 0
        if self._of_cache and cache is not None:
            unwatch(cache)
        if self._error is not None:
            return f"a hook failed: {self._error}"
        if self._fired != self._expected:
            return f"{self._fired} of {self._expected} captured modules ran"
        return None

    def remove(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _register(self, module: torch.nn.Module, tensor_type: str, rows: torch.Tensor) -> RemovableHandle:
        if tensor_type == "layer_input":
            return module.register_forward_pre_hook(
                lambda _, args, given: self._copy(given.get("hidden_states", args[0] if args else None), rows),
                with_kwargs=True,
            )
        if tensor_type == "router_topk":
            return module.register_forward_pre_hook(
                lambda _, args, given: self._copy_beside(choice(args, given), rows), with_kwargs=True
            )
        return module.register_forward_hook(lambda _module, _args, output: self._copy(output, rows))

    def _take_kv(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        for rows in self._of_cache.get(layer, ()):
            # [1, heads, tokens, head_dim] to [tokens, heads x head_dim].
            self._copy_beside((keys[0].transpose(0, 1).flatten(1), values[0].transpose(0, 1).flatten(1)), rows)

    def _copy_beside(self, pair: Pair | None, rows: torch.Tensor) -> None:
        if self._count == 0:
            return
        try:
            if pair is None or any(part.shape != (self._count, rows.shape[1] // 2) for part in pair):
                given = "no ids and weights" if pair is None else [tuple(part.shape) for part in pair]
                raise CaptureError(f"a module was given {given}, not {(self._count, rows.shape[1] // 2)} twice")
            target = rows[self._first : self._first + self._count]
            for part, half in zip(pair, target.chunk(2, dim=1), strict=True):
                half.copy_(part)
            self._fired += 1
        # As in `_copy`.
        except Exception as exc:
            self._error = self._error or exc

    def _copy(self, given: Any, rows: torch.Tensor) -> None:  # noqa: ANN401 - what any module is given or returns
        count = self._count
        if count == 0:
            return
        try:
            found = given[0] if isinstance(given, tuple) else given
            if found.shape != (1, count, rows.shape[1]):
                raise CaptureError(f"a module gave {tuple(found.shape)}, not {(1, count, rows.shape[1])}")
            rows[self._first : self._first + count].copy_(found[0])
            self._fired += 1
        # This runs inside the model's forward pass: nothing of ours may leave it. `disarm` says it afterwards.
        except Exception as exc:
            self._error = self._error or exc


def source(parts: ModelMap, tensor_type: str, layer: int) -> torch.nn.Module:
    """Return the module whose output, or of `layer_input` and `router_topk` whose input, a tensor type is.

    Args:
        parts: of the model.
        tensor_type: which tensor.
        layer: 0-based.

    Raises:
        CaptureError: the layer has no such part.
    """
    experts = experts_of(parts, layer) if tensor_type == "router_topk" else None
    if experts is not None:
        return experts
    return parts.layers[layer] if tensor_type == "layer_input" else parts.module(tensor_type, layer)
