"""The way of a step's rows from a device to the host: a fixed ring of pinned buffers, filled by asynchronous copies.

A slot's life: `begin` takes the oldest free one, lets a stream of its own wait for what the model's stream has done so
far, copies, and makes the model's stream wait for the copy before it goes on, since the next step overwrites what is
copied; the host waits for nothing. `wait` returns when the copy is done. `release` gives the slot back once its rows
were written. A slot whose copy is under way, or whose rows are not written yet, is never taken; nothing is allocated
and no pageable memory is read or written after the start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from undercurrent.errors import CaptureError


class Event(Protocol):
    """What is needed of a `torch.cuda.Event`."""

    def record(self, stream: Stream, /) -> None:
        """Mark what a stream has been given so far."""

    def synchronize(self) -> None:
        """Wait until the marked work is done."""


class Stream(Protocol):
    """What is needed of a `torch.cuda.Stream`."""

    def wait_event(self, event: Event, /) -> None:
        """Do what comes later after the work that an event marks."""


class Device(Protocol):
    """What is needed of a device: `Cuda`, or a stand-in."""

    def current(self) -> Stream:
        """Return the stream that the model runs on."""

    def side(self) -> Stream:
        """Return a stream of its own for copies."""

    def event(self) -> Event:
        """Return a new event."""

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """Return host memory for a tensor of the device, which the device reads and writes by itself."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, stream: Stream) -> None:
        """Copy on a stream; return at once."""


class Cuda:
    """A CUDA device.

    Args:
        device: as torch calls it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Stream:
        """Return the stream that the model runs on."""
        stream: Stream = torch.cuda.current_stream(self._device)
        return stream

    def side(self) -> Stream:
        """Return a stream of its own for copies."""
        stream: Stream = torch.cuda.Stream(self._device)
        return stream

    def event(self) -> Event:
        """Return a new event."""
        event: Event = torch.cuda.Event()
        return event

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """Return page-locked host memory for a tensor."""
        return torch.zeros(like.shape, dtype=like.dtype, pin_memory=True)

    def copy(self, source: torch.Tensor, target: torch.Tensor, stream: Stream) -> None:
        """Copy on a stream; return at once."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)


class Staging:
    """See the module.

    Args:
        buffers: on the device; the first dimension of each is the rows of a step.
        whole: on the device; copied as they are.
        device: that has them.
        slots: steps whose rows may be under way or unwritten at once.
    """

    def __init__(
        self, buffers: Sequence[torch.Tensor], whole: Sequence[torch.Tensor], device: Device, slots: int = 1
    ) -> None:
        self._buffers, self._whole, self._device = tuple(buffers), tuple(whole), device
        self._side = device.side()
        self._ready = device.event()
        self._done = [device.event() for _ in range(slots)]
        self.rows = [[device.pinned(buffer) for buffer in buffers] for _ in range(slots)]
        self.words = [[device.pinned(tensor) for tensor in whole] for _ in range(slots)]
        self._free = deque(range(slots))
        self._taken: set[int] = set()

    def begin(self, rows: int) -> int:
        """Start the copy of a step's rows; return its slot.

        Args:
            rows: of the step.

        Raises:
            CaptureError: the rows of every slot are unwritten still.
        """
        if not self._free:
            raise CaptureError("the rows of earlier steps were not written in time")
        slot = self._free.popleft()
        self._taken.add(slot)
        model = self._device.current()
        self._ready.record(model)
        self._side.wait_event(self._ready)
        for source, target in zip(self._buffers, self.rows[slot], strict=True):
            self._device.copy(source[:rows], target[:rows], self._side)
        for source, target in zip(self._whole, self.words[slot], strict=True):
            self._device.copy(source, target, self._side)
        self._done[slot].record(self._side)
        # The next step overwrites what is being copied.
        model.wait_event(self._done[slot])
        return slot

    def wait(self, slot: int) -> None:
        """Return when the copy of a slot is done.

        Args:
            slot: from `begin`.
        """
        self._done[slot].synchronize()

    def release(self, slot: int) -> None:
        """Give a slot back whose rows were written, or that nobody wants any more.

        Args:
            slot: from `begin`; one that is free already stays so.
        """
        if slot in self._taken:
            # Its memory must not be given to another copy while this one still writes it.
            self._done[slot].synchronize()
            self._taken.remove(slot)
            self._free.append(slot)
