"""Taps: forward hooks that copy what a module computed into buffers, each stamped with the step it belongs to.

One buffer [max rows, layers, width] per tap group, so that all layers of a token stand side by side: the rows of a
record are one slice. A tap is a `torch.library` op that mutates its buffer, so that a compiler which meets it cannot
drop it; on a CPU, where nothing is compiled yet, it is the same copy without the dispatcher around it. The stamp is
written with the copy: a tap that did not run in a step is seen by its stamp, not believed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from undercurrent.adapters.model_map import ModelMap
from undercurrent.capture.points import TapGroup
from undercurrent.errors import CaptureError

logger = logging.getLogger(__name__)

SUM, FIRST, WHOLE = "h + r", "h", "tensor"
"""What of a module's output is tapped: the sum of a pair, its first element, the output itself."""

_libraries: list[torch.library.Library] = []


def tap_op() -> Callable[..., None]:
    """Return the op `undercurrent::tap(x, r, out, stamp, step)`: out[:n] = x (+ r), stamp = step."""
    if not _libraries:
        library = torch.library.Library("undercurrent", "DEF")
        library.define("tap(Tensor x, Tensor? r, Tensor(a!) out, Tensor(b!) stamp, Tensor step) -> ()")
        library.impl("tap", _tap, "CompositeExplicitAutograd")
        library.impl("tap", lambda x, r, out, stamp, step: None, "Meta")
        _libraries.append(library)
    op: Callable[..., None] = torch.ops.undercurrent.tap.default
    return op


def _tap(x: torch.Tensor, r: torch.Tensor | None, out: torch.Tensor, stamp: torch.Tensor, step: torch.Tensor) -> None:
    target = out[: x.shape[0]]
    if r is None:
        target.copy_(x)
    else:
        # In the model's own type, as the model itself adds them; out of place, since both are still needed.
        torch.add(x, r, out=target)
    stamp.copy_(step)


@dataclass(slots=True)
class Tap:
    """One layer of one group.

    Args:
        group: it belongs to.
        slot: its stamp.
        layer: 0-based.
        module: whose output it copies.
        out: where, [max rows, width].
        stamp: its element of the stamps.
        mode: what of the output.
    """

    group: TapGroup
    slot: int
    layer: int
    module: torch.nn.Module
    out: torch.Tensor
    stamp: torch.Tensor
    mode: str


class TapSet:
    """All taps of a model.

    Args:
        groups: what to tap.
        parts: where the modules are.
        width: hidden size.
        max_rows: most rows of a step.
        device: of the model.
        max_tap_bytes: refuse beyond this.
        on_host: write the stamps from Python, without the op; by default where the model runs on the CPU.

    Raises:
        CaptureError: the buffers would be too large, or the model lacks a part.
    """

    def __init__(
        self,
        groups: Sequence[TapGroup],
        parts: ModelMap,
        *,
        width: int,
        max_rows: int,
        device: torch.device,
        max_tap_bytes: int,
        on_host: bool | None = None,
    ) -> None:
        self.bytes = sum(group.row_bytes(width) for group in groups) * max_rows
        if self.bytes > max_tap_bytes:
            raise CaptureError(
                f"taps need {self.bytes} bytes for {max_rows} rows, more than max_tap_bytes = {max_tap_bytes}: "
                "capture fewer layers or lower max_num_batched_tokens"
            )
        self._width = width
        self._shape: torch.Size | None = None
        self._rows_shape = torch.Size((0, width))
        self._targets: list[torch.Tensor] = []
        self._number = 0
        self.error: Exception | None = None
        count = sum(len(group.layers) for group in groups)
        self._stamps = torch.zeros(count, dtype=torch.int64, device=device)
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._buffers: dict[TapGroup, torch.Tensor] = {}
        self._mirrors: dict[TapGroup, torch.Tensor] = {}
        self.taps: list[Tap] = []
        for group in groups:
            shape = (max_rows, len(group.layers), width)
            buffer = torch.zeros(shape, dtype=getattr(torch, group.dtype), device=device)
            self._buffers[group] = buffer
            # Off the CPU the rows of a step are copied to the host at its end: correct, and not yet overlapped.
            self._mirrors[group] = buffer if device.type == "cpu" else torch.zeros(shape, dtype=buffer.dtype)
            for index, layer in enumerate(group.layers):
                slot = len(self.taps)
                module = parts.module(group.tensor_type, layer)
                mode = WHOLE if group.tensor_type == "residual_stream" else FIRST
                self.taps.append(Tap(group, slot, layer, module, buffer[:, index, :], self._stamps[slot], mode))
        self._stamps_host = self._stamps if device.type == "cpu" else torch.zeros(count, dtype=torch.int64)
        self._stamp_array: npt.NDArray[np.int64] = self._stamps_host.numpy()
        # On the host itself the stamps and the step's number are plain memory, and taps need no dispatcher.
        self._on_host = device.type == "cpu" if on_host is None else on_host
        self._stamp_words = memoryview(self._stamp_array)
        self._rows = 0
        self._fresh = b""
        self._op = tap_op()
        self._hooks = [tap.module.register_forward_hook(self._hook(tap)) for tap in self.taps]

    def rows_as_bytes(self) -> dict[TapGroup, npt.NDArray[np.uint8]]:
        """Return the host's view of each group's buffer, uint8 [max rows, row bytes]."""
        return {g: m.view(torch.uint8).reshape(m.shape[0], -1).numpy() for g, m in self._mirrors.items()}

    def arm(self, step: int, rows: int) -> None:
        """Let the taps copy in the forward pass of a step.

        Args:
            step: its number, above 0.
            rows: that it has; a module that computes another number of rows is not believed.
        """
        if self._on_host:
            self._number = step
        else:
            self._step.fill_(step)
        self._fresh = step.to_bytes(8, sys.byteorder) * len(self.taps)
        if rows != self._rows:
            self._rows = rows
            self._rows_shape = torch.Size((rows, self._width))
            self._targets = [tap.out[:rows] for tap in self.taps] if self._on_host else []
        self._shape = self._rows_shape
        self.error = None

    def disarm(self) -> None:
        """Let the taps do nothing until the next `arm`."""
        self._shape = None

    def stale(self, step: int, rows: int) -> frozenset[TapGroup]:
        """Bring the rows of a step to the host; return the groups that do not have them.

        Args:
            step: its number.
            rows: that it has.

        Raises:
            CaptureError: a tap failed in this step.
        """
        if self.error is not None:
            raise CaptureError(f"a tap failed: {self.error}") from self.error
        if self._stamps is not self._stamps_host:
            self._stamps_host.copy_(self._stamps)
            for group, buffer in self._buffers.items():
                self._mirrors[group][:rows].copy_(buffer[:rows])
        if self._stamp_words.tobytes() == self._fresh:
            return frozenset()
        return frozenset(tap.group for tap in self.taps if self._stamp_array[tap.slot] != step)

    def fired(self, tap: Tap, step: int) -> bool:
        """Whether a tap copied in a step; ask after `stale`.

        Args:
            tap: one of `taps`.
            step: its number.
        """
        return bool(self._stamp_array[tap.slot] == step)

    def remove(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hook(self, tap: Tap) -> Callable[..., None]:
        copy = self._host_copy(tap) if self._on_host else self._op_copy(tap)

        def hook(_module: torch.nn.Module, _args: Any, output: Any) -> None:  # noqa: ANN401 - any module's output
            shape = self._shape
            if shape is None:
                return
            try:
                first = output[0] if isinstance(output, tuple) else output
                # Another shape leaves the stamp old, and so the rows unbelieved.
                if first.shape == shape:
                    copy(first, output[1] if tap.mode == SUM else None)
            # This runs inside the model's forward pass: nothing of ours may leave it. `stale` raises it afterwards.
            except Exception as exc:
                self.error = exc

        return hook

    def _host_copy(self, tap: Tap) -> Callable[[torch.Tensor, torch.Tensor | None], None]:
        slot, words = tap.slot, self._stamp_words

        def copy(x: torch.Tensor, r: torch.Tensor | None) -> None:
            if r is None:
                self._targets[slot].copy_(x)
            else:
                torch.add(x, r, out=self._targets[slot])
            words[slot] = self._number

        return copy

    def _op_copy(self, tap: Tap) -> Callable[[torch.Tensor, torch.Tensor | None], None]:
        op, out, stamp, step = self._op, tap.out, tap.stamp, self._step
        return lambda x, r: op(x, r, out, stamp, step)
