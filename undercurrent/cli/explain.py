"""`undercurrent explain`: what happened to one request, over all topics."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from undercurrent.cli.options import Bootstrap, ConfigFile, Prefix
from undercurrent.cli.tables import moment
from undercurrent.cli.times import parse_time
from undercurrent.counts import counted

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from rich.console import Console
    from rich.text import Text

    from undercurrent.insight.explaining import Explained
    from undercurrent.insight.timeline import Entry, TimeLine

app = typer.Typer(add_completion=False)

_STYLES = {
    "prompt": "bold",
    "accepted": "cyan",
    "released": "yellow",
    "stream": "blue",
    "stream end": "blue",
    "activations": "blue",
    "stream closed": "yellow",
    "gap": "bold red",
    "stray": "red",
    "signal": "magenta",
    "scores": "magenta",
    "verdict": "magenta",
    "error": "bold red",
    "command": "yellow",
    "ack": "yellow",
    "final": "bold green",
    "dead letter": "bold red",
    "unreadable": "bold red",
}


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="Id of the request.")],
    since: Annotated[
        str | None,
        typer.Option("--since", help="Look at nothing before this: ISO 8601, Unix seconds, or 30m, 6h, 2d ago."),
    ] = None,
    json_object: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
    config: ConfigFile = None,
    prefix: Prefix = None,
    bootstrap_servers: Bootstrap = None,
) -> int:
    """Show one request as a time line: prompt, run, activations, scores, verdicts, commands, final, dead letters.

    It reads the topics alone, each where this request can lie in it. What breaks a promise is said at the end, as by
    `undercurrent audit`. Exit 1 when no topic knows the request.
    """
    from contextlib import ExitStack

    from undercurrent.cli.pipelines import pipeline_of
    from undercurrent.insight.explaining import Explainer

    since_ms = None if since is None else parse_time(since, "--since")
    pipeline = pipeline_of(config, prefix, bootstrap_servers)
    explainer = Explainer(pipeline, request_id, since_ms)
    with ExitStack() as bars:
        found = explainer.run(_progress(bars))
    if not len(found.line):
        sys.stderr.write(f"undercurrent explain: no topic of {pipeline.prefix!r} knows the request {request_id!r}\n")
        return 1
    if json_object:
        _write_json(found)
    else:
        _write(found)
    return 0


def _progress(bars: ExitStack) -> Callable[[str, int], Callable[[int], None]]:
    from undercurrent.cli.progress import progress

    def begin(what: str, total: int) -> Callable[[int], None]:
        bars.close()
        return bars.enter_context(progress(f"reading {what}", total))

    return begin


def _write_json(found: Explained) -> None:
    import dataclasses

    from undercurrent.cli.jsonl import dumps
    from undercurrent.insight.timeline import iterate

    line = found.line
    told = {
        "request_id": line.request_id,
        "outcome": line.outcome,
        "timeline": list(iterate(line.entries)),
        "scores": [
            {"attempt": attempt, "index": index, "point": point, "probe": probe, "scores": curve.points}
            for (attempt, index, point, probe), curve in sorted(line.curves.items())
            if len(curve)
        ],
        "findings": [{**dataclasses.asdict(finding), "kind": finding.kind.value} for finding in found.findings],
    }
    sys.stdout.write(dumps(told) + "\n")


def _write(found: Explained) -> None:
    from rich.table import Table

    from undercurrent.cli.findings import write_findings
    from undercurrent.cli.rendering import console, text
    from undercurrent.protocol.audit_findings import FindingKind

    out, line = console(), found.line
    entries = line.entries
    first_ms = entries[0].at_ms
    out.print(text(f"{line.request_id}: {line.outcome}, from {moment(first_ms * 1000)}", "bold"))
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for entry in entries:
        style = "dim" if entry.void else _STYLES.get(entry.what, "")
        void = " (void: it does not hold the request)" if entry.void and entry.what != "stray" else ""
        table.add_row(
            text(_elapsed(entry.at_ms - first_ms), "dim"),
            text(entry.what, style),
            text(entry.text + _lasted(entry) + void),
        )
    for said in _curves(line, out):
        table.add_row(text(""), text("scores", _STYLES["scores"]), said)
    out.print(table)
    if found.findings:
        # A request that is under way has no final either: the finding then says where it stands.
        under_way = all(finding.kind is FindingKind.NO_FINAL for finding in found.findings)
        title, style = ("No final yet", "bold") if under_way else ("Promises that are not kept", "bold red")
        out.print(text(f"{title}, as far as was read:", style))
        write_findings(found.findings)


def _curves(line: TimeLine, out: Console) -> list[Text]:
    """Return the curve of each probe with its range, over two lines each."""
    from undercurrent.cli.rendering import text

    width, said = max(16, min(out.width, 100) - 32), []
    for (attempt, index, point, probe), curve in sorted(line.curves.items()):
        if not len(curve):
            continue
        points = curve.points
        top = max(points, key=lambda item: item[1])
        low = min(score for _, score in points)
        child = f", child {index}" if index else ""
        told = f"{probe} on {point}, attempt {attempt}{child}: {counted(len(points), 'position')} from {points[0][0]} "
        told += f"to {points[-1][0]}, {low:.4g} to {top[1]:.4g}, highest at {top[0]}"
        said.append(text(f"{curve.line(width)}\n{told}"))
    return said


def _elapsed(ms: int) -> str:
    """Return a time since the first entry, at most nine characters."""
    if ms < 60_000:
        return f"+{ms / 1000:.3f} s"
    if ms < 3_600_000:
        return f"+{ms // 60_000}:{ms // 1000 % 60:02d} m"
    return f"+{ms / 3_600_000:.1f} h"


def _lasted(entry: Entry) -> str:
    if entry.until_ms is None or entry.until_ms - entry.at_ms < 1:
        return ""
    return f", within {(entry.until_ms - entry.at_ms) / 1000:.3f} s"
