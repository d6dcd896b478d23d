"""The file of a bare server: its mistakes are told with their key, and its path changes no graph."""

from __future__ import annotations

import pytest
import yaml

from undercurrent.adapters.vllm import settings as s
from undercurrent.adapters.vllm.server_settings import server_config
from undercurrent.errors import CaptureError, ConfigError, SpecError
from undercurrent.protocol.brake import BrakeLimits
from undercurrent.protocol.holdout import HoldoutRule

POINT = {
    "name": "residual", "layers": [1], "tensor_type": "residual_stream", "position": "*", "execution_mode": "async",
    "queue_depth": 64,
}  # fmt: skip
GOOD = {"kafka": {"bootstrap_servers": "localhost:9"}, "points": "points.yaml"}


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.delenv("UNDERCURRENT_BOOTSTRAP_SERVERS", raising=False)

    def wrote(spec=(POINT, {**POINT, "name": "mlp", "tensor_type": "mlp_out"}), **sections):
        copies = [dict(point) for point in spec]
        (tmp_path / "points.yaml").write_text(yaml.safe_dump({"version": 1, "extraction_points": copies}))
        path = tmp_path / "capture.yaml"
        path.write_text(yaml.safe_dump({**GOOD, **sections}))
        return path

    return wrote


@pytest.mark.parametrize(
    ("static", "always"), [(None, ("residual", "mlp")), (True, ("residual", "mlp")), (False, ()), (["mlp"], ("mlp",))]
)
def test_what_is_always_captured(write, static, always):
    rules = server_config(write(capture={} if static is None else {"static": static})).rules
    assert (rules.points, rules.always, rules.partitions, rules.trusted) == (("residual", "mlp"), always, 4, False)


@pytest.mark.parametrize(
    ("sections", "match"),
    [
        ({"publisher": {"intervall_ms": 3}}, r"publisher\.intervall_ms: unknown key.*interval_ms"),
        ({"capture": {"static": ["nowhere"]}}, r"capture\.static: no extraction point 'nowhere'; known are"),
        ({"capture": {"static": 1}}, r"capture\.static"),
        ({"engine": {"name": "a b"}}, r"engine\.name"),
        ({"engine": {"nice": 20}}, r"engine\.nice"),
        ({"points": None}, "points: is missing"),
        ({"kafka": {}}, "bootstrap_servers"),
        ({"kafka": {"bootstrap_servers": "b:1", "acks": 1}}, "acks"),
        ({"topics": {"activation_partition": 3}}, "activation_partition"),
        ({"publishers": {}}, "publishers: unknown key.*publisher"),
        ({"group": {"name": ""}}, r"group\.name"),
        ({"brake": {"max_abort_share": 0}}, r"brake\.max_abort_share"),
        ({"brake": {"min_requests": 501}}, "it would never brake"),
        ({"holdout_share": 1}, "holdout_share"),
        ({"holdout_salt": "x"}, "holdout_salt: unknown key"),
    ],
)
def test_a_mistake_names_the_file_and_the_key(write, sections, match):
    path = write(**sections)
    with pytest.raises(ConfigError, match=match) as error:
        s.settings_of({"undercurrent": {"settings": str(path)}})
    assert str(path) in str(error.value)


def test_a_point_that_a_pipeline_cannot_honour_is_refused(write):
    inline = {key: value for key, value in POINT.items() if key != "queue_depth"} | {"execution_mode": "inline"}
    with pytest.raises(SpecError, match="inline"):
        server_config(write(spec=[inline]))


@pytest.mark.parametrize("policy", ["hold_intake", "abort"])
def test_what_only_an_engine_worker_does_for_an_unguarded_point_is_refused(write, policy):
    with pytest.raises(SpecError, match=f"'residual' field 'on_unavailable': {policy} is what"):
        server_config(write(spec=[{**POINT, "on_unavailable": policy}]))


@pytest.mark.parametrize("position", ["generated[-1]", "generated[-3]+1"])
def test_a_position_that_counts_from_the_end_is_known_to_need_somebody_who_says_where_that_is(write, position):
    rules = server_config(write(spec=[POINT, {**POINT, "name": "last", "position": position}])).rules
    assert (rules.points, rules.from_end) == (("residual", "last"), {"last"})


def test_neither_brake_nor_holdout_is_on_unless_the_file_says_so(write):
    config = server_config(write())
    assert (config.own.brake.limits, config.holdout) == (BrakeLimits(), HoldoutRule())
    config = server_config(write(brake={"max_abort_share": 0.1, "window": 200}, holdout_share=0.01))
    assert config.own.brake.limits == BrakeLimits(max_abort_share=0.1, window=200, min_requests=100)
    assert config.holdout == HoldoutRule(share=0.01)


def test_a_worker_captures_as_the_file_says(write):
    path = write(capture={"max_tap_mib": 3, "block_timeout_s": 0.5, "check_plans": True})
    found = s.settings_of({"undercurrent": {"settings": str(path)}})
    assert [point.name for point in found.points] == ["residual", "mlp"]
    assert (found.max_tap_bytes, found.block_timeout_s, found.check_plans) == (3 << 20, 0.5, True)
    assert found.server.path == path
    with pytest.raises(CaptureError, match="nothing else"):
        s.settings_of({"undercurrent": {"settings": str(path), "password": "x"}})
