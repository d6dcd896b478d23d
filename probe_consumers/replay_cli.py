"""`undercurrent replay`: run probes again on recorded activations and compare."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from undercurrent.cli.options import Bootstrap

app = typer.Typer(help="Run probes again on recorded activations and compare.", add_completion=False)

_CHOOSE = "Which records"
_COMPARE = "Comparison"


@app.command()
def replay(
    out: Annotated[
        Path, typer.Option("--out", file_okay=False, help="Folder of results and progress; the same goes on with it.")
    ],
    dataset: Annotated[
        Path | None,
        typer.Argument(exists=True, file_okay=False, help="A dataset to read, instead of the point's topic."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", exists=True, dir_okay=False, help="A probe host's configuration."),
    ] = None,
    point: Annotated[
        str | None, typer.Option("--point", help="Extraction point; that of the bindings where they have one.")
    ] = None,
    probes: Annotated[
        Path | None,
        typer.Option(
            "--probes",
            exists=True,
            dir_okay=False,
            help="Bindings, instead of the configuration's and of what was rolled out.",
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since", rich_help_panel=_CHOOSE, help="Records appended from this time on: ISO 8601, or Unix seconds."
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", rich_help_panel=_CHOOSE, help="Records appended before this time.")
    ] = None,
    from_offset: Annotated[
        list[str] | None,
        typer.Option(
            "--from-offset", rich_help_panel=_CHOOSE, help="First offset, or PARTITION:OFFSET; may be repeated."
        ),
    ] = None,
    to_offset: Annotated[
        list[str] | None,
        typer.Option("--to-offset", rich_help_panel=_CHOOSE, help="Offset after the last one, or PARTITION:OFFSET."),
    ] = None,
    request: Annotated[
        list[str] | None, typer.Option("--request", rich_help_panel=_CHOOSE, help="Only this request; may be repeated.")
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option(
            "--requests", exists=True, dir_okay=False, rich_help_panel=_CHOOSE, help="Only those in a file, one a line."
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", rich_help_panel=_CHOOSE, help="Only requests labelled NAME=VALUE; may be repeated."),
    ] = None,
    last: Annotated[
        int | None, typer.Option("--last", min=1, rich_help_panel=_CHOOSE, help="Only the last so many requests.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            rich_help_panel=_COMPARE,
            help="live (where a topic is read), none (where a dataset is), or the folder of another replay.",
        ),
    ] = None,
    service: Annotated[
        str | None,
        typer.Option("--service", rich_help_panel=_COMPARE, help="Consumer group whose live verdicts are compared."),
    ] = None,
    fail_on_diff: Annotated[
        bool,
        typer.Option(
            "--fail-on-diff",
            rich_help_panel=_COMPARE,
            help="Exit 1 when anything differs, or nothing could be compared.",
        ),
    ] = False,
    wait: Annotated[
        float,
        typer.Option(
            "--wait", min=0.0, rich_help_panel=_COMPARE, help="Seconds to wait for a live host that is not there yet."
        ),
    ] = 0.0,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Processes, a partition each at a time; one per core.")
    ] = None,
    offline: Annotated[
        bool,
        typer.Option("--offline", help="Ask no broker whether a request of a DATASET was erased after its export."),
    ] = False,
    bootstrap_servers: Bootstrap = None,
) -> int:
    """Run probes on recorded activations with the live host's own code, and compare with what the live host said.

    Reads the point's topic, its ends fixed at the start, or a DATASET. No consumer group, no commits, no aborts.

    Progress is kept in --out: run the same command again to go on where it was stopped. Results are verdicts.parquet,
    scores.parquet and summary.json, and report.json where something was compared. They are compared bit for bit;
    streams that the range cuts and what retention has deleted are named, and not compared.
    """
    # Imported here: `--help` needs neither a Kafka client nor numpy.
    from rich.console import Console

    from probe_consumers.replay_command import replay as run_replay
    from probe_consumers.replay_order import Origins, ReplayOrder
    from probe_consumers.replay_progress import shown
    from probe_consumers.replay_range import RangeRequest, parse_offsets, parse_time
    from probe_consumers.replay_select import parse_labels, read_requests
    from probe_consumers.replay_source import load
    from probe_consumers.replay_telling import told

    origins = Origins(config=config, probes=probes, bootstrap_servers=bootstrap_servers, dataset=dataset)
    named = frozenset(request or ()) | (read_requests(requests) if requests is not None else frozenset())
    order = ReplayOrder(
        origins=origins,
        point=point or load(origins).only_point,
        range=RangeRequest(
            since_ms=None if since is None else parse_time(since, "--since"),
            until_ms=None if until is None else parse_time(until, "--until"),
            offsets=parse_offsets(from_offset or []) or None,
            ends=parse_offsets(to_offset or [], "--to-offset") or None,
        ),
        requests=named or None,
        labels=parse_labels(label or []),
        last=last,
        out=out,
        workers=workers or len(os.sched_getaffinity(0)),
        service=service,
        compare=compare or ("live" if dataset is None else "none"),
        wait_s=wait,
        offline=offline,
    )
    console = Console(stderr=True)
    result = run_replay(order, lambda folder, plan: shown(folder, plan, console))
    sys.stdout.write(told(out, result))
    return 1 if fail_on_diff and (result.diff is None or not result.diff.equal) else 0
