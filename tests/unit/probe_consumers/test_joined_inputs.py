"""What a loop that joins points reads: lanes, who holds them, what is paused, and what cannot be joined."""

from __future__ import annotations

from dataclasses import replace

import pytest

from probe_consumers.config import ServiceSection
from probe_consumers.halves import TORN_AFTER_S, Halves
from probe_consumers.holding import Holding
from probe_consumers.inputs import Inputs
from probe_consumers.states import StatesTopic
from undercurrent.kafka.client import Assignor, group_consumer_config
from undercurrent.kafka.records import Partition, Record
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.protocol.host_events import StateKey
from undercurrent.protocol.streams import StreamId
from undercurrent.topics import TopicPlan

PLAN = TopicPlan(points=("residual", "attn"), activation_partitions=3)
JOINED = Inputs.of(PLAN, ("residual", "attn"))
ALONE = Inputs.of(PLAN, ("attn",))
RESIDUAL, ATTN = (PLAN.activations(point) for point in ("residual", "attn"))


def test_of_one_topic_a_lane_is_its_partition_and_of_several_each_has_its_own():
    assert [ALONE.place(7), ALONE.label(7), ALONE.letters_of(7)] == [Partition(ATTN, 7), "7", PLAN.dlq(ATTN)]
    assert [JOINED.place(lane) for lane in (0, 2, 3, 5)] == [
        Partition(RESIDUAL, 0), Partition(RESIDUAL, 2), Partition(ATTN, 0), Partition(ATTN, 2),
    ]  # fmt: skip
    assert all(JOINED.lane(JOINED.place(lane)) == lane for lane in range(6))
    assert [JOINED.label(lane) for lane in (1, 4)] == ["residual:1", "attn:1"]
    assert [JOINED.letters_of(lane) for lane in (1, 4)] == [PLAN.dlq(RESIDUAL), PLAN.dlq(ATTN)]
    assert JOINED.told([4, 1]) == "residual:1, attn:1"


def test_records_of_several_topics_carry_their_lane():
    records = [Record(topic, 1, 5, b"k", b"v", 0, ()) for topic in (ATTN, RESIDUAL)]
    assert [record.partition for record in JOINED.laned(records)] == [4, 1]
    assert ALONE.laned(records[:1]) == records[:1]


def test_states_of_a_point_lie_where_its_partition_does_and_are_told_apart():
    states = StatesTopic("states", "g", JOINED)
    keys = [states.key(StateKey(lane, StreamId("r", 1, 0))) for lane in (1, 4)]
    assert keys == [b'["g", "residual", 1, "r", 1, 0]', b'["g", "attn", 1, "r", 1, 0]']
    assert [states.place(lane) for lane in (1, 4)] == [Partition("states", 1)] * 2
    assert [states.is_mine(key, 4) for key in keys] == [False, True]


# --- who holds what


def test_a_member_that_keeps_holding_halves_says_so_once_and_is_not_ready(caplog):
    now = [0.0]
    halves = Halves(JOINED, lambda: now[0])
    for at_s, assigned in ((0, {0, 3}), (1, {0, 3, 1}), (1 + TORN_AFTER_S, {0, 3, 1})):
        now[0] = at_s
        halves.look(assigned)
        assert halves.trouble == ""
    for _ in range(3):
        now[0] += 1
        halves.look({0, 3, 1})
    assert "partitions 1 of only some of" in halves.trouble
    assert "service.assignor: range" in halves.trouble
    assert len(caplog.records) == 1
    halves.look({0, 3, 1, 4})
    assert halves.trouble == ""
    # A half that comes and goes is what a group does whose members change.
    for at_s in range(100, 200, 10):
        now[0] = at_s
        halves.look({0, 3, 1} if at_s % 20 else {0, 3})
    assert (halves.trouble, len(caplog.records)) == ("", 1)


class Paused(set):
    """What a member has paused."""

    def pause(self, where):
        self.add(where)

    def resume(self, where):
        self.discard(where)


def test_what_is_ahead_stands_still_beside_what_waits_for_slow_probes():
    paused = Paused()
    holding = Holding(JOINED, paused)
    flowing = {0, 1, 3, 4}
    holding.keep_back({3}, flowing)
    assert paused == {Partition(ATTN, 0)}
    holding.hold(flowing)
    assert len(paused) == 4
    holding.release(())
    assert paused == {Partition(ATTN, 0)}
    holding.hold(flowing)
    holding.keep_back(frozenset(), flowing)
    assert len(paused) == 4
    holding.release([4])
    assert paused == {Partition(ATTN, 1)}
    paused.clear()
    # A lane that begins anew is let go by whoever begins it.
    holding.keep_back({0}, flowing)
    holding.drop([0])
    holding.keep_back({0}, flowing)
    assert paused == {Partition(RESIDUAL, 0)}
    holding.keep_back(frozenset(), flowing - {0})
    assert paused == {Partition(RESIDUAL, 0)}


# --- how partitions are handed out


@pytest.mark.parametrize(
    ("said", "alone", "joined"),
    [
        ({}, Assignor.COOPERATIVE_STICKY, Assignor.RANGE),
        ({"assignor": "range"}, Assignor.RANGE, Assignor.RANGE),
        ({"assignor": "consumer"}, Assignor.CONSUMER, Assignor.CONSUMER),
        ({"assignor": "cooperative-sticky"}, Assignor.COOPERATIVE_STICKY, Assignor.COOPERATIVE_STICKY),
    ],
)
def test_groups_that_join_points_use_range_unless_the_file_says_otherwise(said, alone, joined):
    service = ServiceSection.model_validate(said)
    assert service.assignor_of(("residual",)) is alone
    assert service.assignor_of(("residual", "attn")) is joined


def test_members_that_join_topics_ask_the_broker_for_its_range_assignor():
    settings = KafkaSettings(bootstrap_servers="nowhere:1")
    for together, asked in ((True, "range"), (False, "uniform")):
        config = group_consumer_config(settings, "g", assignor=Assignor.CONSUMER, together=together)
        assert (config["group.protocol"], config["group.remote.assignor"]) == ("consumer", asked)
    config = group_consumer_config(settings, "g", assignor=Assignor.RANGE, together=True)
    assert config["partition.assignment.strategy"] == "range"


def test_labels_of_a_plan_of_other_sizes_do_not_meet():
    wider = Inputs.of(replace(PLAN, activation_partitions=5), ("attn", "residual"))
    assert len({wider.label(lane) for lane in range(10)}) == 10
    assert wider.partners([2]) == {2, 7}
    assert wider.torn({2, 7, 4, 8}) == [3, 4]
