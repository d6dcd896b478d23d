"""Which part of an extraction point a pipeline rank captures: the layers that it owns, as one shard of each stream.

Only ranks that own a layer of a point write its streams, so nobody waits for a shard that never comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from undercurrent.spec import ExtractionPoint, TensorType


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank captures of a point.

    Args:
        layers: of the point that it owns, in the point's order; empty where it writes no shard.
        shard: number of its shard, -1 where it writes none.
        shards: how many ranks write one.
    """

    layers: tuple[int, ...]
    shard: int
    shards: int


def share_of(point: ExtractionPoint, owned: Sequence[range], rank: int) -> Share:
    """Return what a rank captures of a point.

    Args:
        point: its layers are those of the model.
        owned: decoder layers of each rank, in order. The final norm belongs to the last one.
        rank: whose share is asked for.
    """
    shares = [_layers(point, layers, last=number == len(owned) - 1) for number, layers in enumerate(owned)]
    writers = [number for number, layers in enumerate(shares) if layers]
    return Share(shares[rank], writers.index(rank) if rank in writers else -1, len(writers))


def _layers(point: ExtractionPoint, owned: range, *, last: bool) -> tuple[int, ...]:
    if point.tensor_type is TensorType.FINAL_NORM:
        return point.layers if last else ()
    return tuple(layer for layer in point.layers if layer in owned)
