"""What transactions cost a probe host: its rate with them beside its rate without.

The host and the topic are those of the part `consume`. Without transactions the same verdicts go through an idempotent
producer, which is never waited for, and no offset is committed: nothing of what makes an output appear once is left.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.probe_traffic import Traffic
from benchmarks.stream_parts import Aim, Options, in_turn, ratio
from probe_consumers.transactor import Transactor
from undercurrent.codec import Codec
from undercurrent.kafka.publisher import Publisher
from undercurrent.protocol.host_events import Transaction
from undercurrent.testing.brokers import Broker

AIMS = {"commit_overhead": Aim("<", 0.05)}


def measure(broker: Broker, options: Options) -> dict[str, float]:
    """Return `commit_overhead`."""
    with tempfile.TemporaryDirectory() as folder:
        traffic = Traffic(broker, Path(folder))
        publisher, codec, topic = Publisher(broker.settings()), Codec(), traffic.bench.plan.verdicts

        class Plain(Transactor):
            """Writes the verdicts, without a transaction."""

            def write(self, transaction: Transaction, _group_metadata: object) -> bool:
                for verdict in transaction.verdicts:
                    publisher.produce(topic, codec.encode(verdict), key=verdict.request_id.encode())
                publisher.poll(0.0)
                return True

        with traffic.bench:
            records = traffic.load(int(options.seconds * 20_000), options.seed)
            traffic.host_rate(records)
            found = in_turn(
                {"with": lambda: traffic.host_rate(records), "without": lambda: traffic.host_rate(records, Plain)},
                options,
            )
        publisher.close()
    for side, rates in found.items():
        print(f"{side:8} {np.median(rates):9,.0f} records/s; rounds: {' '.join(f'{one:,.0f}' for one in rates)}")
    return {"commit_overhead": 1 - ratio(found, "with", "without")}
