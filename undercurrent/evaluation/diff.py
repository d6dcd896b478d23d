"""Whether two runs of the same probes over the same records said the same: bit for bit, stream by stream."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undercurrent.protocol.messages import ProbeVerdict, VerdictKind

LISTED_DIFFERENCES = 1000
"""Differences that a report lists; all of them are counted."""

_COMPARED = ("kind", "verdict", "score", "action", "token_pos", "complete", "missing", "partial", "end_reason", "error")


@dataclass(frozen=True, slots=True, order=True)
class TellingId:
    """One probe on one stream.

    Args:
        request_id: the request.
        attempt: its attempt.
        index: its child.
        probe: name of the binding.
    """

    request_id: str
    attempt: int
    index: int
    probe: str


_KEY = np.dtype("<i8")


@dataclass(slots=True)
class Telling:
    """All that one probe said of one stream.

    Args:
        last_words: its results and errors; one, if all is well.
        parts: its scores as they came: keys (position and layer in one number) and bits, int64 [n] and uint32 [n].
    """

    last_words: list[ProbeVerdict] = field(default_factory=list)
    parts: list[tuple[NDArray[np.int64], NDArray[np.uint32]]] = field(default_factory=list)

    @property
    def scores(self) -> dict[tuple[int, int], int]:
        """Bits of each score, by (position, layer); the last where one came more than once."""
        keys, bits = self.joined()
        return {(key >> 32, key & 0xFFFFFFFF): value for key, value in zip(keys.tolist(), bits.tolist(), strict=True)}

    @property
    def doubled(self) -> int:
        """Scores that came more than once."""
        keys, _ = self.joined()
        return len(keys) - len(np.unique(keys))

    def joined(self) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Return keys and bits of all scores, by key; those of one key as they came."""
        keys = np.concatenate([np.empty(0, _KEY), *(keys for keys, _ in self.parts)])
        bits = np.concatenate([np.empty(0, "<u4"), *(bits for _, bits in self.parts)])
        order = np.argsort(keys, kind="stable")
        return keys[order], bits[order]

    def take(self, verdict: ProbeVerdict) -> None:
        """Add a verdict."""
        if verdict.kind in (VerdictKind.RESULT, VerdictKind.ERROR):
            self.last_words.append(verdict)
        if verdict.scores:
            positions = np.frombuffer(verdict.score_positions, "<i4").astype(_KEY)
            keys = (positions[:, None] << 32) | np.array(verdict.score_layers, _KEY)
            self.parts.append((keys.reshape(-1), np.frombuffer(verdict.scores, "<u4")))


def telling_id(verdict: ProbeVerdict) -> TellingId:
    """Return which probe and stream a verdict speaks of."""
    return TellingId(verdict.request_id, verdict.attempt, verdict.index, verdict.probe)


def collect(verdicts: Iterable[ProbeVerdict]) -> dict[TellingId, Telling]:
    """Return what was said, by probe and stream."""
    told: dict[TellingId, Telling] = {}
    for verdict in verdicts:
        told.setdefault(telling_id(verdict), Telling()).take(verdict)
    return told


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that is not the same.

    Args:
        request_id: the request.
        attempt: its attempt.
        index: its child.
        probe: name of the binding.
        what: `absent_live`, `absent_replay`, `doubled_live`, `doubled_replay`, `score`, `score_absent_live`,
            `score_absent_replay`, or a verdict's field.
        live: what the live run said.
        replay: what the replay said.
        token_pos: of a score.
        layer: of a score.
    """

    request_id: str
    attempt: int
    index: int
    probe: str
    what: str
    live: Any = None
    replay: Any = None
    token_pos: int | None = None
    layer: int | None = None


@dataclass(slots=True)
class DiffReport:
    """What a comparison found.

    Args:
        verdicts_compared: pairs of last words.
        scores_compared: pairs of scores.
        differences: the first `LISTED_DIFFERENCES`.
        differences_total: all.
        max_abs_diff: between finite scores that both have.
        decisions_changed: streams whose action or verdict differs.
        not_judged_yet: last words of the replay on records that the live run had not come to; no differences.
        waiting: the first `LISTED_DIFFERENCES` of them.
        unreadable: live records that cannot be read, whatever they were.
        unreadable_first: where the first of them lie.
    """

    verdicts_compared: int = 0
    scores_compared: int = 0
    differences: list[Difference] = field(default_factory=list)
    differences_total: int = 0
    max_abs_diff: float = 0.0
    decisions_changed: int = 0
    not_judged_yet: int = 0
    waiting: list[TellingId] = field(default_factory=list)
    unreadable: int = 0
    unreadable_first: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether nothing was there to compare."""
        return self.verdicts_compared == 0

    @property
    def equal(self) -> bool:
        """Whether something was compared and nothing differs."""
        return not self.empty and self.differences_total == 0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {**asdict(self), "equal": self.equal, "empty": self.empty}

    def add(self, name: TellingId, what: str, **facts: Any) -> None:  # noqa: ANN401 - fields of Difference
        """Count a difference, and list it while there is room."""
        self.differences_total += 1
        if len(self.differences) < LISTED_DIFFERENCES:
            self.differences.append(Difference(**asdict(name), what=what, **facts))

    def wait_for(self, name: TellingId) -> None:
        """Count what the live run had not come to, and list it while there is room."""
        self.not_judged_yet += 1
        if len(self.waiting) < LISTED_DIFFERENCES:
            self.waiting.append(name)


def compare(
    live: Mapping[TellingId, Telling],
    replay: Mapping[TellingId, Telling],
    report: DiffReport | None = None,
    judged_up_to: Mapping[int, int] | None = None,
    ahead: Collection[TellingId] = (),
) -> DiffReport:
    """Compare what two runs said.

    Args:
        live: of the live run.
        replay: of the replay.
        report: of other requests, to go on with.
        judged_up_to: first offset whose outputs the live run may not have written yet, by partition; where there is
            none it has written all.
        ahead: whose last words follow from what it had not come to in other partitions than their own.
    """
    report = DiffReport() if report is None else report
    for name in sorted(live.keys() | replay.keys()):
        if name not in live or not live[name].last_words:
            if name in replay and (name in ahead or _lies_ahead(replay[name], judged_up_to or {})):
                report.wait_for(name)
            else:
                report.add(name, "absent_live")
        elif name not in replay or not replay[name].last_words:
            report.add(name, "absent_replay")
        else:
            _compare_words(report, name, live[name].last_words, replay[name].last_words)
            _compare_scores(report, name, live[name], replay[name])
    return report


def _lies_ahead(telling: Telling, judged_up_to: Mapping[int, int]) -> bool:
    """Whether its last words follow from records that the live run had not come to."""
    return bool(telling.last_words) and all(
        word.source_partition in judged_up_to and word.source_offset >= judged_up_to[word.source_partition]
        for word in telling.last_words
    )


def _compare_words(report: DiffReport, name: TellingId, live: list[ProbeVerdict], replay: list[ProbeVerdict]) -> None:
    report.verdicts_compared += 1
    for side, words in (("live", live), ("replay", replay)):
        if len(words) > 1:
            report.add(name, f"doubled_{side}", **{side: len(words)})
    for what in _COMPARED:
        mine, theirs = getattr(live[0], what), getattr(replay[0], what)
        if mine != theirs and not (_is_nan(mine) and _is_nan(theirs)):
            report.add(name, what, live=mine, replay=theirs)
    report.decisions_changed += (live[0].action, live[0].verdict) != (replay[0].action, replay[0].verdict)


def _compare_scores(report: DiffReport, name: TellingId, live: Telling, replay: Telling) -> None:
    for side, telling in (("live", live), ("replay", replay)):
        if doubled := telling.doubled:
            report.add(name, f"doubled_{side}", **{side: doubled})
    (keys, bits), (other_keys, other_bits) = live.joined(), replay.joined()
    if np.array_equal(keys, other_keys) and np.array_equal(bits, other_bits):
        report.scores_compared += len(np.unique(keys))
        return
    said, said_again = live.scores, replay.scores
    for position, layer in sorted(said.keys() | said_again.keys()):
        mine, theirs = said.get((position, layer)), said_again.get((position, layer))
        at = {"token_pos": position, "layer": layer}
        if mine is None or theirs is None:
            report.add(name, f"score_absent_{'live' if mine is None else 'replay'}", **at)
            continue
        report.scores_compared += 1
        if mine != theirs:
            values = _float(mine), _float(theirs)
            distance = abs(values[0] - values[1])
            if math.isfinite(distance):
                report.max_abs_diff = max(report.max_abs_diff, distance)
            report.add(name, "score", live=values[0], replay=values[1], **at)


def _float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)
