"""Topics brought to their plan, on both brokers."""

from __future__ import annotations

import pytest

from undercurrent.errors import TopicError
from undercurrent.kafka.admin import DifferenceKind, TopicAdmin
from undercurrent.testing.brokers import Broker
from undercurrent.topics import DAY_MS, TopicPlan

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(60)]


def test_apply_creates_mends_and_then_finds_nothing_to_do(broker: Broker, topic_prefix: str) -> None:
    admin = TopicAdmin(broker.settings())
    plan = TopicPlan(prefix=topic_prefix, points=("p",))
    made = admin.apply(plan)
    assert {found.kind for found in made} == {DifferenceKind.MISSING}
    assert len(made) == len(plan.topics())
    admin.check_partitions(plan.topics())
    assert admin.differences(plan.topics()) == []
    assert admin.apply(plan) == []
    actual = admin.describe([plan.prompts, plan.probe_state])
    assert actual[plan.prompts].config["message.timestamp.type"] == "LogAppendTime"
    assert actual[plan.probe_state].config["cleanup.policy"] == "compact"

    longer = TopicPlan(prefix=topic_prefix, points=("p",), generations_retention_ms=4 * DAY_MS)
    mended = admin.apply(longer)
    assert {found.key for found in mended} == {"retention.ms", "segment.ms"}
    assert admin.differences(longer.topics()) == []


def test_another_partition_count_is_refused_and_nothing_else_is_touched(broker: Broker, topic_prefix: str) -> None:
    admin = TopicAdmin(broker.settings())
    admin.apply(TopicPlan(prefix=topic_prefix, verdict_partitions=2))
    for count in (1, 3):
        plan = TopicPlan(
            prefix=topic_prefix, points=("new",), verdict_partitions=count, generations_retention_ms=5 * DAY_MS
        )
        with pytest.raises(TopicError, match=rf"{topic_prefix}\.verdicts: 2 partitions, planned {count}"):
            admin.apply(plan)
        with pytest.raises(TopicError, match="2 partitions"):
            admin.check_partitions([topic for topic in plan.topics() if topic.name == plan.verdicts])
        found = admin.describe([plan.activations("new"), plan.generations])
        assert set(found) == {plan.generations}
        assert found[plan.generations].config["retention.ms"] == str(3 * DAY_MS)


def test_a_missing_topic_fails_the_minutely_check(broker: Broker, topic_prefix: str) -> None:
    with pytest.raises(TopicError, match=f"{topic_prefix}.prompts: missing"):
        TopicAdmin(broker.settings()).check_partitions(TopicPlan(prefix=topic_prefix).topics())


def test_deleting_what_is_not_there_is_nothing(broker: Broker, topic_prefix: str) -> None:
    admin = TopicAdmin(broker.settings())
    plan = TopicPlan(prefix=topic_prefix)
    admin.create([topic for topic in plan.topics() if topic.name == plan.control])
    admin.delete([plan.control])
    admin.delete([plan.control])
    assert admin.describe([plan.control]) == {}
