"""Writes rows of activations as they come: a table of tokens and a file of tensors for every so many bytes of a part.

What is held at any time is bounded by three parts' unfinished files and one more copy while a file is written, however
long the recording is.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

from undercurrent.errors import DatasetError
from undercurrent.evaluation.dataset_format import (
    FORMAT,
    LAYER_CONVENTION,
    SCORE_PREFIX,
    TOKEN_SCHEMA,
    VERSION,
    data_file,
    tensor_file,
    tensor_key,
    with_columns,
)
from undercurrent.files import writing

SHARD_BYTES = 64 << 20
# Of a token's row in its table and of the objects that hold a block, roughly; it bounds files of narrow rows.
_ROW_BYTES = 96
_BLOCK_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of one stream from one step.

    Args:
        request_id: the request.
        attempt: its attempt.
        index: its child.
        point: the extraction point.
        layers: of the columns.
        positions: absolute, int32 [n].
        token_ids: int32 [n], or [0] where they are not known.
        values: [n, layers, width].
        prompt_len: tokens of the prompt.
        step: scheduler step.
        captured_at_us: end of that step.
        gap: messages of the stream that never came, directly before these rows.
        scores: of each probe, float32 [n, layers]; NaN where it gave none.
        row_shape: shape of a row where it is not [width].
        fingerprint: of the model.
    """

    request_id: str
    attempt: int
    index: int
    point: str
    layers: tuple[int, ...]
    positions: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    values: NDArray[Any]
    prompt_len: int
    step: int = 0
    captured_at_us: int = 0
    gap: int = 0
    scores: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    row_shape: tuple[int, ...] = ()
    fingerprint: str = ""

    @property
    def cells(self) -> int:
        """Number of (token, layer) rows."""
        return len(self.positions) * len(self.layers)


@dataclass(slots=True)
class _Shard:
    """What the next pair of files of a part will hold."""

    number: int = 0
    rows: list[Rows] = field(default_factory=list)
    kinds: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    size_bytes: int = 0


class DatasetWriter:
    """Writes the tables of tokens and the tensors of a dataset.

    Args:
        folder: of the dataset.
        probes: names of the probes whose scores have a column.
        shard_bytes: size of a file of tensors after which the next one begins.
        tensors_in_parquet: write the values beside each token too, as lists of float32.

    Attributes:
        counts: (token, layer) rows by part.
    """

    def __init__(
        self,
        folder: Path,
        *,
        probes: Sequence[str] = (),
        shard_bytes: int = SHARD_BYTES,
        tensors_in_parquet: bool = False,
    ) -> None:
        self._folder = folder
        self._probes = tuple(probes)
        self._shard_bytes = shard_bytes
        self._in_parquet = tensors_in_parquet
        self._schema = with_columns(TOKEN_SCHEMA, SCORE_PREFIX, self._probes, pa.float32())
        if tensors_in_parquet:
            self._schema = self._schema.append(pa.field("tensor", pa.list_(pa.float32())))
        self._shards: defaultdict[str, _Shard] = defaultdict(_Shard)
        self.counts: defaultdict[str, int] = defaultdict(int)
        for name in ("data", "tensors"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def add(self, part: str, rows: Rows) -> None:
        """Take rows of a part, after those that were taken before.

        Raises:
            DatasetError: their arrays do not fit together.
        """
        shape = (len(rows.positions), len(rows.layers))
        if rows.values.ndim != 3 or rows.values.shape[:2] != shape or len(rows.token_ids) not in (0, shape[0]):
            raise DatasetError(
                f"{rows.request_id} at {rows.point}: values {list(rows.values.shape)} and {len(rows.token_ids)} token "
                f"ids for {shape[0]} positions and {shape[1]} layers"
            )
        kind = rows.values.dtype.name, rows.row_shape or rows.values.shape[2:]
        keys = [tensor_key(rows.point, layer) for layer in rows.layers]
        # One key has one element type and one width within a file: another model's rows begin the next one.
        if any(self._shards[part].kinds.get(key, kind) != kind for key in keys):
            self._flush(part)
        shard = self._shards[part]
        shard.kinds |= dict.fromkeys(keys, kind)
        shard.rows.append(rows)
        shard.size_bytes += rows.values.nbytes + rows.cells * _ROW_BYTES + _BLOCK_BYTES
        self.counts[part] += rows.cells
        if shard.size_bytes >= self._shard_bytes:
            self._flush(part)

    def close(self) -> None:
        """Write what is left."""
        for part in list(self._shards):
            self._flush(part)

    def _flush(self, part: str) -> None:
        shard = self._shards[part]
        if not shard.rows:
            return
        held: defaultdict[str, list[NDArray[Any]]] = defaultdict(list)
        placed: defaultdict[str, int] = defaultdict(int)
        at: list[NDArray[np.int64]] = []
        for rows in shard.rows:
            count = len(rows.positions)
            firsts = []
            for column, layer in enumerate(rows.layers):
                key = tensor_key(rows.point, layer)
                held[key].append(rows.values[:, column])
                firsts.append(placed[key])
                placed[key] += count
            at.append((np.arange(count, dtype=np.int64)[:, None] + np.array(firsts, np.int64)).ravel())
        table, tensors = (self._folder / name(part, shard.number) for name in (data_file, tensor_file))
        with writing(table):
            pq.write_table(self._table(shard, np.concatenate(at)), table, compression="zstd")
        try:
            save_file({key: np.concatenate(pieces) for key, pieces in held.items()}, tensors, metadata=_metadata(shard))
        except SafetensorError as exc:
            raise DatasetError(f"{tensors}: cannot be written: {exc}") from exc
        self._shards[part] = _Shard(shard.number + 1)

    def _table(self, shard: _Shard, row: NDArray[np.int64]) -> pa.Table:
        """Return the table of a shard's rows: tokens in order, layers within a token."""
        pieces = shard.rows
        cells = np.array([rows.cells for rows in pieces])
        which = np.repeat(np.arange(len(pieces)), cells)

        def each(name: str) -> pa.Array:
            """Return a field that all rows of a piece share."""
            return pa.array([getattr(rows, name) for rows in pieces]).take(pa.array(which))

        positions = np.concatenate([np.repeat(rows.positions, len(rows.layers)) for rows in pieces])
        firsts = np.concatenate([[0], np.cumsum(cells)[:-1]])
        gap = np.zeros(len(which), np.int64)
        gap[firsts] = [rows.gap for rows in pieces]
        columns: dict[str, Any] = {
            **{name: each(name) for name in ("request_id", "attempt", "index", "point", "step", "captured_at_us")},
            "token_pos": positions,
            "is_generated": positions >= np.repeat([rows.prompt_len for rows in pieces], cells),
            "token_id": _ids(pieces),
            "layer": np.concatenate([np.tile(rows.layers, len(rows.positions)) for rows in pieces]),
            "shard": np.full(len(which), shard.number),
            "row": row,
            "gap": gap,
            **{SCORE_PREFIX + probe: _scores(pieces, probe) for probe in self._probes},
        }
        if self._in_parquet:
            columns["tensor"] = _lists(pieces, cells)
        return pa.table([_column(columns[item.name], item.type) for item in self._schema], schema=self._schema)


def _metadata(shard: _Shard) -> dict[str, str]:
    shapes = {rows.point: list(rows.row_shape) for rows in shard.rows if rows.row_shape}
    return {
        "format": FORMAT,
        "version": str(VERSION),
        "layer_convention": LAYER_CONVENTION,
        "model_fingerprint": ",".join(sorted({rows.fingerprint for rows in shard.rows})),
        **{f"row_shape.{point}": json.dumps(shape) for point, shape in shapes.items()},
    }


def _column(values: Any, kind: pa.DataType) -> pa.Array:  # noqa: ANN401 - an array of either library, or a list
    if isinstance(values, pa.Array):
        return values.cast(kind)
    # A score that is absent is NaN here and null there.
    return pa.array(values, kind, from_pandas=kind == pa.float32())


def _lists(pieces: Sequence[Rows], cells: NDArray[np.int64]) -> pa.Array:
    """Return the values of all rows, a list of float32 each."""
    widths = np.repeat([rows.values.shape[2] for rows in pieces], cells)
    flat = np.concatenate([rows.values.astype(np.float32).ravel() for rows in pieces])
    return pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(widths)]).astype(np.int32), pa.array(flat))


def _ids(pieces: Sequence[Rows]) -> pa.Array:
    """Return the token ids of all rows, null where they are not known."""
    known = np.concatenate([np.full(rows.cells, bool(len(rows.token_ids))) for rows in pieces])
    ids = [
        np.repeat(rows.token_ids, len(rows.layers)) if len(rows.token_ids) else np.zeros(rows.cells, np.int32)
        for rows in pieces
    ]
    return pa.array(np.concatenate(ids), pa.int32(), mask=~known)


def _scores(pieces: Sequence[Rows], probe: str) -> NDArray[np.float32]:
    absent = [np.full(rows.cells, np.nan, np.float32) if probe not in rows.scores else None for rows in pieces]
    return np.concatenate(
        [rows.scores[probe].ravel() if gone is None else gone for rows, gone in zip(pieces, absent, strict=True)]
    )
