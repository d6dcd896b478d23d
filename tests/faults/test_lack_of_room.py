"""No room: a ring that is full because the broker is slow, a disk that is full because nobody looked after it."""

from __future__ import annotations

import time

import pytest

from tests.faults.ring_world import QUICK, RingWorld
from undercurrent.testing.brokers import apache_kafka, find_kafka_home
from undercurrent.testing.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.faults, pytest.mark.timeout(300)]

# 32 KiB for each token of two layers.
WIDE = {"width": 4096, "layers": 4}


def test_what_a_full_ring_loses_is_declared_and_the_engine_goes_on(patient_broker, tmp_path):
    room = {"publisher": {"ring_mib": 2, "max_cycle_mib": 1, "buffer_mib": 1}}
    # Nobody is missed meanwhile: requests that ran again would be whole.
    patient = {"session.timeout.ms": 60_000}
    with RingWorld(
        patient_broker.settings(**patient), tmp_path, seed=21, tokens=(100, 200), engine=WIDE, sections=room
    ) as world:
        worker = world.start_worker()
        world.start_host()
        worker.wait_ready()
        world.send(8)
        world.under_way()
        patient_broker.pause()
        time.sleep(4.0)  # the ring holds less than half a second of it
        patient_broker.resume()
        world.send(4)
        world.settle()
        world.stop()
        figures = world.check(lossless=False)
        assert figures["rows_dropped"] > 0
        assert figures["completed"] + figures["aborted"] == 12


def test_a_broker_whose_disk_is_full_loses_nothing_that_it_took(tmp_path):
    find_kafka_home()  # a container's limit is its own
    room = {"publisher": {"ring_mib": 128}}
    with (
        apache_kafka(properties={"log.segment.bytes": "104857600"}) as broker,
        RingWorld(
            broker.settings(**QUICK), tmp_path, seed=22, partitions=1, tokens=(60, 120), engine=WIDE, sections=room
        ) as world,
    ):
        broker.stop()
        broker.largest_file_kib = 30_000
        broker.start()
        worker = world.start_worker()
        world.start_host()
        worker.wait_ready()
        world.send(24)  # 24 x 90 x 32 KiB: more than twice of what one file takes
        wait_until(lambda: not broker.running, 60.0, f"the end of a broker without room\n{broker.last_lines()}")
        assert "IOException" in broker.log_path.read_text(errors="replace")
        time.sleep(2.0)  # everybody meets a broker that is not there
        broker.largest_file_kib = None
        broker.start()
        world.settle()
        world.stop()
        world.check()
