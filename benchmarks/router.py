"""What `Router.route` costs: p50 and p99 for 1, 100 and 10,000 live bindings, with an empty probe.

    python -m benchmarks.router [--records 50000] [--rounds 5]

Each live request has one binding; records go to the bindings in turn. Three figures per mode and number of bindings:

    inline    the probe runs inside `route`
    async     `route` queues the record, 8 workers run the probe beside it; paced, so that they keep up, and each
              figure is of calls that found a queue with room
    flood     async without a pause: the workers fall behind, queues drop their oldest; what a caller pays at worst

The clock is read before and after each call; what reading it costs alone is in the output as `clock_us` and is not
taken off. The rounds are interleaved; a figure is the median of its rounds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from undercurrent.core import Probe, ProbeRegistry, ProbeResult, RequestContext
from undercurrent.router import MetricsSnapshot, Router
from undercurrent.spec import ActivationRecord, ExtractionPoint, TensorType

BINDINGS = (1, 100, 10_000)
MODES = ("inline", "async", "flood")
GOALS_US = {"inline": 10.0, "async": 5.0}
WORKERS = 8
BATCH = 16


class EmptyProbe(Probe):
    """Looks at nothing."""

    def on_activation(self, record: ActivationRecord) -> None:
        """Return at once."""

    def on_end(self, ctx: RequestContext) -> ProbeResult:
        """Return an empty result."""
        return ProbeResult(self.request_id, self.extraction_point_name, None)


def _records(count: int) -> list[ActivationRecord]:
    tensor = np.zeros(256, np.float32)
    return [
        ActivationRecord(f"request-{number}", "mid", 4, 0, TensorType.RESIDUAL_STREAM, tensor, True, 0.0)
        for number in range(count)
    ]


def _settled(router: Router, records: list[ActivationRecord]) -> None:
    """Wait until no queue holds a record."""
    for record in records:
        while router.get_metrics(record.request_id, "mid").queue_depth:
            time.sleep(0.0005)


def measure(mode: str, bindings: int, calls: int) -> dict[str, float]:
    """Return p50 and p99 of one call in microseconds, and the share of records that were dropped."""
    registry = ProbeRegistry(entry_points=list)
    registry.register("empty", EmptyProbe)
    execution = "inline" if mode == "inline" else "async"
    point = ExtractionPoint("mid", 4, "residual_stream", "*", probe_type="empty", execution_mode=execution)  # type: ignore[arg-type]
    records = _records(bindings)
    seen = dropped = 0

    def count(request_id: str, name: str, found: MetricsSnapshot) -> None:
        nonlocal seen, dropped
        seen += found.activation_count
        dropped += found.drop_count

    with Router(registry, worker_pool_size=WORKERS) as router:
        router.attach_metrics_sink(count)
        for record in records:
            router.register_request(record.request_id, [point])
        pause = (lambda batch: _settled(router, batch)) if mode == "async" else None
        _calls(router.route, records, min(calls, 5000), pause)
        took_us = _calls(router.route, records, calls, pause)
    return {
        "p50_us": float(np.percentile(took_us, 50)),
        "p99_us": float(np.percentile(took_us, 99)),
        "dropped_share": dropped / (seen + dropped),
    }


def _calls(
    route: Callable[[ActivationRecord], object],
    records: list[ActivationRecord],
    calls: int,
    pause: Callable[[list[ActivationRecord]], None] | None,
) -> list[float]:
    clock = time.perf_counter_ns
    took: list[int] = []
    batch: list[ActivationRecord] = []
    gc.collect()
    for number in range(calls):
        record = records[number % len(records)]
        before = clock()
        route(record)
        took.append(clock() - before)
        if pause is not None:
            batch.append(record)
            if len(batch) == BATCH:
                pause(batch)
                batch.clear()
    return [one / 1000 for one in took]


def clock_us() -> float:
    """Return what two readings of the clock cost by themselves, p50 in microseconds."""
    return float(np.percentile(_calls(lambda record: None, _records(1), 20_000, None), 50))


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=50_000, help="calls of one round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rounds: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for mode in MODES:
            for bindings in BINDINGS:
                rounds.setdefault((mode, bindings), []).append(measure(mode, bindings, options.records))
    figures: dict[str, dict[str, dict[str, float]]] = {mode: {} for mode in MODES}
    for (mode, bindings), found in rounds.items():
        median = {name: round(statistics.median(one[name] for one in found), 3) for name in found[0]}
        figures[mode][str(bindings)] = median
        print(f"{mode:7} {bindings:6} bindings  " + "  ".join(f"{name} {value}" for name, value in median.items()))
    reached = {
        mode: all(figures[mode][str(bindings)]["p50_us"] <= goal for bindings in BINDINGS)
        for mode, goal in GOALS_US.items()
    }
    summary = {"figures": figures, "clock_us": round(clock_us(), 3), "goals_p50_us": GOALS_US, "reached": reached}
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
