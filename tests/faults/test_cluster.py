"""Three brokers of which the leader is killed in mid-stream: a stall, and nothing else."""

from __future__ import annotations

import pytest

from tests.faults.ring_prompts import POINT
from tests.faults.ring_world import QUICK, RingWorld
from undercurrent.kafka.client import make_admin
from undercurrent.testing.clusters import apache_cluster

pytestmark = [pytest.mark.kafka, pytest.mark.faults, pytest.mark.alone, pytest.mark.timeout(300)]


def test_a_leader_that_is_killed_costs_no_output(tmp_path):
    with (
        apache_cluster(3) as cluster,
        RingWorld(cluster.settings(**QUICK), tmp_path, seed=31, partitions=1, copies=3) as world,
    ):
        worker = world.start_worker()
        world.start_host()
        worker.wait_ready()
        world.send(8)
        world.under_way()
        led = leaders(cluster)
        of_streams = led[world.bench.plan.activations(POINT)]
        cluster.node(of_streams).kill()
        world.send(8)
        world.settle()
        assert leaders(cluster)[world.bench.plan.activations(POINT)] != of_streams
        world.stop()
        world.check()


def leaders(cluster):
    """Return who leads the first partition of each topic, by the topic's name."""
    return {
        name: topic.partitions[0].leader
        for name, topic in make_admin(cluster.settings()).list_topics(timeout=10).topics.items()
    }
