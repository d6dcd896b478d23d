"""The command itself: options in, a report out."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undercurrent.cli.inspect_model import Format, parse_layers
from undercurrent.cli.tables import write_table
from undercurrent.errors import CaptureError, ConfigError

if TYPE_CHECKING:
    from undercurrent.cli.doctor.examination import Report

app = typer.Typer(add_completion=False)


@app.command("doctor")
def doctor(
    model: Annotated[str, typer.Argument(help="Folder of a model, or its name on a hub.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An engine argument of vLLM, as in `--set max_num_seqs=64`."),
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", help="Decoder layers to look at; the first, the middle and the last.")
    ] = None,
    requests: Annotated[int, typer.Option(min=2, max=1024, help="Requests at once.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, max=4096, help="Tokens that each generates.")] = 32,
    parity_gib: Annotated[
        float, typer.Option(min=0, help="Compare with transformers up to this size of the weights in float32.")
    ] = 8.0,
    form: Annotated[Format, typer.Option("--format", help="How the report is written.")] = Format.TABLE,
) -> None:
    """Load a model with capture, run recognisable requests at once, and fail if any record is wrong.

    Every record must name its request's own token at its position, equal what the same request gives alone, and be
    nearer to that than to any other request or position; where the model is small enough it must equal what
    transformers computes too. Exit code 1 if anything is wrong or the engine refuses to capture.
    """
    try:
        from undercurrent.cli.doctor.examination import Plan, examine
    except ImportError as exc:
        raise ConfigError(f"an examination needs vLLM: pip install 'undercurrent[vllm]' ({exc})") from exc
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # Standard output is the report's.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    plan = Plan(
        model=model,
        engine_args=parse_settings(settings or ()),
        layers=None if layers is None else parse_layers(layers),
        requests=requests,
        tokens=tokens,
        parity_bytes=int(parity_gib * (1 << 30)),
    )
    try:
        report = examine(plan, _tell)
    except OSError as exc:
        there = "" if Path(model).exists() else "; accepted: a folder with config.json, or a name on a hub within reach"
        raise CaptureError(f"{model}: cannot be loaded: {exc}{there}") from exc
    if form is Format.JSON:
        from undercurrent.cli.jsonl import dumps

        sys.stdout.write(dumps({**dataclasses.asdict(report), "sound": report.sound}) + "\n")
    else:
        _write(report)
    if not report.sound:
        raise typer.Exit(1)


def _tell(line: str) -> None:
    sys.stderr.write(f"{line} ...\n")


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Return engine arguments from texts like max_num_seqs=64; values are read as YAML.

    Raises:
        ConfigError: one has no `=`, or its value is no YAML.
    """
    import yaml

    values: dict[str, Any] = {}
    for text in settings:
        key, separator, value = text.partition("=")
        if not separator or not key.isidentifier():
            raise ConfigError(f"--set {text!r}: accepted: KEY=VALUE, such as max_num_seqs=64")
        try:
            values[key] = yaml.safe_load(value)
        except yaml.YAMLError as exc:
            raise ConfigError(f"--set {key}: {value!r} is no YAML value") from exc
    return values


def _write(report: Report) -> None:
    width = max(map(len, (*report.facts, *report.cost)), default=0)
    for name, value in report.facts.items():
        sys.stdout.write(f"{name.ljust(width)}  {value}\n")
    for name, figure in report.cost.items():
        sys.stdout.write(f"{name.ljust(width)}  {figure:.3g}\n")
    sys.stdout.write("\n")
    write_table([_row(report, name, refused) for name, refused in report.supported.items()])
    if report.parity_skipped:
        sys.stdout.write(f"\nnot compared with transformers: {report.parity_skipped}\n")
    found = [*report.bookkeeping]
    for title, comparisons in (("alone", report.alone), ("transformers", report.parity)):
        found += [f"{name} against {title}: {line}" for name, one in comparisons.items() for line in one.problems]
    sys.stdout.writelines(f"WRONG  {line}\n" for line in found)
    sys.stdout.write("\nevery record is right\n" if report.sound else "\nthis engine's records cannot be trusted\n")


def _row(report: Report, name: str, refused: str) -> dict[str, object]:
    row: dict[str, object] = {"tensor_type": name, "captured": "no" if refused else "yes"}
    for title, comparisons in (("alone", report.alone), ("transformers", report.parity)):
        one = comparisons.get(name)
        row[f"{title}: worst"] = "-" if one is None else f"{one.worst:.1e}"
        row[f"{title}: strangers"] = "-" if one is None else f"{one.strangers} of {one.rows}"
    row["why not"] = refused or "-"
    return row
