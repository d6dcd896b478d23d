"""`undercurrent engines`: which engines there are; take one away for good."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from undercurrent.cli.options import Bootstrap, ConfigFile, PointsFile
from undercurrent.cli.planning import plan_of
from undercurrent.cli.tables import moment, write_table
from undercurrent.counts import counted
from undercurrent.errors import ConfigError

app = typer.Typer(help="Which engines there are; take one away for good.", no_args_is_help=True, add_completion=False)


@app.command("list")
def list_engines(
    config: ConfigFile = None,
    bootstrap_servers: Bootstrap = None,
    json_lines: Annotated[bool, typer.Option("--json", help="JSON lines instead of a table.")] = False,
) -> None:
    """Print the engines that have started while the topic of acknowledgements was kept, and their latest incarnation.

    That an engine is listed does not say that it runs: nothing announces an end.
    """
    from engine_worker.retiring import known_engines
    from undercurrent.acls import Service
    from undercurrent.pipeline import connection, interactive, permitted, read_sections

    sections = read_sections(config)
    plan = plan_of({**sections, "points": None}, config, None, None)
    kafka = interactive(connection(sections, bootstrap_servers))
    permitted(kafka, Service.OPERATOR, plan, only={plan.acks})
    known = known_engines(kafka, plan)
    rows = [
        {
            "engine": name,
            "incarnation": engine.incarnation,
            "started": moment(engine.started.started_at_us),
            "host": engine.started.host,
            "pid": engine.started.pid,
            "version": engine.started.version,
            "retired": engine.started.retired,
        }
        for name, engine in sorted(known.items())
    ]
    if not rows:
        sys.stderr.write(f"no engine has started as far back as {plan.acks} is kept\n")
    if json_lines:
        sys.stdout.writelines(json.dumps(row) + "\n" for row in rows)
    else:
        write_table([{**row, "retired": "yes" if row["retired"] else "no"} for row in rows])


@app.command()
def retire(
    name: Annotated[str, typer.Argument(help="Name of the engine, as its configuration has it.")],
    unseen: Annotated[
        bool, typer.Option("--unseen", help="Also a name that no start is known of: its record may be too old.")
    ] = False,
    config: ConfigFile = None,
    points: PointsFile = None,
    bootstrap_servers: Bootstrap = None,
) -> None:
    """Close the streams that an engine has left open, when it will never start again.

    Probe hosts hold such a stream open, and read again from its start after each rebalance, until its engine starts
    anew. A process of that name that still runs gives its requests up and ends with an error: other workers run them
    again. May be repeated.
    """
    from engine_worker.retiring import known_engines
    from engine_worker.retiring import retire as retire_engine
    from undercurrent.acls import Service
    from undercurrent.pipeline import connection, interactive, permitted, read_sections

    sections = read_sections(config)
    plan = plan_of(sections, config, points, None)
    if not plan.points:
        raise ConfigError(
            "no extraction point is named, and an engine has streams on their topics alone: give --points, or --config "
            "with points: FILE"
        )
    kafka = interactive(connection(sections, bootstrap_servers))
    permitted(kafka, Service.OPERATOR, plan, only={plan.acks, *map(plan.activations, plan.points)})
    known = known_engines(kafka, plan)
    if name not in known and not unseen:
        names = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"no engine {name!r} has started as far back as {plan.acks} is kept; known: {names}")
    retired = retire_engine(kafka, plan, name)
    sys.stdout.write(
        f"{name}: retired as incarnation {retired.incarnation}, in {counted(retired.partitions, 'partition')}\n"
    )
