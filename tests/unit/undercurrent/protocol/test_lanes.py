"""Lanes: the inputs of a host that reads several points."""

import pytest

from undercurrent.protocol.lanes import Lanes


def test_the_partitions_of_the_first_topic_are_lanes_of_the_same_number():
    lanes = Lanes(("t.residual", "t.attn"), 3)
    assert [lanes.lane("t.residual", number) for number in range(3)] == [0, 1, 2]
    assert [lanes.where(lane) for lane in (2, 3, 5)] == [("t.residual", 2), ("t.attn", 0), ("t.attn", 2)]
    assert [(lanes.side(lane), lanes.number(lane)) for lane in (1, 4)] == [(0, 1), (1, 1)]
    assert lanes.of(1) == (1, 4)
    assert lanes.whole({0, 1, 2, 4, 5}) == {1, 2}


def test_with_a_single_topic_a_lane_is_a_partition_however_many_there_are():
    lanes = Lanes(("t",))
    assert (lanes.lane("t", 7), lanes.where(7), lanes.of(7), lanes.whole({7, 9})) == (7, ("t", 7), (7,), {7, 9})


def test_several_topics_need_a_number_of_partitions():
    with pytest.raises(ValueError, match="2 topics of 0 partitions"):
        Lanes(("a", "b"))
    with pytest.raises(KeyError):
        Lanes(("a", "b"), 1).lane("c", 0)
