"""What a replay leaves behind: verdicts and scores, each as Parquet and as JSON lines."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from undercurrent.errors import ReplayError
from undercurrent.protocol.messages import ProbeVerdict, VerdictKind

_STREAM = [("request_id", pa.string()), ("attempt", pa.int64()), ("index", pa.int32())]
_PROBE = [("point", pa.string()), ("probe", pa.string())]

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
    ]
)
SCORES = pa.schema([*_STREAM, *_PROBE, ("token_pos", pa.int32()), ("layer", pa.int32()), ("score", pa.float32())])


class TableSink:
    """One table, written as `<name>.parquet` and `<name>.jsonl`.

    Args:
        folder: where to.
        name: of the table.
        schema: its columns.
    """

    def __init__(self, folder: Path, name: str, schema: pa.Schema) -> None:
        self._schema = schema
        self._parquet = pq.ParquetWriter(folder / f"{name}.parquet", schema)
        self._lines = (folder / f"{name}.jsonl").open("w", encoding="utf-8")

    def write(self, rows: Iterable[Mapping[str, Any]]) -> int:
        """Add rows; return how many."""
        listed = list(rows)
        if listed:
            self._parquet.write_table(pa.Table.from_pylist(listed, schema=self._schema))
            self._lines.writelines(json.dumps(_plain(row), ensure_ascii=False) + "\n" for row in listed)
        return len(listed)

    def close(self) -> None:
        """Finish both files."""
        self._parquet.close()
        self._lines.close()


class ReplaySinks:
    """The tables of a replay.

    Args:
        folder: where to; it is made.

    Raises:
        ReplayError: nothing can be written there.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._verdicts = TableSink(folder, "verdicts", VERDICTS)
            self._scores = TableSink(folder, "scores", SCORES)
        except OSError as exc:
            raise ReplayError(f"{folder}: results cannot be written there: {exc.strerror}") from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._verdicts.close()
        self._scores.close()

    def write(self, verdicts: Iterable[ProbeVerdict]) -> None:
        """Add verdicts and the scores that they carry; watermarks give scores alone."""
        listed = list(verdicts)
        names = VERDICTS.names
        self._verdicts.write(
            {name: getattr(item, name) for name in names} for item in listed if item.kind is not VerdictKind.WATERMARK
        )
        self._scores.write(row for item in listed for row in score_rows(item))


def score_rows(verdict: ProbeVerdict) -> Iterator[dict[str, Any]]:
    """Yield one row per score that a verdict carries."""
    identity = {name: getattr(verdict, name) for name in ("request_id", "attempt", "index", "point", "probe")}
    positions = struct.unpack(f"<{len(verdict.score_positions) // 4}i", verdict.score_positions)
    scores = struct.unpack(f"<{len(verdict.scores) // 4}f", verdict.scores)
    for at, score in enumerate(scores):
        row, column = divmod(at, len(verdict.score_layers))
        yield {**identity, "token_pos": positions[row], "layer": verdict.score_layers[column], "score": score}


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as JSON can hold it: what is not finite becomes null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }
