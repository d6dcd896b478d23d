"""Probe folders: written and read back, and each way in which one can be wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from undercurrent.errors import ProbeError
from undercurrent.probes import LinearProbe
from undercurrent.probes.folder import LinearArtefact

SETTINGS = {"layer": 2, "tensor_type": "attn_out", "threshold": 0.5, "name": "vault", "version": "7",
            "aggregation": {"kind": "ema", "alpha": 0.25}, "positions": "generated", "point": "mid", "mode": "flag",
            "fingerprints": {"model": "f00d"}}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    LinearProbe.from_arrays(np.arange(5) / 7, [0.125], **SETTINGS).save(tmp_path / "vault")
    return tmp_path / "vault"


def test_a_saved_probe_reads_back_as_itself(folder):
    made = LinearProbe.from_arrays(np.arange(5) / 7, [0.125], **SETTINGS)
    read = LinearProbe.from_folder(folder)
    assert read.fingerprint == made.fingerprint
    assert read.artefact.config == made.artefact.config
    assert read.artefact.weight.tobytes() == made.artefact.weight.tobytes()
    assert sorted(path.name for path in folder.iterdir()) == ["probe.json", "probe.safetensors"]


def test_the_fingerprint_follows_weights_and_settings():
    base = LinearProbe.from_arrays(np.arange(5), 0.0, **SETTINGS)
    others = [
        LinearProbe.from_arrays(np.arange(5) + np.float32(1e-6), 0.0, **SETTINGS),
        LinearProbe.from_arrays(np.arange(5), 1e-6, **SETTINGS),
        *(LinearProbe.from_arrays(np.arange(5), 0.0, **(SETTINGS | change))
          for change in ({"layer": 3}, {"threshold": 0.6}, {"aggregation": {"kind": "max"}}, {"positions": "all"})),
    ]  # fmt: skip
    assert len({probe.fingerprint for probe in [base, *others]}) == 7
    assert base.artefact.with_threshold(0.6).fingerprint == others[3].fingerprint


def test_reference_tensors_are_kept(tmp_path):
    artefact = LinearProbe.from_arrays([1.0], 0.0, **SETTINGS).artefact
    rich = LinearArtefact(artefact.weight, 0.0, artefact.config, {"scores": np.arange(3, dtype=np.float32)})
    LinearProbe(rich).save(tmp_path)
    read = LinearProbe.from_folder(tmp_path).artefact
    assert read.reference["scores"].tolist() == [0, 1, 2]
    assert read.fingerprint == artefact.fingerprint


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer": "2"}, "field 'layer'"),
        ({"layer": ...}, "field 'layer': is missing"),
        ({"threshold": "high"}, "field 'threshold'"),
        ({"tensor_type": "resid"}, "field 'tensor_type'.*residual_stream"),
        ({"colour": "red"}, "field 'colour': unknown key; accepted: aggregation, coherence, description"),
        ({"format": "pickle"}, "field 'format'.*undercurrent.linear/1"),
        ({"aggregation": {"kind": "sum"}}, "field 'aggregation'.*max.*k_of_n"),
        ({"aggregation": {"kind": "k_of_n", "k": 4, "n": 2}}, "field 'aggregation.*k is 4"),
        ({"positions": "some"}, "field 'positions'"),
        ({"fingerprints": {"modle": "x"}}, "field 'fingerprints.modle': unknown key"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(folder, change, words):
    path = folder / "probe.json"
    data = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))
    with pytest.raises(ProbeError, match=rf"probe\.json: .*{words}"):
        LinearProbe.from_folder(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"threshold": NaN}', "[" * 100_000, "\udcff"])
def test_a_config_that_is_no_json_object_is_named(folder, text):
    (folder / "probe.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ProbeError, match=r"probe\.json"):
        LinearProbe.from_folder(folder)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"bias": np.zeros(1, np.float32)}, "'weight' is missing"),
        ({"weight": np.zeros((1, 5), np.float32)}, "'bias' is missing"),
        ({"weight": np.zeros(5, np.float32), "bias": np.zeros(1, np.float32)}, r"accepted: float32 \[1, width\]"),
        ({"weight": np.zeros((1, 5)), "bias": np.zeros(1, np.float32)}, r"float64 \[1, 5\]"),
        ({"weight": np.zeros((1, 0), np.float32), "bias": np.zeros(1, np.float32)}, r"\[1, 0\]"),
        ({"weight": np.zeros((1, 5), np.float32), "bias": np.zeros(2, np.float32)}, r"accepted: float32 \[1\]"),
        ({"weight": np.full((1, 5), np.nan, np.float32), "bias": np.zeros(1, np.float32)}, "finite"),
        (
            {"weight": np.zeros((1, 5), np.float32), "bias": np.zeros(1, np.float32), "w2": np.zeros(1)},
            "unknown tensor",
        ),
    ],
)
def test_wrong_tensors_are_named_with_their_file(folder, tensors, words):
    save_file(tensors, folder / "probe.safetensors")
    with pytest.raises(ProbeError, match=rf"probe\.safetensors: .*{words}"):
        LinearProbe.from_folder(folder)


@pytest.mark.parametrize("content", [None, b"", b"not safetensors", b"\xff" * 64])
def test_weights_that_are_missing_or_damaged_are_named(folder, content):
    path = folder / "probe.safetensors"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ProbeError, match=r"probe\.safetensors"):
        LinearProbe.from_folder(folder)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ProbeError, match="absent is no folder"):
        LinearProbe.from_folder(tmp_path / "absent")
