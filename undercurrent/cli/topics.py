"""`undercurrent topics`: the topics of a pipeline as planned, as they are, and made so."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undercurrent.cli.acls import acls
from undercurrent.cli.options import Bootstrap, ConfigFile, PointsFile, Prefix
from undercurrent.cli.planning import groups_of, plan_of
from undercurrent.cli.tables import write_table

if TYPE_CHECKING:
    from undercurrent.topics import Topic

app = typer.Typer(help="Plan, create and check the topics.", no_args_is_help=True, add_completion=False)

app.command()(acls)

Json = Annotated[bool, typer.Option("--json", help="JSON lines instead of a table.")]


@app.command()
def plan(
    config: ConfigFile = None,
    points: PointsFile = None,
    prefix: Prefix = None,
    bootstrap_servers: Bootstrap = None,
    offline: Annotated[bool, typer.Option("--offline", help="Ask no broker: the plan alone.")] = False,
    json_lines: Json = False,
) -> None:
    """Print the topics that a configuration makes, and what `apply` would change.

    Where the configuration or an option names a broker, it is asked, and so is the schema registry: `+` would be made,
    `~` changed, and while there is a `!` apply refuses to do anything.
    """
    from undercurrent.pipeline import connection, interactive, names_brokers, read_sections

    sections = read_sections(config)
    planned = plan_of(sections, config, points, prefix)
    rows = [_row(topic) for topic in planned.topics()]
    if offline or not names_brokers(sections, bootstrap_servers):
        _print(rows, json_lines)
        if not offline:
            sys.stderr.write("no broker is named, so the cluster was not looked at: the plan alone\n")
        return
    from undercurrent.cli.topic_changes import find_changes

    changes = find_changes(
        interactive(connection(sections, bootstrap_servers)), planned, groups_of(sections, planned, config)
    )
    if json_lines:
        _print([{**row, "change": changes.of(row["topic"])} for row in rows], json_lines)
        return
    _print(rows, json_lines)
    lines = list(changes.lines())
    sys.stdout.write("\n" + "".join(f"{line}\n" for line in lines or ["nothing to change"]))


@app.command()
def apply(
    config: ConfigFile = None,
    points: PointsFile = None,
    prefix: Prefix = None,
    bootstrap_servers: Bootstrap = None,
) -> None:
    """Create what is missing and mend settings, and register the schemas where there is a registry; may be repeated.

    The changes are printed before anything is done. Nothing at all is done when a topic has another number of
    partitions than planned: that number decides where a key lies and is never changed.
    """
    from undercurrent.cli.topic_changes import find_changes, make_changes, summary
    from undercurrent.pipeline import connection, interactive, read_sections

    sections = read_sections(config)
    planned = plan_of(sections, config, points, prefix)
    settings = interactive(connection(sections, bootstrap_servers))
    changes = find_changes(settings, planned, groups_of(sections, planned, config))
    sys.stdout.writelines(f"{line}\n" for line in changes.lines())
    sys.stdout.flush()
    make_changes(settings, changes)
    sys.stdout.write(f"{summary(changes)}\n")


@app.command("list")
def list_topics(
    config: ConfigFile = None,
    points: PointsFile = None,
    prefix: Prefix = None,
    bootstrap_servers: Bootstrap = None,
    json_lines: Json = False,
    check: Annotated[bool, typer.Option("--check", help="Exit 1 if a topic is not as planned.")] = False,
) -> int:
    """Print each planned topic as the cluster has it, and how it differs."""
    from undercurrent.kafka.admin import TopicAdmin, compare
    from undercurrent.pipeline import connection, interactive, read_sections

    sections = read_sections(config)
    planned = plan_of(sections, config, points, prefix).topics()
    actual = TopicAdmin(interactive(connection(sections, bootstrap_servers))).describe(topic.name for topic in planned)
    rows, different = [], 0
    for topic in planned:
        found = [str(difference).removeprefix(f"{topic.name}: ") for difference in compare([topic], actual)]
        different += bool(found)
        there = actual.get(topic.name)
        rows.append({**_row(topic, there.partitions if there else 0), "state": "; ".join(found) or "as planned"})
    _print(rows, json_lines)
    return 1 if check and different else 0


def _row(topic: Topic, partitions: int | None = None) -> dict[str, Any]:
    """Return a topic as the cells of a table."""
    facts = dataclasses.asdict(topic)
    kept = "last of each key" if topic.compact else _duration(topic.retention_ms)
    return {
        "topic": facts["name"],
        "partitions": topic.partitions if partitions is None else partitions,
        "kept": kept,
        "max_bytes": topic.max_message_bytes,
    }


def _duration(ms: int) -> str:
    """Return a time as days, hours or seconds, whichever is whole."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("s", 1000)):
        if ms % size == 0:
            return f"{ms // size} {unit}"
    return f"{ms} ms"


def _print(rows: list[dict[str, Any]], json_lines: bool) -> None:
    if json_lines:
        from undercurrent.cli.jsonl import dumps

        sys.stdout.writelines(dumps(row) + "\n" for row in rows)
        return
    write_table(rows)
