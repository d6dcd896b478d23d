"""The plots of a report. Everything is counted or thinned first, so that a page stays small whatever was evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from undercurrent.evaluation.figures import Figure, Ints
from undercurrent.evaluation.findings import Findings
from undercurrent.evaluation.inputs import POSITIVE, UNKNOWN
from undercurrent.evaluation.metrics import Bools, Floats
from undercurrent.evaluation.resampling import Bootstrap, Rounds, Sample

POINTS = 400
BAND_ROUNDS = 200
BLUE, RED, GREY = "#1f6feb", "#d1242f", "#8c959f"
INK, FAINT = "#7d8590", "rgba(125,133,144,0.25)"
"""Of text and grid: half-way between black and white, since a plot does not know what it lies on."""
BAND = "rgba(31,111,235,0.15)"


TITLES = {
    "scores": "Scores of the test part",
    "roc": "ROC, false-positive rate on a log axis",
    "precision": "Precision and recall",
    "against threshold": "Rates against the threshold",
    "reliability": "Reliability",
    "detection": "Share detected against tokens from the onset",
    "layers": "AUROC by layer and position (not of the test part)",
    "length": "False-positive rate by length",
}


def plots(found: Findings, table: pd.DataFrame) -> Iterator[tuple[str, go.Figure]]:
    """Yield each plot under its key in `TITLES`; what there is nothing to draw of is left out.

    Args:
        found: the figures.
        table: a row per request: part, label, score, weight, unit.
    """
    tested = table[(table["part"] == "test") & (table["label"] != UNKNOWN) & table["score"].notna()]
    sample = Sample(
        np.asarray(tested["label"] == POSITIVE),
        tested["unit"].to_numpy(np.int64),
        tested["weight"].to_numpy(np.float64),
    )
    scores = tested["score"].to_numpy(np.float64)
    # With fewer there is no figure either: a curve through a handful of points would look like one.
    if found.auroc.value is not None and sample.labels.any() and not sample.labels.all():
        yield "scores", score_histogram(found, sample, scores)
        yield "roc", roc(found, sample, scores)
        yield "precision", precision_recall(found, sample, scores)
        yield "against threshold", against_threshold(found, sample, scores)
    if found.calibration.bins:
        yield "reliability", reliability(found)
    if found.detection.curve:
        yield "detection", detection_curve(found)
    if found.layers:
        yield "layers", layer_map(found)
    if found.lengths.bands:
        yield "length", length_bands(found)


def score_histogram(found: Findings, sample: Sample, scores: Floats) -> go.Figure:
    """Return the scores of both classes with the thresholds."""
    edges = np.histogram_bin_edges(scores, bins=50)
    figure = blank("score", "share of the class")
    for name, colour, label in (("negatives", BLUE, False), ("positives", RED, True)):
        chosen = sample.labels == label
        counts = np.histogram(scores[chosen], bins=edges, weights=sample.weights[chosen])[0]
        middles, width = (edges[1:] + edges[:-1]) / 2, float(edges[1] - edges[0])
        named = f"{name} (n = {int(chosen.sum()):,})"
        figure.add_bar(x=middles, y=counts / counts.sum(), width=width, name=named, marker_color=colour, opacity=0.55)
    _thresholds(figure, found)
    return figure.update_layout(barmode="overlay", bargap=0)


def roc(found: Findings, sample: Sample, scores: Floats) -> go.Figure:
    """Return TPR against FPR with its band over resampled groups."""
    grid, line = roc_line(sample, scores)
    curve = _tpr_at(grid, sample.labels, scores)
    drawn = np.concatenate([curve(weights) for weights in Bootstrap(BAND_ROUNDS).weights(sample)])
    low, high = np.quantile(drawn, (0.025, 0.975), axis=0)
    figure = blank("false-positive rate", "true-positive rate")
    _band(figure, grid, low, high)
    figure.add_scatter(x=grid, y=line, name="probe", line_color=BLUE)
    figure.add_scatter(x=grid, y=grid, name="chance", line={"color": GREY, "dash": "dot"})
    for point in found.operating:
        if point.fpr.value and point.tpr.value is not None:
            figure.add_scatter(
                x=[point.fpr.value], y=[point.tpr.value], mode="markers", name=point.name, error_y=_error(point.tpr)
            )
    figure.update_xaxes(type="log", range=[float(np.log10(grid[0])), 0])
    return figure.update_yaxes(range=[0, 1.01])


def precision_recall(found: Findings, sample: Sample, scores: Floats) -> go.Figure:
    """Return precision against recall, at the share of positives of the test part and at the stated one."""
    threshold, tpr, fpr = _rates(sample, scores)
    share = float(np.average(sample.labels, weights=sample.weights))
    figure = blank("recall (true-positive rate)", "precision")
    stated = found.settings["prevalence"]
    shares = [(share, f"test part ({share:.1%} positives)", BLUE)]
    shares += [(stated, f"traffic as stated ({stated:.3%})", RED)] if stated is not None else []
    for prevalence, name, colour in shares:
        caught, false = tpr * prevalence, fpr * (1 - prevalence)
        # Where fewer than three negatives acted, the precision at another prevalence is anybody's guess.
        used = (caught + false > 0) & ((prevalence == share) | (fpr * (~sample.labels).sum() >= 3))
        figure.add_scatter(
            x=tpr[used],
            y=(caught[used] / (caught + false)[used]),
            name=name,
            line_color=colour,
            customdata=threshold[used],
            hovertemplate="recall %{x:.3f}, precision %{y:.3f}, threshold %{customdata:.4g}",
        )
    return figure.update_yaxes(range=[0, 1.01]).update_xaxes(range=[0, 1.01])


def against_threshold(found: Findings, sample: Sample, scores: Floats) -> go.Figure:
    """Return TPR, FPR and, with prevalence and requests per day, false stops per day against the threshold."""
    threshold, tpr, fpr = _rates(sample, scores)
    figure = blank("threshold", "rate")
    figure.add_scatter(x=threshold, y=tpr, name="true-positive rate", line_color=RED)
    figure.add_scatter(x=threshold, y=fpr, name="false-positive rate", line_color=BLUE)
    prevalence, per_day = found.settings["prevalence"], found.settings["requests_per_day"]
    if prevalence is not None and per_day is not None:
        stops = fpr * (1 - prevalence) * per_day
        figure.add_scatter(
            x=threshold,
            y=np.where(stops > 0, stops, np.nan),
            name="false stops per day",
            yaxis="y2",
            line={"color": GREY, "dash": "dash"},
        )
        figure.update_layout(
            yaxis2={
                "title": "false stops per day (log)",
                "overlaying": "y",
                "side": "right",
                "type": "log",
                "exponentformat": "none",
                "tickformat": ",",
                "dtick": 1,
                "showgrid": False,
            }
        )
    _thresholds(figure, found)
    return figure.update_yaxes(range=[0, 1.05], selector={"side": None})


def reliability(found: Findings) -> go.Figure:
    """Return the share of positives against the probability, with how many requests stand behind each point."""
    bins = [part for part in found.calibration.bins if part.n]
    figure = blank("probability said", "share of positives")
    figure.add_scatter(x=[0, 1], y=[0, 1], name="perfect", mode="lines", line={"color": GREY, "dash": "dot"})
    figure.add_scatter(
        x=[part.predicted for part in bins],
        y=[part.observed for part in bins],
        name=found.calibration.kind,
        mode="lines+markers+text",
        text=[f"n={part.n:,}" for part in bins],
        textposition=["top left" if number % 2 else "bottom right" for number in range(len(bins))],
        line_color=BLUE,
    )
    return figure.update_xaxes(range=[-0.03, 1.05]).update_yaxes(range=[-0.1, 1.1])


def detection_curve(found: Findings) -> go.Figure:
    """Return the share of positives detected within so many tokens of the onset."""
    curve = [point for point in found.detection.curve if point.low is not None and point.high is not None]
    figure = blank("tokens from the onset", "share detected")
    steps = [point.tokens for point in curve]
    _band(figure, np.array(steps), np.array([p.low for p in curve]), np.array([p.high for p in curve]), shape="hv")
    figure.add_scatter(
        x=[point.tokens for point in found.detection.curve],
        y=[point.detected for point in found.detection.curve],
        name="detected",
        mode="lines+markers" if len(found.detection.curve) < 3 else "lines",
        line={"color": BLUE, "shape": "hv"},
    )
    return figure.update_yaxes(range=[0, 1.01])


def layer_map(found: Findings) -> go.Figure:
    """Return AUROC of each layer and position bucket, the interval in the cell's note."""
    layers = sorted({cell.layer for cell in found.layers})
    positions = list(dict.fromkeys(cell.position for cell in found.layers))
    if len(positions) == 1:
        return _layer_line(found)
    by_place = {(cell.layer, cell.position): cell.auroc for cell in found.layers}
    cells = [[by_place.get((layer, position)) for layer in layers] for position in positions]
    heat = go.Heatmap(
        x=[str(layer) for layer in layers],
        y=positions,
        z=[[cell.value if cell else None for cell in row] for row in cells],
        text=[[str(cell) if cell else "" for cell in row] for row in cells],
        hovertemplate="layer %{x}, %{y}: %{text}",
        zmin=0.5,
        zmax=1,
        colorscale="Blues",
        colorbar={"title": "AUROC"},
    )
    return blank("layer", "position").add_trace(heat).update_xaxes(type="category")


def _layer_line(found: Findings) -> go.Figure:
    """Return AUROC of each layer with its interval, where there is one kind of position."""
    cells = [cell for cell in found.layers if cell.auroc.value is not None]
    figure = blank("layer", "AUROC")
    for name, colour, best in (("layer", BLUE, False), ("best of several, optimistic", RED, True)):
        mine = [cell for cell in cells if cell.optimistic is best]
        errors = [_error(cell.auroc) for cell in mine]
        figure.add_scatter(
            x=[str(cell.layer) for cell in mine],
            y=[cell.auroc.value for cell in mine],
            error_y={"type": "data", **{key: [e[key][0] for e in errors] for key in ("array", "arrayminus")}},
            mode="markers",
            marker={"color": colour, "size": 9},
            name=name,
        )
    figure.add_hline(y=0.5, line_dash="dot", line_color=GREY, annotation_text="chance")
    order = [str(cell.layer) for cell in cells]
    return figure.update_xaxes(type="category", categoryorder="array", categoryarray=order)


def length_bands(found: Findings) -> go.Figure:
    """Return the false-positive rate of each quartile of length."""
    bands = found.lengths.bands
    figure = blank("tokens (quartiles of the negatives)", "false-positive rate")
    low = [(band.fpr.value or 0) - (band.fpr.low or 0) for band in bands]
    high = [(band.fpr.high or 0) - (band.fpr.value or 0) for band in bands]
    figure.add_scatter(
        x=[f"{band.shortest:,}-{band.longest:,}" for band in bands],
        y=[band.fpr.value for band in bands],
        error_y={"type": "data", "array": high, "arrayminus": low},
        mode="markers",
        marker={"color": BLUE, "size": 10},
        name="measured",
    )
    wanted = found.operating[0].wanted_fpr if found.operating else None
    if wanted is not None:
        figure.add_hline(y=wanted, line_dash="dot", line_color=RED, annotation_text="wanted")
    return figure.update_yaxes(rangemode="tozero")


def blank(x: str, y: str) -> go.Figure:
    """Return an empty figure with its axes named, readable on a light and on a dark page."""
    axis = {"gridcolor": FAINT, "zerolinecolor": FAINT, "linecolor": GREY}
    return go.Figure().update_layout(
        template="plotly_white",
        height=380,
        margin={"l": 60, "r": 60, "t": 20, "b": 50},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": INK},
        xaxis={"title": x, "automargin": True, **axis},
        yaxis={"title": y, "automargin": True, **axis},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": FAINT, "activecolor": INK},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    )


def roc_line(sample: Sample, scores: Floats) -> tuple[Floats, Floats]:
    """Return false-positive rates, evenly spaced on a log axis, and the true-positive rate at each."""
    grid = np.geomspace(1 / max(10, int((~sample.labels).sum())), 1, POINTS // 2)
    return grid, _tpr_at(grid, sample.labels, scores)(sample.weights[None, :])[0]


def _thresholds(figure: go.Figure, found: Findings) -> None:
    for number, point in enumerate(found.operating):
        if point.threshold is not None:
            figure.add_vline(
                x=point.threshold,
                line={"dash": "dash", "color": INK, "width": 1.5},
                annotation_text=point.name,
                annotation_y=1 - 0.08 * number,
                annotation_position="right",
            )


def _band(figure: go.Figure, x: Floats, low: Floats, high: Floats, shape: str = "linear") -> None:
    line = {"width": 0, "shape": shape}
    figure.add_scatter(x=x, y=high, line=line, showlegend=False, hoverinfo="skip", mode="lines")
    figure.add_scatter(x=x, y=low, line=line, fill="tonexty", fillcolor=BAND, name="95 % interval", mode="lines")


def _error(figure: Figure) -> dict[str, Any]:
    value, low, high = figure.value or 0.0, figure.low or 0.0, figure.high or 0.0
    return {"type": "data", "array": [high - value], "arrayminus": [value - low]}


def _rates(sample: Sample, scores: Floats) -> tuple[Floats, Floats, Floats]:
    """Return thresholds in descending order with TPR and FPR at each, thinned."""
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(sample.weights[order] * sample.labels[order])
    false = np.cumsum(sample.weights[order] * ~sample.labels[order])
    ends = np.flatnonzero(np.append(scores[order][1:] != scores[order][:-1], True))
    if ends.size > POINTS:
        # Evenly by rank and by positives: of rare positives the ranks alone would keep too few.
        by_hits = np.searchsorted(hits[ends], np.linspace(0, hits[-1], POINTS // 2)).clip(max=ends.size - 1)
        ends = ends[np.union1d(np.linspace(0, ends.size - 1, POINTS).astype(int), by_hits)]
    return scores[order][ends], hits[ends] / hits[-1], false[ends] / false[-1]


def _tpr_at(grid: Floats, labels: Bools, scores: Floats) -> Rounds:
    """Return a function from weights [k, n] to the TPR at each FPR of a grid, [k, grid]."""
    order: Ints = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(scores[order][1:] != scores[order][:-1]), scores.size - 1)

    def curve(weights: Floats) -> Floats:
        ordered = weights[:, order]
        hits = np.cumsum(ordered * labels[order], axis=1)[:, ends]
        false = np.cumsum(ordered * ~labels[order], axis=1)[:, ends]
        rows = [
            np.interp(grid, np.concatenate(([0.0], f / f[-1])), np.concatenate(([0.0], h / h[-1])))
            for f, h in zip(false, hits, strict=True)
        ]
        return np.array(rows)

    return curve
