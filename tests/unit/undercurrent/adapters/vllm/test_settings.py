"""The settings file, the tap set, and the versions that are accepted: all without vLLM."""

from __future__ import annotations

import json

import pytest

from undercurrent.adapters.vllm import settings as s
from undercurrent.adapters.vllm.version_check import ALLOW_UNSUPPORTED_VLLM_ENV, SUPPORTED_VLLM, check_vllm_version
from undercurrent.errors import CaptureError
from undercurrent.spec import ExtractionPoint


def point(name="p", **fields):
    values = {"layers": (0, 2), "tensor_type": "residual_stream", "position": "*", "execution_mode": "async"}
    return ExtractionPoint(name=name, **(values | fields))


def test_settings_survive_the_file_and_are_private(tmp_path):
    path = tmp_path / "capture.json"
    wanted = s.CaptureSettings(
        ring="/proc/1/fd/3", points=(point(), point("q", stride=2)), max_tap_bytes=5, check_plans=True
    )
    wanted.write(path)
    assert s.CaptureSettings.read(path) == wanted
    assert s.settings_of(s.additional_config(wanted.points, path)) == wanted
    assert path.stat().st_mode & 0o077 == 0


def test_capture_is_off_unless_it_is_asked_for():
    assert s.settings_of({}) is None
    assert s.settings_of(None) is None
    assert s.settings_of({"other": 1}) is None


def test_what_cannot_be_read_is_refused(tmp_path):
    path = tmp_path / "capture.json"
    with pytest.raises(CaptureError, match="cannot read"):
        s.CaptureSettings.read(path)
    for text in ("{", "{}", json.dumps({"spec": {"version": 1, "extraction_points": [{"name": "x"}]}, "ring": "r"})):
        path.write_text(text)
        with pytest.raises(CaptureError, match="cannot read"):
            s.CaptureSettings.read(path)
    with pytest.raises(CaptureError, match="nothing else"):
        s.settings_of({"undercurrent": {"taps": ""}})
    s.CaptureSettings(ring="r", points=(point(),)).write(path)
    other = s.additional_config((point(layers=(1,)),), path)
    with pytest.raises(CaptureError, match="other taps"):
        s.settings_of(other)


def test_the_tap_set_depends_on_the_graph_alone():
    one = s.tap_set((point("a"), point("b", tensor_type="mlp_out")))
    same = s.tap_set((point("y", tensor_type="mlp_out", position="prompt[*]"), point("x")))
    assert one == same
    assert one != s.tap_set((point("a"), point("b", tensor_type="mlp_out", layers=(0,))))
    # What is published of a tapped row changes no graph.
    assert one == s.tap_set((point("a", dtype="int8"), point("b", tensor_type="mlp_out")))


def test_versions():
    assert check_vllm_version(f"{SUPPORTED_VLLM[0]}.0", {}) == f"{SUPPORTED_VLLM[0]}.0"
    assert check_vllm_version(SUPPORTED_VLLM[0], {})
    for version in ("0.3", "0.320.1", "0.31.2", "1.0"):
        with pytest.raises(CaptureError, match="not supported"):
            check_vllm_version(version, {})
        assert check_vllm_version(version, {ALLOW_UNSUPPORTED_VLLM_ENV: "1"}) == version
