"""With tensor parallelism: every tap must copy the same on every rank, or what it copies is a part of a sum.

A module that reduces gives each rank its whole output, bit for bit the same. Some hand on what only this rank has
computed, and leave the sum to a later module: there is no rank whose rows could be published. So the model runs once
more, and the ranks compare what their taps hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from undercurrent.adapters.vllm.residual import silenced
from undercurrent.adapters.vllm.tap import Tap, TapSet
from undercurrent.errors import CaptureError

Exchange = Callable[[object], Sequence[object]]
"""What this rank says -> what every rank says; a collective, so each of them calls it equally often."""

_STEP = 1


def check_equal(
    run: Callable[[np.ndarray], None], taps: TapSet, ids: np.ndarray, kernels: Sequence[nn.Module], exchange: Exchange
) -> None:
    """Refuse taps that hold different rows on different ranks.

    Args:
        run: runs the model eagerly on int32 token ids, without a KV cache.
        taps: installed ones.
        ids: token ids, the same on every rank.
        kernels: what reads the KV cache: without one it leaves its output unset, so it gives fixed noise.
        exchange: see `Exchange`.

    Raises:
        CaptureError: one of them does, by name; on every rank.
    """
    with torch.inference_mode(), silenced(kernels):
        taps.arm(_STEP, len(ids))
        try:
            run(ids)
        finally:
            taps.disarm()
    taps.stale(_STEP, len(ids))
    told = exchange([_digest(tap, len(ids)) for tap in taps.taps])
    for number, tap in enumerate(taps.taps):
        if len({digests[number] for digests in told}) > 1:  # type: ignore[index]
            raise CaptureError(
                f"{tap.group.tensor_type} of layer {tap.layer} ({type(tap.module).__name__}) is not the same on every "
                "rank of tensor parallelism: each has a part of it, and no rank the whole"
            )


def told_of_all(work: Callable[[], None], exchange: Exchange) -> None:
    """Do something on every rank; where it is refused on one it is refused on all, and none waits for another.

    Args:
        work: the same on every rank.
        exchange: see `Exchange`.

    Raises:
        CaptureError: as `work` raised it here or elsewhere.
    """
    error = ""
    try:
        work()
    except CaptureError as exc:
        error = str(exc)
    for other in exchange(error):
        if other:
            raise CaptureError(str(other))


def _digest(tap: Tap, rows: int) -> bytes:
    held = tap.out[:rows].contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.sha256(held).digest()
