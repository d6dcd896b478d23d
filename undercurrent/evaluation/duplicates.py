"""Requests with the same text, or nearly: what stands in two parts of a split is no test."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from undercurrent.evaluation.figures import Ints

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


def find_duplicates(texts: Sequence[str | None]) -> Duplicates:
    """Return the duplicates among texts; None or a text without words is a duplicate of nothing."""
    first: dict[tuple[str, ...], int] = {}
    exact = np.arange(len(texts))
    grams: list[Ints] = []
    owners: list[Ints] = []
    for row, text in enumerate(texts):
        words = tuple(normalised(text)) if isinstance(text, str) else ()
        if not words:
            continue
        exact[row] = first.setdefault(words, row)
        if exact[row] == row and len(words) >= OVERLAP:
            found = np.array([hash(words[at : at + OVERLAP]) for at in range(len(words) - OVERLAP + 1)], dtype=np.int64)
            grams.append(np.unique(found))
            owners.append(np.full(grams[-1].size, row))
    edges, common = _shared(grams, owners, np.bincount(exact, minlength=len(texts)))
    joined = np.concatenate([np.stack([np.arange(len(texts)), exact]), edges], axis=1)
    return Duplicates(exact, join(joined, len(texts)), common)


def join(edges: Ints, n: int) -> Ints:
    """Return the code of each node's connected component, [n], from edges [2, m]."""
    graph = coo_array((np.ones(edges.shape[1], dtype=np.int8), (edges[0], edges[1])), shape=(n, n))
    return np.asarray(connected_components(graph, directed=False)[1], dtype=np.int64)


def _shared(grams: Sequence[Ints], owners: Sequence[Ints], copies: Ints) -> tuple[Ints, int]:
    """Return an edge [2, m] for each request that has a passage of an earlier one, and how many passages are common."""
    if not grams:
        return np.empty((2, 0), dtype=np.int64), 0
    gram, owner = np.concatenate(grams), np.concatenate(owners)
    order = np.argsort(gram, kind="stable")
    gram, owner = gram[order], owner[order]
    starts = np.flatnonzero(np.concatenate(([True], gram[1:] != gram[:-1])))
    sizes = np.diff(np.append(starts, gram.size))
    common = np.add.reduceat(copies[owner], starts) > max(COMMON_LEAST, COMMON_SHARE * copies.sum())
    common &= sizes > 1
    keep = np.repeat(~common, sizes)
    return np.stack([owner, np.repeat(owner[starts], sizes)])[:, keep], int(common.sum())
