"""How long a killed probe host's successor needs, with a request open for 2 GB of its partition.

One request opens, then the records of others follow in the same partition, 2 GB in all, with some of its own among
them. The host is killed when it has come to the end. Its successor's clock runs from its start, the import of its
modules included, until a record of the open request that was appended meanwhile is scored: it has the request's state
by then. What the group's session adds to that, in which nobody has the partition, is a setting.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.probe_traffic import WIDTH, Traffic
from benchmarks.stream_parts import Aim, Options
from undercurrent.codec import Codec
from undercurrent.kafka.client import Isolation
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.reader import AssignedReader
from undercurrent.protocol.messages import ProbeVerdict
from undercurrent.testing.brokers import QUICK, Broker
from undercurrent.testing.probe_bench import ProbeBench
from undercurrent.testing.streams import StreamBuilder

AIMS = {"recovery_s": Aim("<", 10.0)}
GIGABYTES = 2.0
PARTS = 16


def measure(broker: Broker, options: Options) -> dict[str, float]:
    """Return `recovery_s`."""
    with tempfile.TemporaryDirectory() as folder:
        traffic = Traffic(broker, Path(folder), 1, QUICK)
        with traffic.bench as bench:
            config = traffic.configure(slot="0")
            long = StreamBuilder("long", width=WIDTH, dtype="bfloat16")
            row = np.zeros(WIDTH, np.float32)
            bench.write(long.key, [long.start(), long.block([0], row)])
            host = bench.start_host(config)
            chunk = int(GIGABYTES * 2**30 / PARTS / (2 * WIDTH))
            for part in range(1, PARTS + 1):
                traffic.load(chunk, options.seed * 100 + part)
                bench.write(long.key, [long.block([part], row)])
            scored = Scored(bench)
            bench.wait(lambda: scored.passes(PARTS), "the host at the end", timeout_s=300.0, interval_s=0.0)
            host.kill()
            bench.write(long.key, [long.block([PARTS + 1], row)])
            time.sleep(7.0)  # until its session is over
            began = time.perf_counter()
            host = bench.start_host(config)
            bench.wait(lambda: scored.passes(PARTS + 1), "the successor at the end", timeout_s=300.0, interval_s=0.0)
            took_s = time.perf_counter() - began
            scored.close()
            assert host.terminate() == 0
    return {"recovery_s": took_s}


class Scored:
    """Counts the tokens of the long request that have a committed score.

    Args:
        bench: whose verdicts.
    """

    def __init__(self, bench: ProbeBench) -> None:
        partitions = OffsetLookup(bench.settings).partitions(bench.plan.verdicts)
        self._reader = AssignedReader(bench.settings, dict.fromkeys(partitions, 0), isolation=Isolation.READ_COMMITTED)
        self._codec = Codec()
        self._count = 0

    def passes(self, count: int) -> bool:
        """Return whether there are more than so many by now."""
        for record in self._reader.poll_batch(5000, 0.1):
            if record.key == b"long":
                said = self._codec.decode(record.value)
                self._count += len(said.score_positions) // 4 if isinstance(said, ProbeVerdict) else 0
        return self._count > count

    def close(self) -> None:
        """End the client."""
        self._reader.close()
