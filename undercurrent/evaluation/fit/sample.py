"""A seeded sample of tokens per request: bounded memory, and the same rows in whatever order the requests come."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from undercurrent.errors import ProbeError
from undercurrent.evaluation.fit.blocks import POSITIVE, UNKNOWN, LabelledRequest, Positions, Site


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """What is kept of every request.

    Args:
        request_id: the request.
        label: what it is.
        group: its group.
        tokens: how many of its tokens could train.
    """

    request_id: str
    label: bool
    group: str
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Sampled rows of all requests, in the order of their ids.

    Args:
        requests: facts of each.
        rows: by site, float32 [n, width].
        labels: of the rows, bool [n].
        owners: index in `requests` of each row, int [n].
        tokens_per_request: at most so many rows of a request.
    """

    requests: Sequence[Facts]
    rows: dict[Site, NDArray[np.float32]]
    labels: NDArray[np.bool_]
    owners: NDArray[np.intp]
    tokens_per_request: int

    @property
    def weights(self) -> NDArray[np.float64]:
        """One per row, float64 [n]: those of a request add up to 1, however long it is."""
        return 1.0 / np.bincount(self.owners, minlength=len(self.requests))[self.owners]


@dataclass(slots=True)
class _Drawn:
    facts: Facts
    labels: NDArray[np.bool_]
    rows: dict[Site, NDArray[np.float32]]


def usable_tokens(block: LabelledRequest, positions: Positions) -> NDArray[np.intp]:
    """Return the indices of the tokens that can train: they count, and they and their request have a label."""
    if block.label is None:
        return np.empty(0, np.intp)
    return np.flatnonzero(block.counted(positions) & (block.labels_of_tokens() != UNKNOWN))


class SampleBuilder:
    """Draws at most `tokens_per_request` tokens of each request, fewer where memory would not hold them.

    Which tokens depends on the seed and the request alone. A smaller draw is a part of the larger one, and how much
    smaller depends on all requests together, so neither depends on their order.

    Args:
        sites: whose rows are kept.
        positions: which tokens count.
        tokens_per_request: to begin with.
        seed: of the draw.
        max_bytes: of the kept rows.

    Raises:
        ProbeError: `tokens_per_request` is less than 1.
    """

    def __init__(
        self, sites: Sequence[Site], *, positions: Positions, tokens_per_request: int, seed: int, max_bytes: int
    ) -> None:
        if tokens_per_request < 1:
            raise ProbeError(f"tokens per request: {tokens_per_request}; accepted: at least 1")
        self._sites = tuple(sites)
        self._positions = positions
        self._per_request = tokens_per_request
        self._seed = seed
        self._max_bytes = max_bytes
        self._drawn: dict[str, _Drawn] = {}
        self._bytes = 0
        self.unknown = 0
        """Requests that nobody labelled."""
        self.empty = 0
        """Labelled requests without a token that could train."""
        self.tokens = 0
        """Tokens that could train."""

    def take(self, block: LabelledRequest) -> NDArray[np.intp]:
        """Draw from a request; return the indices of all of its tokens that could train.

        Raises:
            ProbeError: rows are wrong, or not even one token per request fits into memory.
        """
        if block.label is None:
            self.unknown += 1
            return np.empty(0, np.intp)
        labels, usable = block.labels_of_tokens(), usable_tokens(block, self._positions)
        self.empty += not usable.size
        self.tokens += usable.size
        if usable.size:
            # Not sorted: what is given up later must be the end of a random order.
            chosen = _random(self._seed, block.request_id).permutation(usable)[: self._per_request]
            facts = Facts(block.request_id, block.label, block.group_key, int(usable.size))
            drawn = _Drawn(
                facts, labels[chosen] == POSITIVE, {site: block.rows_at(site, chosen) for site in self._sites}
            )
            self._drawn[block.request_id] = drawn
            self._bytes += sum(rows.nbytes for rows in drawn.rows.values())
            self._shrink()
        return usable

    def _shrink(self) -> None:
        while self._bytes > self._max_bytes:
            if self._per_request == 1:
                raise ProbeError(
                    f"one token of each of {len(self._drawn)} requests at {len(self._sites)} sites is more than the "
                    f"{self._max_bytes / 2**20:.0f} MiB that the memory bound leaves for a sample: raise the bound, or "
                    f"give fewer layers or requests"
                )
            self._per_request //= 2
            for drawn in self._drawn.values():
                drawn.labels = drawn.labels[: self._per_request]
                # Copied: a view would keep the whole alive.
                drawn.rows = {site: rows[: self._per_request].copy() for site, rows in drawn.rows.items()}
            self._bytes = sum(rows.nbytes for drawn in self._drawn.values() for rows in drawn.rows.values())

    def finish(self) -> Sample:
        """Return the sample, and keep nothing.

        Raises:
            ProbeError: there is none, one of the classes is missing, or a request has another width than the others.
        """
        ordered = [self._drawn.pop(name) for name in sorted(self._drawn)]
        labels = [drawn.facts.label for drawn in ordered]
        if not any(labels) or all(labels):
            positives = sum(labels)
            raise ProbeError(
                f"{positives} positive and {len(labels) - positives} negative requests with tokens that could train "
                f"({self.unknown} unlabelled, {self.empty} without such a token); accepted: some of both"
            )
        counts = [len(drawn.labels) for drawn in ordered]
        rows = {site: _gathered(site, ordered, sum(counts)) for site in self._sites}
        return Sample(
            requests=[drawn.facts for drawn in ordered],
            rows=rows,
            labels=np.concatenate([drawn.labels for drawn in ordered]),
            owners=np.repeat(np.arange(len(ordered)), counts),
            tokens_per_request=self._per_request,
        )


def _gathered(site: Site, ordered: Sequence[_Drawn], total: int) -> NDArray[np.float32]:
    """Return the rows of one site as one array; each request's own are given up as they are copied."""
    width = ordered[0].rows[site].shape[1]
    whole = np.empty((total, width), np.float32)
    start = 0
    for drawn in ordered:
        rows = drawn.rows.pop(site)
        if rows.shape[1] != width:
            names = drawn.facts.request_id, ordered[0].facts.request_id
            raise ProbeError(f"request {names[0]!r}: rows at {site} are {rows.shape[1]} wide, of {names[1]!r} {width}")
        whole[start : start + len(rows)] = rows
        start += len(rows)
    return whole


def _random(seed: int, request_id: str) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed}|{request_id}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))
