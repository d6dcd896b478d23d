"""What a replay is asked for, what was asked for when its folder was made, and that both are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from probe_consumers.bound import Bound, set_fingerprint
from probe_consumers.inputs import Inputs
from probe_consumers.replay import Span
from probe_consumers.replay_range import RangeRequest
from probe_consumers.replay_store import write_json
from undercurrent.errors import ConfigError, ReplayError

FORMAT, VERSION = "undercurrent-replay", 1
_PLAN = "plan.json"
_SUM = "sha256"
_LISTED = 20
_WHOLE = RangeRequest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """Where a process finds the probes and the records; each process of a replay reads them for itself.

    Args:
        config: a probe host's configuration; None where a dataset is replayed with bindings alone.
        probes: bindings, instead of the configuration's.
        bootstrap_servers: brokers, instead of the configuration's.
        dataset: folder of a dataset; None where the point's topic is read.
    """

    config: Path | None = None
    probes: Path | None = None
    bootstrap_servers: str | None = None
    dataset: Path | None = None

    @property
    def rolled_out(self) -> bool:
        """Whether a stream is judged by the versions that were in force when it began: not where bindings are named."""
        return self.probes is None and self.dataset is None

    def to_dict(self) -> dict[str, str | None]:
        """Return it as plain data."""
        return {name: None if value is None else str(value) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, told: Mapping[str, str | None]) -> Origins:
        """Return what `to_dict` gave."""
        paths = {
            name: None if told[name] is None else Path(str(told[name])) for name in ("config", "probes", "dataset")
        }
        return cls(bootstrap_servers=told["bootstrap_servers"], **paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOrder:
    """What to replay.

    Args:
        origins: where probes and records are.
        point: the extraction point.
        range: which part of its topic.
        requests: ids; None for all.
        labels: names and values that a request must have, all of them.
        last: only so many requests, the latest ones.
        out: folder of the results.
        workers: processes that read.
        service: consumer group whose verdicts are compared; the configured one where that wrote any.
        compare: with whose verdicts: `live`, `none`, or the folder of another replay.
        wait_s: how long a live host is waited for that has not come to the range's end, seconds.
        offline: ask no broker whether a request of a dataset was erased after its export.
    """

    origins: Origins
    point: str
    range: RangeRequest = _WHOLE
    requests: frozenset[str] | None = None
    labels: tuple[tuple[str, str], ...] = ()
    last: int | None = None
    out: Path
    workers: int = 1
    service: str | None = None
    compare: str = "live"
    wait_s: float = 0.0
    offline: bool = False

    def __post_init__(self) -> None:
        for first, second, why in _clashes(self):
            raise ConfigError(f"{first} and {second}: {why}")

    def asked(self) -> dict[str, Any]:
        """Return all that the outputs depend on, besides the records and the probes, as plain data."""
        offsets, ends = ({str(number): at for number, at in (asked or {}).items()} for asked in self._sides)
        return {
            "dataset": None if self.origins.dataset is None else str(self.origins.dataset.resolve()),
            "point": self.point,
            "since_ms": self.range.since_ms,
            "until_ms": self.range.until_ms,
            "from_offset": offsets,
            "to_offset": ends,
            "requests": None if self.requests is None else _named(self.requests),
            "labels": [f"{name}={value}" for name, value in self.labels],
            "last": self.last,
        }

    @property
    def _sides(self) -> tuple[Mapping[int | None, int] | None, Mapping[int | None, int] | None]:
        return self.range.offsets, self.range.ends


def check_joined(order: ReplayOrder) -> None:
    """Refuse what has no meaning where points are joined.

    Raises:
        ConfigError: it names the option.
    """
    for option, given, instead in (
        ("--from-offset", order.range.offsets, "--since"),
        ("--to-offset", order.range.ends, "--until"),
        ("--last", order.last, "--since, or name requests"),
    ):
        if given:
            raise ConfigError(
                f"{option}: --point {order.point} reads several topics, which have offsets of their own; use {instead}"
            )


def _clashes(order: ReplayOrder) -> Iterator[tuple[str, str, str]]:
    part, some = order.range, "--label" if order.labels else "--request" if order.requests is not None else ""
    if part.since_ms is not None and part.offsets:
        yield "--since", "--from-offset", "both say where the range begins; give one"
    if part.until_ms is not None and part.ends:
        yield "--until", "--to-offset", "both say where the range ends; give one"
    if order.last is not None and some:
        yield "--last", some, "both choose requests; give one"
    if order.last is not None and (part.since_ms is not None or part.offsets):
        yield (
            "--last",
            "--since" if part.offsets is None else "--from-offset",
            "both say where the range begins; give one",
        )
    if order.wait_s and order.compare != "live":
        yield "--wait", f"--compare {order.compare}", "only a live host is waited for"
    if order.service is not None and order.compare != "live":
        yield "--service", f"--compare {order.compare}", "it says whose live verdicts are compared"
    if order.offline and order.origins.dataset is None:
        yield "--offline", "a topic", "it is read from a broker; a DATASET need not be"
    if order.origins.dataset is not None and part != _WHOLE:
        yield "DATASET", "a range of times or offsets", "a dataset is a range already; export another one"


def _named(requests: frozenset[str]) -> Any:  # noqa: ANN401 - plain data
    listed = sorted(requests)
    if len(listed) <= _LISTED:
        return listed
    return {"count": len(listed), "sha256": hashlib.sha256("\n".join(listed).encode()).hexdigest()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is replayed of one partition.

    Args:
        number: the partition; the lane, where points are joined.
        span: its offsets, the end fixed when the replay began.
        deleted: offsets of it that retention has deleted; None where nobody knows how many.
        remains_from_ms: when the first record that is left was appended, milliseconds since the Unix epoch; None where
            nothing is gone.
        begins_ms: where points are joined, when the first record of a span was appended that has records before it,
            milliseconds since the Unix epoch; None where it has none.
    """

    number: int
    span: Span
    deleted: int | None = 0
    remains_from_ms: int | None = None
    begins_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A replay as it was begun.

    Args:
        asked: see `ReplayOrder.asked`.
        probes: name, mode, version and fingerprint of each binding.
        fingerprint: of the probe set.
        source: topic, or topics that are joined, or the dataset with the sum of its manifest.
        origins: where a process finds probes and records.
        parts: by partition.
        requests: ids that were chosen, None for all.
        facts: what else is to be told of the source.
        points: those that are joined, in the order of their topics; empty where it is one.
        partitions: of each of their topics.
    """

    asked: dict[str, Any]
    probes: list[dict[str, Any]]
    fingerprint: str
    source: dict[str, Any]
    origins: Origins
    parts: tuple[Part, ...]
    requests: tuple[str, ...] | None
    facts: dict[str, Any] = field(default_factory=dict)
    points: tuple[str, ...] = ()
    partitions: int = 0

    @property
    def inputs(self) -> Inputs:
        """What is read."""
        points = self.points or (str(self.asked["point"]),)
        topics = self.source.get("topics") or [str(self.source.get("topic") or points[0])]
        return Inputs(points, topics, topics, self.partitions)

    @property
    def numbers(self) -> list[int]:
        """The partition numbers: each is replayed by one process."""
        return sorted({self.inputs.lanes.number(part.number) for part in self.parts})

    def parts_of(self, number: int) -> list[Part]:
        """Return the parts of a partition number, one per point."""
        by_lane = {part.number: part for part in self.parts}
        return [by_lane[lane] for lane in self.inputs.lanes.of(number)]

    @property
    def spans(self) -> dict[int, Span]:
        """The range, by partition, or lane."""
        return {part.number: part.span for part in self.parts}

    def as_read(self, not_read: Mapping[str, Mapping[str, int]]) -> Plan:
        """Return it with the range that was read.

        Args:
            not_read: of a summary.
        """
        label = self.inputs.label
        left = {part.number: not_read.get(label(part.number), {"start": part.span.end}) for part in self.parts}
        parts = (replace(part, span=Span(part.span.start, left[part.number]["start"])) for part in self.parts)
        return replace(self, parts=tuple(parts))

    def write(self, out: Path) -> None:
        """Write it into the folder of the results."""
        told = asdict(self) | {"format": FORMAT, "version": VERSION, "origins": self.origins.to_dict()}
        # As it is read again: without the types of Python.
        plain = json.loads(json.dumps(told))
        write_json(out / _PLAN, plain | {_SUM: _sum(plain)})

    def differences(self, order: ReplayOrder, bounds: list[Bound], source: Mapping[str, Any]) -> list[str]:
        """Return in words what an order and a probe set ask for that this plan does not."""
        pairs = [(name, self.asked.get(name), value) for name, value in order.asked().items()]
        pairs += [(name, self.source.get(name), value) for name, value in source.items()]
        mine, theirs = ({item["name"]: item for item in told} for told in (self.probes, probe_facts(bounds)))
        for name in sorted(mine.keys() | theirs.keys()):
            pairs.append((f"probe {name}", mine.get(name), theirs.get(name)))
        return [
            f"{name}: {_short(before)} there, {_short(now)} asked for" for name, before, now in pairs if before != now
        ]


def probe_facts(bounds: list[Bound]) -> list[dict[str, Any]]:
    """Return what a plan and a summary say of bindings."""
    return [
        {
            "name": bound.binding.name,
            "mode": bound.mode.value,
            "version": bound.loaded.version,
            "fingerprint": bound.loaded.fingerprint,
        }
        for bound in sorted(bounds, key=lambda item: item.binding.name)
    ]


def read_plan(out: Path) -> Plan | None:
    """Return the plan in a folder, None where there is none.

    Raises:
        ReplayError: it cannot be read.
    """
    path = out / _PLAN
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told.pop(_SUM, "") != _sum(told):
            raise ReplayError(
                f"{path}: was changed after the replay began, and says no longer what its results are of: remove the "
                "folder and start again"
            )
        if (told.pop("format"), told.pop("version")) != (FORMAT, VERSION):
            raise ValueError(f"field 'version': expected {VERSION} of {FORMAT}")
        parts = tuple(
            Part(**part | {"number": int(part["number"]), "span": Span(**part["span"])}) for part in told.pop("parts")
        )
        requests, points = told.pop("requests"), tuple(told.pop("points"))
        origins = Origins.from_dict(told.pop("origins"))
        wanted = None if requests is None else tuple(requests)
        return Plan(**told, parts=parts, origins=origins, requests=wanted, points=points)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ReplayError(f"{path}: cannot be read: {exc}") from exc


def _sum(told: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def check_probes(plan: Plan, bounds: list[Bound]) -> None:
    """Refuse a probe set that is not the plan's: a file of it was changed meanwhile.

    Raises:
        ReplayError: it is another one.
    """
    if set_fingerprint(bounds) != plan.fingerprint:
        raise ReplayError("the probes have changed since the replay began")


def _short(value: object) -> str:
    text = "nothing" if value in (None, [], {}) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:196] + " ..."
