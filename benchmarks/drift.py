"""What watching for drift costs a probe host: the same batches with a probe that carries a reference and without.

    python -m benchmarks.drift [--width 2048] [--streams 64] [--steps 200] [--pairs 5]

Batches are those of a decode: a row per stream and step. The last line is one JSON object: microseconds per record of
scoring and judging, and what watching adds, the least of each.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probe_consumers.bound import Bound
from probe_consumers.drift import DriftSeer
from probe_consumers.runner import BindingRunner
from undercurrent.codec import Codec
from undercurrent.probes import Binding, LinearProbe, LoadedProbe
from undercurrent.protocol.host_events import Step
from undercurrent.protocol.streams import StreamTable
from undercurrent.testing.streams import StreamBuilder

REFERENCE: dict[str, NDArray[Any]] = {
    "drift_score.edges": np.array([0.0]),
    "drift_score.counts": np.array([1.0, 1.0]),
    "drift_score.moments": np.array([500.0, 0.0, 1.0]),
    "drift_norm.moments": np.array([500.0, 0.0, 0.1, 0.4]),
    "drift_verdicts": np.array([0.01, 500.0, 1e9]),
}


def batches(streams: int, steps: int, width: int) -> list[list[Step]]:
    """Return the steps of each batch: first every stream's start, then a row of each."""
    rng, codec, table = np.random.default_rng(0), Codec(), StreamTable("residual")
    rows = rng.normal(size=(1, 1, width)).astype(np.float16)
    builders = [StreamBuilder(f"r{number}", width=width, dtype="float16") for number in range(streams)]
    offset, made = 0, []
    for at in range(-1, steps):
        batch = []
        for builder in builders:
            value = builder.start() if at < 0 else builder.block([at], rows)
            for event in table.observe(offset, codec.decode(value)):
                batch.append(Step(partition=0, offset=offset, timestamp_us=0, event=event, silent=False))
            offset += 1
        made.append(batch)
    return made


def seconds(made: Sequence[list[Step]], width: int, *, watched: bool) -> float:
    """Return the processor time of judging every batch but the first."""
    probe = LinearProbe.from_arrays(
        np.ones(width), 0.0, layer=0, tensor_type="residual_stream", threshold=1e9, name="guard"
    )
    probe = LinearProbe(replace(probe.artefact, reference=REFERENCE))
    factory = LinearProbe.factory(artefact=probe.artefact)
    loaded = LoadedProbe(factory=factory, sample=probe, fingerprint=probe.fingerprint)
    bounds = [Bound(Binding(name="guard", point="residual", probe="p"), loaded)]
    runner = BindingRunner(bounds, "s", lambda: 0, drift=DriftSeer() if watched else None)
    list(runner.process(made[0]))
    began = time.process_time()
    for batch in made[1:]:
        list(runner.process(batch))
        list(runner.watermarks(0))
    return time.process_time() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("width", 2048), ("streams", 64), ("steps", 200), ("pairs", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    made = batches(given.streams, given.steps, given.width)
    records = given.streams * given.steps
    took: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * given.pairs):
        watched = number % 4 in (1, 2)  # neither comes first more often
        took[watched].append(1e6 * seconds(made, given.width, watched=watched) / records)
    # The least: what else runs on the machine only adds.
    plain = min(took[False])
    added = min(took[True]) - plain
    print(f"width {given.width}, {given.streams} streams: {plain:.2f} us a record, watching adds {added:.2f} us")
    print(json.dumps({"us_per_record": round(plain, 3), "added_us": round(added, 3), "pairs": given.pairs}))


if __name__ == "__main__":
    main()
