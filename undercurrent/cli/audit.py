"""`undercurrent audit`: whether the record keeps every promise, read from the topics alone."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undercurrent.cli.options import Bootstrap, ConfigFile, Prefix
from undercurrent.cli.tables import moment
from undercurrent.cli.times import parse_time
from undercurrent.counts import counted

if TYPE_CHECKING:
    from undercurrent.insight.auditing import Audited, Plan

app = typer.Typer(add_completion=False)

MOST_SHOWN = 50


@app.command()
def audit(
    since: Annotated[
        str | None,
        typer.Option(
            "--since", help="Requests whose prompts came from this time on: ISO 8601, Unix seconds, or 30m, 6h, 2d ago."
        ),
    ] = None,
    patience_s: Annotated[
        float, typer.Option("--patience", min=0, help="What was heard of in the last so many seconds may be under way.")
    ] = 60.0,
    unjudged: Annotated[
        list[str] | None,
        typer.Option(
            "--no-probe",
            help="A point that no probe reads, or POINT+POINT that none joins: no verdict is missed; may be repeated.",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help=f"Every finding, not the first {MOST_SHOWN} alone.")] = False,
    json_lines: Annotated[
        bool, typer.Option("--json", help="A JSON line per finding, then one with the sums.")
    ] = False,
    config: ConfigFile = None,
    prefix: Prefix = None,
    bootstrap_servers: Bootstrap = None,
) -> int:
    """Join every topic by request and list what breaks a promise; exit 1 if anything does.

    Every prompt has exactly one valid final or an answer, every stream an end and a verdict, every loss is declared,
    every command is answered by what then happened, and whatever nobody can read lies in a dead-letter topic.
    """
    from undercurrent.cli.pipelines import pipeline_of
    from undercurrent.cli.progress import progress
    from undercurrent.errors import ConfigError
    from undercurrent.insight.auditing import plan_audit, run_audit
    from undercurrent.topics import points_of

    since_ms = None if since is None else parse_time(since, "--since")
    pipeline = pipeline_of(config, prefix, bootstrap_servers)
    points = tuple(unjudged or ())
    unknown = [name for name in points if not set(points_of(name)) <= set(pipeline.points)]
    if unknown:
        raise ConfigError(f"--no-probe {min(unknown)}: the points are {', '.join(pipeline.points) or 'none'}")
    plan = plan_audit(pipeline, since_ms)
    with progress("auditing", plan.offsets) as advance:
        found = run_audit(pipeline, plan, unjudged=points, patience_s=patience_s, progress=advance)
    if json_lines:
        _write_json(found, plan)
    else:
        _write(found, plan, len(found.findings) if every else MOST_SHOWN)
    return 1 if found.findings else 0


def _write_json(found: Audited, plan: Plan) -> None:
    from undercurrent.cli.jsonl import dumps

    for finding in found.findings:
        sys.stdout.write(dumps({**dataclasses.asdict(finding), "kind": finding.kind.value}) + "\n")
    sums: dict[str, Any] = {
        **dataclasses.asdict(found.counts),
        "under_way": found.under_way,
        "findings": len(found.findings),
        "since_ms": plan.since_ms,
    }
    sys.stdout.write(dumps(sums) + "\n")


def _write(found: Audited, plan: Plan, most: int) -> None:
    from undercurrent.cli.findings import write_findings

    counts = found.counts
    if plan.cut_by:
        sys.stdout.write(f"From {moment((plan.since_ms or 0) * 1000)} on: what {plan.cut_by} had before is deleted.\n")
    write_findings(found.findings[:most])
    if len(found.findings) > most:
        sys.stdout.write(f"... and {len(found.findings) - most} more: --all, or --json\n")
    read = (
        f"{counted(counts.prompts, 'prompt')}, {counted(counts.over, 'request')} over, {found.under_way:,} under way, "
        f"{counted(counts.streams, 'stream')}, {counted(counts.words, 'verdict')}, "
        f"{counted(counts.letters, 'dead letter')}, {counts.void:,} void"
    )
    if not found.findings:
        sys.stdout.write(f"Every promise is kept: {read}.\n")
        return
    kinds = Counter(finding.kind.value for finding in found.findings)
    said = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
    count = len(found.findings)
    sys.stdout.write(f"{counted(count, 'finding')} ({said}) in {read}.\n")
