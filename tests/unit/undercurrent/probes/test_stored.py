"""Stored probes as folders: read back as themselves, loaded by their format, refused where they make no probe."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.contracts.probe_cases import BATCH_CASES, CONTEXT, LAYERS, WIDTH
from undercurrent.core import StreamFacts
from undercurrent.errors import ConfigError, ProbeError
from undercurrent.probes import (
    Artefact,
    AttentionProbe,
    Binding,
    EnsembleProbe,
    LinearProbe,
    MahalanobisProbe,
    MeanDifferenceProbe,
    MlpProbe,
    load_binding,
    load_probe,
)
from undercurrent.probes.folder import FORMATS
from undercurrent.spec import ActivationRecord, TensorType
from undercurrent.testing import drive, make_records

SETTINGS = {"layer": 1, "tensor_type": "attn_out", "threshold": 1.0}
KINDS = {"mlp": MlpProbe, "mean-difference": MeanDifferenceProbe, "mahalanobis": MahalanobisProbe,
         "ensemble": EnsembleProbe, "attention": AttentionProbe}  # fmt: skip


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    made = BATCH_CASES[request.param].probe_kwargs["artefact"]
    KINDS[request.param](made).save(tmp_path / "guard")
    return tmp_path / "guard"


def test_every_format_has_a_probe_and_a_case():
    formats = {factory.probe_kwargs["artefact"].config.format for factory in BATCH_CASES.values()}
    assert formats == set(FORMATS)


@pytest.mark.parametrize("name", BATCH_CASES)
def test_a_saved_probe_loads_as_itself(name, tmp_path):
    factory = BATCH_CASES[name]
    made = factory.spawn("r1", "mid")
    made.save(tmp_path / "guard")
    loaded = load_probe("./guard", base=tmp_path)
    assert type(loaded.sample) is type(made)
    assert (loaded.fingerprint, loaded.sample.artefact.config) == (made.fingerprint, made.artefact.config)
    records = make_records(np.random.default_rng(0).normal(size=(9, 2, WIDTH)), layers=LAYERS, prompt_len=3)
    assert drive(loaded.factory, records, blocks=4).scores == drive(factory, records, blocks=4).scores
    assert loaded.factory.spawn("r1", "mid").artefact is loaded.sample.artefact
    assert load_probe("./guard", {"threshold": 99.5}, base=tmp_path).sample.artefact.config.threshold == 99.5


def test_a_binding_of_a_folder_for_another_point_is_refused(tmp_path):
    tensors = {"positive": [1.0, 0.0], "negative": [0.0, 1.0]}
    MeanDifferenceProbe.from_tensors(tensors, **SETTINGS, point="mid").save(tmp_path / "guard")
    assert load_binding(Binding(name="g", point="mid", probe="./guard"), base=tmp_path).version == "1"
    with pytest.raises(ConfigError, match="made for 'mid'"):
        load_binding(Binding(name="g", point="late", probe="./guard"), base=tmp_path)


def test_a_folder_of_another_kind_is_refused_by_name(folder):
    with pytest.raises(ProbeError, match=r"probe\.json: field 'format': 'undercurrent\..*accepted for this: undercurr"):
        LinearProbe.from_folder(folder)
    form = json.loads((folder / "probe.json").read_text())["format"]
    other = next(cls for cls in KINDS.values() if cls.format != form)
    with pytest.raises(ProbeError, match="field 'format'"):
        other.from_folder(folder)
    with pytest.raises(ProbeError, match="is given"):
        other(load_probe(str(folder)).sample.artefact)


def test_every_tensor_is_needed_in_its_shape_and_finite(folder):
    path = folder / "probe.safetensors"
    tensors = load_file(path)
    for name, array in tensors.items():
        for wrong, words in (
            ({}, "is missing"),
            ({name: array.astype(np.float64)}, "accepted: float32"),
            ({name: np.full_like(array, np.nan)}, "not finite"),
            ({name: np.concatenate([array, array[:1], array[:1]])}, "accepted: float32|directions for layers"),
        ):
            if words.startswith("accepted: float32|") and name == "factors":
                continue  # of these there may be any number
            save_file({key: value for key, value in tensors.items() if key != name} | wrong, path)
            with pytest.raises(ProbeError, match=rf"probe\.safetensors: .*({words})"):
                load_probe(str(folder))
    save_file(tensors | {"extra": np.ones(1, np.float32)}, path)
    with pytest.raises(ProbeError, match="unknown tensor 'extra'"):
        load_probe(str(folder))


def test_references_are_kept(folder):
    path = folder / "probe.safetensors"
    save_file(load_file(path) | {"reference.scores": np.arange(3, dtype=np.float32)}, path)
    assert load_probe(str(folder)).sample.artefact.reference["scores"].tolist() == [0, 1, 2]


def test_the_fingerprint_follows_every_tensor_and_the_settings(folder):
    artefact = load_probe(str(folder)).sample.artefact
    prints = {artefact.fingerprint, artefact.with_threshold(77.0).fingerprint}
    for name, array in artefact.tensors.items():
        prints.add(Artefact({**artefact.tensors, name: array * np.float32(1.001)}, artefact.config).fingerprint)
    assert len(prints) == 2 + len(artefact.tensors)


def test_weights_are_shared_and_read_only(folder):
    artefact = load_probe(str(folder)).sample.artefact
    for array in artefact.tensors.values():
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MeanDifferenceProbe.from_tensors({"positive": [1, 2], "negative": [1, 2]}, **SETTINGS), "are equal"),
        (lambda: MahalanobisProbe.from_tensors(
            {"mean": [0, 0], "precision": [1, -1], "factors": [[0, 0]]}, **SETTINGS), "'precision' has a value of -1"),
        (lambda: MahalanobisProbe.from_tensors(
            {"mean": [0, 0], "precision": [1, 1], "factors": [[2, 0]]}, **SETTINGS), "make no distance"),
        (lambda: MahalanobisProbe.from_moments([0, 0], np.eye(3), rank=1, **SETTINGS), "tensor 'precision'"),
        (lambda: MahalanobisProbe.from_moments([0, 0], np.eye(2), rank=2, **SETTINGS), "rank 2; accepted"),
        (lambda: MahalanobisProbe.from_moments([0, 0], np.ones((2, 2)), rank=1, **SETTINGS), "eigenvalue|make no"),
        (lambda: MahalanobisProbe.from_moments([0, 0], np.diag([1.0, 0.0]), rank=1, **SETTINGS), "not above 0"),
        (lambda: MlpProbe.from_tensors({"hidden.weight": np.ones((2, 3)), "hidden.bias": np.ones(2),
                                        "weight": np.ones(3), "bias": [0]}, **SETTINGS), "hidden=2"),
        (lambda: EnsembleProbe.from_tensors({"weight": np.ones((2, 3)), "bias": [0, 0], "mix": [1, 1]},
                                            **SETTINGS), "needs it"),
        (lambda: EnsembleProbe.from_tensors({"weight": np.ones((2, 3)), "bias": [0, 0], "mix": [1, 1]},
                                            **(SETTINGS | {"layers": [5, 1]})), "ascending"),
        (lambda: EnsembleProbe.from_tensors({"weight": np.ones((2, 3)), "bias": [0, 0], "mix": [1, 1]},
                                            **(SETTINGS | {"layers": [0, 3, 5], "layer": 5})), "2 directions for"),
        (lambda: AttentionProbe.from_tensors({"weight": [1.0], "query": [1.0], "bias": [0]}, **SETTINGS,
                                             coherence={"support": 1, "window": 2}), "does not go with"),
        (lambda: LinearProbe.from_arrays([1.0], 0.0, **SETTINGS, pool_min_count=3), "alone"),
        (lambda: LinearProbe.from_arrays([1.0], 0.0, **SETTINGS, layers=[1]), "has 'layer'"),
        (lambda: MlpProbe(), "one of both"),
        (lambda: MlpProbe(LinearProbe.from_arrays([1.0], 0.0, **SETTINGS).artefact), "is given undercurrent.linear"),
    ],
)  # fmt: skip
def test_parts_that_make_no_probe_are_refused(make, words):
    with pytest.raises(ProbeError, match=words):
        make()


# --- the ensemble, whose tokens come layer by layer


def ensemble():
    instance = BATCH_CASES["ensemble"].spawn("r1", "mid")
    instance.on_start(CONTEXT)
    return instance


def record(layer, position):
    return ActivationRecord("r1", "mid", layer, position, TensorType.RESIDUAL_STREAM, np.ones(WIDTH, np.float32), False)


def test_an_ensemble_judges_a_token_when_its_last_layer_has_come():
    instance = ensemble()
    instance.on_activation(record(1, 0))
    assert (instance.aggregate, instance.on_end(CONTEXT).metadata["partial"]) == (None, True)
    instance.on_activation(record(3, 0))
    assert instance.aggregate is not None
    assert instance.on_end(CONTEXT).metadata["partial"] is False


def test_an_ensemble_never_passes_a_token_that_lacks_a_layer():
    instance = ensemble()
    instance.on_activation(record(1, 0))
    with pytest.raises(ProbeError, match=r"token 0 lacks layers \[3\]"):
        instance.on_activation(record(1, 1))
    with pytest.raises(ProbeError, match=r"reads layer 3, the scores are of \[1\]"):
        ensemble().on_scores(np.zeros(1, np.int32), (1,), np.zeros((1, 1), np.float32))


def test_a_half_seen_token_moves_with_the_state():
    straight, moved = ensemble(), ensemble()
    for instance in (straight, moved):
        instance.on_activation(record(1, 0))
    fresh = ensemble()
    fresh.restore(json.loads(json.dumps(moved.state(), allow_nan=False)))
    for instance in (straight, fresh):
        instance.on_activation(record(3, 0))
    assert fresh.state() == straight.state()
    with pytest.raises(ProbeError, match="damaged"):
        ensemble().restore(moved.state() | {"pending": 3})


def test_a_stream_without_one_of_its_layers_is_refused():
    stream = StreamFacts(prompt_len=3, layers=(3,), width=WIDTH, tensor_type="residual_stream")
    with pytest.raises(ProbeError, match=r"reads layer 1, the stream has \[3\]"):
        ensemble().check(stream)
