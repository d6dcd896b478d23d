"""The pipeline that a command's options name, on a cluster that answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from undercurrent.insight.reading import Pipeline


def pipeline_of(config: Path | None, prefix: str | None, bootstrap_servers: str | None) -> Pipeline:
    """Return the topics of a pipeline as the cluster has them.

    Args:
        config: a configuration file; any app's.
        prefix: first part of the topics' names, instead of the configuration's.
        bootstrap_servers: instead of the configuration's.

    Raises:
        ConfigError: no broker is named, or a key is wrong.
        TopicError: there is no such pipeline.
        UnreachableError: no broker answers.
    """
    from undercurrent.cli.planning import plan_of
    from undercurrent.insight.reading import Pipeline
    from undercurrent.pipeline import connection, interactive, read_sections

    sections = read_sections(config)
    # The points are the cluster's: whoever looks on needs no file of them.
    plan = plan_of({key: value for key, value in sections.items() if key != "points"}, config, None, prefix)
    return Pipeline(interactive(connection(sections, bootstrap_servers)), plan.prefix)
