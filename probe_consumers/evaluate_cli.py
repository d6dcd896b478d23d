"""`undercurrent probe evaluate PROBE SOURCE`: what a probe is worth on requests that nothing was chosen on."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probe_consumers.recording_options import SOURCE_HELP, TOPIC, JudgingOptions
from undercurrent.cli import progress as shown
from undercurrent.cli.evaluation_options import (
    CalibrationKind,
    CaseOptions,
    check_out,
    named,
    plain_console,
    progress,
)
from undercurrent.cli.grouping import with_options
from undercurrent.cli.probe_options import OutFolder, options_named
from undercurrent.cli.running import EXIT_FAILED, complain
from undercurrent.errors import ConfigError

if TYPE_CHECKING:
    from undercurrent.evaluation.fit.blocks import TokenRule
    from undercurrent.evaluation.report import Report

app = typer.Typer(help="Judge a probe on the test part of recorded requests.", add_completion=False)

SHOWN_NOTES = 6


@app.command()
@with_options("read", JudgingOptions)
@with_options("judge", CaseOptions)
def evaluate(
    probe: Annotated[str, typer.Argument(help="Folder of the probe, module:Class, or a registered name.")],
    source: Annotated[str, typer.Argument(help=SOURCE_HELP)],
    out: OutFolder,
    judge: CaseOptions,
    prevalence: Annotated[
        float | None, typer.Option("--prevalence", help="Share of positives in the traffic it will see.")
    ] = None,
    requests_per_day: Annotated[
        float | None, typer.Option("--requests-per-day", help="Of that traffic: false stops and misses per day.")
    ] = None,
    abort_latency_tokens: Annotated[
        int | None,
        typer.Option(
            "--abort-latency-tokens", min=0, help="From verdict to stop; measured on the dataset's aborts without it."
        ),
    ] = None,
    token_labels: Annotated[
        str, typer.Option("--token-labels", help="How spans label tokens: spans or after-onset.")
    ] = "spans",  # noqa: S107 - no password
    slice_by: Annotated[
        list[str] | None, typer.Option("--slice", help="Column, or key of the metadata, to report by value.")
    ] = None,
    calibration: Annotated[
        CalibrationKind, typer.Option("--calibration", help="How scores become probabilities.")
    ] = CalibrationKind.PLATT,
    with_text: Annotated[
        bool, typer.Option("--with-text", help="Show texts and token scores of the worst requests in the report.")
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", exists=True, help="tokenizer.json of the model: texts of tokens."),
    ] = None,
    baselines: Annotated[
        bool, typer.Option("--baselines/--no-baselines", help="Fit what it has to beat, and controls.")
    ] = True,
    record: Annotated[
        bool, typer.Option("--record/--no-record", help="Write the figures into the probe's metrics.json.")
    ] = True,
    *,
    read: JudgingOptions,
) -> int:
    """Judge a probe on the test part of recorded requests, by request, as it would act when deployed.

    SOURCE is a dataset's folder or topic:POINT; what is read of a topic is split as `dataset export` does. Writes
    report.html, report.json with its schema, and scores.parquet. Every reading of the test part is counted in the
    dataset's manifest. Exits with 1 where there are too few requests for any figure; the report says how many.
    """
    check_out(out, judge.force)
    rule = _span_rule(token_labels)
    reading = judge.reading(read.regrouped(source), slice_by or ())
    from probe_consumers.recorded import recorded
    from undercurrent.evaluation.dataset_evaluation import Case, judge_on, too_few
    from undercurrent.evaluation.layers import fitted_layers
    from undercurrent.evaluation.recording import read_metrics, record_test, test_entry
    from undercurrent.evaluation.scoring import as_loaded

    loaded, folder = as_loaded(probe), Path(probe)
    metrics = read_metrics(folder) if folder.is_dir() else {}
    options = judge.options(
        reading,
        (metrics.get("threshold") or {}).get("wanted_fpr"),
        name=named(loaded, probe),
        prevalence=prevalence,
        requests_per_day=requests_per_day,
        abort_latency_tokens=abort_latency_tokens,
        calibration=calibration.value,
        with_text=with_text,
        baselines=baselines,
    )
    case = Case(
        reading=reading,
        options=options,
        point=judge.point,
        split_file=judge.split_file,
        token_rule=rule,
        tokenizer=None if tokenizer is None else _tokenizer(tokenizer),
        layers=fitted_layers(metrics),
    )
    reader = f"evaluate {options.name} ({loaded.fingerprint[:12]}) on label {reading.label}"
    lost = source.startswith(TOPIC) and read.dataset is None
    with (
        options_named(),
        recorded(read.recording(source), keep=read.dataset, progress=partial(shown.progress, "exporting")) as data,
    ):
        judged = judge_on(data, loaded, case, reader, told=progress)
        judged.report.write(out)
        if record and folder.is_dir():
            entry = test_entry(judged, data, reading, loaded.fingerprint)
            record_test(folder, entry | ({"dataset": entry["dataset"] | {"path": source}} if lost else {}))
    tell(judged.report, judged.remarks)
    reads = (
        "how often this test part is read is not counted: --dataset FOLDER keeps it"
        if lost
        else f"read the test part for the {_ordinal(judged.test_reads)} time"
    )
    sys.stdout.write(f"{reads}; {out / 'report.html'}\n")
    few = too_few(judged.report)
    if few is not None:
        complain("undercurrent probe evaluate", f"too few requests for a figure: {few}; the report is in {out}")
        return EXIT_FAILED
    return 0


def tell(report: Report, remarks: tuple[str, ...]) -> None:
    """Write to standard output what a person wants to know at once."""
    from rich.panel import Panel
    from rich.table import Table

    console = plain_console()
    found = report.findings
    console.print(Panel(found.headline, title=found.name, title_align="left"), markup=False)
    for note in (*found.notes[:SHOWN_NOTES], *remarks):
        console.print(f"- {note}", markup=False, style="bold red" if note.startswith("LEAKAGE") else None)
    if len(found.notes) > SHOWN_NOTES:
        console.print(f"- and {len(found.notes) - SHOWN_NOTES} more in the report")
    table = Table(title="on the test part, by request", title_justify="left", box=None, pad_edge=False)
    for head in ("threshold for", "threshold", "TPR", "FPR"):
        table.add_column(head)
    for point in found.operating:
        placed = "" if point.threshold is None else f"{point.threshold:.6g}"
        table.add_row(point.name, placed, str(point.tpr), "" if point.threshold is None else str(point.fpr))
    console.print(table)
    for name, figure in (("AUROC", found.auroc), ("AUPRC", found.auprc), ("AUROC of tokens", found.tokens.auroc)):
        if figure.value is not None or name != "AUROC of tokens":
            console.print(f"{name} {figure}", markup=False)
    for rival in found.baselines:
        if rival.auroc.value is not None:
            console.print(f"{rival.name}: AUROC {rival.auroc}", markup=False)


def _span_rule(text: str) -> TokenRule:
    if text == "spans" or text == "after-onset":
        return text  # type: ignore[return-value]
    why = "; it trains, but says nothing of single tokens" if text == "inherit" or text.startswith("last") else ""
    raise ConfigError(f"--token-labels: {text!r}; accepted: spans, after-onset{why}")


def _tokenizer(path: Path) -> Any:  # noqa: ANN401 - tokenizers.Tokenizer has no types
    from undercurrent.evaluation.spans import load_tokenizer

    return load_tokenizer(path)


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
