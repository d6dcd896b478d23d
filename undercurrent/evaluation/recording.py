"""Writing into a probe's folder what its test part said of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from undercurrent.counts import counted
from undercurrent.errors import EvaluationError
from undercurrent.evaluation.dataset import Dataset
from undercurrent.evaluation.dataset_evaluation import Judged, dataset_facts
from undercurrent.evaluation.figures import Figure
from undercurrent.evaluation.fit.artefact import CARD_NAME, METRICS_FORMAT, METRICS_NAME, UNJUDGED
from undercurrent.evaluation.request_facts import Reading
from undercurrent.files import write_text


def read_metrics(folder: Path) -> dict[str, Any]:
    """Return a probe's `metrics.json`; empty where it has none, as a probe from elsewhere.

    Raises:
        EvaluationError: it cannot be read.
    """
    path = folder / METRICS_NAME
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as wrong:
        raise EvaluationError(f"{path}: cannot be read: {wrong}") from wrong
    if not isinstance(found, dict):
        raise EvaluationError(f"{path}: holds a {type(found).__name__}; accepted: an object")
    return found


def test_entry(judged: Judged, data: Dataset, reading: Reading, fingerprint: str) -> dict[str, Any]:
    """Return what `metrics.json` says under `test`: the figures, of which data, and when they were made."""
    found = judged.report.findings
    part = next(part for part in found.split.parts if part.part == "test")
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "dataset": dataset_facts(data),
        "label": reading.label,
        "source": reading.source,
        "point": judged.point,
        "probe_fingerprint": fingerprint,
        "test_reads": found.split.test_reads,
        "requests": part.requests,
        "groups": part.groups,
        "positives": part.positives,
        "negatives": part.negatives,
        "auroc": _plain(found.auroc),
        "auprc": _plain(found.auprc),
        "operating": [
            {
                "name": point.name,
                "threshold": point.threshold,
                "wanted_fpr": point.wanted_fpr,
                "tpr": _plain(point.tpr),
                "fpr": _plain(point.fpr),
            }
            for point in found.operating
        ],
        "headline": found.headline,
    }


def record_test(folder: Path, entry: Mapping[str, Any]) -> None:
    """Write the figures of a test part into `metrics.json`, and into the card in place of there being none.

    A reader sees the old file or the new one. What else stands there is left as it is.

    Raises:
        EvaluationError: `metrics.json` cannot be read or written.
    """
    metrics = {"format": METRICS_FORMAT, **read_metrics(folder), "test": dict(entry)}
    try:
        write_text(folder / METRICS_NAME, json.dumps(metrics, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        card = folder / CARD_NAME
        text = card.read_text(encoding="utf-8") if card.is_file() else ""
        if UNJUDGED in text:
            write_text(card, text.replace(UNJUDGED, _sentence(entry)))
    except OSError as wrong:
        raise EvaluationError(
            f"{folder}: the figures cannot be written: {wrong}; --no-record leaves it as it is"
        ) from wrong


def _sentence(entry: Mapping[str, Any]) -> str:
    return (
        f"On the test part of `{entry['dataset']['path']}` ({counted(entry['requests'], 'request')}, "
        f"{entry['positives']:,} positive, read {counted(entry['test_reads'], 'time')}, {entry['at']}): "
        f"{entry['headline']}"
    )


def _plain(figure: Figure) -> dict[str, Any] | str:
    if figure.value is None:
        return figure.unavailable or "n/a"
    return {name: value for name, value in asdict(figure).items() if name != "unavailable"}
