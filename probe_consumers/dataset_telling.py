"""A dataset's manifest in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from undercurrent.counts import counted
from undercurrent.evaluation.dataset_split import PARTS


def as_json(value: Mapping[str, Any]) -> str:
    """Return plain data as JSON, with a line's end."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def told(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Return what a dataset holds, where it comes from and what was left out."""
    return "".join(line + "\n" for line in _lines(folder, manifest))


def _lines(folder: Path, manifest: Mapping[str, Any]) -> Iterator[str]:
    counts, source, split = manifest["counts"], manifest["source"], manifest["split"]
    size = sum(facts["bytes"] for facts in manifest["files"].values())
    yield f"{folder}: {counted(counts['requests'], 'request')}, {counted(counts['rows'], 'row')}, {size / 1e6:.1f} MB"
    for point, kinds in manifest["points"].items():
        for kind in kinds:
            rows = f"{kind['row_shape'] or [kind['width']]} {kind['dtype']}"
            yield f"  {point}: {kind['tensor_type']} of {kind['model']}, layers {kind['layers']}, rows {rows}"
    parts = ", ".join(f"{part} {counts['requests_by_split'].get(part, 0)}" for part in PARTS)
    yield f"  split by {split['group_by']}: {parts}"
    if split["ungrouped"]:
        bare = counted(split["ungrouped"], "stream")
        yield f"  {bare} without {split['group_by']!r}: each of their requests is its own group"
    yield from _duplicates(split.get("duplicates"))
    for name, values in counts["requests_by_label"].items():
        yield f"  label {name}: " + ", ".join(f"{value} {count}" for value, count in sorted(values.items()))
    if counts["void_requests"]:
        yield f"  {counted(counts['void_requests'], 'attempt is', 'attempts are')} void: another one counts"
    for point, count in source.get("without_token_ids", {}).items():
        if count:
            yield f"  {point}: no token ids were recorded of {counted(count, 'position')} (token_ids: false)"
    yield from _gone(source["topics"])
    yield from _left_out(source)
    if manifest["test_reads"]:
        yield f"  the test part was read {counted(len(manifest['test_reads']), 'time')}"


def _duplicates(found: Mapping[str, Any] | None) -> Iterator[str]:
    if not found or not found["near_across"]:
        return
    done = "left in two parts" if found["kept"] else f"{found['moved']} moved, so that each is in one part"
    yield (
        f"  {counted(found['near_across'], 'request shares its', 'requests share their')} prompt "
        f"({found['exact_across']}), or 13 words in a row of it, with one that was drawn for another part: {done}"
    )


def _gone(topics: Mapping[str, Any]) -> Iterator[str]:
    """Yield what retention has deleted, and topics that are not there."""
    for topic, partitions in topics.items():
        if partitions is None:
            yield f"  {topic}: there is no such topic"
            continue
        for number, part in partitions.items():
            if part["deleted"] is None:
                yield f"  {topic}[{number}]: retention has deleted records of the time asked for"
            elif part["deleted"]:
                yield f"  {topic}[{number}]: retention has deleted the first {counted(part['deleted'], 'offset')}"


def _left_out(source: Mapping[str, Any]) -> Iterator[str]:
    for point, left in source["left_out"].items():
        cut = left["started_before_the_range"]
        if cut["requests"]:
            yield (
                f"  {point}: {counted(cut['requests'], 'request')} ({counted(cut['records'], 'record')}) left out: "
                "started before what was read"
            )
        for cause, count in left["strays"].items():
            yield f"  {point}: {counted(count, 'record')} left out: {cause}"
        if left["undecodable"]:
            yield f"  {point}: {counted(left['undecodable'], 'record')} cannot be read"
    for topic, count in source["undecodable"].items():
        yield f"  {topic}: {counted(count, 'record')} cannot be read"
