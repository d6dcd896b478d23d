"""`undercurrent erase`: a request taken out of everything that can be changed, and kept out of what reads the rest."""

from __future__ import annotations

import getpass
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undercurrent.cli.options import Bootstrap, ConfigFile, PointsFile, Prefix
from undercurrent.counts import counted

if TYPE_CHECKING:
    from probe_consumers.erase_command import Trace
    from undercurrent.evaluation.erasing import ErasedFolder

app = typer.Typer(add_completion=False)


@app.command()
def erase(
    request_id: Annotated[str, typer.Option("--request-id", help="The request.")],
    folder: Annotated[
        list[Path] | None,
        typer.Option("--folder", exists=True, file_okay=False, help="Dataset or results of a replay; may be repeated."),
    ] = None,
    reason: Annotated[str, typer.Option("--reason", help="Kept with the mark; names no one.")] = "",
    author: Annotated[
        str | None, typer.Option("--author", help="Who erases it; this machine's user without it.")
    ] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON line for each topic and folder.")] = False,
    config: ConfigFile = None,
    points: PointsFile = None,
    prefix: Prefix = None,
    bootstrap_servers: Bootstrap = None,
) -> int:
    """Erase a request: mark it, delete its labels and states, take it out of folders, say when the rest is gone.

    A record in the middle of a topic cannot be deleted; retention deletes it, and each topic is printed with the latest
    time of that. From the mark on no export and no replay reads the request. Files in a folder that still name it are
    printed, and the exit code is 1: delete them. So it is while the request still runs.

    Every topic of the configuration is read, so name its points.
    """
    from probe_consumers.erase_command import erase_on_topics
    from undercurrent.acls import Service
    from undercurrent.cli.planning import plan_of
    from undercurrent.errors import ConfigError, DatasetError
    from undercurrent.evaluation.erasing import check_erasable, erase_from_folder
    from undercurrent.pipeline import connection, interactive, permitted, read_sections

    if not request_id:
        raise ConfigError("--request-id: is empty")
    for path in folder or ():
        try:
            check_erasable(path)
        except DatasetError as exc:
            raise ConfigError(f"--folder {exc}") from exc
    sections = read_sections(config)
    plan = plan_of(sections, config, points, prefix)
    if not plan.points:
        raise ConfigError(
            "no extraction point is named, so no activations would be looked for: give --points, or --config with "
            "points: FILE"
        )
    settings = interactive(connection(sections, bootstrap_servers))
    names = {topic.name for topic in plan.topics()}
    permitted(settings, Service.OPERATOR, plan, only=names)
    known = runs = False
    for trace in erase_on_topics(
        settings, plan, request_id, author=getpass.getuser() if author is None else author, reason=reason
    ):
        known, runs = True, runs or trace.still_runs
        tell(trace.topic, trace, as_json=json_lines)
    if not known:
        sys.stderr.write(f"no topic holds a record of {request_id}: if its id is another one, erase that\n")
    left = 0
    for path in folder or ():
        result = erase_from_folder(path, request_id)
        left += len(result.left)
        tell(str(path), result, as_json=json_lines)
    if not json_lines:
        sys.stdout.write(f"{request_id} is marked as erased: nothing exports or replays it from now on\n")
    if runs:
        sys.stderr.write(
            f"{request_id} still runs: what it writes from now on is no less erased, and its probes keep their states "
            "until it has ended; run this again then\n"
        )
    return 1 if left or runs else 0


def tell(where: str, found: Trace | ErasedFolder, *, as_json: bool) -> None:
    """Write what became of a topic or a folder, and the files that are left to delete.

    Args:
        where: topic or folder.
        found: what was found there.
        as_json: a JSON line instead of words.
    """
    from probe_consumers.erase_command import Trace
    from undercurrent.cli.jsonl import dumps

    if as_json:
        facts: dict[str, Any] = {"where": where, **asdict(found)}
        sys.stdout.write(dumps(facts) + "\n")
        return
    if isinstance(found, Trace):
        sys.stdout.write(f"{where}: {_told(found)}\n")
        return
    tables = "".join(f", {counted(count, 'row')} of {name}" for name, count in found.rows.items())
    sys.stdout.write(f"{where}: {counted(found.tensor_rows, 'row')} of tensors overwritten{tables}\n")
    for name in found.left:
        sys.stderr.write(f"{Path(where) / name}: still names what is erased: delete it\n")


def _told(trace: Trace) -> str:
    by = "never by time: its settings set no bound" if trace.gone_by_ms is None else f"by {_moment(trace.gone_by_ms)}"
    if trace.kept:
        return f"{counted(trace.records, 'record')}, kept until the request has ended"
    if trace.tombstones:
        return (
            f"{counted(trace.tombstones, 'key')} deleted, {counted(trace.records, 'record')} gone {by}, if "
            "something is written there after that segment's end; running this again does"
        )
    return f"{counted(trace.records, 'record')}, deleted {by}"


def _moment(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="seconds")
