"""`undercurrent topics acls`: what each service may do on a cluster that checks it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from undercurrent.acls import Names, Right, Service, commands, rights
from undercurrent.cli.options import Bootstrap, ConfigFile, PointsFile, Prefix
from undercurrent.cli.planning import joined_of, plan_of
from undercurrent.errors import ConfigError
from undercurrent.topics import JOIN

_PLACEHOLDER = "$BOOTSTRAP_SERVERS"


def acls(
    service: Annotated[
        list[str] | None, typer.Option("--service", help="Only this service; may be repeated; all by default.")
    ] = None,
    principal: Annotated[
        list[str] | None,
        typer.Option("--principal", help="SERVICE=User:NAME; may be repeated. User:undercurrent-SERVICE without it."),
    ] = None,
    engine_group: Annotated[
        str | None, typer.Option("--engine-group", help="group.name of the engine workers; the configuration's.")
    ] = None,
    probe_service: Annotated[
        list[str] | None,
        typer.Option("--probe-service", help="service.name of probe hosts, the configuration's; may be repeated."),
    ] = None,
    joined: Annotated[
        list[str] | None,
        typer.Option("--joined", help="What a probe joins, as POINT+POINT, the configuration's; may be repeated."),
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Grant them on the cluster instead of printing them.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON line for each right.")] = False,
    config: ConfigFile = None,
    points: PointsFile = None,
    prefix: Prefix = None,
    bootstrap_servers: Bootstrap = None,
) -> None:
    """Print the rights that each service needs and no more, as lines of kafka-acls.sh; asks no broker without --apply.

    Services: engine, publisher, server, probes, producer, replay, operator, admin. `--apply` needs a client that may
    alter the cluster; it grants what is missing and takes nothing away.
    """
    from undercurrent.pipeline import read_sections

    chosen, principals = _services(service), _principals(principal)
    sections = read_sections(config)
    plan = plan_of(sections, config, points, prefix)
    if not plan.points:
        sys.stderr.write(
            "no extraction point is named (--points, --config): topics and groups of points are left out\n"
        )
    names = Names(
        engine_group or _named(sections, "group", "engine"),
        tuple(probe_service or (_named(sections, "service", "probes"),)),
        _joined(joined, plan.points) or joined_of(sections, config.parent if config is not None else Path()),
    )
    granted = {one: (principals.get(one, f"User:undercurrent-{one.value}"), rights(plan, one, names)) for one in chosen}
    if apply:
        _apply(granted, sections, bootstrap_servers)
    elif json_lines:
        _print_json(granted)
    else:
        for one, (user, some) in granted.items():
            lines = commands(user, some, bootstrap_servers or _PLACEHOLDER)
            sys.stdout.write("\n".join((f"# {one.value}", *lines, "")))


def _apply(
    granted: Mapping[Service, tuple[str, Sequence[Right]]], sections: Mapping[str, Any], servers: str | None
) -> None:
    from undercurrent.kafka.acl_admin import grant
    from undercurrent.pipeline import connection, interactive

    settings = interactive(connection(sections, servers))
    for one, (user, some) in granted.items():
        sys.stdout.write(f"{one.value}: {user} has {grant(settings, user, some)} rights\n")


def _print_json(granted: Mapping[Service, tuple[str, Sequence[Right]]]) -> None:
    from undercurrent.cli.jsonl import dumps

    for one, (user, some) in granted.items():
        for right in some:
            facts = {
                "service": one.value,
                "principal": user,
                "resource": right.resource.value,
                "name": right.name,
                "prefixed": right.prefixed,
                "operation": right.operation.value,
            }
            sys.stdout.write(dumps(facts) + "\n")


def _named(sections: Mapping[str, Any], section: str, otherwise: str) -> str:
    """Return the `name` in a section of a service's configuration."""
    found = sections.get(section)
    return str(found.get("name", otherwise)) if isinstance(found, Mapping) else otherwise


def _joined(names: Sequence[str] | None, points: Sequence[str]) -> tuple[str, ...]:
    if names and not points:
        raise ConfigError(f"--joined {names[0]}: no point is known; name the points with --points or --config")
    for name in names or ():
        parts = name.split(JOIN)
        if len(parts) < 2 or not set(parts) <= set(points):
            raise ConfigError(f"--joined {name}: accepted: points with {JOIN} between them, of {', '.join(points)}")
    return tuple(names or ())


def _services(asked: Sequence[str] | None) -> list[Service]:
    return [_service(name, "--service") for name in asked] if asked else list(Service)


def _service(name: str, option: str) -> Service:
    try:
        return Service(name)
    except ValueError:
        raise ConfigError(f"{option} {name}: there is no such service; there are {', '.join(Service)}") from None


def _principals(pairs: Sequence[str] | None) -> dict[Service, str]:
    found = {}
    for pair in pairs or ():
        name, separator, user = pair.partition("=")
        if not separator or not user.startswith("User:") or user == "User:":
            raise ConfigError(f"--principal {pair}: expected SERVICE=User:NAME, for example engine=User:CN=engine")
        found[_service(name, "--principal")] = user
    return found
