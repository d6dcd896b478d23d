"""What a spec must be like to run in a pipeline, where probes live in other processes."""

from __future__ import annotations

import re

from undercurrent.errors import SpecValidationError
from undercurrent.spec.enums import ExecutionMode
from undercurrent.spec.point import ExtractionPoint, ProbeSpec

# A point's name is the end of a topic's name; Kafka allows 249 characters in all.
_TOPIC_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,149}")


def check_pipeline(spec: ProbeSpec) -> None:
    """Refuse a spec that a pipeline cannot honour in full.

    Args:
        spec: the spec of the deployment.

    Raises:
        SpecValidationError: a point is inline, its name is no part of a topic's name, or it asks for what capture
            cannot do.
    """
    for point in spec:
        for field, reason in _objections(point):
            raise SpecValidationError(reason, point=point.name, field=field)


def _objections(point: ExtractionPoint) -> list[tuple[str, str]]:
    found = []
    if point.execution_mode is not ExecutionMode.ASYNC:
        found.append(("execution_mode", "inline belongs to the embedded adapter; accepted in a pipeline: async"))
    if not _TOPIC_PART.fullmatch(point.name):
        found.append(("name", "names a topic: accepted: up to 150 of A-Z a-z 0-9 . _ -, a letter or digit first"))
    return found
