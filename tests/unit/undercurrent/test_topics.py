"""The table of topics, and Kafka's own key rule."""

import dataclasses

import pytest

from undercurrent.errors import TopicError
from undercurrent.topics import DAY_MS, DLQ_EXTRA_BYTES, HOUR_MS, Topic, TopicPlan, murmur2, partition_of


# Values that Apache Kafka's own unit tests give for org.apache.kafka.common.utils.Utils.murmur2, as signed 32 bits.
@pytest.mark.parametrize(
    ("key", "signed"),
    [(b"21", -973932308), (b"foobar", -790332482), (b"a-little-bit-long-string", -985981536)],
)
def test_murmur2_is_java_s(key, signed):
    assert murmur2(key) == signed & 0xFFFFFFFF


def test_partitions_are_spread():
    counts = [0] * 6
    for i in range(6000):
        counts[partition_of(f"request-{i}", 6)] += 1
    assert min(counts) > 800


def test_every_deleting_topic_has_a_dead_letter_topic_that_takes_its_largest_record():
    plan = TopicPlan(points=("a", "b"))
    topics = {t.name: t for t in plan.topics()}
    for topic in [t for t in topics.values() if not t.compact and not t.name.endswith(".dlq")]:
        letter = topics[plan.dlq(topic.name)]
        assert letter.partitions == topic.partitions
        assert letter.max_message_bytes == topic.max_message_bytes + DLQ_EXTRA_BYTES
    assert topics["undercurrent.control"].partitions == topics["undercurrent.control.acks"].partitions == 1
    assert topics[plan.generations].partitions == topics[plan.prompts].partitions
    assert all(t.config["message.timestamp.type"] == "LogAppendTime" for t in topics.values())


def test_compacting_a_stream_topic_is_refused():
    with pytest.raises(TopicError, match="destroy its streams"):
        Topic(name="t", partitions=1, retention_ms=1, compact=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"generations_retention_ms": HOUR_MS}, "finished prompt could run again"),
        ({"control_retention_ms": HOUR_MS}, "abort could be forgotten"),
    ],
)
def test_retentions_that_recovery_depends_on_are_checked(changes, said):
    with pytest.raises(TopicError, match=said):
        dataclasses.replace(TopicPlan(), **changes)


def test_an_unknown_point_names_those_that_exist():
    with pytest.raises(TopicError, match="'c'; the plan has a, b"):
        TopicPlan(points=("a", "b")).activations("c")


def test_a_name_that_kafka_refuses_is_refused():
    with pytest.raises(TopicError, match="A-Z"):
        TopicPlan(points=("späh",)).topics()


@pytest.mark.parametrize("retention_ms", [4, 1000, 60_000, DAY_MS, 7 * DAY_MS + 3])
def test_a_segment_is_at_most_a_quarter_of_the_retention(retention_ms):
    config = Topic(name="t", partitions=1, retention_ms=retention_ms).config
    assert 1 <= int(config["segment.ms"]) <= retention_ms / 4
    assert config["min.insync.replicas"] == "1"


def test_a_retention_that_no_segment_fits_into_is_refused():
    with pytest.raises(TopicError, match="a retention of 3 ms; it must be at least 4"):
        Topic(name="t", partitions=1, retention_ms=3)


def test_copies_in_sync_are_those_that_one_broker_may_be_away_of():
    for copies, given, in_sync in ((1, None, "1"), (2, None, "1"), (3, None, "2"), (5, None, "2"), (3, 3, "3")):
        plan = TopicPlan(points=("p",), replication_factor=copies, min_insync_replicas=given)
        assert {topic.config["min.insync.replicas"] for topic in plan.topics()} == {in_sync}
    with pytest.raises(TopicError, match="min_insync_replicas is 3; accepted: 1 to replication_factor, 2"):
        TopicPlan(replication_factor=2, min_insync_replicas=3)
