"""A replay compared with the live run, or with another replay, bit for bit.

Memory does not grow with the range: both sides are spread over files by the hash of the request, and one file of each
is compared at a time.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from probe_consumers.inputs import Inputs
from probe_consumers.passed_over import PassedOver
from probe_consumers.replay import Edges, Span, comparable
from probe_consumers.replay_merge import STARTED_BEFORE
from probe_consumers.replay_tables import OTHERS, SCORES, VERDICTS, TableLog, read_log
from undercurrent.codec import Codec
from undercurrent.errors import DecodeError, ReplayError
from undercurrent.evaluation.diff import DiffReport, TellingId, collect, compare, telling_id
from undercurrent.files import writing
from undercurrent.kafka.records import Record
from undercurrent.protocol.lanes import Lanes
from undercurrent.protocol.messages import BindingMode, ProbeVerdict, VerdictAction, VerdictKind
from undercurrent.protocol.streams import StreamId

_BUCKET_BYTES = 32 << 20
_MOST_BUCKETS = 256
_NAMES = ("request_id", "attempt", "index", "point", "probe")
_ENUMS = {"kind": VerdictKind, "mode": BindingMode, "action": VerdictAction}


def bucket_count(stored_bytes: int) -> int:
    """Return over how many files so much is spread."""
    return max(1, min(_MOST_BUCKETS, stored_bytes // _BUCKET_BYTES + 1))


@dataclass(slots=True)
class LiveVerdicts:
    """What live hosts said of the bindings of a point, spread over files.

    Args:
        folder: of the files; it is made, and must not be there.
        buckets: how many.
        codec: decodes.
        services: verdicts of each consumer group.
        passed_over: records that cannot be read.
    """

    folder: Path
    buckets: int
    codec: Codec
    services: Counter[str] = field(default_factory=Counter)
    passed_over: PassedOver = field(default_factory=PassedOver)

    def write(self, records: Iterable[Record], point: str, probes: frozenset[str]) -> None:
        """Take the records of the verdicts topic."""
        self.folder.mkdir(parents=True)
        files = [(self.folder / f"{number}").open("wb") for number in range(self.buckets)]
        try:
            for record in records:
                try:
                    message = self.codec.decode(record.value)
                except DecodeError as exc:
                    self.passed_over.add(record, exc)
                    continue
                if isinstance(message, ProbeVerdict) and message.point == point and message.probe in probes:
                    self.services[message.service] += 1
                    value = record.value or b""
                    with writing(self.folder):
                        files[_bucket(message.request_id, self.buckets)].write(struct.pack("<I", len(value)) + value)
        finally:
            with writing(self.folder):
                for file in files:
                    file.close()

    def read(self, bucket: int, service: str | None) -> list[ProbeVerdict]:
        """Return what one consumer group said of the requests of a bucket."""
        found = []
        data = memoryview((self.folder / f"{bucket}").read_bytes())
        while data:
            size = int.from_bytes(data[:4], "little")
            message = self.codec.decode(bytes(data[4 : 4 + size]))
            data = data[4 + size :]
            if isinstance(message, ProbeVerdict) and message.service == service:
                found.append(message)
        return found


class ReplayedVerdicts:
    """What a replay said, spread over files.

    Args:
        out: folder of its results.
        folder: of the files; it is made, and must not be there.
        buckets: how many.
    """

    def __init__(self, out: Path, folder: Path, buckets: int) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        for table, schema in (("verdicts", VERDICTS), ("scores", SCORES)):
            logs = [TableLog(folder / f"{table}-{number}", schema) for number in range(buckets)]
            for batch in _stored(out / f"{table}.parquet"):
                for number, rows in _spread(batch, buckets):
                    logs[number].append(rows)
            for log in logs:
                log.close()

    def read(self, bucket: int) -> list[ProbeVerdict]:
        """Return what was said of the requests of a bucket."""
        return [*map(_verdict, self._rows(bucket)), *_watermarks(list(read_log(self._folder / f"scores-{bucket}")))]

    def ahead(self, bucket: int, lanes: Lanes, judged_up_to: Mapping[int, int]) -> frozenset[TellingId]:
        """Return of whom the last words follow from records that a live run had not come to, at any of their points."""
        found = set()
        for row in self._rows(bucket):
            verdict, places = _verdict(row), (row["source_offset"], *(row[OTHERS] or ()))
            judged = [judged_up_to.get(lane) for lane in lanes.of(verdict.source_partition)]
            late = [up_to is not None and at >= up_to for at, up_to in zip(places, judged, strict=True)]
            if verdict.kind in (VerdictKind.RESULT, VerdictKind.ERROR) and any(late):
                found.add(telling_id(verdict))
        return frozenset(found)

    def _rows(self, bucket: int) -> Iterator[dict[str, Any]]:
        return (row for batch in read_log(self._folder / f"verdicts-{bucket}") for row in batch.to_pylist())


def read_cut(out: Path, inputs: Inputs | None = None, whole: Collection[int] = ()) -> Edges:
    """Return the streams that the range of a replay cut.

    Args:
        out: folder of its results.
        inputs: what it read, where it joined points.
        whole: lanes that had no record behind the range when the live verdicts were read: nobody can have said
            anything that follows from one.
    """
    edges = Edges()
    for batch in _stored(out / "cut.parquet"):
        for row in batch.to_pylist():
            name = StreamId(row["request_id"], row["attempt"], row["index"])
            side = edges.started_before if row["why"] == STARTED_BEFORE else edges.unfinished
            side[name] = row["partition"]
            if side is edges.unfinished and inputs is not None and row["point"] != inputs.points[0]:
                lane = inputs.lanes.of(row["partition"])[inputs.points.index(row["point"])]
                edges.elsewhere.update([name] if lane not in whole else [])
    return edges


def compare_live(
    out: Path,
    live: LiveVerdicts,
    service: str | None,
    spans: Mapping[int, Span],
    judged_up_to: Mapping[int, int] | None = None,
    inputs: Inputs | None = None,
    whole: Collection[int] = (),
) -> DiffReport:
    """Compare a replay with what one consumer group said live.

    Args:
        out: folder of the replay.
        live: what was said.
        service: the group; None where there is none.
        spans: the range of the replay.
        judged_up_to: how far the group had come, by partition, or lane; see `compare`.
        inputs: what the replay read, where it joined points.
        whole: see `read_cut`.
    """
    edges, report = (
        read_cut(out, inputs, whole),
        DiffReport(unreadable=live.passed_over.count),
    )
    report.unreadable_first += live.passed_over.first
    lanes = None if inputs is None else inputs.lanes
    replayed = ReplayedVerdicts(out, live.folder / "replayed", live.buckets)
    for bucket in range(live.buckets):
        mine, theirs = comparable(live.read(bucket, service), replayed.read(bucket), edges, spans, lanes)
        ahead = frozenset() if lanes is None else replayed.ahead(bucket, lanes, judged_up_to or {})
        compare(collect(mine), collect(theirs), report, judged_up_to, ahead)
    return report


def compare_folders(out: Path, other: Path, folder: Path) -> DiffReport:
    """Compare a replay with another one; streams that either range cuts are left out.

    Args:
        out: folder of the replay; its words are the report's `replay`.
        other: folder of the other one; its words are the report's `live`.
        folder: for files that are needed meanwhile.

    Raises:
        ReplayError: the other folder holds no replay.
    """
    count = bucket_count(stored_bytes(out) + stored_bytes(other))
    sides = [ReplayedVerdicts(path, folder / str(number), count) for number, path in enumerate((other, out))]
    cut = {name for path in (other, out) for side in _both(read_cut(path)) for name in side}
    report = DiffReport()
    for bucket in range(count):
        told = [[item for item in side.read(bucket) if _stream(item) not in cut] for side in sides]
        compare(collect(told[0]), collect(told[1]), report)
    return report


def stored_bytes(out: Path) -> int:
    """Return about how many bytes the results of a replay take in memory.

    Raises:
        ReplayError: there are none.
    """
    tables = [_opened(out / f"{table}.parquet").metadata for table in ("verdicts", "scores")]
    groups = [table.row_group(number).total_byte_size for table in tables for number in range(table.num_row_groups)]
    rows: int = sum(table.num_rows for table in tables)
    return int(sum(groups)) + 64 * rows


def _both(edges: Edges) -> tuple[dict[StreamId, int], dict[StreamId, int]]:
    return edges.started_before, edges.unfinished


def _stream(verdict: ProbeVerdict) -> StreamId:
    return StreamId(verdict.request_id, verdict.attempt, verdict.index)


def _opened(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as exc:
        raise ReplayError(f"{path}: cannot be read; expected the table of a replay that has ended: {exc}") from exc


def _stored(path: Path) -> Iterator[pa.RecordBatch]:
    with _opened(path) as file:
        yield from file.iter_batches()


def _bucket(request_id: str, buckets: int) -> int:
    return crc32(request_id.encode()) % buckets


def _spread(batch: pa.RecordBatch, buckets: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows of each bucket."""
    if buckets == 1:
        yield 0, batch
        return
    names = batch["request_id"].dictionary_encode()
    places = np.array([_bucket(name, buckets) for name in names.dictionary.to_pylist()], np.int64)[
        names.indices.to_numpy()
    ]
    for number in np.unique(places).tolist():
        yield number, batch.take(pa.array(np.flatnonzero(places == number)))


def _verdict(row: dict[str, Any]) -> ProbeVerdict:
    told: dict[str, Any] = {
        name: _ENUMS[name](value) if name in _ENUMS else value for name, value in row.items() if name != OTHERS
    }
    return ProbeVerdict(**told, service="", decided_at_us=0)


def _watermarks(batches: Sequence[pa.RecordBatch]) -> Iterator[ProbeVerdict]:
    """Yield the scores of a bucket as verdicts carry them: one for each stream, probe and layer."""
    if not batches:
        return
    table = pa.Table.from_batches(batches, SCORES)
    codes = np.zeros(table.num_rows, np.int64)
    for name in (*_NAMES, "layer"):
        column = table[name].combine_chunks().dictionary_encode()
        codes = np.unique(codes * len(column.dictionary) + column.indices.to_numpy(), return_inverse=True)[1]
    order = np.argsort(codes, kind="stable")
    columns = [table[name].to_numpy()[order] for name in ("token_pos", "layer", "score")]
    firsts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    for first, last in zip(firsts.tolist(), [*firsts[1:].tolist(), len(order)], strict=True):
        places, layers, scores = (column[first:last] for column in columns)
        yield ProbeVerdict(
            **{name: table[name][int(order[first])].as_py() for name in _NAMES},
            service="",
            kind=VerdictKind.WATERMARK,
            mode=BindingMode.SHADOW,
            action=VerdictAction.CONTINUE,
            score_positions=places.astype("<i4").tobytes(),
            score_layers=(int(layers[0]),),
            scores=scores.astype("<f4").tobytes(),
            source_partition=-1,
            source_offset=-1,
            decided_at_us=0,
        )
