"""What `undercurrent replay` does: plan, replay what is not done, write the results, and compare."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from probe_consumers.bound import Bound, set_fingerprint
from probe_consumers.dataset_erased import ask_before_reading
from probe_consumers.joined_topics import check_joined as check_joined_topics
from probe_consumers.replay import Span
from probe_consumers.replay_compare import LiveVerdicts, bucket_count, compare_folders, compare_live, stored_bytes
from probe_consumers.replay_live import LivePositions
from probe_consumers.replay_merge import SUMMARY, merge
from probe_consumers.replay_order import Origins, Part, Plan, ReplayOrder, check_joined, probe_facts, read_plan
from probe_consumers.replay_partition import Watcher
from probe_consumers.replay_pool import run_parts
from probe_consumers.replay_range import RangeRequest, find_range, spans_of
from probe_consumers.replay_select import (
    labelled,
    labels_of_dataset,
    labels_on_topic,
    last_of_dataset,
    last_of_topic,
)
from probe_consumers.replay_source import Loaded, dataset_facts, dataset_parts, load
from probe_consumers.replay_store import lock_folder, write_json
from undercurrent.acls import Names, Service
from undercurrent.errors import ReplayError
from undercurrent.evaluation.diff import DiffReport
from undercurrent.files import is_fresh
from undercurrent.kafka.client import Isolation
from undercurrent.kafka.erasures import read_erasures
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.ranges import Piece, TopicRange
from undercurrent.pipeline import connection, names_brokers, permitted, read_sections
from undercurrent.protocol.rollouts import CANDIDATE_SUFFIX
from undercurrent.subjects import codec_of

REPORT = "report.json"
Show = Callable[[Path, Plan], AbstractContextManager[Watcher]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """What came of a replay.

    Args:
        summary: content of summary.json.
        service: consumer group, or folder, that it was compared with; None where there was none.
        diff: the comparison; None where none was asked for.
    """

    summary: dict[str, Any]
    service: str | None = None
    diff: DiffReport | None = None


def replay(order: ReplayOrder, show: Show | None = None) -> ReplayResult:
    """Replay a range, or go on with it, and compare.

    Args:
        order: what to replay.
        show: shows how far it is.

    Raises:
        ConfigError: no binding reads the point, or the range is none.
        DatasetError: the dataset is none, or holds a request that was erased since.
        ReplayError: the folder is of another replay, the range cannot be read, or it is unclear with whose verdicts to
            compare.
    """
    loaded = load(order.origins)
    bounds = loaded.of_point(order.point)
    points = bounds[0].binding.points
    dataset = order.origins.dataset
    if dataset is None:
        if points:
            check_joined(order)
        host = loaded.host
        names = Names(probe_services=(host.host.service.name,), joined=(order.point,) if points else ())
        permitted(host.kafka, Service.REPLAY, replace(host.plan, points=points or (order.point,)), names)
        read_erasures(host.kafka, host.plan.erasures).refuse(order.requests or ())
    else:
        bounds[0].binding.refuse_joined("a dataset is replayed one point at a time; replay its topics instead")
        if not order.offline:
            _refuse_erased(order.origins, dataset, loaded)
    try:
        order.out.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(order.out)
    except OSError as exc:
        raise ReplayError(f"{order.out}: results cannot be written there: {exc.strerror}") from exc
    try:
        plan = read_plan(order.out) or _begin(order, loaded, bounds)
        _check_plan(plan, order, loaded, bounds)
        summary = _finished(order.out)
        if summary is None:
            with (show or _unseen)(order.out, plan) as watch:
                run_parts(order.out, plan, order.workers, watch)
            summary = merge(order.out, plan)
        return _compared(order, loaded, bounds, plan, summary)
    finally:
        os.close(lock)


def _refuse_erased(origins: Origins, folder: Path, loaded: Loaded) -> None:
    """Refuse a dataset that holds a request that was erased since, where a broker is there to ask."""
    if loaded.config is not None:
        ask_before_reading(folder, loaded.config.kafka, loaded.config.plan.prefix)
        return
    sections = read_sections(None)
    if names_brokers(sections, origins.bootstrap_servers):
        ask_before_reading(folder, connection(sections, origins.bootstrap_servers))


def _unseen(out: Path, plan: Plan) -> AbstractContextManager[Watcher]:
    return nullcontext(lambda: None)


def _finished(out: Path) -> dict[str, Any] | None:
    path = out / SUMMARY
    if not path.exists():
        return None
    # Whoever wrote it may have died before the progress was gone.
    shutil.rmtree(out / "progress", ignore_errors=True)
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(summary, dict):
            raise ValueError("expected an object")
    except ValueError as exc:
        raise ReplayError(f"{path}: cannot be read: {exc}: remove the folder and start again") from exc
    return summary


# --- the plan


def _begin(order: ReplayOrder, loaded: Loaded, bounds: list[Bound]) -> Plan:
    """Fix what is replayed, and write it down before anything is read."""
    # A plan that was not written to its end, by a process that died.
    if found := {path.name for path in order.out.iterdir() if not is_fresh(path)} - {"lock"}:
        raise ReplayError(f"{order.out}: holds {sorted(found)[0]} and no plan of a replay; name another folder")
    points = bounds[0].binding.points
    parts, requests, facts = (
        _of_dataset(order)
        if order.origins.dataset
        else _of_topics(order, loaded, points)
        if points
        else _of_topic(order, loaded)
    )
    plan = Plan(
        asked=order.asked(),
        probes=probe_facts(bounds),
        fingerprint=set_fingerprint(bounds),
        source=_source(order, loaded, points),
        origins=order.origins,
        parts=parts,
        requests=None if requests is None else tuple(sorted(requests)),
        facts=facts,
        points=points,
        partitions=len(parts) // len(points) if points else 0,
    )
    plan.write(order.out)
    return plan


def _source(order: ReplayOrder, loaded: Loaded, points: tuple[str, ...]) -> dict[str, Any]:
    if order.origins.dataset is not None:
        return {"topic": None, **dataset_facts(order.origins.dataset)}
    if points:
        return {"topics": [loaded.host.plan.activations(point) for point in points]}
    return {"topic": loaded.host.plan.activations(order.point)}


def _check_plan(plan: Plan, order: ReplayOrder, loaded: Loaded, bounds: list[Bound]) -> None:
    """Refuse to go on with a replay of something else."""
    differences = plan.differences(order, bounds, _source(order, loaded, bounds[0].binding.points))
    if differences:
        raise ReplayError(f"{order.out}: holds another replay ({'; '.join(differences)}); name another folder")
    if order.origins.dataset is None and not (order.out / SUMMARY).exists():
        lookup = OffsetLookup(loaded.host.kafka)
        ends = lookup.end([where for topic in plan.inputs.topics for where in lookup.partitions(topic)])
        for part in plan.parts:
            where = plan.inputs.place(part.number)
            if ends.get(where, 0) < part.span.end:
                raise ReplayError(
                    f"{where} ends at {ends.get(where, 0)}, the replay in {order.out} reads up to {part.span.end}: it "
                    "is not the topic that it was"
                )


_Found = tuple[tuple[Part, ...], frozenset[str] | None, dict[str, Any]]


def _of_dataset(order: ReplayOrder) -> _Found:
    folder = order.origins.dataset
    assert folder is not None  # noqa: S101 - the caller asked
    requests = order.requests
    if order.labels:
        requests = _both(requests, labelled(labels_of_dataset(folder), order.labels))
    if order.last is not None:
        requests = last_of_dataset(folder, order.last)
    return dataset_parts(folder, order.point), requests, {}


def _of_topic(order: ReplayOrder, loaded: Loaded) -> _Found:
    config, requests = loaded.host, order.requests
    part = find_range(config.kafka, config.plan.activations(order.point), order.range)
    if order.labels:
        requests = _both(requests, labelled(labels_on_topic(config.kafka, config.plan.labels), order.labels))
    if order.last is not None:
        part, requests = last_of_topic(part, order.last, codec_of(config.kafka))
    first_ms = _first_times(part, lambda piece: piece.deleted != 0)
    spans = spans_of(part)
    parts = tuple(
        Part(
            number=piece.partition.number,
            span=spans[piece.partition.number],
            deleted=piece.deleted,
            remains_from_ms=first_ms.get(piece.partition.number),
        )
        for piece in part.pieces
    )
    return parts, requests, {}


def _of_topics(order: ReplayOrder, loaded: Loaded, points: tuple[str, ...]) -> _Found:
    """Return the parts of topics that are joined, those of each topic after those of the one before."""
    config, requests = loaded.host, order.requests
    found = [find_range(config.kafka, config.plan.activations(point), order.range) for point in points]
    check_joined_topics(config, {part.topic: len(part.pieces) for part in found})
    if order.labels:
        requests = _both(requests, labelled(labels_on_topic(config.kafka, config.plan.labels), order.labels))
    parts: list[Part] = []
    for part in found:
        first_ms = _first_times(part, lambda piece: piece.start > 0)
        for piece in part.pieces:
            begins_ms = first_ms.get(piece.partition.number)
            parts.append(
                Part(
                    number=len(parts),
                    span=Span(piece.start, piece.end),
                    deleted=piece.deleted,
                    remains_from_ms=begins_ms if piece.deleted != 0 else None,
                    begins_ms=begins_ms,
                )
            )
    return tuple(parts), requests, {}


def _both(requests: frozenset[str] | None, others: frozenset[str]) -> frozenset[str]:
    return others if requests is None else requests & others


def _first_times(part: TopicRange, asked: Callable[[Piece], bool]) -> dict[int, int]:
    """Return when the first record of a range was appended, of the partitions where that is asked for."""
    found = {}
    for piece in part.pieces:
        if asked(piece) and piece.offsets:
            one = Piece(piece.partition, piece.start, piece.start + 1, 0)
            for record in part.narrowed((one,)).read():
                found[piece.partition.number] = record.timestamp_ms
    return found


# --- the comparison


def _compared(
    order: ReplayOrder, loaded: Loaded, bounds: list[Bound], plan: Plan, summary: dict[str, Any]
) -> ReplayResult:
    if order.compare == "none":
        return ReplayResult(summary=summary)
    meanwhile = order.out / "comparing"
    shutil.rmtree(meanwhile, ignore_errors=True)
    try:
        if order.compare == "live":
            service, diff = _with_live(order, loaded, bounds, plan.as_read(summary.get("not_read", {})), meanwhile)
        else:
            service, diff = order.compare, compare_folders(order.out, Path(order.compare), meanwhile)
    finally:
        shutil.rmtree(meanwhile, ignore_errors=True)
    write_json(order.out / REPORT, {**diff.to_dict(), "service": service})
    return ReplayResult(summary=summary, service=service, diff=diff)


def _with_live(
    order: ReplayOrder, loaded: Loaded, bounds: list[Bound], plan: Plan, folder: Path
) -> tuple[str | None, DiffReport]:
    config = loaded.host
    group = order.service or config.group(order.point)
    positions = LivePositions(OffsetLookup(config.kafka), plan.inputs, config.plan.verdicts)
    # Before the verdicts are read: what is below a position is then among them.
    judged_up_to = positions.wait(group, plan.spans, order.wait_s)
    positions.settle()
    # A verdict is appended after the record that it follows from.
    since = RangeRequest(since_ms=order.range.since_ms)
    part = find_range(config.kafka, config.plan.verdicts, since, Isolation.READ_COMMITTED)
    live = LiveVerdicts(folder, bucket_count(stored_bytes(order.out)), codec_of(config.kafka))
    erasures = read_erasures(config.kafka, config.plan.erasures)
    records = (record for record in part.read() if not erasures.covers(record.key))
    if plan.requests is not None:
        wanted = frozenset(name.encode() for name in plan.requests)
        records = (record for record in records if record.key in wanted)
    names = [bound.binding.name for bound in bounds]
    beside = [name + CANDIDATE_SUFFIX for name in names] if order.origins.rolled_out else []
    live.write(records, order.point, frozenset([*names, *beside]))
    service = _service(order.service, group, frozenset(live.services), has_begun=bool(judged_up_to))
    if service not in (group, None):
        shutil.rmtree(folder)
        return _with_live(replace(order, service=service), loaded, bounds, plan, folder)
    if not plan.points:
        return service, compare_live(order.out, live, service, plan.spans, judged_up_to)
    inputs = plan.inputs
    # After the verdicts were read: what they follow from was in the logs by then.
    ends = OffsetLookup(config.kafka).end([inputs.place(lane) for lane in plan.spans])
    whole = {lane for lane, span in plan.spans.items() if ends[inputs.place(lane)] <= span.end}
    return service, compare_live(order.out, live, service, plan.spans, judged_up_to, inputs, whole)


def _service(asked: str | None, service: str, there: frozenset[str], *, has_begun: bool) -> str | None:
    """Return with whose verdicts to compare.

    Args:
        asked: whose the user wants.
        service: these, or those of the configured group.
        there: who wrote any.
        has_begun: `service` has read the topic, though it may have said nothing.

    Raises:
        ReplayError: that is unclear.
    """
    if service in there or has_begun:
        return service
    if asked is not None or not there:
        return None
    if len(there) > 1:
        raise ReplayError(
            f"verdicts of {', '.join(sorted(there))} are there, none of {service}: name one with --service"
        )
    return next(iter(there))
