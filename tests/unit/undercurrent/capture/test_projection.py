"""Matrices from files: what is accepted, what is refused by name, and how they are known again."""

from __future__ import annotations

import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from undercurrent.capture.points import CapturePoint
from undercurrent.capture.projection import load_projection
from undercurrent.errors import CaptureError
from undercurrent.spec import ExtractionPoint

MATRIX = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


def captured(path, **fields):
    point = ExtractionPoint(
        "p", (0, 1), "residual_stream", "*", execution_mode="async", reduce={"project": str(path)}, **fields
    )
    return CapturePoint.of(point, layers=4, width=8, model_dtype="bfloat16")


def npy(folder, array, name="m.npy"):
    np.save(folder / name, array)
    return folder / name


def test_the_same_matrix_is_known_again_in_any_file(tmp_path):
    save_file({"projection": MATRIX, "other": MATRIX[:1]}, tmp_path / "keyed.safetensors")
    save_file({"anything": MATRIX}, tmp_path / "one.safetensors")
    files = [tmp_path / "keyed.safetensors", tmp_path / "one.safetensors", npy(tmp_path, MATRIX)]
    files.append(npy(tmp_path, MATRIX.astype(np.float64), "double.npy"))
    points = [captured(path) for path in files]
    assert len({point.point_hash for point in points}) == 1
    assert {(p.width, p.dtype, p.row_bytes, p.group.dtype) for p in points} == {(3, "float32", 24, "bfloat16")}
    assert all(np.array_equal(load_projection(path, 8).matrix, MATRIX) for path in files)


def test_another_matrix_is_another_point_and_a_file_that_changed_is_read_again(tmp_path):
    path = npy(tmp_path, MATRIX)
    before = captured(path).point_hash
    npy(tmp_path, MATRIX + 1)
    os.utime(path, ns=(1, 1))
    assert captured(path).point_hash != before
    assert (
        before
        != CapturePoint.of(
            ExtractionPoint("p", (0, 1), "residual_stream", "*", execution_mode="async"),
            layers=4,
            width=8,
            model_dtype="bfloat16",
        ).point_hash
    )


def test_a_projection_goes_out_in_the_points_own_encoding(tmp_path):
    point = captured(npy(tmp_path, MATRIX), dtype="int8")
    assert (point.dtype, point.width, point.row_bytes) == ("int8", 3, 2 * 7)


def broken(folder):
    nan = MATRIX.copy()
    nan[2, 1] = np.nan
    (folder / "text.npy").write_text("no array")
    (folder / "text.safetensors").write_text("no tensors")
    (folder / "m.csv").write_text("1,2")
    save_file({"a": MATRIX, "b": MATRIX}, folder / "two.safetensors")
    save_file({"projection": MATRIX[0]}, folder / "flat.safetensors")
    np.save(folder / "pickled.npy", np.array([{}], object), allow_pickle=True)
    return {
        "nowhere.npy": "cannot be read",
        "text.npy": "cannot be read as .npy",
        "pickled.npy": "cannot be read as .npy",
        "text.safetensors": "cannot be read as safetensors",
        "m.csv": "accepted: a .safetensors or .npy file",
        "two.safetensors": "'projection' is missing; it has a, b",
        "flat.safetensors": r"tensor 'projection' is float32 \[3\]; accepted: a float matrix \[width, k\]",
        npy(folder, MATRIX.T, "turned.npy").name: r"the matrix is \[3, 8\]; accepted: \[8, k\]",
        npy(folder, np.ones((8, 3), np.int64), "ints.npy").name: "int64",
        npy(folder, nan, "nan.npy").name: "not finite",
        npy(folder, np.full((8, 1), 1e300), "huge.npy").name: "not finite as float32",
        npy(folder, np.ones((8, 0), np.float32), "empty.npy").name: r"\[8, 0\]",
    }


def test_what_is_no_matrix_for_these_rows_is_refused_by_point_file_and_reason(tmp_path):
    for name, reason in broken(tmp_path).items():
        with pytest.raises(CaptureError, match=reason) as caught:
            captured(tmp_path / name)
        assert f"point 'p', reduce.project: {tmp_path / name}" in str(caught.value)
