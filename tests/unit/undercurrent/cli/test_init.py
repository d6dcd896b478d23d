from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from compose_spec import PyCompose
from transformers import LlamaConfig

from engine_worker.config import worker_config
from probe_consumers.__main__ import read_config
from undercurrent.cli.main import PROG_NAME, Tree, app
from undercurrent.cli.running import run
from undercurrent.cli.scaffold import Deployment, usual_layer
from undercurrent.core import RequestContext
from undercurrent.pipeline import read_sections, topic_plan
from undercurrent.probes import load_bindings, load_probe
from undercurrent.spec import ActivationRecord, TensorType, load_yaml_file

Captured = pytest.CaptureFixture[str]

NAMES = {
    "engine.yaml", "points.yaml", "probes.yaml", "loud_tokens.py", "host.yaml", "docker-compose.yml", "README.md",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UNDERCURRENT_BOOTSTRAP_SERVERS", "ENGINE_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the configuration of a model of seven layers."""
    LlamaConfig(num_hidden_layers=7, hidden_size=32, num_attention_heads=2).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def init(*arguments: object) -> int:
    return run(app, PROG_NAME, ["init", *map(str, arguments)])


@pytest.fixture
def deployment(model: Path, tmp_path: Path) -> Path:
    assert init(tmp_path / "new" / "ring", "--model", model) == 0
    return tmp_path / "new" / "ring"


def test_every_file_is_written_and_named(model: Path, tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "new" / "ring"
    assert init(folder, "--model", model) == 0
    out, err = capsys.readouterr()
    assert {path.name for path in folder.iterdir()} == NAMES
    assert sorted(out.splitlines()) == sorted(str(folder / name) for name in NAMES)
    assert f"undercurrent config check {folder}" in err


def test_what_is_written_passes_its_own_checks(deployment: Path, capsys: Captured) -> None:
    points, probes = deployment / "points.yaml", deployment / "probes.yaml"
    assert run(app, PROG_NAME, ["validate", str(points), "--probes", str(probes), "--pipeline"]) == 0
    assert run(app, PROG_NAME, ["config", "check", str(deployment)]) == 0
    out = capsys.readouterr().out
    assert "engine.yaml: engine worker, ok" in out
    assert "host.yaml: probe host, ok" in out


def test_both_apps_take_their_files(deployment: Path, model: Path) -> None:
    engine = worker_config(read_sections(deployment / "engine.yaml"), deployment)
    assert engine.own.engine.model == str(model)
    assert engine.points.get("residual").layers == (4,)  # type: ignore[union-attr]
    host = read_config(deployment / "host.yaml")
    assert [(bound.binding.name, bound.mode) for bound in host.bounds] == [("loud-tokens", "shadow")]
    assert engine.plan == host.plan == topic_plan(read_sections(deployment / "engine.yaml"), deployment)
    assert engine.own.metrics.port != host.host.metrics.port


def test_the_first_probe_judges(deployment: Path) -> None:
    (binding,) = load_bindings(deployment / "probes.yaml")
    probe = load_probe(binding.probe, binding.args, base=deployment).factory.spawn("r1", "residual")

    def record(position: int, value: float) -> ActivationRecord:
        row = np.full(4, value, np.float32)
        return ActivationRecord("r1", "residual", 4, position, TensorType.RESIDUAL_STREAM, row, True)

    signals = [probe.on_activation(record(n, value)) for n, value in enumerate((1.0, 1.0, 1.0, 20.0, 1.0))]
    assert [(signal.action, signal.token_pos) for signal in signals] == [
        ("continue", 0), ("continue", 1), ("continue", 2), ("flag", 3), ("continue", 4),
    ]  # fmt: skip
    result = probe.on_end(RequestContext("r1"))
    assert (result.verdict, result.metadata["tokens"]) == ("loud", 5)
    with pytest.raises(ValueError, match="not finite"):
        probe.on_activation(record(9, float("nan")))


def test_the_compose_file_is_valid_and_runs_commands_with_files_that_are_there(
    deployment: Path, model: Path, capsys: Captured
) -> None:
    compose = yaml.safe_load((deployment / "docker-compose.yml").read_text())
    assert sorted(PyCompose.from_json(json.dumps(compose)).service_names()) == sorted(compose["services"])
    for name in ("topics", "engine", "probes"):
        service = compose["services"][name]
        assert service["command"][0] in Tree.table
        assert (deployment / Path(service["command"][-1]).name).is_file()
        assert {"type": "bind", "source": ".", "target": "/etc/undercurrent", "read_only": True} in service["volumes"]
        assert run(app, PROG_NAME, [*service["command"][:2], "--help"]) == 0
    capsys.readouterr()
    engine = compose["services"]["engine"]
    assert engine["environment"]["UNDERCURRENT_ENGINE__MODEL"] == "/model"
    assert {"type": "bind", "source": str(model), "target": "/model", "read_only": True} in engine["volumes"]
    for name, path in (("engine", "engine.yaml"), ("probes", "host.yaml")):
        port = read_sections(deployment / path)["metrics"]["port"]
        assert f"http://localhost:{port}/readyz" in compose["services"][name]["healthcheck"]["test"][-1]


def test_the_containers_variable_names_the_model(deployment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERCURRENT_ENGINE__MODEL", "/model")
    monkeypatch.setenv("UNDERCURRENT_BOOTSTRAP_SERVERS", "kafka:9092")
    config = worker_config(read_sections(deployment / "engine.yaml"), deployment)
    assert (config.own.engine.model, config.kafka.bootstrap_servers) == ("/model", "kafka:9092")


def test_a_file_that_is_there_is_named_and_left_alone(deployment: Path, model: Path, capsys: Captured) -> None:
    (deployment / "points.yaml").write_text("mine")
    (deployment / "engine.yaml").unlink()
    capsys.readouterr()
    assert init(deployment, "--model", model) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "points.yaml, probes.yaml" in line
    assert "engine.yaml" not in line
    assert "--force" in line
    assert (deployment / "points.yaml").read_text() == "mine"
    assert not (deployment / "engine.yaml").exists()
    assert init(deployment, "--model", model, "--force") == 0
    assert load_yaml_file(deployment / "points.yaml").names == ["residual"]


def test_a_name_on_a_hub_needs_a_layer_or_the_hub(tmp_path: Path) -> None:
    assert init(tmp_path / "ring", "--model", "org/some-model", "--layer", "12") == 0
    config = worker_config(read_sections(tmp_path / "ring" / "engine.yaml"), tmp_path / "ring")
    assert config.own.engine.model == "org/some-model"
    assert load_yaml_file(tmp_path / "ring" / "points.yaml").extraction_points[0].layers == (12,)
    compose = yaml.safe_load((tmp_path / "ring" / "docker-compose.yml").read_text())
    PyCompose.from_json(json.dumps(compose))
    assert "UNDERCURRENT_ENGINE__MODEL" not in compose["services"]["engine"]["environment"]


@pytest.mark.parametrize("name", ["a $HOME ${X} $$ b", "quo\"te's", "#hash: {x}", "über*", "-dash"])
def test_a_folder_of_any_name_is_written_so_that_it_is_read_back(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/wrong")
    folder = tmp_path / name
    LlamaConfig(num_hidden_layers=3, hidden_size=32, num_attention_heads=2).save_pretrained(folder)
    assert init(tmp_path / "ring", f"--model={folder}") == 0
    config = worker_config(read_sections(tmp_path / "ring" / "engine.yaml"), tmp_path / "ring")
    assert config.own.engine.model == str(folder)
    compose: dict[str, Any] = yaml.safe_load((tmp_path / "ring" / "docker-compose.yml").read_text())
    assert compose["services"]["engine"]["volumes"][1]["source"].replace("$$", "$") == str(folder)


def test_no_model_is_one_line_and_nothing_is_written(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "empty").mkdir()
    for model, says in (("/no/such/folder", "is no folder"), (tmp_path / "empty", "config.json"), ("", "is empty")):
        assert init(tmp_path / "ring", "--model", model) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line
    assert not (tmp_path / "ring").exists()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, model: Path, capsys: Captured) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert init(folder, "--model", model) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "cannot be written" in line


@pytest.mark.parametrize(("layers", "layer"), [(1, 0), (2, 1), (4, 2), (32, 21)])
def test_the_layer_is_one_that_the_model_has(layers: int, layer: int) -> None:
    assert usual_layer(layers) == layer < layers


def test_no_mark_of_the_templates_is_left() -> None:
    for is_folder in (True, False):
        for text in Deployment(model="m", is_folder=is_folder, layer=1).files().values():
            assert "@" not in text.replace("1@kafka", "")
