"""A dataset's manifest in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
    yield f"{folder}: {counts['requests']} requests, {counts['rows']} rows, {size / 1e6:.1f} MB"
    for point, kinds in manifest["points"].items():
        for kind in kinds:
            rows = f"{kind['row_shape'] or [kind['width']]} {kind['dtype']}"
            yield f"  {point}: {kind['tensor_type']} of {kind['model']}, layers {kind['layers']}, rows {rows}"
    parts = ", ".join(f"{part} {counts['requests_by_split'].get(part, 0)}" for part in PARTS)
    yield f"  split by {split['group_by']}: {parts}"
    if split["ungrouped"]:
        yield f"  {split['ungrouped']} streams have no {split['group_by']!r}: each of their requests is its own group"
    yield from _duplicates(split.get("duplicates"))
    for name, values in counts["requests_by_label"].items():
        yield f"  label {name}: " + ", ".join(f"{value} {count}" for value, count in sorted(values.items()))
    if counts["void_requests"]:
        yield f"  {counts['void_requests']} attempts are void: another one counts"
    for point, count in source.get("without_token_ids", {}).items():
        if count:
            yield f"  {point}: no token ids were recorded of {count} positions (token_ids: false)"
    yield from _gone(source["topics"])
    yield from _left_out(source)
    if manifest["test_reads"]:
        yield f"  the test part was read {len(manifest['test_reads'])} times"


def _duplicates(found: Mapping[str, Any] | None) -> Iterator[str]:
    if not found or not found["near_across"]:
        return
    done = "left in two parts" if found["kept"] else f"{found['moved']} moved, so that each is in one part"
    yield (
        f"  {found['near_across']} requests share their prompt ({found['exact_across']}), or 13 words in a row of it, "
        f"with one that was drawn for another part: {done}"
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
                yield f"  {topic}[{number}]: retention has deleted the first {part['deleted']} offsets"


def _left_out(source: Mapping[str, Any]) -> Iterator[str]:
    for point, left in source["left_out"].items():
        cut = left["started_before_the_range"]
        if cut["requests"]:
            yield (
                f"  {point}: {cut['requests']} requests ({cut['records']} records) are left out: they started before "
                "what was read"
            )
        for cause, count in left["strays"].items():
            yield f"  {point}: {count} records are left out: {cause}"
        if left["undecodable"]:
            yield f"  {point}: {left['undecodable']} records cannot be read"
    for topic, count in source["undecodable"].items():
        yield f"  {topic}: {count} records cannot be read"
