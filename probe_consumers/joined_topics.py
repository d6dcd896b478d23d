"""Whether the topics of points that are joined can be joined at all."""

from __future__ import annotations

from collections.abc import Mapping

from probe_consumers.config import HostConfig
from undercurrent.errors import TopicError


def check_joined(config: HostConfig, counts: Mapping[str, int]) -> None:
    """Refuse to join topics with unequal numbers of partitions: a request's streams would lie anywhere.

    Args:
        config: what to run.
        counts: partitions of each topic that is there.

    Raises:
        TopicError: it names bindings, topics, their counts and what to do.
    """
    for name in config.joined:
        topics = [config.plan.activations(point) for point in config.sources[name]]
        found = {topic: counts[topic] for topic in topics if topic in counts}
        if len(set(found.values())) > 1:
            bindings = ", ".join(repr(bound.binding.name) for bound in config.bounds if bound.binding.point == name)
            listed = ", ".join(f"{topic} has {count}" for topic, count in found.items())
            raise TopicError(
                f"binding {bindings}: field 'points': {listed} partitions; a probe can only join topics that have "
                "equally many, since a request's streams lie in partitions of the same number. A count is never "
                "changed: use another topics.prefix, under which `undercurrent topics apply` makes all of them alike"
            )
