"""`undercurrent replay`: run probes again on recorded activations and compare."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from undercurrent.cli.options import Bootstrap

app = typer.Typer(help="Run probes again on recorded activations and compare.", add_completion=False)


@app.command()
def replay(
    config: Annotated[
        Path, typer.Option("--config", "-c", exists=True, dir_okay=False, help="A probe host's configuration.")
    ],
    point: Annotated[str, typer.Option("--point", help="Extraction point.")],
    out: Annotated[Path, typer.Option("--out", file_okay=False, help="Folder for verdicts, scores and report.json.")],
    probes: Annotated[
        Path | None,
        typer.Option("--probes", exists=True, dir_okay=False, help="Bindings, instead of the configuration's."),
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="Records appended from this time on: ISO 8601, or Unix seconds.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", help="Records appended before this time.")] = None,
    request: Annotated[list[str] | None, typer.Option("--request", help="Only this request; may be repeated.")] = None,
    from_offset: Annotated[
        list[str] | None, typer.Option("--from-offset", help="First offset, or PARTITION:OFFSET; may be repeated.")
    ] = None,
    service: Annotated[
        str | None, typer.Option("--service", help="Consumer group whose verdicts are compared.")
    ] = None,
    fail_on_diff: Annotated[
        bool, typer.Option("--fail-on-diff", help="Exit 1 when anything differs, or nothing could be compared.")
    ] = False,
    bootstrap_servers: Bootstrap = None,
) -> int:
    """Run probes on a recorded range with the live host's own code, and compare with what the live host said.

    No consumer group, no commits, no aborts. Results and scores are compared bit for bit; streams that the range cuts
    are named and not compared.
    """
    # Imported here: `--help` needs neither a Kafka client nor numpy.
    from probe_consumers.__main__ import now_us, read_config
    from probe_consumers.replay_command import ReplayOrder, ReplayResult
    from probe_consumers.replay_command import replay as run_replay
    from probe_consumers.replay_range import RangeRequest, parse_offsets, parse_time

    def told(result: ReplayResult) -> str:
        diff = result.diff
        state = "empty" if diff.empty else "equal" if diff.equal else f"{diff.differences_total} differences"
        return (
            f"{result.records} records, {diff.verdicts_compared} verdicts and {diff.scores_compared} scores compared: "
            f"{state} (largest difference {diff.max_abs_diff:g}, {diff.decisions_changed} decisions changed)\n"
            f"{out / 'report.json'}\n"
        )

    order = ReplayOrder(
        point=point,
        range=RangeRequest(
            since_ms=None if since is None else parse_time(since),
            until_ms=None if until is None else parse_time(until),
            offsets=parse_offsets(from_offset or []),
        ),
        requests=frozenset(request or ()),
        service=service,
        out=out,
    )
    result = run_replay(read_config(config, bootstrap_servers, probes), order, now_us)
    sys.stdout.write(told(result))
    return 1 if fail_on_diff and not result.diff.equal else 0
