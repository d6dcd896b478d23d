"""Directions from elsewhere: each format gives the same vector, and what is wrong is named."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from undercurrent.errors import ProbeError
from undercurrent.probes.importing import read_direction

VECTOR = np.array([0.5, -2.0, 3.25], np.float32)


def _npz(path: Path) -> None:
    np.savez(path, weight=VECTOR.reshape(1, -1), bias=np.array([0.25]))


WRITERS: dict[str, Callable[[Path], object]] = {
    "safetensors": lambda path: save_file({"weight": VECTOR, "bias": np.array([0.25], np.float32)}, path),
    "npz": _npz,
    "json": lambda path: path.write_text(json.dumps({"weight": VECTOR.tolist(), "bias": 0.25})),
}


@pytest.mark.parametrize("ending", WRITERS)
def test_every_format_gives_the_vector_and_its_offset(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"direction.{ending}"
    WRITERS[ending](path)
    found = read_direction(path)
    np.testing.assert_array_equal(found.weight, VECTOR)
    assert (found.bias, found.tensor, found.weight.dtype) == (0.25, "weight", np.float32)


def test_files_without_names_have_no_offset(tmp_path: Path) -> None:
    np.save(tmp_path / "d.npy", VECTOR.astype(np.float64).reshape(-1, 1))
    (tmp_path / "d.json").write_text(json.dumps(VECTOR.tolist()))
    for name in ("d.npy", "d.json"):
        found = read_direction(tmp_path / name)
        np.testing.assert_array_equal(found.weight, VECTOR)
        assert found.bias is None


def test_bfloat16_is_read(tmp_path: Path) -> None:
    path = tmp_path / "steering.safetensors"
    save_torch({"refusal": torch.tensor(VECTOR).to(torch.bfloat16)}, path)
    found = read_direction(path)
    assert found.tensor == "refusal"
    np.testing.assert_array_equal(found.weight, VECTOR)


def test_a_row_of_a_matrix_brings_its_own_offset(tmp_path: Path) -> None:
    path = tmp_path / "layers.npz"
    np.savez(path, weight=np.stack([VECTOR, 2 * VECTOR]), bias=np.array([0.0, 7.0]))
    found = read_direction(path, row=1)
    np.testing.assert_array_equal(found.weight, 2 * VECTOR)
    assert found.bias == 7.0
    with pytest.raises(ProbeError, match=r"tensor 'weight' is \[2, 3\] and has no row 2"):
        read_direction(path, row=2)
    with pytest.raises(ProbeError, match=r"tensor 'weight' is \[2, 3\]; accepted"):
        read_direction(path)


def test_which_of_several_tensors_must_be_said(tmp_path: Path) -> None:
    path = tmp_path / "two.safetensors"
    save_file({"a": VECTOR, "b": -VECTOR}, path)
    with pytest.raises(ProbeError, match="which tensor is the direction\\? It has a, b; name one"):
        read_direction(path)
    np.testing.assert_array_equal(read_direction(path, "b").weight, -VECTOR)
    with pytest.raises(ProbeError, match="tensor 'c' is missing; it has a, b"):
        read_direction(path, "c")


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("d.npy", np.array([1.0, np.nan, 2.0]), "value 1 is nan"),
        ("d.npy", np.zeros(3), "all values are 0"),
        ("d.npy", np.array([1.0, 1e300]), "beyond float32"),
        ("d.npy", np.array(["a", "b"]), "accepted: numbers"),
        ("d.npy", np.array([1.0]), r"is \[1\]; accepted: \[width\]"),
    ],
)
def test_what_is_no_direction_is_refused(name: str, content: np.ndarray, match: str, tmp_path: Path) -> None:
    np.save(tmp_path / name, content)
    with pytest.raises(ProbeError, match=match):
        read_direction(tmp_path / name)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    path = tmp_path / "direction.pt"
    torch.save({"weight": torch.tensor(VECTOR)}, path)
    with pytest.raises(ProbeError, match=r"a \.pt file may run code when it is read"):
        read_direction(path)
    hidden = tmp_path / "direction.npy"
    hidden.write_bytes(pickle.dumps([1.0, 2.0]))
    with pytest.raises(ProbeError, match=r"cannot be read as \.npy"):
        read_direction(hidden)


@pytest.mark.parametrize("ending", ["safetensors", "npy", "npz", "json"])
def test_a_damaged_file_is_named(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"direction.{ending}"
    path.write_bytes(b"\x00garbage")
    with pytest.raises(ProbeError, match=f"direction.{ending}: cannot be read as .{ending}"):
        read_direction(path)


def test_an_unknown_ending_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "direction.csv"
    path.write_text("1,2")
    with pytest.raises(ProbeError, match=r"ending '\.csv'; accepted"):
        read_direction(path)
