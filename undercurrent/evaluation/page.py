"""A report as HTML that needs nothing else: its tables, its plots with plotly inline, no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from undercurrent.counts import counted
from undercurrent.evaluation.findings import Findings
from undercurrent.evaluation.inputs import UNKNOWN
from undercurrent.evaluation.markup import TABLE_STYLE, document, draw, folded, grid
from undercurrent.evaluation.operating import OperatingPoint
from undercurrent.evaluation.plots import TITLES, plots
from undercurrent.evaluation.rivals import Rival


def page(found: Findings, table: pd.DataFrame, tokens: pd.DataFrame | None) -> str:
    """Return the whole report as one HTML document."""
    drawn = dict(plots(found, table))
    parts = [*_summary(found, drawn), *_details(found, tokens, drawn)]
    return document(f"{found.name}: evaluation", [f"<h1>{escape(found.name)}</h1>", *parts])


def summary(found: Findings, table: pd.DataFrame) -> str:
    """Return what a notebook shows: the figures without the plots, which would carry plotly into each cell."""
    unknown = int((table["label"] == UNKNOWN).sum())
    return (
        f"<div class='uc'><style>{TABLE_STYLE}</style><h3>{escape(found.name)}</h3>"
        f"{''.join(_summary(found, {}))}"
        f"<p>{unknown:,} of {counted(len(table), 'request')} without a known label.</p></div>"
    )


def _summary(found: Findings, drawn: Mapping[str, go.Figure]) -> Iterator[str]:
    yield f"<p class='head'>{escape(found.headline)}</p>"
    if found.notes:
        items = (
            f"<li{' class=grave' if note.startswith('LEAKAGE') else ''}>{escape(note)}</li>" for note in found.notes
        )
        yield f"<ul>{''.join(items)}</ul>"
    test = next((part for part in found.split.parts if part.part == "test"), None)
    of = f": {test.positives:,} positive, {test.negatives:,} negative" if test is not None else ""
    yield f"<p>By request, on the test part{of}. Intervals in brackets are {found.settings['confidence']:.0%} ones.</p>"
    yield "<h2>Thresholds</h2>" + _thresholds(found) + _drawn(drawn, "against threshold")
    rows = [("AUROC", found.auroc), ("AUPRC", found.auprc)]
    if found.settings["prevalence"] is not None:
        rows.append((f"AUPRC at {found.settings['prevalence']:.3%} positives", found.auprc_at_prevalence))
    if found.tokens.auroc.value is not None:
        rows.append((f"AUROC of tokens ({found.tokens.tokens:,}, each request weighing the same)", found.tokens.auroc))
    yield "<h2>How well it ranks</h2>" + grid(("figure", "value"), rows)
    yield _drawn(drawn, "scores") + _drawn(drawn, "roc") + _drawn(drawn, "precision")
    yield from _rivals(found)


def _rivals(found: Findings) -> Iterator[str]:
    if not found.baselines:
        return
    rate = next((point for point in found.operating if point.wanted_fpr is not None and point.threshold), None)
    yield "<h2>What it has to beat</h2>" + grid(
        ("baseline", "AUROC", f"TPR at {rate.name}" if rate else "TPR", "probe's gain in AUROC"),
        [("the probe", found.auroc, *([rate.tpr if rate else None, None] if found.auroc.value is not None else []))]
        + [(rival.name, rival.auroc, *_unless_missing(rival)) for rival in found.baselines],
    )
    yield grid(
        ("control", "AUROC", "0.5 within"),
        ((control.name, control.auroc, control.passed) for control in found.controls),
    )


def _thresholds(found: Findings) -> str:
    per_day = found.settings["prevalence"] is not None
    head = ["threshold for", "threshold", "TPR", "FPR", "holds"]
    head += ["precision", "false stops a day", "missed a day"] if per_day else []
    return grid(head, (_point(point)[: len(head)] for point in found.operating))


def _drawn(drawn: Mapping[str, go.Figure], key: str) -> str:
    if key not in drawn:
        return ""
    return f"<h3>{escape(TITLES[key])}</h3>" + draw(drawn[key], key.replace(" ", "-"))


def _point(point: OperatingPoint) -> Sequence[object]:
    if point.threshold is None:
        # Why is said once.
        return (point.name, None, point.tpr)
    rates = (point.tpr, point.fpr, point.holds, point.precision, point.false_stops_per_day, point.missed_per_day)
    return (point.name, point.threshold, *rates)


def _unless_missing(rival: Rival) -> Sequence[object]:
    return () if rival.auroc.value is None else (rival.tpr, rival.gain)


def _details(found: Findings, tokens: pd.DataFrame | None, drawn: Mapping[str, go.Figure]) -> Iterator[str]:
    fit = found.calibration
    yield "<h2>Calibration</h2>" + grid(
        ("kind", "Brier", "Brier of the base rate", "ECE", "ECE by chance, up to"),
        [
            (fit.kind, fit.brier)
            if fit.brier.value is None
            else (fit.kind, fit.brier, fit.brier_of_base_rate, fit.ece, fit.ece_by_chance)
        ],
    )
    yield _drawn(drawn, "reliability")
    yield from _lengths(found, drawn)
    yield from _detection(found, drawn)
    yield from _censoring(found)
    if found.layers:
        yield "<h2>Layers</h2><p>Not of the test part. The best of several looks better than it is.</p>"
        yield _drawn(drawn, "layers") + folded(
            ("layer", "", "AUROC", ""),
            [(c.layer, c.position, c.auroc, "best, optimistic" if c.optimistic else "") for c in found.layers],
        )
    if found.slices:
        yield "<h2>Slices</h2><p>p of doing worse than the rest, Holm-corrected.</p>" + folded(
            ("column", "value", "n", "TPR", "p", "FPR", "p", "flagged"),
            [(s.column, s.value, s.n, s.tpr, s.p_tpr, s.fpr, s.p_fpr, s.flagged) for s in found.slices],
        )
    if found.agreement:
        yield "<h2>Other sources of labels</h2>" + grid(
            ("source", "labelled by both", "differ", "Cohen's kappa"),
            ((a.source, a.n, a.differ, a.kappa) for a in found.agreement),
        )
    yield "<h2>The split</h2>" + grid(
        ("part", "requests", "groups", "positives", "negatives", "label unknown", "no score", "worth"),
        (
            (p.part, p.requests, p.groups, p.positives, p.negatives, p.unknown, p.unscored, f"{p.effective_n:,.0f}")
            for p in found.split.parts
        ),
    )
    if found.wrong:
        yield "<h2>The worst false stops and misses</h2>" + folded(
            ("kind", "request", "score"), [(w.kind, w.request_id, w.score) for w in found.wrong]
        )
    yield from _texts(found, tokens)


def _lengths(found: Findings, drawn: Mapping[str, go.Figure]) -> Iterator[str]:
    yield "<h2>Length</h2>"
    if found.lengths.unavailable:
        yield f"<p>{escape(found.lengths.unavailable)}</p>"
        return
    if not found.lengths.bands:
        yield "<p>n/a (needs a threshold)</p>"
        return
    yield _drawn(drawn, "length") + grid(
        ("negatives of", "FPR", "n"),
        ((f"{band.shortest:,} to {band.longest:,} tokens", band.fpr, band.fpr.n) for band in found.lengths.bands),
    )
    if found.lengths.holds_up_to:
        yield f"<p>The threshold is known to hold up to {counted(found.lengths.holds_up_to, 'token')}.</p>"
    elif found.lengths.holds_up_to == 0:
        yield "<p>It holds at no length: even the shortest negatives are acted on more often than wanted.</p>"


def _detection(found: Findings, drawn: Mapping[str, go.Figure]) -> Iterator[str]:
    yield "<h2>Time to detection</h2>"
    detection = found.detection
    if detection.unavailable:
        yield f"<p>{escape(detection.unavailable)}</p>"
        return
    yield grid(
        ("positives with an onset", "missed (censored)", "acted on before the onset", "stopped in time"),
        [(detection.n, detection.missed, detection.early, detection.stopped_in_time)],
    )
    yield _drawn(drawn, "detection")


def _censoring(found: Findings) -> Iterator[str]:
    held = found.censoring
    yield "<h2>Stops, from the holdout</h2>"
    if not held.holdout:
        yield f"<p>{escape(str(held.tokens_saved))}</p>"
        return
    yield grid(
        ("holdout", "would stop", "of negatives", "negatives among stops", "tokens saved per request"),
        [(held.holdout, held.would_stop, held.false_stops, held.false_among_stops, held.tokens_saved)],
    )


def _texts(found: Findings, tokens: pd.DataFrame | None) -> Iterator[str]:
    by_request = {} if tokens is None else dict(iter(tokens.groupby("request_id", sort=False)))
    threshold = found.operating[0].threshold if found.operating else None
    if by_request:
        yield (
            "<p>Tokens that score above half of their request's are red, deepest at the threshold; the one at which "
            "the probe acts is framed.</p>"
        )
    for wrong in found.wrong:
        if wrong.request_id in by_request:
            shown = "".join(_heat(by_request[wrong.request_id], threshold))
        elif wrong.text is not None:
            shown = escape(wrong.text)
        else:
            continue
        yield f"<h3>{wrong.kind}: {escape(wrong.request_id)}</h3><p class='text'>{shown}</p>"


def _heat(tokens: pd.DataFrame, threshold: float | None) -> Iterator[str]:
    scores = tokens["score"].to_numpy(float)
    low = float(np.median(scores))
    high = max(float(scores.max()), low if threshold is None else threshold)
    reached = tokens["running"].to_numpy(float) >= (np.inf if threshold is None else threshold)
    decided = int(np.argmax(reached)) if reached.any() else -1
    for at, (text, score) in enumerate(zip(tokens["token"], scores, strict=True)):
        strength = max(0.0, (score - low) / (high - low)) if high > low else 0.0
        style = f"background:rgba(209,36,47,{0.7 * strength:.2f})"
        frame = ";outline:2px solid var(--mark)" if at == decided else ""
        yield f"<span style='{style}{frame}' title='{score:.4g}'>{escape(str(text))}</span>"
