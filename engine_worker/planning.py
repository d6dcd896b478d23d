"""From what is asked to figures, each with its formula."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine_worker.config import PublisherSection
from undercurrent.capacity.beside import BesideSizes
from undercurrent.capacity.calibration import ProbeCost, measure
from undercurrent.capacity.joining import joined, measure_join
from undercurrent.capacity.load import PointLoad, Publishing, cycle_s, point_load
from undercurrent.capacity.measured import LINEAR_WIDTH, joining_cost, linear_cost
from undercurrent.capacity.model import ModelShape
from undercurrent.capacity.needs import CHECK_S, disk, longest_retention_s, outage_s, partitions
from undercurrent.capacity.traffic import Traffic
from undercurrent.capacity.units import shown_bytes, shown_duration
from undercurrent.capacity.wire import BATCH_BYTES
from undercurrent.errors import ConfigError
from undercurrent.probes import Binding, LoadedProbe, load_binding, load_bindings
from undercurrent.spec import ProbeSpec, check_pipeline
from undercurrent.topics import TopicPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a plan is asked for; see the options of `undercurrent plan`.

    Args:
        model: that is served.
        spec: what is captured.
        traffic: what is served.
        retention_s: of activations.
        replication: copies.
        partitions: of each activations topic.
        partition_bytes_s: that one partition is to take.
        codec: of compression.
        engines: that share the requests.
        disk_bytes: of all brokers, None where nobody asks.
        probes: a file of bindings, None for none.
        measure: time them here.
        publisher: sizes of an engine's buffers.
        delta_ms: tokens of a request are gathered for so long.
    """

    model: ModelShape
    spec: ProbeSpec
    traffic: Traffic
    retention_s: float
    replication: int
    partitions: int
    partition_bytes_s: float
    codec: str
    engines: int
    disk_bytes: int | None
    probes: Path | None
    measure: bool
    publisher: PublisherSection
    delta_ms: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a plan.

    Args:
        about: a topic, a probe, or the deployment.
        name: of the figure, with its unit.
        value: the number; infinite where nothing limits it.
        formula: where it comes from, with the numbers in it.
    """

    about: str
    name: str
    value: float
    formula: str


def figures(asked: Asked) -> list[Figure]:
    """Return the figures of a plan.

    Raises:
        SpecError: a pipeline cannot honour the points, or the model has not what they ask for.
        ConfigError: a binding names a point that is not there.
        ProbeError: a probe does not load.
    """
    check_pipeline(asked.spec)
    how = Publishing(
        codec=asked.codec,
        partitions=asked.partitions,
        engines=asked.engines,
        interval_ms=asked.publisher.interval_ms,
    )
    loads = {point.name: point_load(point, asked.model, asked.traffic, how) for point in asked.spec}
    if not loads:
        raise ConfigError("--spec: has no extraction points; there is nothing to plan for")
    bound = _bound(asked, loads)
    costs = dict(_costs(asked, bound, loads))
    found = [figure for load in loads.values() for figure in _topic(load, asked, how)]
    found += _beside(asked, bound, costs)
    found += _probes(asked, bound, costs)
    found += _partitions(asked, bound, costs, loads)
    found += _deployment(asked, bound, loads)
    places = {figure.about: None for figure in found}
    return [figure for about in places for figure in found if figure.about == about]


Bound = list[tuple[Binding, LoadedProbe]]


def _bound(asked: Asked, loads: Mapping[str, PointLoad]) -> Bound:
    if asked.probes is None:
        return []
    bindings = load_bindings(asked.probes)
    for binding in bindings:
        try:
            binding.check_points(loads)
        except ConfigError as exc:
            raise ConfigError(f"{asked.probes}: {exc}") from exc
    return [(binding, load_binding(binding, base=asked.probes.parent)) for binding in bindings]


def _costs(asked: Asked, bound: Bound, loads: Mapping[str, PointLoad]) -> Iterator[tuple[str, Cost]]:
    for binding, loaded in bound:
        read = [loads[point] for point in binding.sources]
        streams = [load.stream for load in read]
        joins = len(read) > 1
        stream = joined(streams) if joins else streams[0]
        probe = measure(loaded, stream) if asked.measure else linear_cost(stream.width)
        join = None
        if joins:
            join = measure_join(streams) if asked.measure else joining_cost(stream.width // len(read))
        yield binding.name, Cost(probe=probe, join=join, read=tuple(read))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a binding costs.

    Args:
        probe: its probe.
        join: joining, for each record and row of each point; None where it reads one.
        read: what it reads.
    """

    probe: ProbeCost
    join: ProbeCost | None
    read: tuple[PointLoad, ...]

    @property
    def rows(self) -> float:
        """Rows of a request that the probe sees: those that each of its points has, at most."""
        return min(load.rows.total for load in self.read)

    @property
    def rows_s(self) -> float:
        """Rows that it sees in a second."""
        return min(load.rows_s for load in self.read)

    @property
    def records_s(self) -> float:
        """Records, or runs of joined rows, in which it sees them: as many as the point has that has most."""
        return max(load.records_s for load in self.read)

    @property
    def cores(self) -> float:
        """Cores that it takes."""
        join = self.join
        joining = 0.0 if join is None else sum(join.cores(load.records_s, load.rows_s) for load in self.read)
        return joining + self.probe.cores(self.records_s, self.rows_s)


def _topic(load: PointLoad, asked: Asked, how: Publishing) -> Iterator[Figure]:
    about, rate, rows, stream = f"activations.{load.point}", asked.traffic.requests_per_s, load.rows, load.stream
    yield Figure(
        about,
        "rows_per_s",
        load.rows_s,
        f"requests/s x (rows of a prompt + rows of what is generated) = {rate:g} x ({rows.prompt:g} + "
        f"{rows.generated:g}); the last token is never computed",
    )
    yield Figure(
        about,
        "records_per_s",
        load.records_s,
        "requests/s x (start + end + records of a prompt + a record for each generated row)",
    )
    yield Figure(
        about,
        "batches_per_s",
        load.batches_s,
        f"engines x partitions x (1 - exp(-{load.requests_met:.3g})) / cycle, cycle = {cycle_s(asked.traffic, how):g} "
        f"s, in which {load.requests_met:.3g} requests have records in a partition; "
        f"{load.records_s / load.batches_s:.1f} records in a batch",
    )
    yield Figure(
        about,
        "bytes_per_s",
        load.bytes_s,
        f"rows/s x {stream.row_bytes:,} B of values ({len(stream.layers)} x {stream.width:,} {stream.dtype}) x "
        f"{load.values_left:.3f} + (rows/s x {stream.beside_bytes} B of positions and token ids + records/s x "
        f"{load.framing_bytes_s / load.records_s:.0f} B of framing) x {load.framing_left:.3f} + batches/s x "
        f"{BATCH_BYTES} B ({asked.codec} leaves these shares)",
    )
    yield _disk(about, load.bytes_s, asked.partitions, asked.retention_s, asked.replication)


def _disk(about: str, bytes_s: float, count: int, retention_s: float, replication: int) -> Figure:
    found = disk(bytes_s, count, retention_s, replication)
    return Figure(
        about,
        "disk_bytes",
        found.used_bytes,
        f"bytes/s x (retention {shown_duration(retention_s)} + a segment's {shown_duration(found.roll_s)} + "
        f"{shown_duration(CHECK_S)} between checks) x {replication} copies",
    )


def _beside(asked: Asked, bound: Bound, costs: Mapping[str, Cost]) -> Iterator[Figure]:
    sizes, plan, rate = BesideSizes(asked.traffic), TopicPlan(), asked.traffic.requests_per_s
    events = f"a claim, {sizes.events(asked.delta_ms)} token events ({asked.delta_ms:g} ms each) and a final"
    kept_ms = plan.generations_retention_ms
    topics: list[tuple[str, float, str, int]] = [
        ("prompts", sizes.prompt(), "a prompt, 4 characters a token", plan.prompts_retention_ms),
        ("generations", sizes.generation(asked.delta_ms), events, kept_ms),
    ]
    if bound:
        words = sum(sizes.verdicts(costs[binding.name].rows) for binding, _ in bound)
        topics.append(("verdicts", words, f"scores each 100 ms and a result of {len(bound)} probes", kept_ms))
    for name, size, what, retention_ms in topics:
        yield Figure(
            name,
            "bytes_per_s",
            rate * size,
            f"requests/s x {size:,.0f} B: {what}; not compressed, a batch for each record: at most",
        )
        yield _disk(name, rate * size, plan.prompt_partitions, retention_ms / 1000, asked.replication)


def _probes(asked: Asked, bound: Bound, costs: Mapping[str, Cost]) -> Iterator[Figure]:
    for binding, _ in bound:
        cost = costs[binding.name]
        joining = ""
        if cost.join is not None:
            joining = (
                f" + records/s of all its points x {cost.join.record_s * 1e6:.1f} us + their rows/s x "
                f"{cost.join.row_s * 1e6:.2f} us of joining"
            )
        table = f"a linear probe's, from the table, scaled from width {LINEAR_WIDTH:,}; --measure times this one"
        where = "measured here, just now" if asked.measure else table
        yield Figure(
            f"probe {binding.name}",
            "cores",
            cost.cores,
            f"records/s x {cost.probe.record_s * 1e6:.1f} us + rows/s x {cost.probe.row_s * 1e6:.2f} us{joining} "
            f"({where}; without the Kafka client and verdicts)",
        )


def _partitions(
    asked: Asked, bound: Bound, costs: Mapping[str, Cost], loads: Mapping[str, PointLoad]
) -> Iterator[Figure]:
    for name, load in loads.items():
        cores = sum(costs[binding.name].cores for binding, _ in bound if name in binding.sources)
        yield Figure(
            f"activations.{name}",
            "partitions",
            partitions(load.bytes_s, asked.partition_bytes_s, cores),
            f"at least: the larger of bytes/s / {shown_bytes(asked.partition_bytes_s)}/s and probe cores, {cores:.2g}; "
            f"planned with {asked.partitions}; the number is never changed later",
        )


def _deployment(asked: Asked, bound: Bound, loads: Mapping[str, PointLoad]) -> Iterator[Figure]:
    groups = {binding.point: binding.sources for binding, _ in bound}
    sent = sum(load.bytes_s for load in loads.values())
    received = sum(loads[point].bytes_s for points in groups.values() for point in points)
    network = [
        ("produced_bytes_per_s", sent, "bytes/s of all activations, from the engines to the brokers"),
        (
            "replicated_bytes_per_s",
            sent * (asked.replication - 1),
            f"the same x ({asked.replication} copies - 1), between the brokers",
        ),
        (
            "consumed_bytes_per_s",
            received,
            f"bytes/s of the points that probes read ({', '.join(sorted(groups)) or 'none'}), once for each "
            "group of hosts",
        ),
    ]
    for name, value, formula in network:
        yield Figure("network", name, value, formula)
    ring, cycle, buffer = asked.publisher.ring_mib, asked.publisher.max_cycle_mib, asked.publisher.buffer_mib
    each = sum(load.ring_bytes_s for load in loads.values()) / asked.engines
    yield Figure(
        "brokers away",
        "survived_s",
        outage_s(list(loads.values()), asked.engines, ring << 20, (cycle + buffer) << 20),
        f"(publisher.ring_mib {ring} + max_cycle_mib {cycle} + buffer_mib {buffer}) MiB / {shown_bytes(each)}/s that "
        f"an engine captures, uncompressed; then a point's overflow rule decides, or earlier its queue_depth",
    )
    if asked.disk_bytes is not None and sent:
        yield Figure(
            "activations",
            "longest_retention_s",
            longest_retention_s(asked.disk_bytes, sent, asked.replication),
            f"{shown_bytes(asked.disk_bytes)} / (bytes/s of all points x {asked.replication} copies) less a segment's "
            f"time and {shown_duration(CHECK_S)}; 0: the disk is too small",
        )
