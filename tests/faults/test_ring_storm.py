"""A whole ring in a storm: processes killed, ended and frozen, a network that is cut, groups that never rest."""

from __future__ import annotations

import random
import time

import pytest

from tests.faults.ring_prompts import POINT
from tests.faults.ring_world import QUICK, RingWorld
from tests.faults.storm import LONG_S, Storm, strangers
from undercurrent.kafka.client import Assignor
from undercurrent.testing.brokers import apache_kafka
from undercurrent.testing.cut_proxy import cuttable_kafka

pytestmark = [pytest.mark.kafka, pytest.mark.faults, pytest.mark.alone, pytest.mark.timeout(300)]


def test_every_process_is_killed_ended_and_frozen_while_the_ring_works(tmp_path):
    with apache_kafka() as broker, RingWorld(broker.settings(**QUICK), tmp_path, seed=11) as world:
        start_two_of_each(world)
        storm = Storm(world, random.Random(11), broker)
        world.send(8)
        world.under_way()
        # What becomes of brokers is played by tests of its own, and by the soak.
        names = ["publisher frozen", "publisher told to end", "host told to end", "worker killed", "host killed"]
        storm.run(150.0, names)
        world.settle()
        world.stop()
        world.check(may_die=True, may_lose_streams=True)


@pytest.mark.parametrize("assignor", [Assignor.COOPERATIVE_STICKY, Assignor.CONSUMER])
def test_groups_that_never_come_to_rest_lose_and_double_nothing(patient_broker, tmp_path, assignor):
    options = QUICK if assignor is Assignor.COOPERATIVE_STICKY else {}
    world = RingWorld(patient_broker.settings(**options), tmp_path, seed=12, assignor=assignor, partitions=4)
    with world:
        worker = world.start_worker()
        world.start_host()
        worker.wait_ready()
        plan = world.bench.plan
        of_prompts = strangers(world, f"{plan.prefix}.engine", plan.prompts, assignor, 1)
        of_streams = strangers(world, f"{plan.prefix}.probes.{POINT}", plan.activations(POINT), assignor, 2)
        with of_prompts as prompts, of_streams as streams:
            # That they come and go is what is played: so long that each group was turned over several times.
            until = time.monotonic() + 12.0
            while time.monotonic() < until or min(sum(prompts), sum(streams)) < 3:
                world.send(3)
                time.sleep(0.5)
        world.settle()
        world.stop()
        world.check()


def test_a_network_that_is_cut_for_half_of_the_ring(tmp_path):
    with (
        cuttable_kafka("far") as (broker, networks),
        RingWorld(broker.settings(**QUICK), tmp_path, seed=13) as world,
    ):
        network = networks["far"]
        world.start_worker("engine-0", kafka=network.settings(**QUICK))
        world.start_host("host-0", kafka=network.settings(**QUICK))
        world.workers["engine-0"].wait_ready()
        world.send(6)
        world.under_way()
        world.start_worker("engine-1")
        world.start_host("host-1")
        for reset in (False, True):
            world.send(6)
            world.under_way()
            with network.cut(reset=reset):
                time.sleep(LONG_S)  # how long it is cut is what is played
            world.send(6)
        world.settle()
        world.stop()
        figures = world.check()
        assert figures["attempts"] > figures["requests"]


def start_two_of_each(world):
    for number in range(2):
        world.start_worker(f"engine-{number}")
        world.start_host(f"host-{number}")
    for worker in world.workers.values():
        worker.wait_ready()
