"""What a worker counts of its publisher and of its lag."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from engine_worker.observer import Observer
from engine_worker.publisher_cycle import Cycle, PointCounts
from engine_worker.publisher_telling import Report
from tests.unit import messages
from undercurrent.kafka.records import Partition
from undercurrent.protocol.brake import Brake
from undercurrent.protocol.guarding import Gap, Unguarded
from undercurrent.protocol.messages import AckOutcome, ControlAck, GenerationKind, Guard, GuardState, Outcome
from undercurrent.protocol.worker import WorkerCore
from undercurrent.service.health import Heartbeat
from undercurrent.service.metrics import EngineMetrics, PublisherMetrics
from undercurrent.spec import OnUnavailable


class Lookup:
    def end(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return dict.fromkeys(partitions, 10)


class Core:
    """A worker that owns what it is told to own."""

    running = waiting = held = 0
    proving = False
    alone = None

    def __init__(self) -> None:
        self.lows: dict[int, int] = {}
        self.brake = Brake()
        self.unguarded: dict[str, Unguarded] = {}

    def paused(self) -> dict[int, str | None]:
        return dict.fromkeys(self.lows)

    def positions(self) -> dict[int, tuple[int, object]]:
        return {number: (low, None) for number, low in self.lows.items()}


def observer(registry: CollectorRegistry) -> Observer:
    return Observer(
        prompts="prompts",
        engine=EngineMetrics(registry, ["p"]),
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


def test_the_stages_of_an_abort_are_timed_from_the_capture_or_from_the_operators_command() -> None:
    registry = CollectorRegistry()
    said = observer(registry)
    times = {"published_at_us": 2_000_000, "decided_at_us": 3_000_000, "received_at_us": 4_000_000}
    probe = ack(AckOutcome.APPLIED, captured_at_us=1_000_000, applied_at_us=5_000_000, **times)
    operator = ack(AckOutcome.APPLIED, decided_at_us=3_000_000, received_at_us=4_000_000, applied_at_us=6_000_000)
    for one in (probe, operator, replace(operator, outcome=AckOutcome.UNKNOWN)):
        said.acknowledged(one)

    def seconds(family: str) -> dict[str, tuple[float, float]]:
        found: dict[str, list[float]] = {}
        (metric,) = (f for f in registry.collect() if f.name == f"undercurrent_engine_{family}")
        for sample in metric.samples:
            if sample.name.endswith(("_count", "_sum")):
                found.setdefault(sample.labels["stage"], []).append(sample.value)
        return {stage: (count, total) for stage, (count, total) in found.items()}

    assert seconds("abort_seconds") == {"published": (1, 1), "decided": (1, 2), "received": (1, 3), "applied": (1, 4)}
    assert seconds("operator_abort_seconds") == {"received": (1, 1), "applied": (1, 3)}
    outcomes = {outcome: registry.get_sample_value("undercurrent_engine_abort_acks_total", {"outcome": outcome})
                for outcome in ("applied", "unknown")}  # fmt: skip
    assert outcomes == {"applied": 2, "unknown": 1}


def test_a_clock_that_runs_behind_gives_no_negative_time() -> None:
    registry = CollectorRegistry()
    observer(registry).acknowledged(ack(AckOutcome.APPLIED, captured_at_us=9_000_000, received_at_us=8_000_000))
    assert registry.get_sample_value("undercurrent_engine_abort_seconds_sum", {"stage": "received"}) == 0


def test_completed_requests_that_a_guard_did_not_see_whole_are_counted_by_the_worst_of_their_guards() -> None:
    registry = CollectorRegistry()
    said = observer(registry)
    complete, behind, absent = GuardState.COMPLETE, GuardState.BEHIND, GuardState.ABSENT
    for outcome, states in [
        (Outcome.COMPLETED, ()),
        (Outcome.COMPLETED, (complete, complete)),
        (Outcome.COMPLETED, (complete, behind)),
        (Outcome.COMPLETED, (behind, absent)),
        (Outcome.ABORTED, (absent,)),
    ]:
        guards = tuple(Guard(probe="g", state=state) for state in states)
        said.generation(messages.event(kind=GenerationKind.FINAL, outcome=outcome, guards=guards))
    family = next(f for f in registry.collect() if f.name == "undercurrent_requests_unguarded")
    counts = {s.labels["state"]: s.value for s in family.samples if s.name.endswith("_total")}
    assert counts == {"absent": 1, "behind": 1, "error": 0, "incomplete": 0}


def test_an_unguarded_point_is_told_once_counted_and_makes_a_worker_unready_where_it_acts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry, core = CollectorRegistry(), Core()
    said = observer(registry)

    def see(policy: OnUnavailable | None, reason: str = "probe g: not heard of for 4 s", *, sure: bool = True) -> None:
        gap = None if policy is None else Unguarded(policy, Gap(reason, sure=sure), (0, 3))
        core.unguarded = {} if gap is None else {"p": gap}
        said._set_gauges(_core(core))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"undercurrent_engine_{name}", labels)

    def unready() -> list[str]:
        return [reason for reason in said.not_ready() if "unguarded" in reason]

    hold = OnUnavailable.HOLD_INTAKE
    see(hold, "nobody has looked", sure=False)
    assert (value("point_unguarded", point="p"), caplog.messages, len(unready())) == (0, [], 1), "it has just started"
    see(hold)
    see(hold, "probe g: not heard of for 5 s")
    line = (
        "point p is unguarded on partitions 0, 3: probe g: not heard of for {} s; new requests that want it wait "
        "(on_unavailable: hold_intake)"
    )
    assert (caplog.messages, unready()) == ([line.format(4)], [line.format(5)])
    assert (value("point_unguarded", point="p"), value("intake_paused", reason="unguarded")) == (1, 1)
    see(None)
    see(None)
    assert (caplog.messages[1:], unready()) == (["point p is guarded again"], [])
    assert (value("point_unguarded", point="p"), value("intake_paused", reason="unguarded")) == (0, 0)
    see(OnUnavailable.ABORT)
    assert "requests that want it are aborted" in unready()[0]
    assert value("intake_paused", reason="unguarded") == 0
    see(None)
    see(OnUnavailable.CONTINUE)
    assert (unready(), caplog.records[-1].levelname) == ([], "WARNING")


def ack(outcome: AckOutcome, **times: int) -> ControlAck:
    values = {"received_at_us": 0, **times}
    return ControlAck(command_id="c", request_id="r", engine="e", incarnation=1, outcome=outcome, **values)


def test_what_waits_is_lost_or_is_unknown_is_counted_by_point_and_reason() -> None:
    registry = CollectorRegistry()
    said = observer(registry)
    lost = {"queue_depth": 4, "buffer_full": 2, "refused": 6, "cut_off": 8}
    broken = Cycle(counts={"p": PointCounts(records=7, record_bytes=70, dropped=dict(lost))})
    report = Report(renewed=1, waiting_bytes=900)
    report.add_unknown(broken)
    said.report({name: getattr(report, name) for name in Report.__slots__})
    said.publisher_gone()
    prefix = "undercurrent_publisher_"
    assert registry.get_sample_value(f"{prefix}unknown_records_total", {"point": "p"}) == 7
    # Nobody has acknowledged them.
    assert registry.get_sample_value(f"{prefix}records_total", {"point": "p"}) == 0
    for reason, count in lost.items():
        labels = {"point": "p", "reason": reason}
        assert registry.get_sample_value(f"{prefix}dropped_activations_total", labels) == count
    for kind in ("producer", "process"):
        assert registry.get_sample_value(f"{prefix}renewals_total", {"kind": kind}) == 1
    assert registry.get_sample_value(f"{prefix}buffer_used_bytes") == 900
