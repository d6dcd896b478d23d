"""`undercurrent probe import` writes a folder that a probe host reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from undercurrent.adapters.fingerprint import model_fingerprint
from undercurrent.cli.main import PROG_NAME, app
from undercurrent.cli.running import run
from undercurrent.probes import LinearProbe, load_probe
from undercurrent.testing import demo_model

VECTOR = np.array([1.0, -2.0, 0.5], np.float32)


def import_(file: Path, out: Path, *more: str) -> int:
    given = ["probe", "import", str(file), "--out", str(out), "--layer", "2", "--threshold", "1.5", *more]
    return run(app, PROG_NAME, given)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    np.savez(tmp_path / "refusal.npz", weight=VECTOR, bias=np.array(0.25))
    return tmp_path / "refusal.npz"


def test_the_folder_scores_as_the_direction_does(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert import_(file, tmp_path / "refusal") == 0
    loaded = load_probe(str(tmp_path / "refusal")).sample
    assert isinstance(loaded, LinearProbe)
    np.testing.assert_array_equal(loaded.score(np.eye(3, dtype=np.float32)), VECTOR + 0.25)
    config = loaded.artefact.config
    assert (config.name, config.layer, config.threshold, config.aggregation.kind) == ("refusal", 2, 1.5, "max")
    assert f"width 3, layer 2 of residual_stream, max >= 1.5, fingerprint {loaded.fingerprint[:12]}" in (
        capsys.readouterr().out
    )


def test_settings_reach_the_folder(file: Path, tmp_path: Path) -> None:
    model = demo_model.folder() / "model"
    window = '{"kind": "k_of_n", "k": 2, "n": 3}'
    more = ["--name", "guard", "--version", "7", "--bias", "-1", "--aggregation", window, "--positions", "generated"]
    assert import_(file, tmp_path / "out", *more, "--mode", "flag", "--model", str(model)) == 0
    probe = LinearProbe.from_folder(tmp_path / "out")
    config = probe.artefact.config
    assert (config.name, config.version, probe.artefact.bias) == ("guard", "7", -1.0)
    assert config.aggregation.model_dump() == {"kind": "k_of_n", "k": 2, "n": 3}
    assert (config.positions, config.mode) == ("generated", "flag")
    assert config.fingerprints.model == model_fingerprint(model)


def test_a_probe_is_replaced_only_when_told(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert import_(file, tmp_path / "out") == 0
    assert import_(file, tmp_path / "out", "--bias", "3") == 2
    assert "--force replaces it" in capsys.readouterr().err
    assert LinearProbe.from_folder(tmp_path / "out").artefact.bias == 0.25
    assert import_(file, tmp_path / "out", "--bias", "3", "--force") == 0
    assert LinearProbe.from_folder(tmp_path / "out").artefact.bias == 3.0


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        (["--aggregation", "median"], 2, "--aggregation: "),
        (["--aggregation", "{k"], 2, "--aggregation: '{k' is no JSON"),
        (["--tensor", "other"], 1, "tensor 'other' is missing; it has bias, weight"),
        (["--tensor-type", "logits"], 2, "--tensor-type: 'logits'"),
        (["--bias", "nan"], 2, "must be finite"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_written(
    more: list[str], code: int, says: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert import_(file, tmp_path / "out", *more) == code
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
