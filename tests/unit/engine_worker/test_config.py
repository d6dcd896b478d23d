"""The engine worker's configuration."""

from __future__ import annotations

import pytest

from engine_worker.building import build_engine
from engine_worker.config import worker_config
from undercurrent.cli.options import EngineKind
from undercurrent.errors import ConfigError, SpecError
from undercurrent.kafka.client import Assignor
from undercurrent.protocol.guarding import GuardRules
from undercurrent.protocol.holdout import HoldoutRule
from undercurrent.service.config import read_sections, shown
from undercurrent.spec import OnUnavailable

KAFKA = {"kafka": {"bootstrap_servers": "localhost:1"}}
POINTS = """
version: 1
extraction_points:
  - {name: residual, layers: [0], tensor_type: residual_stream, position: "*", execution_mode: %s}
"""


def config(tmp_path, **sections):
    return worker_config({**KAFKA, "engine": {"kind": "fake"}, **sections}, tmp_path)


def test_defaults_and_names(tmp_path):
    found = config(tmp_path, topics={"prefix": "x"})
    assert (found.group_id, found.own.group.assignor) == ("x.engine", Assignor.COOPERATIVE_STICKY)
    assert found.own.guards.probes == ()
    assert found.points.names == []


def test_limits_reach_the_protocol(tmp_path):
    made = config(tmp_path, limits={"max_in_flight": 3, "handover_s": 1}, guards={"wait_s": 0.25})
    limits = made.limits
    assert (limits.max_in_flight, limits.handover_s, limits.guard_wait_s) == (3, 1.0, 0.25)
    assert limits.control_keep_s == made.plan.control_retention_ms / 1000
    assert config(tmp_path, topics={"dedupe_window_ms": 5000}).limits.dedupe_window_s == 5.0


def test_a_holdout_is_off_by_default_and_its_salt_comes_from_a_file_and_is_not_shown(tmp_path):
    assert config(tmp_path).holdout == HoldoutRule()
    with pytest.raises(ConfigError, match="holdout_share"):
        config(tmp_path, holdout_share=1)
    (tmp_path / "salt").write_text("ours\n")
    (tmp_path / "engine.yaml").write_text(f"holdout_share: 0.01\nholdout_salt_file: {tmp_path / 'salt'}\n")
    made = config(tmp_path, **read_sections(tmp_path / "engine.yaml", {}))
    assert made.holdout == HoldoutRule(share=0.01, salt="ours")
    assert "ours" not in f"{shown(made.own)} {made.holdout} {made.own}"


def test_request_slots_that_could_run_out_are_refused(tmp_path):
    limits = {"max_in_flight": 10, "max_children": 4}
    assert config(tmp_path, limits=limits, publisher={"request_slots": 80}).own.publisher.request_slots == 80
    with pytest.raises(ConfigError, match=r"publisher\.request_slots: is 79; .* is 80"):
        config(tmp_path, limits=limits, publisher={"request_slots": 79})


def guarded_points(tmp_path, policy):
    spec = (POINTS % "async").rstrip().rstrip("}")
    (tmp_path / "points.yaml").write_text(f"{spec}, queue_depth: 8, on_unavailable: {policy}}}\n")
    return {"points": "points.yaml", "topics": {"activation_partitions": 3}}


@pytest.mark.parametrize("policy", OnUnavailable)
def test_what_is_done_where_nobody_guards_a_point_reaches_the_protocol(tmp_path, policy):
    sections = guarded_points(tmp_path, policy)
    guards = {"probes": ["g"], "absent_after_s": 2, "max_lag_s": 9}
    assert config(tmp_path, guards=guards, **sections).guards == GuardRules(
        probes=("g",), absent_after_s=2.0, max_lag_s=9.0, policies={"residual": policy}, partitions=3
    )


@pytest.mark.parametrize("policy", [OnUnavailable.HOLD_INTAKE, OnUnavailable.ABORT])
def test_a_point_that_nobody_could_ever_guard_is_refused(tmp_path, policy):
    sections = guarded_points(tmp_path, policy)
    with pytest.raises(ConfigError, match=f"guards.probes: names no probe, .*'residual' .*: {policy.value};"):
        config(tmp_path, **sections)


def test_a_model_folder_is_looked_for_beside_the_file_and_a_name_is_left_alone(tmp_path):
    (tmp_path / "model").mkdir()
    beside = config(tmp_path, engine={"kind": "vllm", "model": "model"})
    assert beside.own.engine.model == str(tmp_path / "model")
    assert config(tmp_path, engine={"kind": "vllm", "model": "org/name"}).own.engine.model == "org/name"
    assert config(tmp_path, engine={"kind": "hf", "model": "model"}).own.engine.model == str(tmp_path / "model")


def test_an_option_takes_the_place_of_the_files_kind_of_engine(tmp_path):
    sections = {**KAFKA, "engine": {"kind": "vllm", "model": "org/name", "args": {"enforce_eager": True}}}
    section = worker_config(sections, tmp_path, engine=EngineKind.HF).own.engine
    assert (section.kind, section.model) == (EngineKind.HF, "org/name")
    with pytest.raises(ConfigError, match=r"engine\.model"):
        worker_config({**KAFKA, "engine": {"kind": "fake"}}, tmp_path, engine=EngineKind.HF)


def test_each_kind_of_engine_is_built_from_its_own_arguments(tmp_path):
    built = build_engine(config(tmp_path, engine={"kind": "hf", "model": "m", "args": {"threads": 1}}), None)
    assert type(built).__name__ == "HFEngine"
    with pytest.raises(ConfigError, match="enable_lora"):
        build_engine(config(tmp_path, engine={"kind": "hf", "model": "m", "args": {"enable_lora": True}}), None)
    with pytest.raises(ConfigError, match=r"engine\.args.*colour"):
        build_engine(config(tmp_path, engine={"kind": "fake", "args": {"colour": 1}}), None)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"engine": {"kind": "vllm"}}, "engine.model"),
        ({"engine": {"kind": "hf"}}, "engine.model"),
        ({"engine": {"kind": "other"}}, "engine.kind"),
        ({"limits": {"max_in_flight": 0}}, "limits.max_in_flight"),
        ({"limits": {"max_inflight": 1}}, "did you mean 'max_in_flight'"),
        ({"guard": {}}, "did you mean 'guards'"),
        ({"group": {"assignor": "sticky"}}, "group.assignor"),
        ({"topics": {"partitions": 1}}, "topics"),
    ],
)
def test_a_mistake_names_its_place(tmp_path, sections, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        config(tmp_path, **sections)


def test_a_point_that_a_pipeline_cannot_honour_is_refused(tmp_path):
    path = tmp_path / "points.yaml"
    path.write_text(POINTS % "async", encoding="utf-8")
    assert config(tmp_path, points="points.yaml").plan.points == ("residual",)
    path.write_text(POINTS % "inline", encoding="utf-8")
    with pytest.raises(SpecError, match="inline"):
        config(tmp_path, points="points.yaml")
