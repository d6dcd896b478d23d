"""What a tap is where a compiler or a CUDA graph sees it: an op that copies rows into a buffer it declares to mutate.

Declared so, no compiler may drop it, move it over a change of what it reads, or merge two of them. Its addresses are
fixed, and so is everything that it asks of Python while a graph is captured: a replay runs its kernels alone. A module
that gives a shape that does not fit leaves the stamp as it was, and so the rows unbelieved; nothing is raised, since
this runs inside the model's forward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

ROWS_SHIFT = 40
"""A stamp is the number of the step in its low bits, and above them the rows that the module gave."""

_SCHEMA = (
    "tap(Tensor x, Tensor? r, bool beside, Tensor(a!) buffer, int layer, Tensor(b!) stamps, int slot, Tensor step)"
    " -> ()"
)
_libraries: list[torch.library.Library] = []


def tap_op() -> Callable[..., None]:
    """Return the op `undercurrent::tap(x, r, beside, buffer, layer, stamps, slot, step)`, defined at the first call.

    It writes x, x + r, or x and r side by side, into `buffer[:n, layer]`, and step and n into `stamps[slot]`. On a CPU,
    where no graph is replayed, it does nothing while `step` is 0.
    """
    if not _libraries:
        library = torch.library.Library("undercurrent", "DEF")
        library.define(_SCHEMA)
        library.impl("tap", _tap, "CompositeExplicitAutograd")
        library.impl("tap", _tap_on_cpu, "CPU")
        library.impl("tap", lambda *_: None, "Meta")
        _libraries.append(library)
    op: Callable[..., None] = torch.ops.undercurrent.tap.default
    return op


def copy_rows(x: torch.Tensor, r: torch.Tensor | None, beside: bool, target: torch.Tensor) -> bool:
    """Write the rows of what a module gave; return whether they fit.

    Args:
        x: [n, ...].
        r: None, or as x.
        beside: x and r side by side in one row, else their sum, in their own type as the model itself adds them.
        target: [most rows, width]; rows beyond it, which only a padded batch has, are left out.
    """
    rows, (most, width) = x.shape[0], target.shape
    of_x = width // 2 if beside else width
    if x.numel() != rows * of_x or (r is not None and r.shape != x.shape) or (beside and r is None):
        return False
    x = x.reshape(rows, of_x)[:most]
    target = target[:rows]
    if r is None:
        target.copy_(x)
        return True
    r = r.reshape(rows, of_x)[:most]
    if beside:
        target[:, :of_x].copy_(x)
        target[:, of_x:].copy_(r)
    else:
        # Out of place: both are still needed.
        torch.add(x, r, out=target)
    return True


def _tap(
    x: torch.Tensor,
    r: torch.Tensor | None,
    beside: bool,
    buffer: torch.Tensor,
    layer: int,
    stamps: torch.Tensor,
    slot: int,
    step: torch.Tensor,
) -> None:
    if copy_rows(x, r, beside, buffer[:, layer]):
        torch.add(step, x.shape[0] << ROWS_SHIFT, out=stamps[slot : slot + 1])


def _tap_on_cpu(
    x: torch.Tensor,
    r: torch.Tensor | None,
    beside: bool,
    buffer: torch.Tensor,
    layer: int,
    stamps: torch.Tensor,
    slot: int,
    step: torch.Tensor,
) -> None:
    if step.item():
        _tap(x, r, beside, buffer, layer, stamps, slot, step)
