"""A report as HTML that needs nothing else: its tables, its plots with plotly inline, no network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

import pandas as pd
from plotly.offline import get_plotlyjs

from undercurrent.evaluation.figures import brief
from undercurrent.evaluation.findings import Findings
from undercurrent.evaluation.inputs import UNKNOWN
from undercurrent.evaluation.operating import OperatingPoint
from undercurrent.evaluation.plots import plots
from undercurrent.evaluation.rivals import Rival

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1060px;margin:2em auto;padding:0 1em;color:#1f2328}
.uc table{border-collapse:collapse;margin:.5em 0 1.5em;font-size:14px}
.uc th,.uc td{padding:.3em .8em;border-bottom:1px solid #d1d9e0;text-align:left;vertical-align:top}
.uc .head{font-size:17px;font-weight:600;padding:.8em 1em;background:#ddf4ff;border-left:4px solid #0969da}
.uc .grave{color:#a40e26;font-weight:600}
.uc .text{white-space:pre-wrap;font:13px/1.6 ui-monospace,monospace;max-width:900px}
"""

Rows = Iterable[Sequence[object]]


def page(found: Findings, table: pd.DataFrame, tokens: pd.DataFrame | None) -> str:
    """Return the whole report as one HTML document."""
    drawn = [
        f"<h2>{escape(title)}</h2>"
        + figure.to_html(
            full_html=False, include_plotlyjs=False, config={"displaylogo": False}, div_id=f"plot-{number}"
        )
        for number, (title, figure) in enumerate(plots(found, table))
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(found.name)}: evaluation</title>'
        f"<style>{STYLE}</style><script>{get_plotlyjs()}</script></head><body><div class='uc'>"
        f"<h1>{escape(found.name)}</h1>{''.join(_summary(found))}{''.join(drawn)}{''.join(_details(found, tokens))}"
        f"</div></body></html>\n"
    )


def summary(found: Findings, table: pd.DataFrame) -> str:
    """Return what a notebook shows: the figures without the plots, which would carry plotly into each cell."""
    unknown = int((table["label"] == UNKNOWN).sum())
    return (
        f"<div class='uc'><style>{STYLE.split(chr(10), 2)[2]}</style><h3>{escape(found.name)}</h3>"
        f"{''.join(_summary(found))}<p>{unknown:,} of {len(table):,} requests have no known label.</p></div>"
    )


def grid(head: Sequence[str], rows: Rows) -> str:
    """Return a table."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return escape(brief(value) if isinstance(value, float) else str(value))


def _summary(found: Findings) -> Iterator[str]:
    yield f"<p class='head'>{escape(found.headline)}</p>"
    if found.notes:
        items = (
            f"<li{' class=grave' if note.startswith('LEAKAGE') else ''}>{escape(note)}</li>" for note in found.notes
        )
        yield f"<ul>{''.join(items)}</ul>"
    confidence = found.settings["confidence"]
    yield f"<p>By request, on the test part. Intervals are {confidence:.0%} ones.</p>"
    rows = [("AUROC", found.auroc, found.auroc.n), ("AUPRC", found.auprc, found.auprc.n)]
    if found.settings["prevalence"] is not None:
        named = f"AUPRC at {found.settings['prevalence']:.3%} positives"
        rows.append((named, found.auprc_at_prevalence, found.auprc_at_prevalence.n))
    yield grid(("figure", "value", "n"), rows)
    yield "<h2>Thresholds</h2>" + grid(
        ("chosen for", "threshold", "TPR", "FPR on test", "holds", "precision", "false stops a day", "missed a day"),
        (_point(point) for point in found.operating),
    )
    rate = next((point for point in found.operating if point.wanted_fpr is not None), None)
    yield "<h2>What it has to beat</h2>" + grid(
        ("baseline", "AUROC", f"TPR at {rate.name}" if rate else "TPR", "probe's gain in AUROC"),
        [("the probe", found.auroc, rate.tpr if rate else None, None)]
        + [(rival.name, rival.auroc, *_unless_missing(rival)) for rival in found.baselines],
    )
    yield grid(
        ("control", "AUROC", "0.5 within"),
        ((control.name, control.auroc, control.passed) for control in found.controls),
    )


def _point(point: OperatingPoint) -> Sequence[object]:
    if point.threshold is None:
        # Why is said once.
        return (point.name, None, point.tpr, None, None, None, None, None)
    rates = (point.tpr, point.fpr, point.holds, point.precision, point.false_stops_per_day, point.missed_per_day)
    return (point.name, point.threshold, *rates)


def _unless_missing(rival: Rival) -> Sequence[object]:
    return (None, None) if rival.auroc.value is None else (rival.tpr, rival.gain)


def _details(found: Findings, tokens: pd.DataFrame | None) -> Iterator[str]:
    yield "<h2>The split</h2>" + grid(
        ("part", "requests", "groups", "positives", "negatives", "label unknown", "no score", "worth"),
        (
            (p.part, p.requests, p.groups, p.positives, p.negatives, p.unknown, p.unscored, p.effective_n)
            for p in found.split.parts
        ),
    )
    fit = found.calibration
    yield "<h2>Calibration</h2>" + grid(
        ("kind", "Brier", "Brier of the base rate", "ECE", "ECE by chance, up to"),
        [(fit.kind, fit.brier, fit.brier_of_base_rate, fit.ece, fit.ece_by_chance)],
    )
    yield from _lengths(found)
    yield from _detection(found)
    yield from _censoring(found)
    if found.agreement:
        yield "<h2>Other sources of labels</h2>" + grid(
            ("source", "labelled by both", "differ", "Cohen's kappa"),
            ((a.source, a.n, a.differ, a.kappa) for a in found.agreement),
        )
    if found.layers:
        yield "<h2>Layers</h2><p>Not of the test part. The best of several looks better than it is.</p>" + grid(
            ("layer", "position", "AUROC", ""),
            ((c.layer, c.position, c.auroc, "best, optimistic" if c.optimistic else "") for c in found.layers),
        )
    if found.slices:
        yield "<h2>Slices</h2><p>p of doing worse than the rest, Holm-corrected.</p>" + grid(
            ("column", "value", "n", "TPR", "p", "FPR", "p", "flagged"),
            ((s.column, s.value, s.n, s.tpr, s.p_tpr, s.fpr, s.p_fpr, s.flagged) for s in found.slices),
        )
    if found.wrong:
        yield "<h2>The worst false stops and misses</h2>" + grid(
            ("kind", "request", "score"), ((w.kind, w.request_id, w.score) for w in found.wrong)
        )
    yield from _texts(found, tokens)


def _lengths(found: Findings) -> Iterator[str]:
    yield "<h2>Length</h2>"
    if found.lengths.unavailable:
        yield f"<p>{escape(found.lengths.unavailable)}</p>"
        return
    yield grid(
        ("negatives of", "FPR", "n"),
        ((f"{band.shortest:,} to {band.longest:,} tokens", band.fpr, band.fpr.n) for band in found.lengths.bands),
    )
    if found.lengths.holds_up_to is not None:
        yield f"<p>The threshold is known to hold up to {found.lengths.holds_up_to:,} tokens.</p>"


def _detection(found: Findings) -> Iterator[str]:
    yield "<h2>Time to detection</h2>"
    detection = found.detection
    if detection.unavailable:
        yield f"<p>{escape(detection.unavailable)}</p>"
        return
    yield grid(
        ("positives with an onset", "missed (censored)", "acted on before the onset", "stopped in time"),
        [(detection.n, detection.missed, detection.early, detection.stopped_in_time)],
    )


def _censoring(found: Findings) -> Iterator[str]:
    held = found.censoring
    yield "<h2>Stops, from the holdout</h2>" + grid(
        ("holdout", "would stop", "of negatives", "negatives among stops", "tokens saved per request"),
        [(held.holdout, held.would_stop, held.false_stops, held.false_among_stops, held.tokens_saved)],
    )


def _texts(found: Findings, tokens: pd.DataFrame | None) -> Iterator[str]:
    by_request = {} if tokens is None else dict(iter(tokens.groupby("request_id", sort=False)))
    for wrong in found.wrong:
        if wrong.request_id in by_request:
            shown = "".join(_heat(by_request[wrong.request_id]))
        elif wrong.text is not None:
            shown = escape(wrong.text)
        else:
            continue
        yield f"<h3>{wrong.kind}: {escape(wrong.request_id)}</h3><p class='text'>{shown}</p>"


def _heat(tokens: pd.DataFrame) -> Iterator[str]:
    scores = tokens["score"].to_numpy(float)
    low, high = float(scores.min()), float(scores.max())
    for text, score in zip(tokens["token"], scores, strict=True):
        strength = (score - low) / (high - low) if high > low else 0.0
        colour = f"rgba(209,36,47,{0.7 * strength:.2f})"
        yield f"<span style='background:{colour}' title='{score:.4g}'>{escape(str(text))}</span>"
