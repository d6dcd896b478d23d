"""`undercurrent probe precision` on an exported dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.unit.probe_consumers.dataset_doubles import Topics
from undercurrent import evaluation
from undercurrent.capture.projection import load_projection
from undercurrent.cli.main import PROG_NAME, app
from undercurrent.cli.running import run
from undercurrent.probes import EnsembleProbe, LinearProbe, MlpProbe
from undercurrent.testing.streams import StreamBuilder

WIDTH, PROMPT, TOKENS, REQUESTS = 16, 4, 12, 240
DIRECTION = np.random.default_rng(1).normal(size=WIDTH).astype(np.float32)
DIRECTION[3] = 0.01  # of the dimension that is far larger than the others


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests of bfloat16 rows; positives are shifted along the probe's direction; one dimension is far larger."""
    made, rng = Topics(), np.random.default_rng(0)
    for number in range(REQUESTS):
        name, label = f"r{number}", number % 2 == 0
        values = rng.normal(size=(TOKENS, 2, WIDTH))
        values[:, 1] += 0.5 * label * DIRECTION
        values[:, :, 3] *= 20
        stream = StreamBuilder(name, layers=(3, 5), width=WIDTH, prompt_len=PROMPT, dtype="bfloat16")
        rows = values.astype(ml_dtypes.bfloat16)
        made.prompt(name)
        made.activations(stream, stream.start(), stream.block(list(range(TOKENS)), rows), stream.end())
        made.answer(name, "ab")
        if number % 12:
            made.label(name, "positive" if label else "negative")
    folder = tmp_path_factory.mktemp("data") / "d"
    made.export(folder)
    return folder


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    made = LinearProbe.from_arrays(DIRECTION, 0.5, layer=5, tensor_type="residual_stream", threshold=6.0, name="guard")
    made.save(tmp_path / "guard")
    return tmp_path / "guard"


def precision(probe: Path, dataset: Path, *more: str) -> int:
    return run(app, PROG_NAME, ["probe", "precision", str(probe), str(dataset), "--label", "bad", *more])


def measured(probe: Path, dataset: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert precision(probe, dataset, "--json", *more) == 0
    found = json.loads(capsys.readouterr().out)
    return {"": found, **{row["name"]: row for row in found["encodings"]}}


def test_each_encoding_beside_the_recorded_one(dataset: Path, probe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(probe, dataset, capsys, "--project", "15", "--project", "1")
    facts, recorded = found.pop(""), found["bfloat16"]
    assert list(found) == ["bfloat16", "float16", "int8", "project 15", "project 1"]
    counted = evaluation.load(dataset).requests.query("split == 'threshold'")["label.bad"].value_counts()
    assert (facts["positives"], facts["negatives"]) == (counted["positive"], counted["negative"])
    assert facts["requests"] == counted.sum()
    assert recorded["drift"]["max"] == 0
    assert recorded["auroc_change"] is None
    # Of two layers: int8 has a scale a row, a projection is float32.
    values = [row["bytes_per_token"]["values"] for row in found.values()]
    assert values == [2 * 2 * WIDTH, 2 * 2 * WIDTH, 2 * (WIDTH + 4), 2 * 4 * 15, 2 * 4 * 1]
    # bfloat16 within float16's range loses nothing; int8 loses by the large dimension, and a projection most.
    assert found["float16"]["drift"]["max"] == 0
    assert 0 < found["int8"]["drift"]["p50"] < found["project 1"]["drift"]["p50"]
    assert 0 < found["int8"]["drift"]["max"] < 1
    assert found["project 1"]["kept"] < found["project 15"]["kept"] < 1
    change = found["project 1"]["auroc_change"]
    assert change["low"] < change["value"] < 0
    assert change["value"] == pytest.approx(found["project 1"]["auroc"]["value"] - recorded["auroc"]["value"])
    assert found["project 1"]["acts_too"] + found["project 1"]["acts_no_more"] > 0
    assert not evaluation.load(dataset).manifest["test_reads"]


def test_a_saved_projection_is_what_was_measured(
    dataset: Path, probe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert precision(probe, dataset, "--project", "8", "--save-projection", str(out)) == 0
    assert f"reduce: {{project: {out / '8' / 'projection.safetensors'}}}" in capsys.readouterr().out
    matrix = load_projection(out / "8" / "projection.safetensors", WIDTH).matrix
    carried = LinearProbe.from_folder(out / "8" / "probe")
    assert (matrix.shape, carried.artefact.width) == ((WIDTH, 8), 8)
    config = carried.artefact.config
    assert (config.threshold, config.layer, config.name) == (6.0, 5, "guard-8")
    # By least squares no other probe on these rows is nearer to the whole one's scores.
    blocks = list(evaluation.load(dataset).blocks("residual", split="fit"))
    rows = np.concatenate([block.rows[5] for block in blocks]).astype(np.float32)
    wanted = LinearProbe.from_folder(probe).score(rows)
    best = np.linalg.lstsq(np.column_stack([rows @ matrix, np.ones(len(rows))]), wanted, rcond=None)[0]
    np.testing.assert_allclose(carried.artefact.weight, best[:-1], rtol=1e-3, atol=1e-4)
    assert carried.artefact.bias == pytest.approx(best[-1], rel=1e-3, abs=1e-4)
    assert precision(probe, dataset, "--project", "8", "--save-projection", str(out)) == 2
    assert "is there already; --force replaces it" in capsys.readouterr().err
    assert precision(probe, dataset, "--project", "8", "--save-projection", str(out), "--force") == 0


def test_float16_that_overflows_ends_requests(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, rng = Topics(), np.random.default_rng(0)
    for number in range(60):
        values = rng.normal(size=(3, 1, WIDTH)).astype(np.float32)
        values[1, 0, 0] = 1e5 if number % 4 == 0 else 1.0
        stream = StreamBuilder(f"r{number}", layers=(5,), width=WIDTH, prompt_len=1, dtype="float32")
        made.activations(stream, stream.start(), stream.block([0, 1, 2], values), stream.end())
        made.label(f"r{number}", "positive" if number % 2 else "negative")
    made.export(tmp_path / "d")
    probe = LinearProbe.from_arrays(DIRECTION, 0.0, layer=5, tensor_type="residual_stream", threshold=0.0)
    probe.save(tmp_path / "p")
    found = measured(tmp_path / "p", tmp_path / "d", capsys)
    assert found["float16"]["failed"] > 0
    assert found["int8"]["failed"] == found["float32"]["failed"] == 0
    assert measured(tmp_path / "p", tmp_path / "d", capsys, "--part", "test")["int8"]["failed"] == 0
    assert len(evaluation.load(tmp_path / "d").manifest["test_reads"]) == 1


def test_what_is_not_linear_has_no_projection(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(3)
    mlp = {"hidden.weight": rng.normal(size=(4, WIDTH)), "hidden.bias": np.zeros(4), "weight": np.ones((1, 4))}
    both = {"weight": rng.normal(size=(2, WIDTH)), "bias": np.zeros(2), "mix": np.ones(2)}
    settings = {"tensor_type": "residual_stream", "threshold": 1.0}
    MlpProbe.from_tensors(mlp | {"bias": np.zeros(1)}, layer=5, **settings).save(tmp_path / "mlp")
    EnsembleProbe.from_tensors(both, layers=[3, 5], **settings).save(tmp_path / "both")
    for name, reason in (("mlp", "an MLP is not linear"), ("both", "an ensemble has a direction for each layer")):
        found = measured(tmp_path / name, dataset, capsys, "--project", "4")
        assert reason in found["project 4"]["unavailable"]
        assert found["project 4"]["auroc"] is None
        assert found["int8"]["drift"]["max"] > 0
    assert precision(tmp_path / "mlp", dataset, "--project", "4") == 0
    assert "project 4: n/a (an MLP is not linear in its row" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--project", "16"], "a projection to 16; accepted: 1 to 15, below the probe's width"),
        (["--project", "4", "--project", "4"], "--project: 4, 4; accepted: each size once"),
        (["--part", "all"], "--part: 'all'; accepted: threshold, test"),
        (["--label", "good"], "no label 'good'; it has bad"),
        (["--point", "mlp"], "no point 'mlp'; it has residual"),
        (["--save-projection", "x"], "there is no --project to save"),
    ],
)
def test_what_is_wrong_is_named(
    more: list[str], says: str, dataset: Path, probe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert precision(probe, dataset, *more) in (1, 2)
    assert says in capsys.readouterr().err


def test_a_record_that_is_not_the_models_is_refused(
    probe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Topics()
    stream = StreamBuilder("r", layers=(5,), width=WIDTH, prompt_len=1, dtype="int8")
    rows = np.ones((2, 1, WIDTH), np.float32)
    made.activations(stream, stream.start(), stream.block([0, 1], rows), stream.end())
    made.label("r", "positive")
    made.export(tmp_path / "d")
    assert precision(probe, tmp_path / "d") == 1
    assert "point 'residual': recorded as int8; accepted: a recording in the model's own" in capsys.readouterr().err
    other = LinearProbe.from_arrays(np.ones(4), 0.0, layer=5, tensor_type="residual_stream", threshold=0.0)
    other.save(tmp_path / "narrow")
    assert precision(tmp_path / "narrow", tmp_path / "d") == 1
    assert "width is 16; the probe 'linear' reads 4" in capsys.readouterr().err
