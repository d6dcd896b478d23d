"""The parts of a replay into its results: the same bytes, however many processes wrote them and how often they died."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from probe_consumers.inputs import Inputs
from probe_consumers.replay import HALF, NO_OPEN_STREAM, LeftOut, Mark, Span, cut_streams
from probe_consumers.replay_order import FORMAT, VERSION, Plan
from probe_consumers.replay_store import Checkpoint, part_folder, read_checkpoint, write_json
from probe_consumers.replay_tables import (
    CUT,
    LEFT_OUT,
    SCORES,
    VERDICTS,
    cut_batch,
    left_out_batch,
    placed,
    placed_schema,
    read_log,
    write_parquet,
)
from undercurrent.errors import ReplayError
from undercurrent.protocol.streams import StreamId

SUMMARY = "summary.json"
STARTED_BEFORE, UNFINISHED = "started_before_the_range", "unfinished_at_its_end"
LISTED = 1000
"""Streams that a summary names; all of them are counted."""


def merge(out: Path, plan: Plan) -> dict[str, Any]:
    """Write the results, remove the progress, and return the summary.

    Raises:
        ReplayError: a part is not done.
    """
    numbers, inputs = plan.numbers, plan.inputs
    reached = {number: _done(out, number) for number in numbers}
    left_out = [row for number in numbers for row in _left_out(out, number)]
    tally = Tally({row.stream for row in left_out if row.stream is not None})
    write_parquet(out / "verdicts.parquet", VERDICTS, tally.watch(_rows(out, numbers, "verdicts")))
    write_parquet(out / "scores.parquet", SCORES, tally.count_scores(_rows(out, numbers, "scores")))
    unfinished = {stream: lane for number in numbers for stream, lane in reached[number].unfinished}
    cut = cut_streams(left_out, plan.spans, tally.spoken | unfinished.keys())
    # The late end of a stream that was closed before is no fault.
    told = [row for row in left_out if row.cause != HALF and (not row.is_end or row.stream in cut)]
    cuts = [cut_batch(STARTED_BEFORE, cut), cut_batch(UNFINISHED, unfinished)]
    for name, schema, batches in (("left_out", LEFT_OUT, [left_out_batch(told)]), ("cut", CUT, cuts)):
        rows = [placed(batch, inputs) for batch in batches]
        write_parquet(out / f"{name}.parquet", placed_schema(schema), rows)
    summary = _summary(plan, reached, told, cut, unfinished, tally)
    write_json(out / SUMMARY, summary)
    shutil.rmtree(out / "progress", ignore_errors=True)  # there is none of no partition
    return summary


class Tally:
    """Counts what goes into the results.

    Args:
        suspects: streams of which it is to be known whether a verdict speaks of them.
    """

    def __init__(self, suspects: set[StreamId]) -> None:
        self._ids = pa.array(sorted({stream.request_id for stream in suspects}), pa.string())
        self._rows: Counter[tuple[Any, ...]] = Counter()
        self.spoken: set[StreamId] = set()
        self.scores = 0

    def watch(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Pass verdicts on and count them."""
        for batch in batches:
            names = ("probe", "kind", "verdict", "action", "partial", "complete")
            self._rows.update(zip(*(batch[name].to_pylist() for name in names), strict=True))
            if len(self._ids):
                found = batch.filter(pc.is_in(batch["request_id"], value_set=self._ids))
                ids = zip(*(found[name].to_pylist() for name in ("request_id", "attempt", "index")), strict=True)
                self.spoken.update(StreamId(*name) for name in ids)
            yield batch

    def count_scores(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Pass scores on and count them."""
        for batch in batches:
            self.scores += batch.num_rows
            yield batch

    def of_probe(self, probe: str) -> dict[str, Any]:
        """Return what a probe has said: counts and, of the streams that it judged to their end, shares."""

        def count(**wanted: Any) -> int:  # noqa: ANN401 - a column's value
            names = ("kind", "verdict", "action", "partial", "complete")
            return sum(
                many
                for (name, *row), many in self._rows.items()
                if name == probe
                and all(dict(zip(names, row, strict=True))[key] == value for key, value in wanted.items())
            )

        results, errors = count(kind="result"), count(kind="error")
        verdicts = sorted({row[2] for row in self._rows if row[0] == probe and row[1] == "result"})
        actions = {action: count(kind="result", action=action) for action in ("continue", "flag", "abort")}
        return {
            "streams": results + errors,
            "results": results,
            "errors": errors,
            "verdicts": {verdict: count(kind="result", verdict=verdict) for verdict in verdicts},
            "actions": actions,
            "partial": count(kind="result", partial=True),
            "incomplete": count(kind="result", complete=False),
            "rates": {
                "flag": _share(actions["flag"], results),
                "abort": _share(actions["abort"], results),
                "error": _share(errors, results + errors),
            },
        }


def _share(count: int, total: int) -> float | None:
    return count / total if total else None


def _done(out: Path, number: int) -> Checkpoint:
    found = read_checkpoint(part_folder(out, number))
    if found is None or not found.done:
        raise ReplayError(f"{out}: partition {number} is not replayed to its end")
    return found


def _rows(out: Path, numbers: Sequence[int], table: str) -> Iterator[pa.RecordBatch]:
    for number in numbers:
        yield from read_log(part_folder(out, number) / f"{table}.arrows")


def _left_out(out: Path, number: int) -> Iterator[LeftOut]:
    for batch in read_log(part_folder(out, number) / "left_out.arrows"):
        for row in batch.to_pylist():
            name = row.pop("request_id"), row.pop("attempt"), row.pop("index")
            yield LeftOut(**row, stream=None if name[0] is None else StreamId(*name))


def _summary(
    plan: Plan,
    reached: dict[int, Checkpoint],
    left_out: Sequence[LeftOut],
    cut: dict[StreamId, int],
    unfinished: dict[StreamId, int],
    tally: Tally,
) -> dict[str, Any]:
    causes, inputs = Counter(_cause(row, cut) for row in left_out), plan.inputs
    return {
        "format": FORMAT,
        "version": VERSION,
        "source": plan.source,
        "asked": plan.asked,
        "requests": None if plan.requests is None else len(plan.requests),
        "probes": plan.probes,
        "fingerprint": plan.fingerprint,
        "ranges": {inputs.label(part.number): asdict(part.span) for part in plan.parts},
        "not_read": {
            inputs.label(lane): asdict(Span(mark.position, plan.spans[lane].end))
            for lane, mark in _marks(inputs, reached).items()
            if mark.position < plan.spans[lane].end
        },
        "deleted": {
            inputs.label(part.number): {"offsets": part.deleted, "left_from": _time(part.remains_from_ms)}
            for part in plan.parts
            if part.deleted != 0
        },
        "records": {
            "read": sum(item.records for item in reached.values()),
            "of_other_requests": sum(item.skipped for item in reached.values()),
            "bytes": sum(item.read_bytes for item in reached.values()),
            "left_out": dict(sorted(causes.items())),
        },
        "cut": {STARTED_BEFORE: _named(cut, inputs), UNFINISHED: _named(unfinished, inputs)},
        "scores": tally.scores,
        "by_probe": {item["name"]: tally.of_probe(item["name"]) for item in plan.probes},
        **plan.facts,
    }


def _cause(row: LeftOut, cut: dict[StreamId, int]) -> str:
    is_cut = row.cause == NO_OPEN_STREAM and row.stream in cut
    return STARTED_BEFORE if is_cut else row.cause


def _marks(inputs: Inputs, reached: dict[int, Checkpoint]) -> dict[int, Mark]:
    pairs = [zip(inputs.lanes.of(number), item.marks, strict=True) for number, item in reached.items()]
    return {lane: mark for lanes in pairs for lane, mark in lanes}


def _named(streams: dict[StreamId, int], inputs: Inputs) -> dict[str, Any]:
    def where(lane: int) -> dict[str, Any]:
        number = {"partition": inputs.lanes.number(lane)}
        return number | {"point": inputs.point(lane)} if inputs.joined else number

    listed = [asdict(stream) | where(streams[stream]) for stream in sorted(streams)[:LISTED]]
    return {"count": len(streams), "named": listed}


def _time(milliseconds: int | None) -> str | None:
    return None if milliseconds is None else datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat()
