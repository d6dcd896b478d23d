"""What is healthy, degraded and down."""

from __future__ import annotations

from dataclasses import replace

import pytest

from undercurrent.insight.health import (
    GroupState,
    Level,
    Limits,
    PartitionState,
    PointState,
    Status,
    level_of,
    troubles,
)

ENGINES = GroupState(
    name="t.engine",
    topic="t.prompts",
    members=1,
    partitions=(PartitionState(number=0, end=10, emitted=10, lag=0, owner="e"),),
)
HOSTS = GroupState(name="t.probes.p", topic="t.activations.p", members=1, beat_age_s=0.5)


def status(**fields):
    known = {"prompts": 10, "engines": [ENGINES], "hosts": [HOSTS], "points": [PointState(name="p", streams=3)]}
    known |= {"guards": {"g": {"complete": 4}}, "letters": {"t.prompts.dlq": (7, 0)}, "acks": {"applied": 1}}
    return Status(prefix="t", at_ms=0, window_s=60.0, **{**known, **fields})


def of(**fields):
    found = troubles(status(**fields), Limits())
    return level_of(found), [trouble.text for trouble in found]


def test_a_pipeline_without_troubles_is_healthy():
    assert of() == (Level.HEALTHY, [])


def test_a_server_without_prompts_and_without_probes_is_healthy():
    assert of(prompts=0, engines=[], hosts=[], guards={}) == (Level.HEALTHY, [])


@pytest.mark.parametrize(
    ("fields", "level", "said"),
    [
        ({"engines": []}, Level.DOWN, "ever taken a prompt"),
        ({"engines": [replace(ENGINES, members=0)]}, Level.DOWN, "no engine worker is in the group"),
        ({"hosts": [replace(HOSTS, members=0, beat_age_s=None)]}, Level.DEGRADED, "not guarded"),
        ({"hosts": [replace(HOSTS, beat_age_s=6.0)]}, Level.DEGRADED, "was heard of for 6 s"),
        ({"hosts": [replace(HOSTS, lag_s=11.0)]}, Level.DEGRADED, "11 s behind"),
        ({"points": [PointState(name="p", dropped=3)]}, Level.DEGRADED, "3 activations of p dropped"),
        ({"points": [PointState(name="p", broken=1)]}, Level.DEGRADED, "1 stream of p ended as lost"),
        ({"letters": {"t.prompts.dlq": (7, 2)}}, Level.DEGRADED, "2 dead letters lately"),
        ({"guards": {"g": {"complete": 1, "absent": 2, "behind": 1}}}, Level.DEGRADED, "2 absent, 1 behind"),
        ({"acks": {"braked": 5}}, Level.DEGRADED, "5 recent aborts"),
    ],
)
def test_each_trouble_is_told(fields, level, said):
    found, texts = of(**fields)
    assert found is level
    assert len(texts) == 1
    assert said in texts[0]


def test_an_old_open_request_is_named_with_its_age():
    old = PartitionState(number=3, end=10, emitted=5, lag=5, oldest="r-1", oldest_age_s=301.0)
    level, (text,) = of(engines=[replace(ENGINES, partitions=(old,))])
    assert level is Level.DEGRADED
    assert text == "'r-1', the oldest open request of partition 3 of t.prompts, is 301 s old"


def test_the_worst_comes_first():
    level, texts = of(engines=[replace(ENGINES, members=0)], letters={"t.prompts.dlq": (7, 2)})
    assert level is Level.DOWN
    assert "group" in texts[0]
