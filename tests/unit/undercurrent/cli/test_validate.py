from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from undercurrent.cli.main import PROG_NAME, app
from undercurrent.cli.running import run
from undercurrent.probes import LinearProbe

POINT = {
    "name": "residual",
    "layers": [2, 3],
    "tensor_type": "residual_stream",
    "position": "generated[*]",
    "stride": 4,
    "execution_mode": "async",
}
GUARD = {"name": "guard", "point": "residual", "probe": "./guard", "mode": "abort"}

Captured = pytest.CaptureFixture[str]


def spec(folder: Path, *points: dict[str, Any], name: str = "points.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump({"version": 1, "extraction_points": list(points or [POINT])}))
    return path


def bindings(folder: Path, *given: dict[str, Any]) -> Path:
    probe = LinearProbe.from_arrays([1.0, 2.0], 0.0, layer=2, tensor_type="residual_stream", threshold=1.0)
    probe.save(folder / "guard")
    path = folder / "probes.yaml"
    path.write_text(yaml.safe_dump({"bindings": list(given or [GUARD])}))
    return path


def validate(*arguments: object) -> int:
    return run(app, PROG_NAME, ["validate", *map(str, arguments)])


def test_a_right_spec_is_shown_as_a_table(tmp_path: Path, capsys: Captured) -> None:
    inline = {**POINT, "name": "end", "position": "prompt[-1]", "execution_mode": "inline", "probe_type": "p"}
    del inline["stride"]
    path = spec(tmp_path, POINT, inline)
    assert validate(path) == 0
    out, err = capsys.readouterr()
    assert err == ""
    first, heads, *rows = out.splitlines()
    assert first == f"{path}: ok, 2 points"
    assert heads.split() == [
        "point",
        "layers",
        "tensor_type",
        "position",
        "mode",
        "kind",
        "probe",
        "in",
        "a",
        "pipeline",
    ]
    assert rows[0].split() == ["residual", "2,3", "residual_stream", "generated[*]", "every", "4", "async",
                               "trajectory", "-", "yes"]  # fmt: skip
    assert rows[1].split()[-3:] == ["p", "no:", "execution_mode"]


def test_each_file_is_checked_and_each_error_names_file_point_and_field(tmp_path: Path, capsys: Captured) -> None:
    bad = spec(tmp_path, {**POINT, "tensor_type": "resid"}, name="bad.yaml")
    good, worse = spec(tmp_path), tmp_path / "worse.yaml"
    worse.write_text("extraction_points: [{name: x, layrs: 1}]")
    assert validate(bad, good, worse) == 2
    out, err = capsys.readouterr()
    assert out.startswith(f"{good}: ok")
    first, second = err.splitlines()
    assert first.startswith(f"undercurrent validate: {bad}: point 'residual' field 'tensor_type': 'resid'; accepted: ")
    assert f"{worse}: point 'x' field" in second


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not nothing"),
        (b"\x00\xff\xfe\x7fELF", "utf-8"),
        (b"- 1\n- 2\n", "not list"),
        (b"a: !!python/object/apply:os.system [x]", "not plain data"),
        (b"[" * 10_000, "nesting"),
        (b"{", "not YAML"),
    ],
)
def test_a_file_that_is_no_spec_is_one_line(content: bytes, says: str, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "points.yaml"
    path.write_bytes(content)
    assert validate(path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"undercurrent validate: {path}: ")
    assert says in line


def test_what_cannot_be_opened_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    for path, says in ((tmp_path / "nowhere.yaml", "No such file"), (tmp_path, "Is a directory")):
        assert validate(path) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"undercurrent validate: {path}: cannot be read: {says}" + " or directory" * ("No" in says)


def test_old_spellings_are_told(tmp_path: Path, capsys: Captured) -> None:
    old = {**POINT, "tensor": POINT["tensor_type"]}
    del old["tensor_type"]
    path = spec(tmp_path, old)
    assert validate(path) == 0
    assert f"{path}: extraction point 'residual': key 'tensor' is now called" in capsys.readouterr().err


def test_a_pipeline_refuses_what_only_the_embedded_adapter_can_do(tmp_path: Path, capsys: Captured) -> None:
    path = spec(tmp_path, {**POINT, "execution_mode": "inline"})
    assert validate(path) == 0
    assert validate(path, "--pipeline") == 2
    assert f"{path}: point 'residual' field 'execution_mode'" in capsys.readouterr().err


def test_bindings_are_loaded_and_shown(tmp_path: Path, capsys: Captured) -> None:
    assert validate(spec(tmp_path), "--probes", bindings(tmp_path)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"{tmp_path / 'probes.yaml'}: ok, 1 binding\n" in out
    assert out.splitlines()[-1].split()[:5] == ["guard", "residual", "./guard", "abort", "1"]


@pytest.mark.parametrize(
    ("binding", "points", "code", "says"),
    [
        ({"point": "other"}, POINT, 2, "binding 'guard': field 'point': 'other'; accepted: residual"),
        ({"probe": "./absent"}, POINT, 1, "binding 'guard': .*absent is no folder"),
        ({"probe": "no.such:Probe"}, POINT, 1, "binding 'guard': .*no.such"),
        ({"probe": "unregistered"}, POINT, 1, "binding 'guard': no probe is called 'unregistered'"),
        ({"mode": "kill"}, POINT, 2, "mode"),
        ({}, {**POINT, "layers": [5]}, 2, r"binding 'guard': field 'point': .* reads layer 2, .* has \[5\]"),
        ({}, {**POINT, "tensor_type": "mlp_out"}, 2, "fitted on tensor_type 'residual_stream'"),
        ({}, {**POINT, "execution_mode": "inline"}, 2, "execution_mode"),
    ],
)
def test_a_wrong_binding_is_named(
    binding: dict[str, Any], points: dict[str, Any], code: int, says: str, tmp_path: Path, capsys: Captured
) -> None:
    probes = bindings(tmp_path, {**GUARD, **binding})
    assert validate(spec(tmp_path, points), "--probes", probes) == code
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert re.search(says, err)


def test_where_a_spec_is_wrong_bindings_are_still_loaded(tmp_path: Path, capsys: Captured) -> None:
    path = spec(tmp_path, {**POINT, "layers": []})
    assert validate(path, "--probes", bindings(tmp_path)) == 2
    out, err = capsys.readouterr()
    assert len(err.splitlines()) == 1
    assert "1 binding" in out


def test_json_has_a_line_a_file(tmp_path: Path, capsys: Captured) -> None:
    bad = spec(tmp_path, {**POINT, "layers": []}, name="bad.yaml")
    assert validate(spec(tmp_path), bad, "--json") == 2
    good, wrong = map(json.loads, capsys.readouterr().out.splitlines())
    assert (good["ok"], good["points"][0]["stride"]) == (True, 4)
    assert (wrong["ok"], wrong["point"], wrong["field"]) == (False, "residual", "layers")
    assert wrong["error"].startswith("point 'residual' field 'layers'")
    assert validate(spec(tmp_path), "--json", "--probes", bindings(tmp_path)) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[1])["bindings"][0]["mode"] == "abort"


def test_no_file_is_a_usage_error(capsys: Captured) -> None:
    assert validate() == 2
    assert "SPEC" in capsys.readouterr().err


def test_a_matrix_that_is_not_there_is_named_with_its_point(tmp_path: Path, capsys: Captured) -> None:
    np.save(tmp_path / "right.npy", np.ones((8, 2), np.float32))
    assert validate(spec(tmp_path, {**POINT, "reduce": {"project": "right.npy"}})) == 0
    capsys.readouterr()
    assert validate(spec(tmp_path, {**POINT, "reduce": {"project": "wrong.npy"}})) == 2
    told = capsys.readouterr()
    assert "point 'residual', reduce.project" in told.out + told.err
    assert f"{tmp_path / 'wrong.npy'}: cannot be read" in told.out + told.err
