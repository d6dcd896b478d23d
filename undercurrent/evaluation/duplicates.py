"""Requests with the same text, or nearly: what stands in two parts of a split is no test."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from undercurrent.evaluation.figures import Ints
from undercurrent.evaluation.passages import Passages

OVERLAP = 13
"""Consecutive words that two texts must share to be near duplicates."""

COMMON_SHARE = 0.05
COMMON_LEAST = 20
"""A passage in more requests than both of these is a template's: it would make one duplicate of all that use it."""


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Which requests share text.

    Args:
        exact: code of each request's normalised text, [n].
        near: code of each request's cluster of texts that share 13 words in a row, [n]; exact ones are in one cluster.
        common_passages: runs of 13 words that were taken for a template's.
    """

    exact: Ints
    near: Ints
    common_passages: int


def normalised(text: str) -> list[str]:
    """Return a text's words, without case, punctuation or differences of encoding."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    return "".join(letter if letter.isalnum() else " " for letter in plain).split()


def find_duplicates(texts: Iterable[str | None], folder: Path | None = None) -> Duplicates:
    """Return the duplicates among texts; None or a text without words is a duplicate of nothing.

    Args:
        texts: read once, one after the other.
        folder: where passages lie that do not fit memory.
    """
    first: dict[int, int] = {}
    codes: list[int] = []
    passages = Passages(folder)
    for row, text in enumerate(texts):
        words = tuple(normalised(text)) if isinstance(text, str) else ()
        codes.append(first.setdefault(hash(words), row) if words else row)
        if words and codes[row] == row and len(words) >= OVERLAP:
            found = [hash(words[at : at + OVERLAP]) for at in range(len(words) - OVERLAP + 1)]
            passages.add(np.unique(np.array(found, dtype=np.int64)), row)
    exact = np.array(codes, dtype=np.int64)
    n = len(exact)
    edges, common = _shared(passages, np.bincount(exact, minlength=n))
    joined = np.concatenate([np.stack([np.arange(n), exact]), edges], axis=1)
    return Duplicates(exact, join(joined, n), common)


def join(edges: Ints, n: int) -> Ints:
    """Return the code of each node's connected component, [n], from edges [2, m]."""
    graph = coo_array((np.ones(edges.shape[1], dtype=np.int8), (edges[0], edges[1])), shape=(n, n))
    return np.asarray(connected_components(graph, directed=False)[1], dtype=np.int64)


def _shared(passages: Passages, copies: Ints) -> tuple[Ints, int]:
    """Return an edge [2, m] for each request that has a passage of an earlier one, and how many passages are common."""
    edges, common = [np.empty((2, 0), dtype=np.int64)], 0
    for passage, owner in passages.groups():
        starts = np.flatnonzero(np.concatenate(([True], passage[1:] != passage[:-1])))
        sizes = np.diff(np.append(starts, passage.size))
        is_common = np.add.reduceat(copies[owner], starts) > max(COMMON_LEAST, COMMON_SHARE * copies.sum())
        is_common &= sizes > 1
        keep = np.repeat(~is_common, sizes)
        pairs = np.stack([owner, np.repeat(owner[starts], sizes)])[:, keep]
        edges.append(np.unique(pairs[:, pairs[0] != pairs[1]], axis=1))
        common += int(is_common.sum())
    return np.concatenate(edges, axis=1), common
