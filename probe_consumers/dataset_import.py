"""What `undercurrent dataset import` writes and a replay of a dataset reads: its streams as messages again.

A stream is written by its own engine's name, one shard with all of its layers, a block per recorded step; messages that
never came leave their numbers free. What cannot be written again as it was is counted: see `Imported.altered`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from undercurrent.codec import Codec
from undercurrent.codec.tensors import bytes_of, row_bytes
from undercurrent.errors import DatasetError
from undercurrent.evaluation.dataset_format import (
    STREAMS,
    data_file,
    read_manifest,
    read_table,
    tensor_file,
    tensor_key,
)
from undercurrent.evaluation.dataset_split import PARTS
from undercurrent.evaluation.dataset_tensors import TensorFile
from undercurrent.protocol.messages import ActivationBlock, EndReason, StreamEnded, StreamInvalidated, StreamStarted


@dataclass(frozen=True, slots=True)
class Written:
    """A message of a stream.

    Args:
        point: extraction point.
        request_id: the request.
        value: the bytes of the message.
    """

    point: str
    request_id: str
    value: bytes


StreamKey = tuple[str, int, int, str]

BLOCK_BYTES = 512 << 10
_COLUMNS = ["request_id", "attempt", "index", "point", "token_pos", "token_id", "layer", "row", "step"]
_COLUMNS += ["captured_at_us", "gap"]
_NO_END = {"", "superseded"}


@dataclass(slots=True)
class Imported:
    """What was made.

    Args:
        streams: made.
        messages: made.
        altered: streams whose end cannot be written as it was, by the reason that it had.
    """

    streams: int = 0
    messages: int = 0
    altered: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Writing:
    """A stream of which rows are still to come."""

    started: StreamStarted
    facts: dict[str, Any]
    seq: int = 1
    seen: int = 0


class DatasetImport:
    """Makes messages of the streams of a dataset.

    Args:
        folder: of the dataset.
        wanted: streams to make; all by default.
        block_bytes: largest block.
        codec: encodes; framed without a schema registry when not given.
    """

    def __init__(
        self,
        folder: Path,
        wanted: Collection[StreamKey] | None = None,
        *,
        block_bytes: int = BLOCK_BYTES,
        codec: Codec | None = None,
    ) -> None:
        self._folder = folder
        self._manifest = read_manifest(folder)
        self._block_bytes = block_bytes
        self._codec = codec or Codec()
        self._streams = read_table(folder / STREAMS)
        names = zip(
            *(self._streams[name].to_pylist() for name in ("request_id", "attempt", "index", "point")), strict=True
        )
        self._known: dict[StreamKey, int] = {name: place for place, name in enumerate(names)}
        self._wanted = self._known.keys() if wanted is None else frozenset(wanted)
        points_of: defaultdict[tuple[str, int, int], list[str]] = defaultdict(list)
        for name, attempt, index, point in self._known.keys() & self._wanted:
            points_of[name, attempt, index].append(point)
        self._points_of = {request: tuple(sorted(points)) for request, points in points_of.items()}
        self._writing: dict[StreamKey, _Writing] = {}
        # Streams without rows, by request and point.
        self._empty: defaultdict[tuple[str, str], list[StreamKey]] = defaultdict(list)
        for key, count in zip(self._known, self._streams["positions"].to_pylist(), strict=True):
            if not count and key in self._wanted:
                self._empty[key[0], key[3]].append(key)
        self.result = Imported()

    @property
    def points(self) -> tuple[str, ...]:
        """Points whose topics it writes to."""
        return tuple(self._manifest["points"])

    def messages(self) -> Iterator[Written]:
        """Yield every message, each stream's in order; the same ones in the same order every time.

        Raises:
            DatasetError: a file is missing or does not say what another one says.
        """
        for part in PARTS:
            prefix = f"data/{part}-"
            count = sum(name.startswith(prefix) for name in self._manifest["files"])
            for number in range(count):
                yield from self._file(part, number)
        for key in sorted(key for keys in self._empty.values() for key in keys):
            yield from self._begin(key)
            yield from self._end(key)
        if self._writing:
            key = next(iter(self._writing))
            writing = self._writing[key]
            raise DatasetError(
                f"{self._folder}: {key[0]} at {key[3]}: {writing.seen} positions, {STREAMS} says "
                f"{writing.facts['positions']}"
            )

    def _file(self, part: str, number: int) -> Iterator[Written]:
        table = read_table(self._folder / data_file(part, number), _COLUMNS)
        tensors = TensorFile(self._folder / tensor_file(part, number))
        maps: dict[str, NDArray[Any]] = {key: tensors.map(key) for key in tensors.keys}
        columns = {name: table[name].combine_chunks() for name in _COLUMNS}
        numbers = {
            name: columns[name].to_numpy(zero_copy_only=False)
            for name in ("attempt", "index", "token_pos", "layer", "row", "step", "captured_at_us", "gap")
        }
        numbers["token_id"] = pc.fill_null(columns["token_id"], -1).to_numpy(zero_copy_only=False)
        for first, last in _pieces(columns, numbers):
            key = tuple(columns[name][first].as_py() for name in ("request_id", "attempt", "index", "point"))
            if key not in self._known:
                raise DatasetError(f"{self._folder}: {key[0]} (attempt {key[1]}) at {key[3]} is not in {STREAMS}")
            if key not in self._wanted:
                continue
            yield from self._piece(key, {name: values[first:last] for name, values in numbers.items()}, maps)

    def _piece(self, key: StreamKey, rows: dict[str, NDArray[Any]], maps: dict[str, NDArray[Any]]) -> Iterator[Written]:
        if key not in self._writing:
            yield from self._before(key)
            yield from self._begin(key)
        writing = self._writing[key]
        started = writing.started
        count = len(started.layers)
        layers = tuple(rows["layer"][:count].tolist())
        if len(rows["row"]) % count or set(layers) != set(started.layers):
            raise DatasetError(
                f"{self._folder}: {key[0]} at {key[3]}: layers {layers}, its start names {started.layers}"
            )
        places = rows["row"].reshape(-1, count)
        values = np.stack(
            [maps[tensor_key(key[3], layer)][places[:, column]] for column, layer in enumerate(layers)], axis=1
        )
        positions = rows["token_pos"][::count].astype("<i4")
        ids = rows["token_id"][::count].astype("<i4")
        writing.seq += int(rows["gap"][0])
        for start in range(0, len(positions), step := self._tokens_of(values)):
            stop = start + step
            yield self._message(
                started,
                ActivationBlock(
                    **_identity(started),
                    tensor_type=started.tensor_type,
                    dtype=values.dtype.name,
                    width=started.width,
                    layers=layers,
                    row_shape=started.row_shape,
                    seq=writing.seq,
                    step=int(rows["step"][0]),
                    captured_at_us=int(rows["captured_at_us"][0]),
                    positions=positions[start:stop].tobytes(),
                    token_ids=b"" if (ids < 0).any() else ids[start:stop].tobytes(),
                    data=bytes_of(values[start:stop], values.dtype.name),
                ),
            )
            writing.seq += 1
        writing.seen += len(positions)
        if writing.seen >= writing.facts["positions"]:
            yield from self._end(key)

    def _before(self, key: StreamKey) -> Iterator[Written]:
        """Yield the streams that have to come before one: a higher attempt voids every lower one."""
        empty = self._empty.pop((key[0], key[3]), [])
        earlier = sorted(other for other in empty if other[1] < key[1])
        if later := [other for other in empty if other[1] >= key[1]]:
            self._empty[key[0], key[3]] = later
        for other in earlier:
            yield from self._begin(other)
            yield from self._end(other)

    def _tokens_of(self, values: NDArray[Any]) -> int:
        """Return how many tokens a block may have."""
        token_bytes = int(values.shape[1]) * row_bytes(values.dtype.name, int(values.shape[2])) + 8
        return max(1, self._block_bytes // token_bytes)

    def _begin(self, key: StreamKey) -> Iterator[Written]:
        facts = self._facts(self._known[key])
        told = json.loads(facts["started"])
        for name in ("layers", "row_shape", "unembedded_positions"):
            told[name] = tuple(told[name])
        # A stream at a point that is not written never comes: nobody shall wait for it.
        told["points"] = self._points_of[key[:3]]
        if told["dtype"] == "int8":
            # The rows were multiplied by their scales; that is what a probe reads.
            told["dtype"] = "float32"
        # The rollouts that were in force stand in a topic of the pipeline that the streams come from.
        started = StreamStarted(**told | {"rollouts": 0})
        self._writing[key] = _Writing(started, facts)
        self.result.streams += 1
        yield self._message(started, started)

    def _end(self, key: StreamKey) -> Iterator[Written]:
        writing = self._writing.pop(key)
        facts, started = writing.facts, writing.started
        reason = facts["end_reason"]
        if reason == "rewound":
            yield self._message(
                started,
                StreamInvalidated(
                    **_identity(started),
                    seq=writing.seq,
                    first_position=facts["clear_up_to"] + 1,
                    revision=1,
                    invalidated_at_us=started.started_at_us,
                ),
            )
            writing.seq += 1
        elif reason in ("conflict", "shard_behind"):
            self.result.altered[reason] = self.result.altered.get(reason, 0) + 1
        if facts["ended"] is None and reason in _NO_END:
            # It is open, or a higher attempt's start closes it.
            return
        told = json.loads(facts["ended"]) if facts["ended"] else _lost(started)
        seq = writing.seq + facts["trailing_gap"]
        yield self._message(
            started,
            StreamEnded(
                **_identity(started),
                seq=seq,
                last_seq=seq - 1,
                layers=tuple(told["layers"]),
                emitted=tuple(told["emitted"]),
                dropped=tuple(told["dropped"]),
                last_pos=told["last_pos"],
                reason=EndReason(told["reason"]),
                detail=told["detail"],
                ended_at_us=told["ended_at_us"],
            ),
        )

    def _facts(self, place: int) -> dict[str, Any]:
        row: dict[str, Any] = self._streams.slice(place, 1).to_pylist()[0]
        return row

    def _message(self, started: StreamStarted, message: Any) -> Written:  # noqa: ANN401 - one of a stream's messages
        self.result.messages += 1
        return Written(started.point, started.request_id, self._codec.encode(message))


def _pieces(columns: dict[str, pa.Array], numbers: dict[str, NDArray[Any]]) -> Iterator[tuple[int, int]]:
    """Yield first and last row of what one message had: rows of one stream and one step, and a gap begins another."""
    count = len(numbers["row"])
    if not count:
        return
    changed = np.zeros(count, np.bool_)
    changed[0] = True
    for name in ("request_id", "point"):
        codes = pc.dictionary_encode(columns[name]).indices.to_numpy(zero_copy_only=False)
        changed[1:] |= codes[1:] != codes[:-1]
    for name in ("attempt", "index", "step", "captured_at_us"):
        changed[1:] |= numbers[name][1:] != numbers[name][:-1]
    changed |= numbers["gap"] > 0
    firsts = np.flatnonzero(changed).tolist()
    yield from zip(firsts, [*firsts[1:], count], strict=True)


def _identity(started: StreamStarted) -> dict[str, Any]:
    names = ("request_id", "attempt", "index", "point", "shard", "engine", "incarnation")
    return {name: getattr(started, name) for name in names}


def _lost(started: StreamStarted) -> dict[str, Any]:
    """Return the end that somebody else writes for a stream whose engine is gone."""
    nothing = [0] * len(started.layers)
    return {
        "last_pos": -1,
        "layers": started.layers,
        "emitted": nothing,
        "dropped": nothing,
        "reason": EndReason.LOST.value,
        "detail": "",
        "ended_at_us": started.started_at_us,
    }
