"""The tables of a replay: verdicts, scores, and the records that no stream took; and logs that they are appended to.

A log is an Arrow stream on disk that can be cut off at any batch's end and go on there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from probe_consumers.inputs import Inputs
from probe_consumers.replay import LeftOut
from undercurrent.errors import ReplayError
from undercurrent.files import replacing, writing
from undercurrent.protocol.messages import ProbeVerdict, VerdictKind
from undercurrent.protocol.streams import StreamId

_STREAM = [("request_id", pa.string()), ("attempt", pa.int64()), ("index", pa.int32())]
_PROBE = [("point", pa.string()), ("probe", pa.string())]
_ROW_GROUP = 131_072
OTHERS = "other_offsets"

VERDICTS = pa.schema(
    [
        *_STREAM,
        *_PROBE,
        ("probe_version", pa.string()),
        ("probe_fingerprint", pa.string()),
        ("kind", pa.string()),
        ("mode", pa.string()),
        ("action", pa.string()),
        ("verdict", pa.string()),
        ("score", pa.float64()),
        ("token_pos", pa.int32()),
        ("layer", pa.int32()),
        ("clear_up_to", pa.int32()),
        ("scored", pa.int64()),
        ("complete", pa.bool_()),
        ("missing", pa.int64()),
        ("partial", pa.bool_()),
        ("end_reason", pa.string()),
        ("command_id", pa.string()),
        ("error", pa.string()),
        ("source_partition", pa.int32()),
        ("source_offset", pa.int64()),
        ("captured_at_us", pa.int64()),
        (OTHERS, pa.list_(pa.int64())),
    ]
)
"""A row per signal, result and error; `other_offsets` of a joining probe: the records at its other points."""

SCORES = pa.schema([*_STREAM, *_PROBE, ("token_pos", pa.int32()), ("layer", pa.int32()), ("score", pa.float32())])
"""A row per score; NaN where a probe that looks at single records gave none."""

LEFT_OUT = pa.schema(
    [
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        *_STREAM,
        ("cause", pa.string()),
        ("detail", pa.string()),
        ("is_end", pa.bool_()),
    ]
)

CUT = pa.schema([*_STREAM, ("partition", pa.int32()), ("why", pa.string())])


def verdict_batch(
    verdicts: Iterable[ProbeVerdict], others: Callable[[ProbeVerdict], tuple[int, ...] | None] = lambda _: None
) -> pa.RecordBatch:
    """Return the rows of verdicts; watermarks have none.

    Args:
        verdicts: the verdicts.
        others: see `Replay.other_offsets`.
    """
    told = [item for item in verdicts if item.kind is not VerdictKind.WATERMARK]
    columns = {name: [getattr(item, name) for item in told] for name in VERDICTS.names if name != OTHERS}
    return pa.RecordBatch.from_pydict({**columns, OTHERS: [others(item) for item in told]}, schema=VERDICTS)


def score_batch(verdicts: Iterable[ProbeVerdict]) -> pa.RecordBatch:
    """Return a row per score that verdicts carry, in their order."""
    carrying = [item for item in verdicts if item.scores]
    counts = [len(item.scores) // 4 for item in carrying]
    owner = np.repeat(np.arange(len(carrying), dtype=np.int32), counts)
    columns = {
        name: pa.array([getattr(item, name) for item in carrying], SCORES.field(name).type).take(pa.array(owner))
        for name in SCORES.names[:5]
    }
    places: list[np.ndarray] = [np.empty(0, np.int32)]
    layers: list[np.ndarray] = [np.empty(0, np.int32)]
    for named, group in groupby(carrying, key=lambda item: item.score_layers):
        positions = np.frombuffer(b"".join(item.score_positions for item in group), "<i4")
        places.append(np.repeat(positions, len(named)))
        layers.append(np.tile(np.array(named, np.int32), len(positions)))
    columns["token_pos"] = pa.array(np.concatenate(places), pa.int32())
    columns["layer"] = pa.array(np.concatenate(layers), pa.int32())
    columns["score"] = pa.array(np.frombuffer(b"".join(item.scores for item in carrying), "<f4"), pa.float32())
    return pa.RecordBatch.from_pydict(columns, schema=SCORES)


def left_out_batch(rows: Sequence[LeftOut]) -> pa.RecordBatch:
    """Return a row per record that no stream took."""
    listed = [
        {
            "partition": row.partition,
            "offset": row.offset,
            "request_id": row.stream.request_id if row.stream else None,
            "attempt": row.stream.attempt if row.stream else None,
            "index": row.stream.index if row.stream else None,
            "cause": row.cause,
            "detail": row.detail,
            "is_end": row.is_end,
        }
        for row in rows
    ]
    return pa.RecordBatch.from_pylist(listed, schema=LEFT_OUT)


def cut_batch(why: str, streams: Mapping[StreamId, int]) -> pa.RecordBatch:
    """Return a row per stream that the range cuts.

    Args:
        why: in a word.
        streams: each with its partition.
    """
    listed = [asdict(stream) | {"partition": streams[stream], "why": why} for stream in sorted(streams)]
    return pa.RecordBatch.from_pylist(listed, schema=CUT)


def placed(batch: pa.RecordBatch, inputs: Inputs) -> pa.RecordBatch:
    """Return rows whose partition is a lane with the point and the partition of that lane."""
    lanes = batch["partition"].to_pylist()
    columns = {name: batch[name] for name in batch.schema.names}
    columns |= {
        "partition": pa.array(map(inputs.lanes.number, lanes), pa.int32()),
        "point": pa.array(map(inputs.point, lanes), pa.string()),
    }
    return pa.RecordBatch.from_pydict(columns, schema=placed_schema(batch.schema))


def placed_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema of `placed` rows."""
    return schema.append(pa.field("point", pa.string()))


class TableLog:
    """A table that grows on disk.

    Args:
        path: of the file.
        schema: its columns.
        length: bytes of it that count; what lies behind was written by somebody who did not come to say so.

    Raises:
        ReplayError: it is shorter than that.
    """

    def __init__(self, path: Path, schema: pa.Schema, length: int = 0) -> None:
        self._schema = schema
        self._path = path
        self._file = path.open("r+b" if path.exists() else "w+b")
        size = self._file.seek(0, os.SEEK_END)
        if size < length:
            raise ReplayError(f"{path}: {size} bytes, its checkpoint says {length}: remove the folder and start again")
        self._file.truncate(length)
        self.length = self._file.seek(length)
        if not length:
            self._append(memoryview(schema.serialize()))

    def append(self, batch: pa.RecordBatch) -> None:
        """Add rows."""
        if batch.num_rows:
            self._append(memoryview(batch.serialize()))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, data: memoryview) -> None:
        with writing(self._path):
            self._file.write(data)
            self._file.flush()
        self.length += len(data)


def read_log(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a log that is complete."""
    with pa.OSFile(str(path)) as source, pa.ipc.open_stream(source) as reader:
        yield from reader


def write_parquet(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write a table in one step: it is there whole, or not at all. Its bytes depend on its rows alone."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    with replacing(path) as fresh, writing(fresh), pq.ParquetWriter(fresh, schema, compression="zstd") as writer:
        for batch in batches:
            waiting.append(batch)
            rows += batch.num_rows
            while rows >= _ROW_GROUP:
                table = pa.Table.from_batches(waiting, schema)
                writer.write_table(table.slice(0, _ROW_GROUP).combine_chunks(), row_group_size=_ROW_GROUP)
                waiting = table.slice(_ROW_GROUP).combine_chunks().to_batches()
                rows -= _ROW_GROUP
        if rows:
            writer.write_table(pa.Table.from_batches(waiting, schema).combine_chunks(), row_group_size=_ROW_GROUP)
