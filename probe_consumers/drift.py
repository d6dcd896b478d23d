"""Drift of live traffic: what committed results and some rows' norms say, window by window."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from probe_consumers.bound import Bound
from probe_consumers.chunks import Chunk
from undercurrent.codec import as_array, positions
from undercurrent.errors import ProbeError
from undercurrent.probes.drift import FIGURES, WINDOW_REQUESTS, DriftReference, DriftWindow
from undercurrent.probes.folder import ProbeConfig
from undercurrent.probes.trajectory import TrajectoryProbe
from undercurrent.protocol.messages import ActivationBlock, ProbeVerdict, VerdictAction
from undercurrent.protocol.streams import Stream

logger = logging.getLogger(__name__)

ROW_EVERY = 64
"""Of so many rows the norm of one is taken."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Watched:
    """A version of a binding whose probe carries a reference.

    Args:
        bound: the version.
        config: of its probe.
        reference: what later traffic is compared with.
    """

    bound: Bound
    config: ProbeConfig
    reference: DriftReference

    @classmethod
    def of(cls, bound: Bound) -> Watched | None:
        """Return a version to watch, None where its probe carries no reference.

        Raises:
            ProbeError: the reference is damaged.
        """
        sample = bound.loaded.sample
        if not isinstance(sample, TrajectoryProbe):
            return None
        try:
            reference = DriftReference.of(sample.artefact.reference)
        except ProbeError as exc:
            raise ProbeError(f"binding {bound.binding.name!r}: {exc}") from exc
        return None if reference is None else cls(bound=bound, config=sample.artefact.config, reference=reference)

    @property
    def key(self) -> Key:
        """What its windows are told by: name, version, fingerprint."""
        return self.bound.binding.name, self.bound.loaded.version, self.bound.loaded.fingerprint

    def window(self) -> DriftWindow:
        """Return an empty window."""
        return DriftWindow(reference=self.reference, threshold=self.config.threshold)


Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that a probe has judged to its end.

    Args:
        watched: the probe.
        score: last aggregate.
        acted: whether the probe did.
        expected: rows that were captured or declared lost, 0 where that is not known.
        scored: rows that the probe scored.
    """

    watched: Watched
    score: float | None
    acted: bool
    expected: int
    scored: int


@dataclass(slots=True)
class Seen:
    """What was seen since it was taken last.

    Args:
        ended: requests, by partition.
        norms: sum of logarithms and number of rows, by probe.
    """

    ended: defaultdict[int, list[Ended]] = field(default_factory=lambda: defaultdict(list))
    norms: dict[Watched, tuple[float, int]] = field(default_factory=dict)


class DriftSeer:
    """Collects, on the loop's thread, what drift is told by; probes without a reference are passed over."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Bound, Watched | None]] = {}
        self._seen = Seen()
        self._next_row = 0

    def rows(self, chunks: Iterable[Chunk], bounds_of: Callable[[Chunk], Iterable[Bound]]) -> None:
        """Take the norms of every so many rows of what arrived; what is only read again is passed over.

        Args:
            chunks: of a batch.
            bounds_of: gives what runs on the stream of one.
        """
        arrived = [chunk for chunk in chunks if not chunk.silent]
        sizes = [tokens for chunk in arrived for tokens in chunk.tokens]
        total = sum(sizes)
        if self._next_row >= total:  # most batches of a few rows
            self._next_row -= total
            return
        ends = np.cumsum(sizes)
        firsts = [0, *accumulate(map(len, arrived))]
        picked = np.arange(self._next_row, total, ROW_EVERY)
        self._next_row = int(picked[-1]) + ROW_EVERY - total
        which = np.searchsorted(ends, picked, side="right")
        for at in np.unique(which).tolist():
            first = int(ends[at - 1]) if at else 0
            place = bisect_right(firsts, at) - 1
            chunk = arrived[place]
            for bound in bounds_of(chunk):
                if (watched := self._watched(bound)) is not None:
                    block = chunk.block(at - firsts[place])
                    self._norms(watched, chunk.stream, block, picked[which == at] - first)

    def _watched(self, bound: Bound) -> Watched | None:
        known = self._known.get(id(bound))
        if known is None:
            try:
                watched = Watched.of(bound)
            except ProbeError as exc:  # of a version that was rolled out: it judges all the same
                logger.error("drift is not told: %s", exc)
                watched = None
            # Held with it, so that no other one gets the same identity.
            known = self._known[id(bound)] = bound, watched
        return known[1]

    def _norms(self, watched: Watched, stream: Stream, block: ActivationBlock, picked: NDArray[np.intp]) -> None:
        config = watched.config
        generated = positions(block)[picked] >= stream.started.prompt_len
        counted = {"all": picked, "generated": picked[generated], "prompt": picked[~generated]}[config.positions]
        if not len(counted) or config.layer not in block.layers:
            return
        rows = as_array(block)[counted, block.layers.index(config.layer)].astype(np.float64)
        squares = np.einsum("ij,ij->i", rows, rows)
        logs = 0.5 * np.log(squares[np.isfinite(squares) & (squares > 0)])
        known, count = self._seen.norms.get(watched, (0.0, 0))
        self._seen.norms[watched] = known + float(logs.sum()), count + len(logs)

    def ended(self, bound: Bound, partition: int, verdict: ProbeVerdict, stream: Stream) -> None:
        """Take a probe's result."""
        watched = self._watched(bound)
        if watched is None:
            return
        acted = verdict.action is not VerdictAction.CONTINUE
        expected = 0
        for shard in stream.shards.values():
            if shard.ended is not None:
                # Not strict: a record that its writer has not filled in must not end whoever reads it.
                counts = zip(shard.ended.layers, shard.ended.emitted, shard.ended.dropped, strict=False)
                expected += sum(emitted + lost for layer, emitted, lost in counts if layer in watched.config.all_layers)
        self._seen.ended[partition].append(Ended(watched, verdict.score, acted, expected, verdict.scored or 0))

    def forget(self, partition: int) -> None:
        """Drop what no transaction holds of a partition: it comes again."""
        self._seen.ended.pop(partition, None)

    def take(self) -> Seen:
        """Return, and reset, what was seen; it counts when the transaction that carries it is written."""
        seen, self._seen = self._seen, Seen()
        return seen


@dataclass(slots=True)
class Told:
    """The last whole window of a probe.

    Args:
        figures: NaN before there was one.
        limits: of the same.
        raised: names of those beyond their limits; None before there was a window.
    """

    figures: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(FIGURES, math.nan))
    limits: Mapping[str, float] = field(default_factory=dict)
    raised: tuple[str, ...] | None = None


class DriftWatch:
    """Windows of one point's probes, one after the other; a fresh process begins them anew.

    Args:
        bounds: those that are known from the start; versions that a rollout brings come later.
        window_requests: length of a window.
    """

    def __init__(self, bounds: Sequence[Bound] = (), window_requests: int = WINDOW_REQUESTS) -> None:
        self._length = window_requests
        self._windows: dict[Key, DriftWindow] = {}
        self.told: dict[Key, Told] = {}
        for bound in bounds:
            if (watched := Watched.of(bound)) is not None:
                self._window(watched)

    def count(self, seen: Seen) -> list[Key]:
        """Count what a written transaction carried; return the probes whose window is whole by that."""
        for watched, (log_sum, rows) in seen.norms.items():
            self._window(watched).add_norms(log_sum, rows)
        return [key for ended in seen.ended.values() for item in ended for key in self._request(item)]

    def _window(self, watched: Watched) -> DriftWindow:
        if watched.key not in self._windows:
            self._windows[watched.key] = watched.window()
            self.told.setdefault(watched.key, Told())
        return self._windows[watched.key]

    def _request(self, item: Ended) -> Iterator[Key]:
        window = self._window(item.watched)
        window.add(item.score, acted=item.acted, expected=item.expected, scored=item.scored)
        if window.requests < self._length:
            return
        key = item.watched.key
        told = Told(window.figures(self._length), window.limits(), window.raised(self._length))
        self.told[key] = told
        del self._windows[key]
        if told.raised:
            shown = ", ".join(
                f"{name} {told.figures[name]:.4g} (limit {told.limits[name]:.4g})" for name in told.raised
            )
            logger.warning("probe %s %s: %d requests have drifted: %s", key[0], key[1], window.requests, shown)
        yield key
