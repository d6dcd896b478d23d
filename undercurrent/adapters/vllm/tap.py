"""Taps: a module's `forward` is wrapped, and what it gave is copied into a buffer, stamped with the step it belongs to.

One buffer [max rows, layers, width] per tap group, so that all layers of a token stand side by side: the rows of a
record are one slice. The stamp is written with the copy: a tap that did not run in a step, or ran on fewer rows than
the step has, is seen by its stamp, not believed.

There are three ways to copy. On a CPU without a compiler: from Python, without torch's dispatcher around it. On a GPU
without a compiler or graphs: by the op of `tap_op`, while a step is armed. Where the model is compiled or captured: by
that op in every run, since what a graph contains is decided before there is a step; such taps are installed before the
model runs first, and stay.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from undercurrent.adapters.model_map import BESIDE, FIRST, SUM, WHOLE, ModelMap, Source
from undercurrent.adapters.vllm.staging import Cuda, Device, Staging
from undercurrent.adapters.vllm.tap_op import ROWS_SHIFT, copy_rows, tap_op, unbatched
from undercurrent.capture.points import TapGroup
from undercurrent.errors import CaptureError

__all__ = ["BESIDE", "FIRST", "SUM", "WHOLE", "Tap", "TapSet", "Way"]

logger = logging.getLogger(__name__)

_STEP_MASK = (1 << ROWS_SHIFT) - 1
_KNOWN_SIZES = 512

Copy = Callable[[torch.Tensor, torch.Tensor | None], None]


class Way(Enum):
    """How taps copy; see the module."""

    HOST = "from Python"
    OP = "by the op, in armed steps"
    GRAPH = "by the op, in every run"


@dataclass(slots=True)
class Tap:
    """One layer of one group.

    Args:
        group: it belongs to.
        index: of the layer in the group.
        slot: its stamp.
        layer: 0-based.
        source: what it reads.
        mode: what of it, at first `source.at`.
        out: where, [max rows, width].
    """

    group: TapGroup
    index: int
    slot: int
    layer: int
    source: Source
    mode: str
    out: torch.Tensor

    @property
    def module(self) -> torch.nn.Module:
        """The module whose output or input it copies."""
        return self.source.module


class TapSet:
    """All taps of a model. They copy from `install` on, which fixes what each of them reads.

    Args:
        groups: what to tap.
        parts: where the modules are.
        max_rows: most rows of a step.
        device: of the model.
        max_tap_bytes: refuse beyond this.
        way: how to copy; by default from Python where the model runs on the CPU, else by the op.
        copying: how rows come to the host; by default those of a CPU are there, and those of a GPU are staged.

    Raises:
        CaptureError: the buffers would be too large, or the model lacks a part.
    """

    def __init__(
        self,
        groups: Sequence[TapGroup],
        parts: ModelMap,
        *,
        max_rows: int,
        device: torch.device,
        max_tap_bytes: int,
        way: Way | None = None,
        copying: Device | None = None,
    ) -> None:
        self.bytes = sum(group.row_bytes for group in groups) * max_rows
        if self.bytes > max_tap_bytes:
            raise CaptureError(
                f"taps need {self.bytes} bytes for {max_rows} rows, more than max_tap_bytes = {max_tap_bytes}: "
                "capture fewer layers or lower max_num_batched_tokens"
            )
        on_cpu = device.type == "cpu"
        self.way = way or (Way.HOST if on_cpu else Way.OP)
        self.error: Exception | None = None
        self.taps: list[Tap] = []
        self._buffers: dict[TapGroup, torch.Tensor] = {}
        for group in groups:
            shape = (max_rows, len(group.layers), group.width)
            buffer = torch.zeros(shape, dtype=getattr(torch, group.dtype), device=device)
            self._buffers[group] = buffer
            for index, layer in enumerate(group.layers):
                source = parts.source(group.tensor_type, layer)
                self.taps.append(Tap(group, index, len(self.taps), layer, source, source.at, buffer[:, index, :]))
        self._stamps = torch.zeros(len(self.taps), dtype=torch.int64, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        copying = copying or (None if on_cpu else Cuda(device))
        buffers = list(self._buffers.values())
        self._staging = None if copying is None else Staging(buffers, [self._stamps], copying)
        self._slot = -1
        mirrors, stamps = (
            (buffers, self._stamps) if self._staging is None else (self._staging.rows[0], self._staging.words[0][0])
        )
        self._mirrors = dict(zip(self._buffers, mirrors, strict=True))
        self._stamp_array: npt.NDArray[np.int64] = stamps.numpy()
        # On the host itself the stamps and the step's number are plain memory.
        self._stamp_words = memoryview(self._stamp_array)
        self._step_word = memoryview(self._step.numpy()) if on_cpu else None
        self._armed = False
        self._rows = self._number = 0
        self._fresh = b""
        self._sizes: dict[int, tuple[list[torch.Size], list[torch.Tensor]]] = {}
        self._shapes: list[torch.Size] = []
        self._targets: list[torch.Tensor] = []
        self._wrapped: list[tuple[torch.nn.Module, Callable[..., Any], Callable[..., Any] | None]] = []

    def rows_as_bytes(self) -> dict[TapGroup, npt.NDArray[np.uint8]]:
        """Return the host's view of each group's buffer, uint8 [max rows, row bytes]."""
        return {g: m.view(torch.uint8).reshape(m.shape[0], -1).numpy() for g, m in self._mirrors.items()}

    def arm(self, step: int, rows: int) -> None:
        """Let the taps copy in the forward pass of a step.

        Args:
            step: its number, above 0.
            rows: that it has; a module that gives fewer, or without a graph another number, is not believed.
        """
        if self._staging is not None and self._slot >= 0:
            self._staging.release(self._slot)
        self._number = step + (rows << ROWS_SHIFT)
        self._fresh = self._number.to_bytes(8, sys.byteorder) * len(self.taps)
        if self.way is not Way.HOST:
            self._set_step(step)
        if rows != self._rows:
            self._rows = rows
            self._shapes, self._targets = self._sizes.get(rows) or self._size(rows)
        self.error = None
        self._armed = True

    def disarm(self) -> None:
        """Let the taps do nothing until the next `arm`; those in a graph off the CPU still write, and nobody reads."""
        self._armed = False
        if self._step_word is not None:
            self._step_word[0] = 0

    def _size(self, rows: int) -> tuple[list[torch.Size], list[torch.Tensor]]:
        """Return what each tap is given, and where it writes, in a step of so many rows; the last sizes are kept."""
        if len(self._sizes) >= _KNOWN_SIZES:
            self._sizes.clear()
        shapes = [torch.Size((rows, tap.group.width)) for tap in self.taps]
        self._sizes[rows] = found = shapes, [tap.out[:rows] for tap in self.taps]
        return found

    def _set_step(self, step: int) -> None:
        if self._step_word is not None:
            self._step_word[0] = step
        else:
            self._step.fill_(step)

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
        if self._staging is not None:
            # One slot: the rows of a step are written before the next begins.
            self._slot = self._staging.begin(rows)
            self._staging.wait(self._slot)
        if self._stamp_words.tobytes() == self._fresh:
            return frozenset()
        return frozenset(tap.group for tap in self.taps if not self.fired(tap, step, rows))

    def fired(self, tap: Tap, step: int, rows: int) -> bool:
        """Whether a tap copied at least the rows of a step; ask after `stale`.

        Args:
            tap: one of `taps`.
            step: its number.
            rows: that it has.
        """
        stamp = int(self._stamp_array[tap.slot])
        return stamp & _STEP_MASK == step and stamp >> ROWS_SHIFT >= rows

    def forget(self) -> None:
        """Believe no row that was copied until now: the numbers of steps may begin anew."""
        self._stamps.zero_()
        # Taps in a graph go on stamping the last number, which would come again.
        self._set_step(0)

    def install(self) -> None:
        """Wrap the modules; those that are wrapped already stay so below.

        Raises:
            CaptureError: a module does not have the inputs that a tap reads.
        """
        modules = {id(tap.module): tap.module for tap in self.taps}
        for key, module in modules.items():
            taps = [tap for tap in self.taps if id(tap.module) == key]
            before = [_of_inputs(tap, self._copy(tap)) for tap in taps if tap.source.inputs]
            after = [_of_output(tap, self._copy(tap)) for tap in taps if not tap.source.inputs]
            inner = module.forward
            if self.way is Way.GRAPH:
                forward = _always(inner, tuple(before), tuple(after))
            else:
                forward = self._when_armed(inner, before, after)
            self._wrapped.append((module, forward, module.__dict__.get("forward")))
            module.forward = forward

    def remove(self) -> None:
        """Take the taps off the model again, last installed first."""
        self.disarm()
        while self._wrapped:
            module, forward, previous = self._wrapped.pop()
            # What somebody else has wrapped since stays, and what is below it copies nothing any more.
            if module.__dict__.get("forward") is forward:
                if previous is None:
                    del module.forward
                else:
                    module.forward = previous

    def _copy(self, tap: Tap) -> Copy:
        beside = tap.mode == BESIDE
        if self.way is not Way.HOST:
            op, buffer, index, stamps, slot, step = (
                tap_op(),
                self._buffers[tap.group],
                tap.index,
                self._stamps,
                tap.slot,
                self._step,
            )
            return lambda x, r: op(x, r, beside, buffer, index, stamps, slot, step)
        slot, words = tap.slot, self._stamp_words
        of_x = tap.group.width // 2 if beside else tap.group.width

        def by_shape(x: torch.Tensor, r: torch.Tensor | None) -> None:
            # The usual tensors are [rows, width] already: one comparison tells.
            if x.shape != self._shapes[slot]:
                by_size(x, r)
                return
            if r is None:
                self._targets[slot].copy_(x)
            else:
                torch.add(x, r, out=self._targets[slot])
            words[slot] = self._number

        def by_size(x: torch.Tensor, r: torch.Tensor | None) -> None:
            # Another number of rows leaves the buffer and the stamp as they were, and so the rows unbelieved.
            if unbatched(x, of_x).shape[0] == self._rows and copy_rows(x, r, beside, self._targets[slot]):
                words[slot] = self._number

        return by_size if beside or tap.source.inputs else by_shape

    def _when_armed(
        self, inner: Callable[..., Any], before: Sequence[Callable[..., None]], after: Sequence[Callable[..., None]]
    ) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any module's own signature
            if not self._armed:
                return inner(*args, **kwargs)
            if before:
                self._each(before, args, kwargs)
            output = inner(*args, **kwargs)
            try:
                for take in after:
                    take(output)
            # This runs inside the model's forward pass: nothing of ours may leave it. `stale` raises it afterwards.
            except Exception as exc:
                self.error = exc
            return output

        return forward

    def _each(self, before: Sequence[Callable[..., None]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            for take in before:
                take(args, kwargs)
        # As above.
        except Exception as exc:
            self.error = exc


def _always(
    inner: Callable[..., Any], before: tuple[Callable[..., None], ...], after: tuple[Callable[..., None], ...]
) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any module's own signature
        for take in before:
            take(args, kwargs)
        output = inner(*args, **kwargs)
        for take in after:
            take(output)
        return output

    return forward


def _of_output(tap: Tap, copy: Copy) -> Callable[[Any], None]:
    paired = tap.mode in {SUM, BESIDE}

    def take(output: Any) -> None:  # noqa: ANN401 - any module's output
        copy(output[0] if isinstance(output, tuple) else output, output[1] if paired else None)

    return take


def _of_inputs(tap: Tap, copy: Copy) -> Callable[[tuple[Any, ...], dict[str, Any]], None]:
    names = list(inspect.signature(type(tap.module).forward).parameters)[1:]
    wanted = tap.source.inputs[: 2 if tap.mode in {SUM, BESIDE} else 1]
    missing = [name for name in wanted if name not in names]
    if missing:
        raise CaptureError(
            f"{type(tap.module).__name__} has no input {', '.join(missing)}, which {tap.group.tensor_type} is read from"
        )
    places = [(names.index(name), name) for name in wanted]

    def take(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = [args[place] if place < len(args) else kwargs.get(name) for place, name in places]
        copy(values[0], values[1] if len(values) > 1 else None)

    return take
