"""The tensors of a dataset as arrays on the files themselves: nothing is read before it is looked at."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from undercurrent.errors import DatasetError

_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_LENGTH_BYTES = 8
Selection = int | slice | NDArray[Any] | Sequence[int]


class TensorFile:
    """One file of tensors.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _header(self) -> tuple[dict[str, Any], int]:
        """The safetensors header, and where the values begin."""
        try:
            with self._path.open("rb") as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                header = json.loads(file.read(length))
        except (OSError, ValueError, OverflowError, MemoryError) as exc:
            raise DatasetError(f"{self._path}: no file of tensors that can be read: {exc}") from exc
        if not isinstance(header, dict):
            raise DatasetError(f"{self._path}: no file of tensors that can be read: its header is no object")
        return header, _LENGTH_BYTES + length

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of its tensors."""
        return tuple(key for key in self._header[0] if key != "__metadata__")

    @property
    def metadata(self) -> dict[str, str]:
        """What it says of the recording."""
        return dict(self._header[0].get("__metadata__", {}))

    def map(self, key: str) -> NDArray[Any]:
        """Return a tensor as a read-only array on the file.

        Raises:
            DatasetError: there is no such tensor, its element type is none that activations have, or the file is cut.
        """
        header, start = self._header
        if key not in header:
            raise DatasetError(f"{self._path}: no tensor {key!r}; it has {', '.join(self.keys) or 'none'}")
        facts = header[key]
        dtype = _DTYPES.get(facts["dtype"])
        if dtype is None:
            raise DatasetError(f"{self._path}: {key}: element type {facts['dtype']}; known are {', '.join(_DTYPES)}")
        shape = tuple(facts["shape"])
        if not math.prod(shape):
            return np.empty(shape, dtype)
        try:
            return np.memmap(self._path, dtype=dtype, mode="r", offset=start + facts["data_offsets"][0], shape=shape)
        except (OSError, ValueError) as exc:
            raise DatasetError(
                f"{self._path}: {key}: {list(shape)} of {facts['dtype']} cannot be read: {exc}; "
                "`undercurrent dataset info --verify` names what has changed"
            ) from exc


class Tensor:
    """The rows of one layer in one part, [rows, width], over all of its files.

    Slices and indices read what they name and nothing else; `numpy.asarray(tensor)` reads everything.

    Args:
        name: what it is, for errors.
        pieces: the tensor of each file, by the file's number.
    """

    def __init__(self, name: str, pieces: dict[int, NDArray[Any]]) -> None:
        if not pieces:
            raise DatasetError(f"{name}: there are no rows")
        kinds = {(piece.dtype.name, piece.shape[1]) for piece in pieces.values()}
        if len(kinds) > 1:
            found = ", ".join(f"{dtype} of width {width}" for dtype, width in sorted(kinds))
            raise DatasetError(f"{name}: rows of different models: {found}; export them apart")
        self._pieces = dict(sorted(pieces.items()))
        lengths = [len(piece) for piece in self._pieces.values()]
        self._ends = np.cumsum(lengths)
        self._starts = dict(zip(self._pieces, [0, *self._ends[:-1].tolist()], strict=True))
        self._first = next(iter(self._pieces.values()))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width."""
        return int(self._ends[-1]), int(self._first.shape[1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type, as recorded."""
        return self._first.dtype

    @property
    def ndim(self) -> int:
        """Two."""
        return 2

    @property
    def pieces(self) -> dict[int, NDArray[Any]]:
        """The memory-mapped tensor of each file, by the file's number."""
        return dict(self._pieces)

    def index(self, shard: ArrayLike, row: ArrayLike) -> NDArray[np.int64]:
        """Return where rows are in this tensor, from the columns `shard` and `row` of the table of tokens."""
        starts = np.zeros(max(self._starts) + 1, np.int64)
        starts[list(self._starts)] = list(self._starts.values())
        return np.asarray(starts[np.asarray(shard)] + np.asarray(row), np.int64)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, selection: Selection) -> NDArray[Any]:
        """Return a row [width], or the rows named, [n, width]."""
        if isinstance(selection, int | np.integer):
            row: NDArray[Any] = self._take(np.array([range(len(self))[int(selection)]]))[0]
            return row
        if isinstance(selection, slice):
            return self._slice(*selection.indices(len(self)))
        chosen = np.asarray(selection)
        if chosen.dtype == np.bool_:
            if len(chosen) != len(self):
                raise IndexError(f"{len(chosen)} truth values for {len(self)} rows")
            chosen = np.flatnonzero(chosen)
        chosen = np.where(chosen < 0, chosen + len(self), chosen).astype(np.int64)
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(self):
            raise IndexError(f"row {chosen.max()} of {len(self)}")
        return self._take(chosen)

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Return all rows."""
        if copy is False and (len(self._pieces) > 1 or dtype not in (None, self.dtype)):
            raise ValueError("rows of several files, or of another type, are no array without a copy")
        return np.asarray(self[:], dtype)

    def _slice(self, start: int, stop: int, step: int) -> NDArray[Any]:
        if len(self._pieces) == 1:
            # `indices` names the place before the first row as -1, which a slice takes for the last one.
            return self._first[start : None if stop < 0 else stop : step]
        return self._take(np.arange(start, stop, step))

    def _take(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        out = np.empty((len(rows), self.shape[1]), self.dtype)
        which = np.searchsorted(self._ends, rows, side="right")
        for number, (shard, piece) in enumerate(self._pieces.items()):
            here = which == number
            if here.any():
                out[here] = piece[rows[here] - self._starts[shard]]
        return out
