"""Processes that die at the worst moments: between two steps of which the second makes the first known."""

from __future__ import annotations

import pytest

from tests.faults.ring_world import QUICK, RingWorld
from undercurrent.failpoints import VARIABLE
from undercurrent.kafka.client import Assignor
from undercurrent.testing.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.faults, pytest.mark.timeout(300)]

# Who is armed with what, at which passage: in mid-traffic, not at the first of all.
ROUNDS = [("abort_sent:1", "accepted:3"), ("offsets_sent:4", "final_sent:2"), ("committed:4", "stream_started:2")]


@pytest.mark.parametrize("assignor", [Assignor.COOPERATIVE_STICKY])
def test_a_death_between_two_steps_costs_nothing(patient_broker, tmp_path, assignor):
    with RingWorld(patient_broker.settings(**QUICK), tmp_path, seed=3, assignor=assignor, partitions=4) as world:
        armed_host = world.start_host("armed", {VARIABLE: "revoke"})
        armed_worker = world.start_worker("armed", {VARIABLE: "revoke"})
        world.send(8)
        world.under_way()
        # The groups ask them for partitions, for those who stay.
        world.start_host("lasting")
        world.start_worker("lasting")
        died(world, armed_host, armed_worker)
        for of_host, of_worker in ROUNDS:
            armed_host = world.start_host("armed", {VARIABLE: of_host})
            armed_worker = world.start_worker("armed", {VARIABLE: of_worker})
            armed_worker.wait_ready()
            world.send(12)
            died(world, armed_host, armed_worker)
        del world.hosts["armed"], world.workers["armed"]
        world.settle()
        world.stop()
        figures = world.check(may_lose_streams=True)
        assert figures["attempts"] > figures["requests"]
        assert figures["aborts"] > 0


def died(world, host, worker):
    """Wait until both have come to the place where they were told to die."""

    def gone():
        # Traffic goes on until each has come to its place.
        there = [f"{VARIABLE}: kill at passage" in process.log.read_text() for process in (host, worker)]
        if not all(there):
            world.send(2)
        return all(there)

    wait_until(gone, 90.0, f"the death of the armed: {world.folder}", every_s=0.5)
    assert host.wait() == -9
    if "stream_started" in worker.log.read_text():
        # It was its publisher, which the worker replaces, by one that will die there too.
        worker.kill()
    assert worker.wait() == -9
