"""What a device knows and the host does not, brought to the host."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


class HostCopy:
    """The first rows of a tensor, as an array on the host; where the tensor lies there, its own memory.

    Args:
        tensor: one that stays where it is.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.on_host = tensor.device.type == "cpu"
        self._tensor = tensor
        self._copy = tensor
        if not self.on_host:
            self._copy = torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
        self.array: npt.NDArray[Any] = self._copy.numpy()

    def bring(self, rows: int) -> None:
        """Make the array's first rows those of the tensor, once what was launched before has run."""
        if not self.on_host:
            self._copy[:rows].copy_(self._tensor[:rows])
