"""A probe host beside raw consume() of the same bytes: decoding, scoring, verdicts and transactions included.

A topic of four partitions holds decode steps of 64 requests, 4096 x bfloat16 each, 8 KB a record. The host is one loop
in this process, as `undercurrent probes run` has it, with one linear probe; its clock runs from its first batch until
everything is decided on. Raw is `Consumer.consume` of the same batch size with the same settings and `value()` of each
message, in this process too; the broker is beside both.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.probe_traffic import RECORD_BYTES, Traffic
from benchmarks.stream_parts import Aim, Options, in_turn, ratio
from undercurrent.testing.brokers import Broker

AIMS = {"consume_ratio": Aim(">=", 0.5)}


def measure(broker: Broker, options: Options) -> dict[str, float]:
    """Return `consume_ratio` and the rates behind it."""
    with tempfile.TemporaryDirectory() as folder:
        traffic = Traffic(broker, Path(folder))
        with traffic.bench:
            records = traffic.load(int(options.seconds * 20_000), options.seed)
            traffic.raw_rate(records)
            found = in_turn(
                {"host": lambda: traffic.host_rate(records), "raw": lambda: traffic.raw_rate(records)}, options
            )
    medians = {side: float(np.median(rates)) for side, rates in found.items()}
    for side, rate in medians.items():
        each = " ".join(f"{one:,.0f}" for one in found[side])
        print(f"{side:5} {rate:9,.0f} records/s, {rate * RECORD_BYTES / 1e6:4,.0f} MB/s; rounds: {each}")
    return {"consume_ratio": ratio(found, "host", "raw"), "consume_records_per_s": medians["host"]}
