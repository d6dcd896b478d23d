"""Consumer groups of probes that join points, as commands know them."""

from __future__ import annotations

import pytest

from undercurrent.cli.groups_known import Groups
from undercurrent.errors import ConfigError
from undercurrent.insight.looking import _reads
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.topics import TopicPlan


def test_a_group_that_joins_topics_is_not_moved_to_an_offset() -> None:
    groups = Groups(KafkaSettings(bootstrap_servers="nowhere:1"), TopicPlan(points=("a", "b")))
    with pytest.raises(ConfigError, match=r"--to 17: .*\.a\+b joins topics.*accepted for it: earliest, latest, or @"):
        list(groups.moves("undercurrent.probes.a+b", "17", None, say_again=False))


@pytest.mark.parametrize(
    ("group", "point", "reads"),
    [
        ("u.probes.a", "a", True),
        ("u.probes.a", "b", False),
        ("u.probes.a+b", "a", True),
        ("u.probes.a+b", "b", True),
        ("u.probes.a+b", "c", False),
        ("u.probes.deep.b+ab", "b", True),
        ("u.probes.c+ab", "b", False),
    ],
)
def test_a_group_reads_each_point_that_its_name_joins(group: str, point: str, reads: bool) -> None:
    assert _reads(group, point) is reads
