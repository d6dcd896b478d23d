"""The demo's phases around an engine without a model: everything real but the tokens."""

import shutil
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from undercurrent.cli.demo.play import Play
from undercurrent.cli.demo.processes import Processes, ProcessFailedError
from undercurrent.cli.demo.stage import Stage
from undercurrent.cli.demo.view import PlainView
from undercurrent.probes.folder import LinearArtefact, make_config, read_folder, write_folder
from undercurrent.testing import demo_model as vault

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180), pytest.mark.alone]


class FakeStage(Stage):
    """A stage whose engine is the scripted one: its letters hold no digit, and no score reaches the threshold."""

    def at(self, address: str) -> Stage:
        stage = super().at(address)
        sections = yaml.safe_load(stage.engine_config.read_text())
        sections["engine"] = {"name": "demo", "kind": "fake", "args": {"width": 128, "step_s": 0.002}}
        stage.engine_config.write_text(yaml.safe_dump(sections))
        shutil.copytree(vault.folder() / "probe", stage.folder / "probe")
        shutil.copy(vault.folder() / "probes.yaml", stage.folder)
        # The demo's probe refuses every model but its own.
        own = read_folder(stage.folder / "probe")
        fields = own.config.model_dump(exclude={"fingerprints"}) | {"threshold": 1e6}
        write_folder(LinearArtefact(own.weight, own.bias, make_config(fields, "test")), stage.folder / "probe")
        sections = yaml.safe_load(stage.probes_config.read_text())
        stage.probes_config.write_text(yaml.safe_dump({**sections, "probes": "probes.yaml"}))
        return stage


class ForeignStage(FakeStage):
    """A stage with the demo's own probe, which was fitted on another model than the scripted engine is."""

    def at(self, address: str) -> Stage:
        stage = super().at(address)
        shutil.rmtree(stage.folder / "probe")
        shutil.copytree(vault.folder() / "probe", stage.folder / "probe")
        return stage


@pytest.fixture(autouse=True)
def _embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNDERCURRENT_BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.delenv("KAFKA_HOME", raising=False)


def test_a_demo_in_which_nothing_is_stopped_says_so(tmp_path: Path) -> None:
    stage = FakeStage.set_up(tmp_path, keep=False)
    with (tmp_path / "shown.txt").open("w") as out, Processes(stage.logs, env=stage.environment) as processes:
        ending = Play(stage, processes, PlainView(Console(file=out, width=140)), ["Hello:"]).run()
        assert [processes.code(name) for name in ("engine", "probes", "producer", "replay")] == [0, 0, 0, 0]
    for number, request in enumerate(ending.report["requests"], start=1):
        assert request["outcome"] == "completed"
        assert request["generated_tokens"] == 300
        if request["label"] == "vault":
            assert f"ask-{number} should have been stopped, but ended completed (length)" in ending.broken
    assert ending.report["replay_equal"]
    assert ending.report["verdicts_compared"] == 9
    assert ending.report["scores_compared"] > 9 * 300
    assert ending.report["latency_ms"] == {"p50": None, "p99": None}
    assert ending.report["broker"]["kind"] == "embedded"
    shown = (tmp_path / "shown.txt").read_text()
    assert "the embedded one, for development only" in shown
    assert "9 verdicts and" in shown


def test_a_probe_that_refuses_the_model_is_said(tmp_path: Path) -> None:
    stage = ForeignStage.set_up(tmp_path, keep=False)
    with (tmp_path / "shown.txt").open("w") as out, Processes(stage.logs, env=stage.environment) as processes:
        ending = Play(stage, processes, PlainView(Console(file=out)), []).run()
    said = [line for line in ending.broken if line.startswith("the probe gave up on ask-")]
    assert len(said) == 8
    assert all("model" in line for line in said)


def test_an_engine_that_cannot_start_is_named_with_its_words(tmp_path: Path) -> None:
    class Broken(FakeStage):
        def at(self, address: str) -> Stage:
            stage = super().at(address)
            text = stage.engine_config.read_text()
            stage.engine_config.write_text(text.replace("step_s", "stop_s"))
            return stage

    stage = Broken.set_up(tmp_path, keep=False)
    with (tmp_path / "shown.txt").open("w") as out, Processes(stage.logs, env=stage.environment) as processes:
        with pytest.raises(ProcessFailedError, match="engine: ended early, exit code 2") as caught:
            Play(stage, processes, PlainView(Console(file=out)), []).run()
        assert any("stop_s" in line for line in caught.value.last_lines())
