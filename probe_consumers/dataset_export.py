"""What `undercurrent dataset export` does: read topics once, and write a folder."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from probe_consumers.dataset_placing import duplicates, place
from probe_consumers.dataset_reading import Reading
from probe_consumers.dataset_source import Source, TopicPart
from probe_consumers.dataset_streams import StreamExport
from probe_consumers.decoding import Decoder
from probe_consumers.replay_range import RangeRequest
from undercurrent.codec import Codec
from undercurrent.errors import DatasetError, TopicError
from undercurrent.evaluation.dataset_facts import FactStore
from undercurrent.evaluation.dataset_folder import FACTS, under_way
from undercurrent.evaluation.dataset_format import (
    FORMAT,
    LAYER_CONVENTION,
    README,
    VERSION,
    file_facts,
    readme,
    write_manifest,
)
from undercurrent.evaluation.dataset_split import SplitRule
from undercurrent.evaluation.dataset_tables import write_tables
from undercurrent.evaluation.dataset_writer import SHARD_BYTES, DatasetWriter
from undercurrent.files import write_text
from undercurrent.kafka.records import Record
from undercurrent.protocol.erasures import Erasures
from undercurrent.topics import TopicPlan

_WHOLE = RangeRequest()
_ADVANCED_EVERY = 500

Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Of so many records in all: gives a function that moves it on by some."""


def unseen(total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Show no progress."""
    return nullcontext(lambda count: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOrder:
    """What to export.

    Args:
        points: extraction points.
        range: which part of their topics.
        requests: ids, all where there are none.
        split: how requests are split.
        keep_duplicates: leave requests in two parts that share text; they are counted all the same.
        with_text: write prompts, their metadata and what was generated.
        tensors_in_parquet: write the values beside each token too.
        shard_bytes: size of a file of tensors after which the next one begins.
    """

    points: tuple[str, ...]
    range: RangeRequest = _WHOLE
    requests: frozenset[str] = frozenset()
    split: SplitRule = field(default_factory=SplitRule)
    keep_duplicates: bool = False
    with_text: bool = True
    tensors_in_parquet: bool = False
    shard_bytes: int = SHARD_BYTES


def export(
    source: Source, plan: TopicPlan, order: ExportOrder, out: Path, progress: Progress = unseen
) -> dict[str, Any]:
    """Write a dataset and return its manifest.

    Args:
        source: opens the topics.
        plan: their names.
        order: what to export.
        out: the folder; it is made, or empty, or what an export that was interrupted has left.
        progress: shows how far it is.

    Raises:
        DatasetError: the folder holds something else, cannot be written, or another export is writing it.
        TopicError: a point has no topic.
        ReplayError: a part of a topic cannot be read, or a request that was asked for is erased.
    """
    # The ends of all topics are fixed before anything is read.
    parts = {point: _part(source, plan, point, order.range) for point in order.points}
    beside = {
        topic: source.part(topic, _WHOLE, committed=topic == plan.verdicts)
        for topic in (plan.prompts, plan.generations, plan.verdicts, plan.labels)
    }
    erasures = _erasures(source, plan)
    erasures.refuse(order.requests)
    with under_way(out), _database(out / FACTS):
        facts = FactStore(out / FACTS)
        try:
            total = sum(span.end - span.start for part in _there(parts, beside) for span in part.spans.values())
            with progress(total) as advance:
                watched = {point: _watched(part, advance, erasures.covers) for point, part in parts.items()}
                covers = {plan.labels: erasures.covers_label}
                near = {
                    topic: part and _watched(part, advance, covers.get(topic, erasures.covers))
                    for topic, part in beside.items()
                }
                return _export(source.codec, plan, order, out, watched, near, facts)
        finally:
            facts.close()


@contextmanager
def _database(path: Path) -> Iterator[None]:
    """Name the file of facts where it cannot be written: the library says no more than that a disk is full."""
    try:
        yield
    except sqlite3.Error as exc:
        raise DatasetError(
            f"{path}: cannot be written: {exc}: make room there and run it again, or name another folder"
        ) from exc


def _there(parts: Mapping[str, TopicPart], beside: Mapping[str, TopicPart | None]) -> Iterator[TopicPart]:
    yield from parts.values()
    yield from (part for part in beside.values() if part is not None)


def _erasures(source: Source, plan: TopicPlan) -> Erasures:
    found = Erasures()
    part = source.part(plan.erasures, _WHOLE)
    for record in () if part is None else part.records:
        found.add(record.key, record.value)
    return found


def _watched(part: TopicPart, advance: Callable[[int], None], erased: Callable[[bytes | None], bool]) -> TopicPart:
    """Return a part without what is erased, that tells how far it is read."""

    def records() -> Iterator[Record]:
        count = 0
        for record in part.records:
            if not erased(record.key):
                yield record
            count += 1
            if count == _ADVANCED_EVERY:
                advance(count)
                count = 0
        advance(count)

    return replace(part, records=records())


def _export(
    codec: Codec,
    plan: TopicPlan,
    order: ExportOrder,
    out: Path,
    parts: Mapping[str, TopicPart],
    beside: Mapping[str, TopicPart | None],
    facts: FactStore,
) -> dict[str, Any]:
    reading = Reading(codec, facts)
    _read_beside(plan, order, beside, reading)
    place(facts, order.split, out, move=not order.keep_duplicates)
    writer = DatasetWriter(
        out, probes=facts.probes, shard_bytes=order.shard_bytes, tensors_in_parquet=order.tensors_in_parquet
    )
    decoder = Decoder(codec)
    exports: dict[str, StreamExport] = {}
    for point, part in parts.items():
        exports[point] = run = StreamExport(point, part.spans, facts, writer, order.split)
        for record in part.records:
            # What an engine's publisher writes to every partition has no key: it closes streams.
            if not order.requests or not record.key or record.key.decode(errors="replace") in order.requests:
                run.feed(decoder.incoming(record))
        run.finish()
    writer.close()
    counts = write_tables(out, facts, with_text=order.with_text)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "undercurrent": version("undercurrent"),
        "layer_convention": LAYER_CONVENTION,
        "points": {point: run.kinds for point, run in exports.items()},
        "probes": list(facts.probes),
        "with_text": order.with_text,
        "split": order.split.to_dict()
        | {
            "ungrouped": sum(run.ungrouped for run in exports.values()),
            "duplicates": duplicates(facts, move=not order.keep_duplicates),
        },
        "counts": counts | {"rows": sum(writer.counts.values()), "rows_by_split": dict(writer.counts)},
        "source": {
            "topics": {plan.activations(point): _range(part) for point, part in parts.items()}
            | {topic: None if part is None else _range(part) for topic, part in beside.items()},
            "requests": sorted(order.requests),
            "records": {point: run.records for point, run in exports.items()},
            "left_out": {point: run.left_out for point, run in exports.items()},
            "without_token_ids": {point: run.positions_without_token_ids for point, run in exports.items()},
            "undecodable": dict(reading.undecodable),
        },
        "test_reads": [],
    }
    return _described(out, manifest)


def _described(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    tables = sorted(path.relative_to(folder).as_posix() for path in folder.glob("data/*.parquet"))
    write_text(folder / README, readme(manifest, tables))
    manifest["files"] = file_facts(folder)
    write_manifest(folder, manifest)
    return manifest


def _read_beside(plan: TopicPlan, order: ExportOrder, beside: Mapping[str, TopicPart | None], reading: Reading) -> None:
    """Read the topics beside the activations, whole."""

    def records(topic: str) -> Iterable[Record]:
        part = beside[topic]
        return () if part is None else part.records

    reading.prompts(records(plan.prompts), order.split)
    reading.generations(records(plan.generations))
    reading.scores(records(plan.verdicts), frozenset(order.points))
    reading.labels(records(plan.labels))


def _part(source: Source, plan: TopicPlan, point: str, asked: RangeRequest) -> TopicPart:
    topic = plan.activations(point)
    part = source.part(topic, asked)
    if part is None:
        raise TopicError(f"there is no topic {topic!r}")
    return part


def _range(part: TopicPart) -> dict[str, Any]:
    return {str(number): {**asdict(span), "deleted": part.deleted[number]} for number, span in part.spans.items()}
