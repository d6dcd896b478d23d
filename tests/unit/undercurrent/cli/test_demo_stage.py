"""The demo's configuration files are those of a deployment: the apps' own loaders read them."""

import dataclasses
import json
from pathlib import Path

import pytest

from engine_worker.config import worker_config
from probe_consumers.config import host_config
from undercurrent.adapters.hf.options import HFOptions
from undercurrent.cli.demo.cast import asks
from undercurrent.cli.demo.scene import choose_broker
from undercurrent.cli.demo.stage import Stage
from undercurrent.cli.options import EngineKind
from undercurrent.errors import UnreachableError
from undercurrent.kafka.client import Assignor
from undercurrent.pipeline import read_sections


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setenv("UNDERCURRENT_BOOTSTRAP_SERVERS", "127.0.0.1:9092")
    return Stage.set_up(tmp_path, keep=False).at("127.0.0.1:9092")


def test_the_engine_worker_reads_its_file(stage: Stage) -> None:
    config = worker_config(read_sections(stage.engine_config), stage.folder)
    assert config.own.engine.kind == "vllm"
    assert Path(config.own.engine.model, "model.safetensors").is_file()
    assert config.own.guards.probes == (stage.probe_name,)
    assert list(config.points.names) == [stage.point]
    assert config.plan == stage.plan


def test_the_engine_worker_reads_the_file_for_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERCURRENT_BOOTSTRAP_SERVERS", "127.0.0.1:9092")
    stage = Stage.set_up(tmp_path, keep=False, engine=EngineKind.HF).at("127.0.0.1:9092")
    section = worker_config(read_sections(stage.engine_config), stage.folder).own.engine
    assert section.kind is EngineKind.HF
    # The engine takes every argument for its own: none is one that it ignores.
    assert set(section.args) <= {field.name for field in dataclasses.fields(HFOptions)}
    assert HFOptions.of(section.args).max_model_len == 512


def test_the_probe_host_reads_its_file_and_finds_the_probe(stage: Stage) -> None:
    config = host_config(read_sections(stage.probes_config), stage.folder)
    [bound] = config.bounds
    assert (bound.binding.name, bound.binding.mode, bound.binding.point) == (stage.probe_name, "abort", stage.point)
    assert config.plan == stage.plan


def test_the_probe_was_fitted_on_the_model_that_is_served(stage: Stage) -> None:
    from undercurrent.adapters.fingerprint import model_fingerprint

    config = worker_config(read_sections(stage.engine_config), stage.folder)
    assert stage.probe.config.fingerprints.model == model_fingerprint(Path(config.own.engine.model))
    assert stage.probe.config.layer in config.points.get(stage.point).layers


def test_committed_figures_keep_what_the_demo_promises(stage: Stage) -> None:
    figures = stage.figures()
    assert figures["auroc_heldout"] > 0.95
    assert figures["auroc_text_baseline"] < 0.65
    assert figures["heldout_overlap"] == 0
    assert figures["n_heldout"] >= 500
    assert figures["threshold"] == stage.threshold
    for rate in figures["tpr_fpr"].values():
        assert rate["low"] <= rate["value"] <= rate["high"]
        assert rate["value"] == rate["count"] / rate["n"]


def test_topics_on_a_given_broker_are_the_demos_own(stage: Stage) -> None:
    assert stage.plan.prompts.startswith("undercurrent-demo-")


def test_prompts_are_written_for_the_producer(stage: Stage) -> None:
    argv = stage.send_argv(asks([]), alone=True)
    path = Path(argv[argv.index("--file") + 1])
    assert [json.loads(line)["points"] for line in path.read_text().splitlines()] == [[]] * 8


def test_three_commands_to_go_on_with_name_what_is_there(stage: Stage) -> None:
    text = str(stage.farewell()[0].renderable)  # type: ignore[union-attr]
    assert [line.split()[1] for line in text.splitlines()] == ["prompts", "tail", "replay"]
    assert text.count("ask-1") >= 3


def test_the_address_is_found_among_what_a_broker_prints() -> None:
    assert Stage.address_in(["127.0.0.1:40001", "Apache Kafka, one node, development only: ..."]) == "127.0.0.1:40001"
    assert Stage.address_in(["starting on 127.0.0.1:40001 soon"]) is None


def test_a_given_broker_wins_over_one_that_is_here(tmp_path: Path) -> None:
    broker = choose_broker({"UNDERCURRENT_BOOTSTRAP_SERVERS": "kafka:9092", "KAFKA_HOME": str(tmp_path)})
    assert (broker.kind, broker.address) == ("given", "kafka:9092")


def test_without_kafka_the_embedded_broker_is_taken_with_what_it_needs() -> None:
    broker = choose_broker({})
    assert (broker.kind, broker.assignor) == ("embedded", Assignor.RANGE)
    assert broker.options["receive.message.max.bytes"] == 1_000_000_000


def test_without_any_broker_the_three_ways_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(UnreachableError, match=r"UNDERCURRENT_BOOTSTRAP_SERVERS.*KAFKA_HOME.*undercurrent\[embedded\]"):
        choose_broker({})
