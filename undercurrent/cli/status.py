"""`undercurrent status`: how far every part of a pipeline is, from its topics alone."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undercurrent.cli.options import Bootstrap, ConfigFile, Prefix
from undercurrent.cli.tables import moment
from undercurrent.counts import counted
from undercurrent.topics import JOIN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from undercurrent.insight.health import GroupState, Limits, PartitionState, Status, Trouble

app = typer.Typer(add_completion=False)

EXIT_DOWN = 2
_COLOURS = ("green", "yellow", "bold red")


@app.command()
def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again until Ctrl-C.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.5, help="Seconds between two looks.")] = 2.0,
    window_s: Annotated[float, typer.Option("--window", min=5, help="How many seconds back `lately` goes.")] = 60.0,
    max_age_s: Annotated[
        float, typer.Option("--max-age", min=0, help="An open request that is older, in seconds, is not well.")
    ] = 300.0,
    max_lag_s: Annotated[
        float, typer.Option("--max-lag", min=0, help="A probe host that is further behind, in seconds, is not well.")
    ] = 10.0,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON object for each look.")] = False,
    config: ConfigFile = None,
    prefix: Prefix = None,
    bootstrap_servers: Bootstrap = None,
) -> int:
    """Show lag, open requests, owners, drops, guards and dead letters; exit 0 healthy, 1 degraded, 2 down.

    It reads the topics and what consumer groups have committed; no process of the pipeline is asked.
    """
    from undercurrent.cli.pipelines import pipeline_of
    from undercurrent.errors import UnreachableError
    from undercurrent.insight.health import Limits
    from undercurrent.insight.looking import Looker

    limits = Limits(max_age_s=max_age_s, max_lag_s=max_lag_s)
    try:
        looker = Looker(pipeline_of(config, prefix, bootstrap_servers), window_s)
        if not watch:
            return _once(looker.look(), limits, json_lines=json_lines)
        return _watch(looker.look, limits, interval_s, json_lines=json_lines)
    except UnreachableError as exc:
        if json_lines:
            _write_down(str(exc))
        sys.stderr.write(f"undercurrent status: down: {exc}\n")
        return EXIT_DOWN


def _once(found: Status, limits: Limits, *, json_lines: bool) -> int:
    from undercurrent.insight.health import level_of, troubles

    wrong = troubles(found, limits)
    if json_lines:
        _write_json(found, wrong)
    else:
        from undercurrent.cli.rendering import console

        console().print(render(found, wrong))
    return int(level_of(wrong))


def _watch(look: Any, limits: Limits, interval_s: float, *, json_lines: bool) -> int:  # noqa: ANN401 - a method
    from undercurrent.insight.health import troubles

    if json_lines or not sys.stdout.isatty():
        while True:
            _once(look(), limits, json_lines=json_lines)
            sys.stdout.flush()
            time.sleep(interval_s)
    from rich.live import Live

    from undercurrent.cli.rendering import console

    with Live(console=console(), auto_refresh=False, screen=True) as live:
        while True:
            found = look()
            live.update(render(found, troubles(found, limits)), refresh=True)
            time.sleep(interval_s)


def _write_json(found: Status, wrong: list[Trouble]) -> None:
    from undercurrent.cli.jsonl import dumps
    from undercurrent.insight.health import level_of

    told = dataclasses.asdict(found)
    told["letters"] = {topic: {"all": total, "lately": lately} for topic, (total, lately) in found.letters.items()}
    told["level"] = level_of(wrong).name.lower()
    told["troubles"] = [{"level": trouble.level.name.lower(), "text": trouble.text} for trouble in wrong]
    sys.stdout.write(dumps(told) + "\n")


def _write_down(why: str) -> None:
    from undercurrent.cli.jsonl import dumps

    sys.stdout.write(dumps({"level": "down", "troubles": [{"level": "down", "text": why}]}) + "\n")


def render(found: Status, wrong: list[Trouble]) -> RenderableType:
    """Return a status as it is shown on a terminal of 80 columns or more."""
    from rich.console import Group

    from undercurrent.cli.rendering import text
    from undercurrent.insight.health import level_of

    level = level_of(wrong)
    head = text(f"{found.prefix} at {moment(found.at_ms * 1000)}: ", "bold")
    head.append(level.name.lower(), _COLOURS[level])
    parts: list[RenderableType] = [head]
    for trouble in wrong:
        parts.append(text(f"  {trouble.text}", _COLOURS[trouble.level]))
    for group in found.engines:
        parts += [text(""), _heading("engine group", group), _prompts(group), *_oldest(group, "request")]
    for group in found.hosts:
        parts += [text(""), _heading("probe group", group), _streams(group), *_oldest(group, "stream")]
    parts += [text(""), *(text(line) for line in _lately(found))]
    return Group(*parts)


def _heading(kind: str, group: GroupState) -> RenderableType:
    from undercurrent.cli.rendering import text

    members = counted(group.members, "member")
    # A group that joins points reads several topics, each in a table of its own.
    said = text(f"{kind} {group.name}{f' on {group.topic}' if JOIN in group.name else ''}", "bold")
    said.append(f", {members}, {group.lag:,} behind")
    if group.beat_age_s is not None:
        said.append(f", heard of {group.beat_age_s:.1f} s ago")
    if group.probes:
        said.append(f": {', '.join(group.probes)}")
    return said


def _prompts(group: GroupState) -> RenderableType:
    rows = [
        (
            str(p.number),
            _number(p.epoch),
            f"{p.emitted:,}",
            f"{p.end:,}",
            f"{p.lag:,}",
            str(p.running),
            str(p.attempts),
            _by(p),
        )
        for p in group.partitions
    ]
    return _table(("part", "e", "from", "end", "lag", "runs", "attempt", "owner"), rows)


def _streams(group: GroupState) -> RenderableType:
    rows = [(str(p.number), f"{p.emitted:,}", f"{p.end:,}", f"{p.lag:,}", _by(p)) for p in group.partitions]
    return _table(("part", "e", "end", "lag", "owner"), rows)


def _oldest(group: GroupState, what: str) -> Iterator[RenderableType]:
    """Yield a line for each partition that has something open: an id may be as long as a terminal is wide."""
    from undercurrent.cli.rendering import text

    for partition in group.partitions:
        if partition.oldest is not None:
            age = _age(partition.oldest_age_s)
            yield text(f"oldest open {what} of {partition.number}: {partition.oldest}, {age} old")


def _by(partition: PartitionState) -> str:
    return partition.owner or "nobody"


def _table(names: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> RenderableType:
    from rich.table import Table

    from undercurrent.cli.rendering import text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    for name in names:
        words = name == "owner"
        table.add_column(
            name, justify="left" if words else "right", overflow="fold", no_wrap=not words, header_style="dim"
        )
    for row in rows:
        table.add_row(*map(text, row))
    return table


def _lately(found: Status) -> list[str]:
    lines = []
    window = f"in the last {found.window_s:g} s"
    finals = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(found.finals.items())) or "none"
    lines.append(f"finals {window}: {finals}")
    for probe, states in sorted(found.guards.items()):
        lines.append(f"  guard {probe}: {', '.join(f'{count:,} {state}' for state, count in sorted(states.items()))}")
    for point in found.points:
        delay = "" if point.delay_ms is None else f", {point.delay_ms:,.0f} ms from capture to the log at most"
        lines.append(
            f"point {point.name} {window}: {counted(point.records, 'record')}, "
            f"{counted(point.streams, 'stream')} ended, "
            f"{point.broken:,} of them broken, {counted(point.dropped, 'activation')} dropped{delay}"
        )
    if found.acks:
        lines.append(
            f"commands {window}: {', '.join(f'{count:,} {name}' for name, count in sorted(found.acks.items()))}"
        )
    letters = {topic: counts for topic, counts in found.letters.items() if counts[0]}
    said = (
        ", ".join(f"{total:,} in {topic} ({lately:,} lately)" for topic, (total, lately) in letters.items()) or "none"
    )
    lines.append(f"dead letters: {said}")
    engines = ", ".join(f"{name} (started {moment(at_us)})" for name, at_us in sorted(found.names.items())) or "none"
    lines.append(f"engines that have started: {engines}")
    return lines


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} m" if seconds < 7200 else f"{seconds / 3600:.1f} h"
