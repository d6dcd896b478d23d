"""Whether two runs of the same probes over the same records said the same: bit for bit, stream by stream."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

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


@dataclass(slots=True)
class Telling:
    """All that one probe said of one stream.

    Args:
        last_words: its results and errors; one, if all is well.
        scores: bits of each score, by (position, layer).
        doubled: scores that came more than once.
    """

    last_words: list[ProbeVerdict] = field(default_factory=list)
    scores: dict[tuple[int, int], int] = field(default_factory=dict)
    doubled: int = 0

    def take(self, verdict: ProbeVerdict) -> None:
        """Add a verdict."""
        if verdict.kind in (VerdictKind.RESULT, VerdictKind.ERROR):
            self.last_words.append(verdict)
        layers = verdict.score_layers
        positions = struct.unpack(f"<{len(verdict.score_positions) // 4}i", verdict.score_positions)
        bits = struct.unpack(f"<{len(verdict.scores) // 4}I", verdict.scores)
        for at, value in enumerate(bits):
            row, column = divmod(at, len(layers))
            key = (positions[row], layers[column])
            self.doubled += key in self.scores
            self.scores[key] = value


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
    """

    verdicts_compared: int = 0
    scores_compared: int = 0
    differences: list[Difference] = field(default_factory=list)
    differences_total: int = 0
    max_abs_diff: float = 0.0
    decisions_changed: int = 0

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


def compare(live: Mapping[TellingId, Telling], replay: Mapping[TellingId, Telling]) -> DiffReport:
    """Compare what two runs said.

    Args:
        live: of the live run.
        replay: of the replay.
    """
    report = DiffReport()
    for name in sorted(live.keys() | replay.keys()):
        if name not in live or not live[name].last_words:
            report.add(name, "absent_live")
        elif name not in replay or not replay[name].last_words:
            report.add(name, "absent_replay")
        else:
            _compare_words(report, name, live[name].last_words, replay[name].last_words)
            _compare_scores(report, name, live[name], replay[name])
    return report


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
        if telling.doubled:
            report.add(name, f"doubled_{side}", **{side: telling.doubled})
    for position, layer in sorted(live.scores.keys() | replay.scores.keys()):
        mine, theirs = live.scores.get((position, layer)), replay.scores.get((position, layer))
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
