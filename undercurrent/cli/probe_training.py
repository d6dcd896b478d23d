"""`undercurrent probe train DATASET`: a probe from recorded requests and their labels."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undercurrent.cli.probe_options import (
    CountedPositions,
    Force,
    Mode,
    Name,
    OutFolder,
    Positions,
    Version,
    check_folder,
    parse_aggregation,
)
from undercurrent.errors import ConfigError

if TYPE_CHECKING:
    from undercurrent.evaluation.dataset import Dataset
    from undercurrent.evaluation.fit.blocks import TokenRule


def train(
    dataset: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Folder of `undercurrent dataset export`.")
    ],
    out: OutFolder,
    label: Annotated[str, typer.Option("--label", help="Name of the label to tell.")],
    point: Annotated[str | None, typer.Option("--point", help="Extraction point; the only one without it.")] = None,
    layers: Annotated[str | None, typer.Option("--layers", help="As 3,5-8; all without it.")] = None,
    kind: Annotated[
        str, typer.Option("--kind", help="logistic, mean-difference, lda, mlp or mahalanobis.")
    ] = "logistic",
    max_fpr: Annotated[float, typer.Option("--fpr", help="Share of negative requests that may act.")] = 0.01,
    strength: Annotated[
        list[float] | None, typer.Option("--strength", help="Of regularisation; several are chosen from.")
    ] = None,
    aggregation: Annotated[
        list[str] | None, typer.Option("--aggregation", help="A kind or JSON; several are chosen from.")
    ] = None,
    positions: CountedPositions = Positions.ALL,
    token_labels: Annotated[
        str, typer.Option("--token-labels", help="inherit, after-onset, spans or last-K, as last-8.")
    ] = "inherit",  # noqa: S107 - no password
    tokens_per_request: Annotated[
        int, typer.Option("--tokens-per-request", min=1, help="Sampled from each request.")
    ] = 32,
    memory_gib: Annotated[float, typer.Option("--memory", help="Bound of the process, in GiB.")] = 4.0,
    folds: Annotated[int, typer.Option("--folds", min=2, help="Of the choice inside the fit split.")] = 5,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of sample, folds and intervals.")] = 0,
    name: Name = None,
    version: Version = "1",
    mode: Mode = None,
    force: Force = False,
) -> None:
    """Train a probe on the fit split of a dataset, and place its threshold on the threshold split.

    Layer, strength and aggregation are chosen by held-out groups inside the fit split. The test split is not read.
    Unlabelled requests are unknown, never negative.
    """
    check_folder(out, force)
    rule, last = _token_rule(token_labels)
    chosen = _layers(layers)
    from undercurrent import evaluation
    from undercurrent.evaluation.fit import Kind, TrainSettings
    from undercurrent.evaluation.fit import train as fit_probe
    from undercurrent.evaluation.fit.from_dataset import DatasetRequests, fingerprints_of

    if kind not in set(Kind):
        raise ConfigError(f"--kind: {kind!r}; accepted: {', '.join(Kind)}")
    data = evaluation.load(dataset)
    settings = TrainSettings(
        kind=Kind(kind),
        strengths=strength or None,
        aggregations=[parse_aggregation(text) for text in aggregation] if aggregation else None,
        positions=positions.value,
        max_fpr=max_fpr,
        tokens_per_request=tokens_per_request,
        folds=folds,
        seed=seed,
        memory_bytes=int(memory_gib * 2**30),
        name=name or out.resolve().name,
        version=version,
        mode=None if mode is None else mode.value,
        description=f"Tells the label `{label}` of requests.",
        fingerprints=fingerprints_of(data),
    )
    fit, threshold = (
        DatasetRequests(
            data=data, point=_point(data, point), split=split, label=label, layers=chosen, rule=rule, last=last
        )
        for split in ("fit", "threshold")
    )
    made = fit_probe(fit, threshold, settings, sites=fit.sites)
    made.save(out)
    sys.stdout.write("".join(f"{line}\n" for line in told(out, made.metrics)))


def told(out: Path, metrics: Mapping[str, Any]) -> Sequence[str]:
    """Return what a person wants to know at once, line by line."""
    chosen, figures, fit = metrics["chosen"], metrics["threshold"], metrics["fit"]
    lines = [
        f"{out}: {metrics['kind']}, layer {chosen['layer']} of {chosen['tensor_type']}, "
        f"{chosen['aggregation']['kind']} >= {figures['value']:.6g}",
        f"fitted on {fit['requests']} requests, {fit['positives']} positive, {fit['unlabelled']} unlabelled left out; "
        f"{fit['sampled_tokens']} of {fit['tokens']} tokens sampled",
    ]
    for site in (metrics["choice"] or {"sites": []})["sites"]:
        lines.append(
            f"  layer {site['layer']}: AUROC {site['auroc']:.3f} ({site['low']:.3f} to {site['high']:.3f}) held out, "
            f"with {site['aggregation']['kind']}, strength {site['strength']:g}"
        )
    if metrics["choice"]:
        lines.append("  the best of several is optimistic until a test split has judged it")
    for rate, what in (("fpr", "false"), ("tpr", "true")):
        lines.append(f"{what} positives on the threshold split: {_rate(figures.get(rate, 'n/a'))}")
    backed = figures.get("wanted_fpr_is_backed")
    if isinstance(backed, str):
        lines.append(f"a false positive rate of {figures['wanted_fpr']:g} cannot be told: {backed}")
    return lines


def _rate(figure: Any) -> str:  # noqa: ANN401 - a proportion as plain data, or why there is none
    if isinstance(figure, str):
        return figure
    if figure.get("weighted"):
        return f"{figure['value']:.2%}, weighted by sampling"
    return f"{figure['count']} of {figure['n']}, {figure['value']:.2%} ({figure['low']:.2%} to {figure['high']:.2%})"


def _point(data: Dataset, point: str | None) -> str:
    if point is not None:
        return point
    if len(data.points) != 1:
        raise ConfigError(f"--point: which of {', '.join(data.points) or 'none'}?")
    return data.points[0]


def _token_rule(text: str) -> tuple[TokenRule, int]:
    match text:
        case "inherit" | "after-onset" | "spans":
            return text, 1
    found = re.fullmatch(r"last-([1-9][0-9]*)", text)
    if found is None:
        raise ConfigError(f"--token-labels: {text!r}; accepted: inherit, after-onset, spans, or last-K, as last-8")
    return "last-K", int(found[1])


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise ConfigError(f"--layers: {text!r}; accepted: numbers and ranges, as 3,5-8")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(dict.fromkeys(found))
