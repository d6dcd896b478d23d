"""All that a report says, as `report.json` holds it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from undercurrent.errors import EvaluationError
from undercurrent.evaluation.agreement import Agreement
from undercurrent.evaluation.calibration import Calibration
from undercurrent.evaluation.censoring import Censoring
from undercurrent.evaluation.detection import Detection
from undercurrent.evaluation.figures import Figure
from undercurrent.evaluation.layers import LayerCell
from undercurrent.evaluation.lengths import Lengths
from undercurrent.evaluation.operating import OperatingPoint
from undercurrent.evaluation.rivals import Control, Rival
from undercurrent.evaluation.slices import Slice
from undercurrent.evaluation.token_figures import TokenFigures

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCounts:
    """A part of the split.

    Args:
        part: its name.
        requests: with a known label.
        groups: of them.
        positives: of them.
        negatives: of them.
        unknown: requests of the part without a known label, in no figure.
        unscored: requests with a known label and without a score, taken as not acted on.
        effective_n: equally weighted requests that would say as much.
    """

    part: str
    requests: int
    groups: int
    positives: int
    negatives: int
    unknown: int
    unscored: int
    effective_n: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitFacts:
    """How the requests were parted.

    Args:
        source: `given`, `stored` or `by group hash`.
        parts: what each part holds.
        texts_compared: whether there were texts to look for duplicates in.
        exact_across: requests whose text stood in two parts.
        near_across: requests that shared 13 words in a row with one of another part, exact ones among them.
        groups_across: groups that stood in two parts.
        moved: requests moved to the earlier part for it.
        left_across: requests that still share something with another part.
        common_passages: passages in so many requests that they were taken for a template's.
        largest_unit: requests of the largest set that is never parted.
        test_reads: how often figures of this test part have been made, this time included; None if it is not stored.
    """

    source: str
    parts: tuple[PartCounts, ...]
    texts_compared: bool
    exact_across: int
    near_across: int
    groups_across: int
    moved: int
    left_across: int
    common_passages: int
    largest_unit: int
    test_reads: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongRequest:
    """A request on which the probe was wrong.

    Args:
        request_id: the request.
        kind: `false stop` or `miss`.
        score: its score.
        text: the text up to the decision, if texts were asked for.
    """

    request_id: str
    kind: str
    score: float | None
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The content of a report.

    Args:
        format: of this content.
        name: of the probe.
        headline: what a reader must know first.
        notes: what qualifies the figures, gravest first.
        split: how the requests were parted.
        auroc: on the test part.
        auprc: on the test part, at its own share of positives.
        auprc_at_prevalence: at the stated prevalence.
        operating: thresholds and what they do; the first is the one that the rest of the report speaks of.
        calibration: scores as probabilities.
        lengths: the effect of length.
        detection: time to detection.
        baselines: what the probe has to beat.
        controls: what must not beat chance.
        tokens: figures over tokens, where spans label them.
        censoring: requests that were cut, and the holdout.
        agreement: of other sources of labels.
        layers: AUROC by layer and position.
        slices: kinds of requests.
        wrong: the worst false stops and misses.
        settings: the options that it was made with.
    """

    format: int = FORMAT
    name: str
    headline: str
    notes: tuple[str, ...]
    split: SplitFacts
    auroc: Figure
    auprc: Figure
    auprc_at_prevalence: Figure
    operating: tuple[OperatingPoint, ...]
    calibration: Calibration
    lengths: Lengths
    detection: Detection
    baselines: tuple[Rival, ...]
    controls: tuple[Control, ...]
    tokens: TokenFigures
    censoring: Censoring
    agreement: tuple[Agreement, ...]
    layers: tuple[LayerCell, ...]
    slices: tuple[Slice, ...]
    wrong: tuple[WrongRequest, ...]
    settings: dict[str, Any]

    def to_json(self) -> str:
        """Return the content as JSON; it has no NaN."""
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False) + "\n"


def schema() -> dict[str, Any]:
    """Return the JSON schema of `report.json`."""
    found = TypeAdapter(Findings).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def read_findings(path: Path) -> Findings:
    """Read a `report.json`.

    Raises:
        EvaluationError: the file is no report, or of another format.
    """
    try:
        found = TypeAdapter(Findings).validate_json(path.read_bytes())
    except ValidationError as wrong:
        first = wrong.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise EvaluationError(f"{path} is no report: {where}: {first['msg']}") from wrong
    if found.format != FORMAT:
        raise EvaluationError(f"{path} has format {found.format}; this version reads {FORMAT}")
    return found
