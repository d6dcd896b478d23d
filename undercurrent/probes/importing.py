"""A direction from elsewhere: a file with one vector, and perhaps an offset, read without running any code.

    .safetensors   one tensor, or one named `weight` (or by the caller), and perhaps `bias`
    .npy           one array
    .npz           as safetensors
    .json          {"weight": [...], "bias": 0.0}, or the list alone

Pickles (.pt, .pkl, .joblib) run code when they are read, so they are refused.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from numpy.typing import NDArray

from undercurrent.errors import ProbeError

WEIGHT_NAME = "weight"
BIAS_NAME = "bias"

_ACCEPTED = ".safetensors, .npy, .npz, .json"
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_PICKLES = frozenset({".pt", ".pth", ".bin", ".pkl", ".pickle", ".joblib"})


@dataclass(frozen=True, slots=True)
class Direction:
    """What a file holds.

    Args:
        weight: float32 [width].
        bias: the offset, where the file has one.
        tensor: name of the tensor that it came from; empty where the file has no names.
    """

    weight: NDArray[np.float32]
    bias: float | None
    tensor: str = ""


def read_direction(path: Path, tensor: str | None = None, row: int | None = None) -> Direction:
    """Return the direction in a file.

    Args:
        path: the file; its ending says how it is read.
        tensor: which of its tensors, where it has several and none is called `weight`.
        row: which row of a matrix, as of one direction per layer.

    Raises:
        ProbeError: it cannot be read, has no such tensor or row, or is no vector of finite numbers; the error names
            file and tensor.
    """
    arrays = _read(path)
    name = _chosen(path, arrays, tensor)
    where = f"{path}: tensor {name!r}" if name else str(path)
    weight = _vector(where, arrays[name], row)
    bias = arrays.get(BIAS_NAME) if name != BIAS_NAME else None
    if bias is None:
        return Direction(weight, None, name)
    if bias.size == 1:
        return Direction(weight, float(_finite(f"{path}: tensor {BIAS_NAME!r}", bias).reshape(-1)[0]), name)
    if row is None or bias.shape != arrays[name].shape[:1]:
        raise ProbeError(f"{path}: tensor {BIAS_NAME!r} is {list(bias.shape)}; accepted: one number")
    return Direction(weight, float(_finite(f"{path}: tensor {BIAS_NAME!r}", bias)[row]), name)


def _read(path: Path) -> dict[str, NDArray[Any]]:
    ending = path.suffix.lower()
    if ending in _PICKLES:
        raise ProbeError(
            f"{path}: a {ending} file may run code when it is read; accepted: {_ACCEPTED}. Save the vector as one of "
            f"them where it was made; of a scikit-learn estimator, LinearProbe.from_sklearn(...).save(FOLDER)"
        )
    try:
        match ending:
            case ".safetensors":
                return _read_safetensors(path)
            case ".npy":
                return {"": np.load(path, allow_pickle=False)}
            case ".npz":
                with np.load(path, allow_pickle=False) as archive:
                    return {name: archive[name] for name in archive.files}
            case ".json":
                return _read_json(path)
    except ValueError as exc:
        # NumPy advises to run what is pickled.
        why = "it is no file of NumPy, or holds pickled objects" if ending.startswith(".np") else exc
        raise ProbeError(f"{path}: cannot be read as {ending}: {why}") from exc
    except (OSError, TypeError, EOFError, RecursionError, zipfile.BadZipFile) as exc:
        raise ProbeError(f"{path}: cannot be read as {ending}: {exc}") from exc
    except safetensors.SafetensorError as exc:
        raise ProbeError(f"{path}: cannot be read as {ending}: {exc}") from exc
    raise ProbeError(f"{path}: ending {ending!r}; accepted: {_ACCEPTED}")


def _read_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    for name, entry in safetensors.deserialize(path.read_bytes()):  # type: ignore[no-untyped-call]
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"tensor {name!r} is {entry['dtype']}; accepted: {', '.join(_DTYPES)}")
        found[name] = np.frombuffer(entry["data"], dtype).reshape(entry["shape"])
    return found


def _read_json(path: Path) -> dict[str, NDArray[Any]]:
    data = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(data, list):
        return {"": np.asarray(data, np.float64)}
    if not isinstance(data, dict):
        raise ValueError(f"it holds a {type(data).__name__}; accepted: a list of numbers, or an object with `weight`")
    return {name: np.asarray(v, np.float64) for name, v in data.items() if isinstance(v, list | int | float)}


def _chosen(path: Path, arrays: Mapping[str, NDArray[Any]], tensor: str | None) -> str:
    listed = ", ".join(sorted(name for name in arrays if name)) or "none with a name"
    if tensor is not None:
        if tensor not in arrays:
            raise ProbeError(f"{path}: tensor {tensor!r} is missing; it has {listed}")
        return tensor
    if WEIGHT_NAME in arrays:
        return WEIGHT_NAME
    others = [name for name in arrays if name != BIAS_NAME]
    if len(others) != 1:
        raise ProbeError(f"{path}: which tensor is the direction? It has {listed}; name one")
    return others[0]


def _vector(where: str, array: NDArray[Any], row: int | None) -> NDArray[np.float32]:
    if row is not None:
        if array.ndim != 2 or not 0 <= row < array.shape[0]:
            raise ProbeError(f"{where} is {list(array.shape)} and has no row {row}; accepted: [rows, width]")
        array = array[row]
    if array.ndim == 2 and 1 in array.shape:
        array = array.reshape(-1)
    if array.ndim != 1 or array.size < 2:
        raise ProbeError(f"{where} is {list(array.shape)}; accepted: [width], [1, width], or a row of [rows, width]")
    with np.errstate(over="ignore"):
        vector = _finite(where, array).astype(np.float32)
    if not np.isfinite(vector).all():
        raise ProbeError(f"{where}: a value is beyond float32; scale the direction")
    if not vector.any():
        raise ProbeError(f"{where}: all values are 0 in float32; accepted: a direction")
    return vector


def _finite(where: str, array: NDArray[Any]) -> NDArray[np.float64]:
    try:
        numbers = np.asarray(array).astype(np.float64)
    except (TypeError, ValueError) as exc:
        raise ProbeError(f"{where} is {array.dtype}; accepted: numbers") from exc
    bad = np.flatnonzero(~np.isfinite(numbers))
    if bad.size:
        raise ProbeError(f"{where}: value {int(bad[0])} is {numbers.reshape(-1)[bad[0]]}; accepted: finite numbers")
    return numbers
