"""What `undercurrent dataset export` does: read topics once, and write a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from probe_consumers.dataset_reading import Reading
from probe_consumers.dataset_source import Source, TopicPart
from probe_consumers.dataset_streams import StreamExport
from probe_consumers.decoding import incoming
from probe_consumers.replay_range import RangeRequest
from undercurrent.codec import Codec
from undercurrent.errors import DatasetError, TopicError
from undercurrent.evaluation.dataset_facts import FactStore
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
from undercurrent.topics import TopicPlan

_FACTS = ".facts.sqlite"
_WHOLE = RangeRequest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOrder:
    """What to export.

    Args:
        points: extraction points.
        range: which part of their topics.
        requests: ids, all where there are none.
        out: the folder; it is made, or empty.
        split: how requests are split.
        with_text: write prompts, their metadata and what was generated.
        tensors_in_parquet: write the values beside each token too.
        shard_bytes: size of a file of tensors after which the next one begins.
    """

    points: tuple[str, ...]
    range: RangeRequest = _WHOLE
    requests: frozenset[str] = frozenset()
    out: Path
    split: SplitRule = field(default_factory=SplitRule)
    with_text: bool = True
    tensors_in_parquet: bool = False
    shard_bytes: int = SHARD_BYTES


def export(source: Source, plan: TopicPlan, order: ExportOrder) -> dict[str, Any]:
    """Write a dataset and return its manifest.

    Raises:
        DatasetError: the folder is not empty.
        TopicError: a point has no topic.
        ReplayError: a part of a topic cannot be read.
    """
    if order.out.exists() and (not order.out.is_dir() or any(order.out.iterdir())):
        raise DatasetError(f"{order.out}: is there already; name a folder that is not, or is empty")
    # The ends of all points are fixed before anything is read.
    parts = {point: _part(source, plan, point, order.range) for point in order.points}
    order.out.mkdir(parents=True, exist_ok=True)
    facts = FactStore(order.out / _FACTS)
    try:
        return _export(source, plan, order, parts, facts)
    finally:
        facts.close()


def _export(
    source: Source, plan: TopicPlan, order: ExportOrder, parts: Mapping[str, TopicPart], facts: FactStore
) -> dict[str, Any]:
    codec = Codec()
    reading = Reading(codec, facts)
    beside = _read_beside(source, plan, order, reading)
    writer = DatasetWriter(
        order.out,
        probes=facts.probes,
        shard_bytes=order.shard_bytes,
        tensors_in_parquet=order.tensors_in_parquet,
    )
    exports: dict[str, StreamExport] = {}
    for point, part in parts.items():
        exports[point] = run = StreamExport(point, part.spans, facts, writer, order.split)
        for record in part.records:
            # What an engine's publisher writes to every partition has no key: it closes streams.
            if not order.requests or not record.key or record.key.decode(errors="replace") in order.requests:
                run.feed(incoming(codec, record))
        run.finish()
    writer.close()
    counts = write_tables(order.out, facts, with_text=order.with_text)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "undercurrent": version("undercurrent"),
        "layer_convention": LAYER_CONVENTION,
        "points": {point: run.kinds for point, run in exports.items()},
        "probes": list(facts.probes),
        "with_text": order.with_text,
        "split": order.split.to_dict() | {"ungrouped": sum(run.ungrouped for run in exports.values())},
        "counts": counts | {"rows": sum(writer.counts.values()), "rows_by_split": dict(writer.counts)},
        "source": {
            "topics": {plan.activations(point): _range(part) for point, part in parts.items()} | beside,
            "requests": sorted(order.requests),
            "records": {point: run.records for point, run in exports.items()},
            "left_out": {point: run.left_out for point, run in exports.items()},
            "undecodable": dict(reading.undecodable),
        },
        "test_reads": [],
    }
    return _described(order.out, manifest)


def _described(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    tables = sorted(path.relative_to(folder).as_posix() for path in folder.glob("data/*.parquet"))
    (folder / README).write_text(readme(manifest, tables), encoding="utf-8")
    manifest["files"] = {name: facts for name, facts in file_facts(folder).items() if name != _FACTS}
    write_manifest(folder, manifest)
    return manifest


def _read_beside(source: Source, plan: TopicPlan, order: ExportOrder, reading: Reading) -> dict[str, Any]:
    """Read the topics beside the activations, whole; return what was read of each, None where one is not there."""
    found: dict[str, TopicPart | None] = {
        topic: source.part(topic, _WHOLE, committed=topic == plan.verdicts)
        for topic in (plan.prompts, plan.generations, plan.verdicts, plan.labels)
    }
    if part := found[plan.prompts]:
        reading.prompts(part.records, order.split)
    if part := found[plan.generations]:
        reading.generations(part.records)
    if part := found[plan.verdicts]:
        reading.scores(part.records, frozenset(order.points))
    if part := found[plan.labels]:
        reading.labels(part.records)
    return {topic: None if part is None else _range(part) for topic, part in found.items()}


def _part(source: Source, plan: TopicPlan, point: str, asked: RangeRequest) -> TopicPart:
    topic = plan.activations(point)
    part = source.part(topic, asked)
    if part is None:
        raise TopicError(f"there is no topic {topic!r}")
    return part


def _range(part: TopicPart) -> dict[str, Any]:
    return {str(number): {**asdict(span), "deleted": part.deleted[number]} for number, span in part.spans.items()}
