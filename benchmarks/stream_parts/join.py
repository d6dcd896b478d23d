"""A probe host that joins two points, beside one that reads one of them: records and bytes a second of a backlog.

Two topics of four partitions hold decode steps of 64 requests, 4096 x bfloat16 each, 8 KB a record, one topic a point.
Both hosts are one loop in this process, as `undercurrent probes run` has it, with one linear probe: of 4096 elements,
and of the 8192 of a joined row. The clock of each runs from its first batch until everything is decided on; the broker
is beside both. A joining host's records are those of both topics.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.probe_traffic import RECORD_BYTES, Traffic
from benchmarks.stream_parts import Aim, Options, in_turn, ratio
from undercurrent.kafka.client import Assignor
from undercurrent.testing.brokers import Broker

AIMS: dict[str, Aim] = {}


def measure(broker: Broker, options: Options) -> dict[str, float]:
    """Return `join_ratio` and the rates behind it."""
    with tempfile.TemporaryDirectory() as folder:
        traffic = Traffic(broker, Path(folder), assignor=Assignor.RANGE, others=("attn",))
        with traffic.bench:
            records = traffic.load(int(options.seconds * 5_000), options.seed)
            traffic.host_rate(records)
            found = in_turn(
                {
                    "joining": lambda: traffic.host_rate(2 * records, joined=True),
                    "plain": lambda: traffic.host_rate(records),
                },
                options,
            )
    medians = {side: float(np.median(rates)) for side, rates in found.items()}
    for side, rate in medians.items():
        each = " ".join(f"{one:,.0f}" for one in found[side])
        print(f"{side:7} {rate:9,.0f} records/s, {rate * RECORD_BYTES / 1e6:4,.0f} MB/s; rounds: {each}")
    return {
        "join_ratio": ratio(found, "joining", "plain"),
        "join_records_per_s": medians["joining"],
        "plain_records_per_s": medians["plain"],
    }
