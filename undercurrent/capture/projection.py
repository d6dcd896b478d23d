"""A matrix that captured rows are multiplied with: `reduce: {project: FILE}`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
from safetensors.numpy import load_file, save

from undercurrent.errors import CaptureError
from undercurrent.files import write_bytes
from undercurrent.spec import ExtractionPoint

_KEY = "projection"


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A projection.

    Args:
        matrix: float32 [width, k], read-only.
        sha256: of the matrix's shape and its float32 values, hex: the same in whatever file it stands.
    """

    matrix: npt.NDArray[np.float32]
    sha256: str


def projection_of(point: ExtractionPoint, width: int | None) -> Projection | None:
    """Return a point's matrix, None where it has none.

    Args:
        point: from a spec.
        width: elements of a row, None where the model is not known.

    Raises:
        CaptureError: it is no matrix for such rows; the text names point, file and key.
    """
    if point.reduce is None:
        return None
    try:
        return load_projection(Path(str(point.reduce["project"])), width)
    except CaptureError as exc:
        raise CaptureError(f"point {point.name!r}, reduce.project: {exc}") from exc


def load_projection(path: Path, width: int | None) -> Projection:
    """Return the matrix in a file, for rows of a given width.

    Args:
        path: a .npy file, or .safetensors with one tensor, or with one that is called `projection`.
        width: elements of a row, None for any.

    Raises:
        CaptureError: it cannot be read, or is no finite float matrix of that many rows; the text names file and key.
    """
    try:
        stat = path.stat()
    except (OSError, ValueError) as exc:
        raise CaptureError(f"{path}: cannot be read: {exc}") from exc
    found = _load(path, stat.st_mtime_ns, stat.st_size)
    if width is not None and found.matrix.shape[0] != width:
        shape = list(found.matrix.shape)
        raise CaptureError(f"{path}: the matrix is {shape}; accepted: [{width}, k], since a row has {width} elements")
    return found


# Each request of an embedded engine checks its points: the same file is not read again.
@lru_cache(maxsize=32)
def _load(path: Path, _mtime_ns: int, _size: int) -> Projection:
    name, array = _read_npy(path) if path.suffix == ".npy" else _read_safetensors(path)
    return projection_from(array, f"{path}: {name}")


def projection_from(array: npt.NDArray[Any], where: str) -> Projection:
    """Return a matrix as a projection.

    Args:
        array: [width, k].
        where: named in an error.

    Raises:
        CaptureError: it is no finite float matrix.
    """
    if array.ndim != 2 or 0 in array.shape or array.dtype.kind != "f":
        raise CaptureError(f"{where} is {array.dtype} {list(array.shape)}; accepted: a float matrix [width, k]")
    with np.errstate(over="ignore"):
        matrix = np.array(array, np.float32, order="C")
    if not np.isfinite(matrix).all():
        raise CaptureError(f"{where} holds a value that is not finite as float32")
    matrix.flags.writeable = False
    digest = hashlib.sha256(np.array(matrix.shape, "<i8").tobytes())
    digest.update(matrix.astype("<f4", copy=False).tobytes())
    return Projection(matrix, digest.hexdigest())


def write_projection(projection: Projection, path: Path) -> None:
    """Write a projection as the .safetensors file that `load_projection` reads.

    Raises:
        OSError: with the file's name.
    """
    write_bytes(path, save({_KEY: projection.matrix}))


def _read_npy(path: Path) -> tuple[str, npt.NDArray[Any]]:
    try:
        array: npt.NDArray[Any] = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as exc:
        raise CaptureError(f"{path}: cannot be read as .npy: {exc}") from exc
    return "the array", array


def _read_safetensors(path: Path) -> tuple[str, npt.NDArray[Any]]:
    if path.suffix != ".safetensors":
        raise CaptureError(f"{path}: accepted: a .safetensors or .npy file")
    try:
        tensors: dict[str, npt.NDArray[Any]] = load_file(path)
    # NumPy has no bfloat16: safetensors raises KeyError or TypeError for what it cannot name.
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError) as exc:
        raise CaptureError(f"{path}: cannot be read as safetensors of float32, float16 or float64: {exc}") from exc
    name = next(iter(tensors)) if len(tensors) == 1 else _KEY
    if name not in tensors:
        held = ", ".join(sorted(tensors)[:8]) or "none"
        raise CaptureError(f"{path}: tensor {_KEY!r} is missing; it has {held}")
    return f"tensor {name!r}", tensors[name]
