"""Scores that no verdict has carried yet, and how they are cut into verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# A verdict must fit into a topic with the broker's default limit of 1 MiB.
_MOST_SCORE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Unsaid:
    """Scores of some tokens.

    Args:
        positions: absolute, int32 little-endian [n].
        layers: of the columns.
        scores: float32 little-endian [n, L].
    """

    positions: bytes
    layers: tuple[int, ...]
    scores: bytes


def grouped(unsaid: Sequence[Unsaid]) -> list[list[Unsaid]]:
    """Cut a sequence where the layers change and before a verdict grows too large; leave out what is empty."""
    groups: list[list[Unsaid]] = []
    room = 0
    for item in (piece for whole in unsaid for piece in _pieces(whole)):
        size = len(item.positions) + len(item.scores)
        if groups and groups[-1][0].layers == item.layers and size <= room:
            groups[-1].append(item)
        else:
            groups.append([item])
            room = _MOST_SCORE_BYTES
        room -= size
    return groups


def _pieces(whole: Unsaid) -> Iterator[Unsaid]:
    row = 4 * len(whole.layers)
    step = max(1, _MOST_SCORE_BYTES // (4 + row))
    for at in range(0, len(whole.positions) // 4, step):
        yield Unsaid(
            whole.positions[4 * at : 4 * (at + step)], whole.layers, whole.scores[row * at : row * (at + step)]
        )
