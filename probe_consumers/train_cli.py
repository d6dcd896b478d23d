"""`undercurrent probe train SOURCE`: a probe from recorded requests and their labels."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probe_consumers.recording_options import SOURCE_HELP, SourceOptions
from undercurrent.cli import probe_options as common
from undercurrent.cli.grouping import with_options
from undercurrent.cli.progress import progress
from undercurrent.counts import counted
from undercurrent.errors import ConfigError, ProbeError

if TYPE_CHECKING:
    from undercurrent.evaluation.dataset import Dataset
    from undercurrent.evaluation.fit import TrainedProbe, TrainSettings
    from undercurrent.evaluation.fit.blocks import TokenRule
    from undercurrent.evaluation.tracking import Log


_MOST_LAYERS = 9999

app = typer.Typer(help="Train a probe on recorded requests and their labels.", add_completion=False)


@app.command()
@with_options("read", SourceOptions)
def train(
    source: Annotated[str, typer.Argument(help=SOURCE_HELP)],
    out: common.OutFolder,
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
    positions: common.CountedPositions = common.Positions.ALL,
    token_labels: Annotated[
        str, typer.Option("--token-labels", help="inherit, after-onset, spans or last-K, as last-8.")
    ] = "inherit",  # noqa: S107 - no password
    tokens_per_request: Annotated[
        int, typer.Option("--tokens-per-request", min=1, help="Sampled from each request.")
    ] = 32,
    memory_gib: Annotated[
        float, typer.Option("--memory", min=0.01, max=2**20, help="Bound of the process, in GiB.")
    ] = 4.0,
    folds: Annotated[int, typer.Option("--folds", min=2, help="Of the choice inside the fit split.")] = 5,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of sample, folds and intervals.")] = 0,
    log_to: Annotated[
        str | None, typer.Option("--log-to", help="Tell an experiment tracker: mlflow or wandb; needs the extra track.")
    ] = None,
    name: common.Name = None,
    version: common.Version = "1",
    mode: common.Mode = None,
    force: common.Force = False,
    *,
    read: SourceOptions,
) -> None:
    """Train a probe on the fit split of recorded requests, and place its threshold on the threshold split.

    SOURCE is a dataset's folder or topic:POINT; what is read of a topic is split as `dataset export` does. Layer,
    strength and aggregation are chosen by held-out groups inside the fit split. The test split is not read. Unlabelled
    requests are unknown, never negative.
    """
    common.check_folder(out, force)
    rule, last = _token_rule(token_labels)
    chosen = _layers(layers)
    from probe_consumers.recorded import recorded
    from undercurrent.evaluation.fit import Kind, TrainSettings

    if kind not in set(Kind):
        raise ConfigError(f"--kind: {kind!r}; accepted: {', '.join(Kind)}")
    log = _tracker(log_to)
    try:
        settings = TrainSettings(
            kind=Kind(kind),
            strengths=strength or None,
            aggregations=[common.parse_aggregation(text) for text in aggregation] if aggregation else None,
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
        )
    except ProbeError as exc:
        raise ConfigError(f"--{str(exc).removeprefix('max_')}") from exc
    with (
        common.options_named(),
        recorded(read.source(source), keep=read.dataset, progress=partial(progress, "exporting")) as data,
    ):
        wanted = _Wanted(label=label, point=point, layers=chosen, rule=rule, last=last)
        made = _trained(data, wanted, settings)
        made.save(out)
    lines = list(told(out, made.metrics))
    if log is not None:
        lines.append(log(out, f"{settings.name} {settings.version}", made.metrics))
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _tracker(text: str | None) -> Log | None:
    """Return what logs the training; asked before it, so that what is not installed costs nobody an hour."""
    from undercurrent.evaluation.tracking import Tracker, open_tracker

    if text is None:
        return None
    if text not in set(Tracker):
        raise ConfigError(f"--log-to: {text!r}; accepted: {', '.join(Tracker)}")
    return open_tracker(Tracker(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """Which rows of a dataset train."""

    label: str
    point: str | None
    layers: tuple[int, ...] | None
    rule: TokenRule
    last: int


def _trained(data: Dataset, wanted: _Wanted, settings: TrainSettings) -> TrainedProbe:
    from undercurrent.evaluation.fit import train as fit_probe
    from undercurrent.evaluation.fit.from_dataset import DatasetRequests, fingerprints_of

    given = {**asdict(wanted), "point": common.chosen_point(data, wanted.point)}
    fit, threshold = (DatasetRequests(data=data, split=split, **given) for split in ("fit", "threshold"))
    made = fit_probe(fit, threshold, replace(settings, fingerprints=fingerprints_of(data)), sites=fit.sites)
    for part in (fit, threshold):
        if part.left_out:
            made.metrics[part.split]["not_finite"] = {
                "requests": len(part.left_out),
                "rows": sum(part.left_out.values()),
            }
    return made


def told(out: Path, metrics: Mapping[str, Any]) -> Sequence[str]:
    """Return what a person wants to know at once, line by line."""
    chosen, figures, fit = metrics["chosen"], metrics["threshold"], metrics["fit"]
    lines = [
        f"{out}: {metrics['kind']}, layer {chosen['layer']} of {chosen['tensor_type']}, "
        f"{chosen['aggregation']['kind']} >= {figures['value']:.6g}",
        f"fitted on {counted(fit['requests'], 'request')}, {fit['positives']} positive, {fit['unlabelled']} unlabelled "
        f"left out; {fit['sampled_tokens']} of {counted(fit['tokens'], 'token')} sampled",
    ]
    for site in (metrics["choice"] or {"sites": []})["sites"]:
        lines.append(
            f"  layer {site['layer']}: AUROC {site['auroc']:.3f} ({site['low']:.3f} to {site['high']:.3f}) held out, "
            f"with {site['aggregation']['kind']}, strength {site['strength']:g}"
        )
    for split in ("fit", "threshold"):
        if gone := metrics[split].get("not_finite"):
            rows, requests = counted(gone["rows"], "row"), counted(gone["requests"], "request")
            lines.append(f"{rows} of {requests} in the {split} split left out: a value is not finite")
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
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not first <= last <= _MOST_LAYERS:
            raise ConfigError(f"--layers: {text!r}; accepted: numbers and ranges, as 3,5-8")
        found += range(first, last + 1)
    return tuple(dict.fromkeys(found))
