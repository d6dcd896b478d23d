"""Engine workers in a storm for as long as one wants: what was done to them, and what it cost.

    python -m benchmarks.engine_storm --seconds 60 [--seed 1] [--assignor consumer]

Prints the counts, then what is wrong with the record, which should be nothing; exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from undercurrent.kafka.client import Assignor
from undercurrent.testing.cut_proxy import cuttable_kafka
from undercurrent.testing.engine_bench import EngineBench
from undercurrent.testing.storm import PROPERTIES, SESSION, Storm, StormPlan


def main() -> int:
    """Play one storm and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    grouping = [Assignor.COOPERATIVE_STICKY, Assignor.CONSUMER]
    parser.add_argument("--assignor", type=Assignor, choices=grouping, default=grouping[0])
    given = parser.parse_args()
    options = SESSION if given.assignor is Assignor.COOPERATIVE_STICKY else {}
    plan = StormPlan(seconds=given.seconds, seed=given.seed, options=options)
    with (
        tempfile.TemporaryDirectory() as folder,
        cuttable_kafka("a", "b", properties=PROPERTIES) as (broker, networks),
        EngineBench(broker.settings(), Path(folder), assignor=given.assignor, partitions=4) as bench,
    ):
        report = Storm(bench, list(networks.values()), plan).run()
    print(report)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
