"""The topics that a command's options make."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from undercurrent.topics import TopicPlan


def joined_of(sections: Mapping[str, Any], folder: Path) -> tuple[str, ...]:
    """Return what probes join, where a configuration names bindings; nothing of others.

    Args:
        sections: of the configuration file.
        folder: where relative paths begin.

    Raises:
        ConfigError: the bindings cannot be read or are wrong.
    """
    named = sections.get("probes")
    if not isinstance(named, str) and sections.get("bindings") is None:
        return ()
    from undercurrent.probes.bindings import bindings_in, load_bindings

    found = load_bindings(folder / named) if isinstance(named, str) else bindings_in(sections["bindings"])
    return tuple(dict.fromkeys(binding.point for binding in found if binding.points))


def groups_of(sections: Mapping[str, Any], plan: TopicPlan, config: Path | None) -> list[str]:
    """Return the consumer groups that a configuration's app and those beside it have, by their usual names.

    Raises:
        ConfigError: it names bindings that cannot be read or are wrong.
    """
    from undercurrent import acls

    def name(section: str, usual: str) -> str:
        return str((sections.get(section) or {}).get("name", usual))

    joined = joined_of(sections, config.parent if config is not None else Path())
    names = acls.Names(name("group", "engine"), (name("service", "probes"),), joined)
    return acls.groups_of(plan, names)


def plan_of(sections: Mapping[str, Any], config: Path | None, points: Path | None, prefix: str | None) -> TopicPlan:
    """Return the topics of a configuration.

    Args:
        sections: of the configuration file.
        config: the file; its paths begin in its folder.
        points: extraction points, instead of the configuration's.
        prefix: first part of each name, instead of the configuration's.

    Raises:
        ConfigError: a field is unknown or wrong.
        SpecError: the points cannot be read.
    """
    from undercurrent.errors import ConfigError, TopicError
    from undercurrent.pipeline import topic_plan
    from undercurrent.topics import check_prefix

    given = dict(sections)
    if points is not None:
        given["points"] = points.resolve()
    if prefix is not None:
        try:
            check_prefix(prefix)
        except TopicError as exc:
            raise ConfigError(f"--{exc}") from exc
        given["topics"] = {**(given.get("topics") or {}), "prefix": prefix}
    try:
        return topic_plan(given, config.parent if config is not None else Path())
    except ConfigError as exc:
        if config is None:
            raise
        raise ConfigError(f"{config}: {exc}") from exc
