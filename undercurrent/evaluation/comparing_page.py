"""A comparison as files: one page with plots, its content as JSON, and the requests on which two probes disagree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from pydantic import TypeAdapter

from undercurrent.counts import counted
from undercurrent.evaluation.comparing import Comparison, McNemar
from undercurrent.evaluation.inputs import POSITIVE, UNKNOWN
from undercurrent.evaluation.markup import document, draw, folded, grid
from undercurrent.evaluation.metrics import Floats
from undercurrent.evaluation.plots import BLUE, GREY, RED, blank, roc_line
from undercurrent.evaluation.report import Report
from undercurrent.evaluation.resampling import Sample
from undercurrent.files import together, write_text, writing

SHOWN_POINTS = 4000
SHOWN_ROWS = 200


def write(found: Comparison, first: Report, second: Report, folder: Path) -> None:
    """Write `compare.html`, `compare.json`, `compare.schema.json` and `disagreements.parquet`.

    Raises:
        OSError: naming the file that cannot be written; a comparison that was there is as it was.
    """
    columns = ["request_id", "label", "first_score", "second_score", "first_acts", "second_acts"]
    rows = pd.DataFrame([asdict(row) for row in found.disagreements], columns=columns)
    with together(folder, last="compare.json") as fresh:
        write_text(fresh / "compare.html", page(found, first, second))
        write_text(fresh / "compare.json", found.to_json())
        write_text(fresh / "compare.schema.json", json.dumps(comparison_schema(), indent=1) + "\n")
        with writing(fresh / "disagreements.parquet"):
            rows.to_parquet(fresh / "disagreements.parquet", index=False)


def comparison_schema() -> dict[str, Any]:
    """Return the JSON schema of `compare.json`."""
    found = TypeAdapter(Comparison).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def page(found: Comparison, first: Report, second: Report) -> str:
    """Return the comparison as one HTML document."""
    return document(f"{found.first} against {found.second}", _parts(found, first, second))


def headline(found: Comparison) -> str:
    """Return what a reader must know first."""
    if found.auroc.value is None:
        return f"Nothing can be told: the difference of AUROC is {found.auroc}."
    said = f"AUROC of {found.first} minus that of {found.second} is {found.auroc}"
    if found.auroc.low is not None and found.auroc.low > 0:
        return f"{found.first} ranks better: {said}."
    if found.auroc.high is not None and found.auroc.high < 0:
        return f"{found.second} ranks better: {said}."
    return f"Neither is known to rank better: {said}, and 0 lies in it."


def _parts(found: Comparison, first: Report, second: Report) -> Iterator[str]:
    yield f"<h1>{escape(found.first)} against {escape(found.second)}</h1><p class='head'>{escape(headline(found))}</p>"
    alone = f", {found.left_out:,} of one alone left out" if found.left_out else ""
    grouped = "Groups hold several requests: McNemar takes them for independent, the intervals do not."
    yield (
        f"<p>{counted(found.n, 'request')} of both test parts{alone}. Differences are the first minus the second, on "
        f"the same resamples of groups. {grouped if found.grouped else ''}</p>"
    )
    yield "<h2>Differences</h2>" + grid(
        ("figure", escape(found.first), escape(found.second), "difference"),
        [
            ("AUROC", first.findings.auroc, second.findings.auroc, found.auroc),
            ("TPR at its threshold", *_rates(first, second, "tpr"), found.tpr),
            ("FPR at its threshold", *_rates(first, second, "fpr"), found.fpr),
        ],
    )
    yield "<h2>Decisions</h2>" + grid(
        ("requests", "only the first acts", "only the second acts", "p (McNemar, exact)"),
        [_decisions("positives", found.positives), _decisions("negatives", found.negatives)],
    )
    yield from _plots(found, first, second)
    count = counted(len(found.disagreements), "request")
    yield f"<h2>Disagreements</h2><p>{count}; all are in <code>disagreements.parquet</code>.</p>"
    if found.disagreements:
        yield folded(
            ("request", "label", "score of the first", "of the second", "first acts", "second acts"),
            [
                (row.request_id, row.label, row.first_score, row.second_score, row.first_acts, row.second_acts)
                for row in found.disagreements[:SHOWN_ROWS]
            ],
        )


def _rates(first: Report, second: Report, name: str) -> tuple[object, object]:
    points = [report.findings.operating[0] if report.findings.operating else None for report in (first, second)]
    one, other = (None if point is None else getattr(point, name) for point in points)
    return one, other


def _decisions(name: str, test: McNemar | None) -> tuple[object, ...]:
    return (name, "n/a (needs both thresholds)", None, None) if test is None else (
        name, test.only_first, test.only_second, test.p)  # fmt: skip


def _plots(found: Comparison, first: Report, second: Report) -> Iterator[str]:
    pair = first.table.merge(second.table[["request_id", "score", "part"]], on="request_id", suffixes=("", "_second"))
    pair = pair[(pair["part"] == "test") & (pair["part_second"] == "test") & (pair["label"] != UNKNOWN)]
    pair = pair[np.isfinite(pair["score"]) & np.isfinite(pair["score_second"])]
    labels = np.asarray(pair["label"] == POSITIVE, dtype=np.bool_)
    if found.auroc.value is None or labels.all() or not labels.any():
        return
    sample = Sample(labels, pair["unit"].to_numpy(np.int64), pair["weight"].to_numpy(np.float64))
    scores = [pair[name].to_numpy(np.float64) for name in ("score", "score_second")]
    yield "<h3>ROC of both, false-positive rate on a log axis</h3>" + draw(_roc(found, sample, scores), "roc")
    yield "<h3>Scores of one against the other</h3>" + draw(_scatter(found, pair, labels, first, second), "scatter")


def _roc(found: Comparison, sample: Sample, scores: list[Floats]) -> go.Figure:
    figure = blank("false-positive rate", "true-positive rate")
    for name, colour, values in zip((found.first, found.second), (BLUE, RED), scores, strict=True):
        grid_, curve = roc_line(sample, values)
        figure.add_scatter(x=grid_, y=curve, name=name, line_color=colour)
    figure.add_scatter(x=grid_, y=grid_, name="chance", line={"color": GREY, "dash": "dot"})
    figure.update_xaxes(type="log", range=[float(np.log10(grid_[0])), 0])
    return figure.update_yaxes(range=[0, 1.01])


def _scatter(found: Comparison, pair: pd.DataFrame, labels: Any, first: Report, second: Report) -> go.Figure:  # noqa: ANN401
    figure = blank(f"score of {found.first}", f"score of {found.second}")
    for name, colour, chosen in (("negatives", BLUE, ~labels), ("positives", RED, labels)):
        rows = pair[chosen]
        # Thinned evenly in the order of the first score, so that the page stays small and tails stay in.
        rows = rows.sort_values("score").iloc[:: max(1, -(-len(rows) // SHOWN_POINTS))]
        figure.add_scattergl(
            x=rows["score"], y=rows["score_second"], mode="markers", name=f"{name} (n = {int(chosen.sum()):,})",
            marker={"color": colour, "size": 4, "opacity": 0.5}, text=rows["request_id"],
            hovertemplate="%{text}: %{x:.4g}, %{y:.4g}",
        )  # fmt: skip
    for report, add in ((first, figure.add_vline), (second, figure.add_hline)):
        point = report.findings.operating[0] if report.findings.operating else None
        if point is not None and point.threshold is not None:
            value = point.threshold
            add(**{"x" if report is first else "y": value}, line_dash="dash", line_color=GREY)
    return figure
