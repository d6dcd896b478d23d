"""`undercurrent probe deploy | mode | promote | rollback | pause | resume | rollouts`: which version runs."""

from __future__ import annotations

import getpass
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undercurrent.cli.options import Bootstrap, ServiceConfig
from undercurrent.cli.probe_options import ProbeMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from probe_consumers.rollout_command import Change
    from undercurrent.protocol.messages import Rollout
    from undercurrent.protocol.rollout_changes import Asked
    from undercurrent.protocol.rollouts import Placed

deploy = typer.Typer(add_completion=False)
mode = typer.Typer(add_completion=False)
promote = typer.Typer(add_completion=False)
rollback = typer.Typer(add_completion=False)
pause = typer.Typer(add_completion=False)
resume = typer.Typer(add_completion=False)
rollouts = typer.Typer(add_completion=False)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the probe's binding.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; kept in the history.")]
Author = Annotated[str, typer.Option("--author", help="Who asks; the user of this machine without it.")]
Share = Annotated[
    float | None,
    typer.Option(
        "--share", help="Share of requests, above 0 up to 1, that the candidate runs on; by hash of their id."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@deploy.command()
def _deploy(
    name: Name,
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", exists=True, file_okay=False, help="The probe, below the hosts' artefacts."),
    ],
    config: ServiceConfig,
    mode: Annotated[ProbeMode, typer.Option("--mode", help="The most that it may do.")] = ProbeMode.SHADOW,
    share: Share = None,
    force: Annotated[bool, typer.Option("--force", help="Also one that was fitted on another model.")] = False,
    reason: Reason = "",
    author: Author = "",
    bootstrap_servers: Bootstrap = None,
) -> None:
    """Put a version on trial, as the candidate: in mode shadow on every request, if nothing else is said.

    In mode shadow or flag it runs beside the deployed version, in mode abort in its place. Requests that start from now
    on have it; those that run are judged to their end as they began. No host is restarted.
    """
    from probe_consumers.__main__ import read_config
    from probe_consumers.rollout_command import bound_of, check_model, version_of
    from undercurrent.protocol.messages import BindingMode
    from undercurrent.protocol.rollout_changes import deploy

    host = read_config(config, bootstrap_servers)
    bound = bound_of(host, name)
    version = version_of(host, bound, folder, BindingMode(mode.value), 1.0 if share is None else share)

    def change(asked: Asked, history: Sequence[Placed]) -> Rollout:
        if not force:
            check_model(host, bound, version, history)
        return deploy(asked, history, version)

    _ask(config, name, change, reason, author, bootstrap_servers)


@mode.command()
def _mode(
    name: Name,
    mode: Annotated[ProbeMode, typer.Argument(metavar="MODE", help="The most that it may do: shadow, flag or abort.")],
    config: ServiceConfig,
    share: Share = None,
    deployed: Annotated[
        bool, typer.Option("--deployed", help="Of the deployed version, also where there is a candidate.")
    ] = False,
    reason: Reason = "",
    author: Author = "",
    bootstrap_servers: Bootstrap = None,
) -> None:
    """Change what the candidate may do, or the deployed version where there is none."""
    from undercurrent.protocol.messages import BindingMode
    from undercurrent.protocol.rollout_changes import set_mode

    change = partial(set_mode, mode=BindingMode(mode.value), share=share, deployed=deployed)
    _ask(config, name, change, reason, author, bootstrap_servers)


@promote.command()
def _promote(
    name: Name, config: ServiceConfig, reason: Reason = "", author: Author = "", bootstrap_servers: Bootstrap = None
) -> None:
    """Make the candidate the deployed version, on every request and in the mode that it has."""
    from undercurrent.protocol.rollout_changes import promote

    _ask(config, name, promote, reason, author, bootstrap_servers)


@rollback.command()
def _rollback(
    name: Name, config: ServiceConfig, reason: Reason = "", author: Author = "", bootstrap_servers: Bootstrap = None
) -> None:
    """Drop the candidate; without one go back to the version that was deployed before, in the mode that it had."""
    from undercurrent.protocol.rollout_changes import rollback

    _ask(config, name, rollback, reason, author, bootstrap_servers)


@pause.command()
def _pause(
    name: Name, config: ServiceConfig, reason: Reason = "", author: Author = "", bootstrap_servers: Bootstrap = None
) -> None:
    """Let the probe act on nobody; it goes on to record what it would have done."""
    from undercurrent.protocol.rollout_changes import pause

    _ask(config, name, pause, reason, author, bootstrap_servers)


@resume.command()
def _resume(
    name: Name, config: ServiceConfig, reason: Reason = "", author: Author = "", bootstrap_servers: Bootstrap = None
) -> None:
    """Let the probe act again: after a pause, and after engines ignored it because it stopped too many requests."""
    from undercurrent.protocol.rollout_changes import resume

    _ask(config, name, resume, reason, author, bootstrap_servers)


@rollouts.command()
def _rollouts(
    config: ServiceConfig,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Name of the probe's binding; all without.")
    ] = None,
    as_json: Json = False,
    bootstrap_servers: Bootstrap = None,
) -> None:
    """Show what is in force for requests that start now; of one probe its history too."""
    from probe_consumers.__main__ import read_config
    from probe_consumers.rollout_command import bound_of, history_of, in_force
    from probe_consumers.rollout_log import read_rollouts
    from undercurrent.cli.tables import write_table
    from undercurrent.pipeline import interactive

    host = read_config(config, bootstrap_servers)
    names = [bound.binding.name for bound in host.bounds] if name is None else [bound_of(host, name).binding.name]
    known = read_rollouts(interactive(host.kafka), host.plan.rollouts)
    states = [in_force(host, known, item) for item in names]
    history = [] if name is None else history_of(known, name)
    if as_json:
        data = {"in_force": states, "history": history}
        sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
        return
    write_table([row for state in states for row in _rows(state)])
    if history:
        sys.stdout.write("\n")
        write_table([{**row, **{key: _short(row[key]) for key in ("deployed", "candidate")}} for row in history])


def _ask(config: Path, name: str, change: Change, reason: str, author: str, bootstrap_servers: str | None) -> None:
    from probe_consumers.__main__ import read_config
    from probe_consumers.rollout_command import in_force, roll_out
    from undercurrent.cli.tables import write_table

    host = read_config(config, bootstrap_servers)
    known = roll_out(host, name, change, author=author or _user(), reason=reason)
    write_table(_rows(in_force(host, known, name)))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return ""


def _rows(state: dict[str, Any]) -> list[dict[str, object]]:
    return [
        {
            "probe": state["probe"],
            "role": role,
            "version": state[role]["version"] or "-",
            "mode": state[role]["mode"] + (" (paused)" if state["paused"] else ""),
            "share": f"{state[role]['share']:g}",
            "artefact": state[role]["artefact"],
            "fingerprint": state[role]["fingerprint"][:12],
        }
        for role in ("deployed", "candidate")
        if role in state
    ]


def _short(version: dict[str, Any] | None) -> str:
    if version is None:
        return "-"
    share = "" if version["share"] == 1.0 else f" {version['share']:g}"
    return f"{version['version'] or 'own'} {version['mode']}{share}"
