"""`undercurrent probe drift PROBE SOURCE`: how far recorded traffic is from what placed a probe's threshold."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probe_consumers.recording_options import SOURCE_HELP, SourceOptions
from undercurrent.cli.grouping import with_options
from undercurrent.cli.probe_options import options_named
from undercurrent.cli.progress import progress
from undercurrent.cli.tables import moment, write_table
from undercurrent.counts import counted
from undercurrent.probes.drift import FIGURES, WINDOW_REQUESTS

if TYPE_CHECKING:
    from probe_consumers.drift_recorded import DriftReport

app = typer.Typer(help="How far traffic is from what placed a probe's threshold.", add_completion=False)


@app.command()
@with_options("read", SourceOptions)
def drift(
    probe: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of a trained probe.")],
    source: Annotated[str, typer.Argument(help=SOURCE_HELP)],
    point: Annotated[str | None, typer.Option("--point", help="Of a dataset with several.")] = None,
    window: Annotated[
        int, typer.Option("--window", min=WINDOW_REQUESTS, help="Requests of each window.")
    ] = WINDOW_REQUESTS,
    fail_on_drift: Annotated[
        bool, typer.Option("--fail-on-drift", help="Exit 1 when a figure is beyond its limit, or there is no window.")
    ] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    *,
    read: SourceOptions,
) -> int:
    """Compare recorded requests with the traffic that placed a probe's threshold, window by window.

    Requests are taken in the order in which they began. The figures are those that a probe host exports, and a figure
    that is beyond its limit has a mark.
    """
    from probe_consumers.drift_recorded import drift as drift_of
    from probe_consumers.recorded import recorded
    from undercurrent.probes import load_probe

    loaded = load_probe(str(probe.resolve()))
    with (
        options_named(),
        recorded(read.source(source), keep=read.dataset, progress=partial(progress, "exporting")) as data,
    ):
        report = drift_of(data, loaded, str(probe), point, window)
    if json_lines:
        sys.stdout.write(json.dumps(report.to_dict(), indent=2) + "\n")
    else:
        _show(report, window)
    return 1 if fail_on_drift and (report.raised or not report.windows) else 0


def _show(report: DriftReport, window: int) -> None:
    rows = [_row(str(at), found) for at, found in enumerate(report.windows, 1)]
    if rows:
        limits = report.windows[-1]["limits"]
        rows.append({"window": "limit", "from (UTC)": "", **{name: f"{limits[name]:.3g}" for name in FIGURES}})
    write_table(rows)
    if report.left or not rows:
        sys.stdout.write(
            f"the last {counted(report.left, 'request')}: n/a (needs >= {window:,} requests, has {report.left:,})\n"
        )
    for error, count in report.errors.items():
        sys.stdout.write(f"{counted(count, 'request')} left out: {error}\n")
    raised = sum(len(found["raised"]) for found in report.windows)
    if rows:
        mark = ", marked with !" if raised else ""
        sys.stdout.write(
            f"{counted(raised, 'figure')} of {counted(len(report.windows), 'window')} beyond the limits{mark}\n"
        )


def _row(name: str, found: Mapping[str, Any]) -> dict[str, str]:
    row = {"window": name, "from (UTC)": moment(found["first_started_at_us"])}
    for figure in FIGURES:
        value = found["figures"][figure]
        row[figure] = "n/a" if math.isnan(value) else f"{value:.3g}{'!' if figure in found['raised'] else ''}"
    return row
