"""`undercurrent groups`: the consumer groups of a pipeline, and moving them by hand."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from undercurrent.cli.options import Bootstrap, ConfigFile, Prefix
from undercurrent.counts import counted

if TYPE_CHECKING:
    from pathlib import Path

    from undercurrent.cli.groups_known import Groups
    from undercurrent.topics import TopicPlan

app = typer.Typer(help="Show where consumer groups stand, and move them.", no_args_is_help=True, add_completion=False)

Json = Annotated[bool, typer.Option("--json", help="JSON lines instead of a table.")]


@app.command()
def describe(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[GROUP]...", help="All of the pipeline's by default.")
    ] = None,
    config: ConfigFile = None,
    prefix: Prefix = None,
    bootstrap_servers: Bootstrap = None,
    json_lines: Json = False,
) -> None:
    """Print, per partition, what a group has committed, what its metadata says, and what is left to do.

    The lag is counted from what is done, not from the committed offset: that one waits for the oldest open request.
    The group that ends in .letters writes dead letters; in its lag the end of a transaction counts too.
    """
    from undercurrent.cli.groups_known import unknown_group
    from undercurrent.cli.jsonl import dumps
    from undercurrent.cli.tables import write_table
    from undercurrent.errors import ConfigError

    groups, plan = _groups(config, prefix, bootstrap_servers)
    rows = []
    known = groups.names()
    for name in names or known:
        stands = groups.stands(name)
        if not stands and name not in known:
            raise ConfigError(unknown_group(name, known))
        state = groups.group(name).state
        rows += [{**stand.row(plan), "state": state} for stand in stands]
    if json_lines:
        sys.stdout.writelines(dumps(row) + "\n" for row in rows)
        return
    write_table(rows)
    if not rows:
        sys.stdout.write("no group of this pipeline has committed anything\n")


@app.command()
def reset(
    name: Annotated[str, typer.Argument(metavar="GROUP", help="Name of the group, as describe prints it.")],
    to: Annotated[
        str, typer.Option("--to", help="earliest, latest, an offset, or @ and milliseconds since the Unix epoch.")
    ],
    partition: Annotated[
        list[int] | None, typer.Option("--partition", min=0, help="May be repeated; all by default.")
    ] = None,
    skip: Annotated[bool, typer.Option("--skip", help="Leave records behind that were never answered for.")] = False,
    say_again: Annotated[
        bool, typer.Option("--say-again", help="Write verdicts on what is read again a second time.")
    ] = False,
    execute: Annotated[bool, typer.Option("--execute", help="Do it; else it is only shown.")] = False,
    config: ConfigFile = None,
    prefix: Prefix = None,
    bootstrap_servers: Bootstrap = None,
) -> int:
    """Move a group that has no members, and keep what its commits know.

    A probe host that is moved back reads again, to rebuild its state, and says nothing twice. An engine worker that is
    moved back runs no finished prompt again. Moving forward leaves records behind: their prompts get no answer, their
    streams no verdict. The group that ends in .letters is the engine workers' too: moved back, it writes dead letters
    again.
    """
    from undercurrent.cli.tables import write_table
    from undercurrent.errors import ConfigError

    groups, plan = _groups(config, prefix, bootstrap_servers)
    moves = list(groups.moves(name, to, partition, say_again=say_again))
    rows = [
        {
            "partition": str(stand.where),
            "from": stand.committed.offset,
            "to": move.offset,
            "kept": move.kept,
            "skipped": move.skipped,
            "said again": move.said_again,
        }
        for stand, move in moves
    ]
    write_table(rows)
    sys.stdout.flush()
    skipped, again = sum(move.skipped for _, move in moves), sum(move.said_again for _, move in moves)
    letters = all(stand.where.topic in plan.swept for stand, _ in moves)
    if skipped and not skip:
        left = "that nobody has looked at" if letters else "without an answer"
        raise ConfigError(f"--skip: is missing; {counted(skipped, 'record')} would be left behind {left}")
    if again and not say_again:
        twice = (
            f"of {counted(again, 'record')} each that nobody can read would become a dead letter a second time"
            if letters
            else f"what these commits knew is gone, so that {counted(again, 'record')} would be judged twice"
        )
        raise ConfigError(f"--say-again: is missing; {twice}")
    if not execute:
        sys.stdout.write("nothing was changed: add --execute\n")
        return 0
    groups.commit(name, moves)
    sys.stdout.write(f"{name}: {counted(len(moves), 'partition')} moved\n")
    return 0


def _groups(config: Path | None, prefix: str | None, bootstrap_servers: str | None) -> tuple[Groups, TopicPlan]:
    from undercurrent.cli.groups_known import Groups
    from undercurrent.cli.planning import plan_of
    from undercurrent.pipeline import connection, interactive, read_sections

    sections = read_sections(config)
    plan = plan_of({key: value for key, value in sections.items() if key != "points"}, config, None, prefix)
    return Groups(interactive(connection(sections, bootstrap_servers)), plan), plan
