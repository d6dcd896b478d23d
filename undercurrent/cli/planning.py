"""The topics that a command's options make."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from undercurrent.topics import TopicPlan


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
    from undercurrent.pipeline import topic_plan

    given = dict(sections)
    if points is not None:
        given["points"] = points.resolve()
    if prefix is not None:
        given["topics"] = {**(given.get("topics") or {}), "prefix": prefix}
    return topic_plan(given, config.parent if config is not None else Path())
