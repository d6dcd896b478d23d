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


def unbatched(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return what a module gave without the batch of one that models of transformers have before their rows.

    Args:
        x: [n, ...], or [1, n, width].
        width: of a row.
    """
    return x[0] if x.dim() == 3 and x.shape[0] == 1 and x.shape[2] == width else x


def copy_rows(x: torch.Tensor, r: torch.Tensor | None, beside: bool, target: torch.Tensor) -> int:
    """Write the rows of what a module gave; return how many there were, 0 where they do not fit.

    Args:
        x: [n, ...], or [1, n, width].
        r: None, or as x.
        beside: x and r side by side in one row, else their sum, in their own type as the model itself adds them.
        target: [most rows, width]; rows beyond it, which only a padded batch has, are left out.
    """
    most, width = target.shape
    of_x = width // 2 if beside else width
    if (r is not None and r.shape != x.shape) or (beside and r is None):
        return 0
    x = unbatched(x, of_x)
    rows = int(x.shape[0])
    if x.numel() != rows * of_x:
        return 0
    x = x.reshape(rows, of_x)[:most]
    target = target[:rows]
    if r is None:
        target.copy_(x)
        return rows
    r = unbatched(r, of_x).reshape(rows, of_x)[:most]
    if beside:
        target[:, :of_x].copy_(x)
        target[:, of_x:].copy_(r)
    else:
        # Out of place: both are still needed.
        torch.add(x, r, out=target)
    return rows


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
    rows = copy_rows(x, r, beside, buffer[:, layer])
    if rows:
        torch.add(step, rows << ROWS_SHIFT, out=stamps[slot : slot + 1])


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
