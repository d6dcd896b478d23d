"""The tables of a dataset that are written at its end: requests, streams, labels."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from undercurrent.evaluation.dataset_facts import FactStore
from undercurrent.evaluation.dataset_format import (
    LABEL_PREFIX,
    LABEL_SCHEMA,
    LABELS,
    REQUEST_SCHEMA,
    REQUESTS,
    STREAM_SCHEMA,
    STREAMS,
    with_columns,
)
from undercurrent.files import writing
from undercurrent.protocol.messages import LabelValue

_BATCH_ROWS = 4096
_VOID_ENDS = frozenset({"superseded", "conflict", "rewound"})


def resolved(values: Iterable[str]) -> str:
    """Return what the labels of one name say together: what all that judged say, or unknown where they disagree."""
    judged = set(values) - {LabelValue.UNKNOWN.value}
    return judged.pop() if len(judged) == 1 else LabelValue.UNKNOWN.value


def write_tables(folder: Path, facts: FactStore, *, with_text: bool) -> dict[str, Any]:
    """Write the three tables and return how much they hold.

    Args:
        folder: of the dataset.
        facts: what is known.
        with_text: write prompts, their metadata and what was generated.
    """
    names = facts.label_names()
    counts: dict[str, Any] = {"requests": 0, "void_requests": 0}
    by_split: defaultdict[str, int] = defaultdict(int)
    by_label: dict[str, defaultdict[str, int]] = {name: defaultdict(int) for name in names}

    def requests() -> Iterator[dict[str, Any]]:
        for row in _requests(facts, names, with_text):
            counts["requests"] += 1
            counts["void_requests"] += row["void"]
            by_split[row["split"]] += 1
            for name in names:
                by_label[name][row[LABEL_PREFIX + name]] += 1
            yield row

    schema = with_columns(REQUEST_SCHEMA, LABEL_PREFIX, names, pa.string())
    _write(folder / REQUESTS, schema, requests())
    counts["streams"] = _write(folder / STREAMS, STREAM_SCHEMA, facts.streams())
    counts["labels"] = _write(folder / LABELS, LABEL_SCHEMA, facts.labels())
    return counts | {
        "requests_by_split": dict(by_split),
        "requests_by_label": {name: dict(found) for name, found in by_label.items()},
    }


def _write(path: Path, schema: pa.Schema, rows: Iterator[Mapping[str, Any]]) -> int:
    count = 0
    with writing(path), pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while batch := list(islice(rows, _BATCH_ROWS)):
            writer.write_table(pa.Table.from_pylist(batch, schema))
            count += len(batch)
    return count


def _requests(facts: FactStore, names: Iterable[str], with_text: bool) -> Iterator[dict[str, Any]]:
    for streams, final, later in facts.children():
        first = streams[0]
        started = json.loads(first["started"])
        prompt = facts.prompt(first["request_id"])
        ends = [stream["end_reason"] for stream in streams]
        told: defaultdict[str, list[str]] = defaultdict(list)
        for name, value in facts.labels_of(first["request_id"]):
            told[name].append(value)
        # Only the final's attempt counts; without a final the highest one that was captured may still.
        other = final["attempt"] != first["attempt"] if final else later
        # A final of a lower attempt says nothing of this run.
        final = {} if other else final
        yield {
            **{name: first[name] for name in ("request_id", "attempt", "index", "split", "group", "prompt_len")},
            "void": other or not _VOID_ENDS.isdisjoint(ends),
            "prompt": prompt.prompt if with_text else None,
            "text": final.get("text") if with_text else None,
            "metadata": json.dumps(prompt.metadata, ensure_ascii=False) if with_text and prompt.metadata else None,
            "tenant": prompt.tenant,
            "created_at_us": prompt.created_at_us,
            "started_at_us": started["started_at_us"],
            "cached_prefix": max(stream["cached_prefix"] for stream in streams),
            "positions": max(stream["positions"] for stream in streams),
            **{name: final.get(name) for name in ("generated_tokens", "outcome", "finish_reason")},
            **{name: final.get(name) for name in ("aborted_by", "aborted_at", "holdout_share")},
            # SQLite has no truth values.
            "holdout": None if final.get("holdout") is None else bool(final["holdout"]),
            "complete": all(stream["complete"] for stream in streams),
            "partial": any(stream["partial"] for stream in streams),
            "missing": sum(stream["missing"] for stream in streams),
            "end_reason": next((reason for reason in ends if reason != "finished"), "finished"),
            **{name: started[name] for name in ("model", "model_fingerprint", "lora", "quantization")},
            **{LABEL_PREFIX + name: resolved(told[name]) for name in names},
        }
