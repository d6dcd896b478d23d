"""How probe hosts scale: 1, 2, 4 and 8 partitions with as many hosts, each a process, on the cores that there are.

The traffic is that of the part `consume`. The hosts join while the topic is empty and are stopped while it is filled;
then the clock runs from when they go on until everything is committed, as their group's offsets tell. The broker is on
the same cores.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.probe_traffic import RECORD_BYTES, Traffic
from benchmarks.stream_parts import Aim, Options
from undercurrent.kafka.client import Assignor
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.protocol.host_position import HostMetadata
from undercurrent.testing.brokers import Broker
from undercurrent.testing.probe_bench import ProbeBench

AIMS: dict[str, Aim] = {}

COUNTS = (1, 2, 4, 8)
# Members that are stopped stay members.
PATIENT: dict[str, str | int] = {"session.timeout.ms": 120_000, "heartbeat.interval.ms": 3000}


def measure(broker: Broker, options: Options) -> dict[str, float]:
    """Return the rate of each number of partitions, and that of eight to that of one."""
    print(f"{os.cpu_count()} cores")
    found: dict[int, float] = {}
    for count in COUNTS:
        with tempfile.TemporaryDirectory() as folder:
            traffic = Traffic(broker, Path(folder), count, PATIENT, assignor=Assignor.RANGE)
            with traffic.bench as bench:
                found[count] = _rate(traffic, bench, count, options)
        print(f"{count} partitions, {count} hosts: {found[count]:9,.0f} records/s, "
              f"{found[count] * RECORD_BYTES / 1e6:4,.0f} MB/s")  # fmt: skip
    return {
        **{f"scale_{count}_records_per_s": rate for count, rate in found.items()},
        "scale_8_to_1": found[8] / found[1],
    }


def _rate(traffic: Traffic, bench: ProbeBench, count: int, options: Options) -> float:
    config = traffic.configure()
    group = traffic.group
    hosts = [bench.start_host(config) for _ in range(count)]

    def share() -> bool:
        held = {beat.member: beat.partitions for beat in bench.heartbeats() if beat.service == group}
        return len(held) == count and all(len(partitions) == 1 for partitions in held.values())

    bench.wait(share, "a partition for each host", timeout_s=180.0, interval_s=1.0)
    for host in hosts:
        host.freeze()
    records = traffic.load(int(options.seconds * 8000), options.seed)
    lookup = OffsetLookup(bench.settings)
    where = lookup.partitions(bench.topic)
    began = time.perf_counter()
    for host in hosts:
        host.thaw()

    def done() -> bool:
        told = (HostMetadata.from_text(text) for _, text in lookup.committed(group, where).values())
        return sum(metadata.emitted_up_to for metadata in told if metadata is not None) >= records

    bench.wait(done, "everything committed", timeout_s=300.0, interval_s=0.05)
    took_s = time.perf_counter() - began
    assert np.all([host.terminate() == 0 for host in hosts])
    return records / took_s
