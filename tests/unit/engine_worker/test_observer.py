"""What a worker counts of its publisher and of its lag."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from engine_worker.observer import Observer
from engine_worker.publisher import Report
from undercurrent.kafka.records import Partition
from undercurrent.protocol.worker import WorkerCore
from undercurrent.service.health import Heartbeat
from undercurrent.service.metrics import EngineMetrics, PublisherMetrics


class Lookup:
    def end(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return dict.fromkeys(partitions, 10)


class Core:
    """A worker that owns what it is told to own."""

    running = waiting = 0
    proving = False

    def __init__(self) -> None:
        self.lows: dict[int, int] = {}

    def paused(self) -> dict[int, str | None]:
        return dict.fromkeys(self.lows)

    def positions(self) -> dict[int, tuple[int, object]]:
        return {number: (low, None) for number, low in self.lows.items()}


def observer(registry: CollectorRegistry) -> Observer:
    return Observer(
        prompts="prompts",
        engine=EngineMetrics(registry),
        publisher=PublisherMetrics(registry, ["p"]),
        lookup=Lookup(),  # type: ignore[arg-type]
        check_partitions=lambda: None,
        steps=lambda: 0,
        heartbeat=Heartbeat("loop", 30.0),
        rings=(),
        stall_s=60.0,
    )


def test_what_the_publisher_lost_or_holds_is_counted() -> None:
    registry = CollectorRegistry()
    said = observer(registry)
    report = Report(refused={"p": 3}, faults={"bad_order": 2}, waiting_s=0.5, waiting_bytes=700)
    said.report({name: getattr(report, name) for name in Report.__slots__})

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"undercurrent_publisher_{name}", labels)

    assert value("delivery_errors_total", point="p") == 3
    assert value("capture_faults_total", kind="bad_order") == 2
    assert value("buffer_used_bytes") == 700
    said.report({name: getattr(Report(), name) for name in Report.__slots__})
    assert value("buffer_used_bytes") == 0


def test_the_lag_of_a_partition_goes_with_it() -> None:
    registry, core = CollectorRegistry(), Core()
    said = observer(registry)

    def lags() -> dict[str, float]:
        family = next(f for f in registry.collect() if f.name == "undercurrent_engine_prompt_lag_records")
        return {sample.labels["partition"]: sample.value for sample in family.samples}

    def look(lows: dict[int, int]) -> None:
        core.lows = lows
        said._set_gauges(_core(core))
        asyncio.run(said._see_lag())

    look({0: 4, 1: 10})
    assert lags() == {"0": 6.0, "1": 0.0}
    look({1: 9})
    assert lags() == {"1": 1.0}


def _core(core: Core) -> WorkerCore:
    return core  # type: ignore[return-value]
