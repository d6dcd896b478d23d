"""Reading and writing specs: lossless round trips, old spellings, and one kind of error for everything else."""

from __future__ import annotations

import time
import warnings

import pytest
import yaml

from undercurrent.errors import SpecValidationError
from undercurrent.spec import (
    UntilPolicy,
    load_spec,
    load_yaml_file,
    parse_dict,
    parse_yaml,
)

SPEC = """
version: 1
extraction_points:
  - name: mid
    layers: [2, 3]
    tensor_type: residual_stream
    position: generated[*]
    execution_mode: async
    queue_depth: 64
  - name: prompt_end
    layers: 3
    tensor_type: final_norm
    position: prompt[-1]
    probe_type: refusal
    probe_args: {threshold: 0.5}
    intervention: {mode: block_until_signal, timeout_ms: 50, on_timeout: abort}
"""


def with_point(**changes):
    point = {"name": "mid", "layers": [3], "tensor_type": "attn_out", "position": "*"} | changes
    return {"version": 1, "extraction_points": [{k: v for k, v in point.items() if v is not ...}]}


def test_every_kind_of_source_gives_the_same_spec(tmp_path):
    path = tmp_path / "points.yaml"
    path.write_text(SPEC, encoding="utf-8")
    spec = parse_yaml(SPEC)
    assert spec.names == ["mid", "prompt_end"]
    for source in (SPEC, str(path), path, yaml.safe_load(SPEC), spec):
        assert load_spec(source) == spec
    assert load_yaml_file(path) == spec


@pytest.mark.parametrize(
    ("until", "expected"),
    [
        ("generation_end", UntilPolicy()),
        ({"fixed_count": 3}, UntilPolicy("fixed_count", 3)),
        ({"kind": "fixed_count", "count": 3}, UntilPolicy("fixed_count", 3)),
        ({"stop_token": 42}, UntilPolicy("stop_token", None, 42)),
        ({"kind": "stop_token", "stop_token": "</think>"}, UntilPolicy("stop_token", None, "</think>")),
    ],
)
def test_until_has_short_forms(until, expected):
    assert parse_dict(with_point(until=until)).get("mid").until == expected


def test_old_spellings_warn_and_mean_the_new_ones():
    data = with_point(layers=..., tensor_type=..., layer=3, tensor="attn_out")
    with pytest.warns(DeprecationWarning, match="is now called") as caught:
        spec = parse_dict(data)
    assert sorted(str(w.message) for w in caught) == [
        "extraction point 'mid': key 'layer' is now called 'layers'",
        "extraction point 'mid': key 'tensor' is now called 'tensor_type'",
    ]
    assert spec == parse_dict(with_point())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse_dict(with_point(every_n=4)).get("mid").stride == 4


@pytest.mark.parametrize(("old", "new", "value"), [("layer", "layers", 1), ("tensor", "tensor_type", "attn_out"),
                                                   ("every_n", "stride", 2)])  # fmt: skip
def test_both_spellings_at_once_are_refused(old, new, value):
    with pytest.raises(SpecValidationError, match=f"stands beside '{old}'") as caught:
        parse_dict(with_point(**{old: value, new: value}))
    assert (caught.value.point, caught.value.field) == ("mid", new)


@pytest.mark.parametrize(
    ("data", "point", "field", "words"),
    [
        (with_point(strid=2), "mid", "strid", "did you mean 'stride'.*accepted: dtype, execution_mode"),
        (with_point(until={"kind": "fixed_count", "cuont": 1}), "mid", "until.cuont", "did you mean 'count'"),
        (with_point(intervention={"mode": "wait"}), "mid", "intervention.mode", "accepted: reject, block_until"),
        (with_point(intervention={"timeout_ms": 4}), "mid", "intervention.timeout_ms", "mode reject waits"),
        (with_point(tensor_type="x"), "mid", "tensor_type", "accepted: residual_stream, attn_out, mlp_out, kv"),
        (with_point(tensor_type=...), "mid", "tensor_type", "is missing"),
        (with_point(position=...), "mid", "position", "is missing"),
        (with_point(layers=[]), "mid", "layers", "at least one layer"),
        (with_point(layers=[-2]), "mid", "layers", "-2; accepted: whole numbers from 0 on"),
        (with_point(layers="2"), "mid", "layers", "accepted: a layer or a list"),
        (with_point(position="generated[3:1]"), "mid", "position", "empty or negative"),
        (with_point(position=1.5), "mid", "position", "not float"),
        (with_point(position="prompt[0]", stride=2), "mid", "stride", "single token"),
        (with_point(stride="2"), "mid", "stride", "accepted: a whole number"),
        (with_point(token_ids="no"), "mid", "token_ids", "true or false"),
        (with_point(queue_depth=4), "mid", "queue_depth", "only execution_mode async"),
        (with_point(probe_args=[1]), "mid", "probe_args", "accepted: a mapping"),
        (with_point(name=..., layers=None), "number 0", "name", "is missing"),
        (with_point(name=3), "number 0", "name", "accepted: text"),
        ({"version": 3, "extraction_points": []}, None, "version", "3; accepted: 1"),
        ({"extraction_points": [], "points": []}, None, "points", "unknown key.*accepted: extraction_points, version"),
        ({"extraction_points": {}}, None, "extraction_points", "accepted: a list"),
        ({"extraction_points": [7]}, "number 0", "extraction_points", "accepted: a mapping"),
        ({}, None, "extraction_points", "is missing"),
    ],
)  # fmt: skip
def test_errors_name_point_and_field_and_what_is_accepted(data, point, field, words):
    with pytest.raises(SpecValidationError, match=words) as caught:
        parse_dict(data)
    assert (caught.value.point, caught.value.field) == (point, field)


def test_several_findings_are_told_at_once():
    with pytest.raises(SpecValidationError, match=r"'stride'.*also: .*'token_ids'") as caught:
        parse_dict(with_point(stride=0, token_ids=3))
    assert caught.value.field == "stride"


def test_doubled_names_are_refused():
    data = with_point()
    data["extraction_points"] *= 2
    with pytest.raises(SpecValidationError, match="another point has this name"):
        parse_dict(data)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGE_BOMB = "a: &a {x: 1}\n" + "".join(
    f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 9)}]}}\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "more than"),
        (MERGE_BOMB, "more than"),
        ("a: &a [*a]", "contains itself"),
        ("!!python/object/apply:os.system ['true']", "not plain data"),
        ("a: !!python/name:os.system", "not plain data"),
        ("a: !!binary aGk=", "not plain data"),
        ("a: !!set {x}", "not plain data"),
        ("a: 2024-13-45", "not plain data; put it in quotes"),
        ("1: x", "not text"),
        ("on: x", "not text"),
        ("? [a]\n: x", "not text"),
        ("a: 1\na: 2", "stands twice"),
        ("[" * 5000, "nest"),
        ("a:\n" + "".join(" " * n + "- \n" for n in range(1, 200)), "not YAML|nested"),
        ("- " * 500 + "x", "nested deeper"),
        ("a: " + "9" * 5000, "cannot be read"),
        ("a: [", "not YAML"),
        ("a: b\n---\nc: d", "not YAML"),
        ("a: *nope", "not YAML"),
        ("\x00", "not YAML"),
        ("", "a spec is a mapping"),
        ("just text", "a spec is a mapping"),
        ("- 1", "a spec is a mapping"),
    ],
)
def test_hostile_yaml_is_one_kind_of_error_and_quick(text, words):
    start = time.process_time()
    with pytest.raises(SpecValidationError, match=words):
        parse_yaml(text)
    assert time.process_time() - start < 0.5


def test_anchors_and_merge_keys_of_ordinary_size_work():
    text = """
    extraction_points:
      - &base {name: one, layers: [1], tensor_type: attn_out, position: '*'}
      - {<<: *base, name: two}
    """
    assert parse_yaml(text).names == ["one", "two"]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(SpecValidationError, match=r"absent\.yaml"):
        load_spec(tmp_path / "absent.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(SpecValidationError, match=r"bytes\.yaml"):
        load_yaml_file(tmp_path / "bytes.yaml")
    (tmp_path / "braces.yaml").write_text("{{{")
    with pytest.raises(SpecValidationError, match=r"braces\.yaml: this is not YAML"):
        load_yaml_file(tmp_path / "braces.yaml")
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(SpecValidationError, match=r"empty\.yaml: a spec is a mapping .* not nothing"):
        load_yaml_file(tmp_path / "empty.yaml")
    with pytest.raises(SpecValidationError, match="cannot be read: Is a directory"):
        load_yaml_file(tmp_path)
    with pytest.raises(SpecValidationError, match="accepted: a path"):
        load_spec(3)


def test_an_error_in_a_file_names_file_point_and_field(tmp_path):
    path = tmp_path / "points.yaml"
    path.write_text(SPEC.replace("generated[*]", "generated"))
    with pytest.raises(SpecValidationError, match=r"points\.yaml: point 'mid' field 'position'") as caught:
        load_yaml_file(path)
    assert (caught.value.point, caught.value.field) == ("mid", "position")


@pytest.mark.filterwarnings("always")
def test_a_warning_points_at_whoever_called(tmp_path):
    text = SPEC.replace("layers: 3", "layer: 3")
    path = tmp_path / "points.yaml"
    path.write_text(text)
    for call in (lambda: parse_yaml(text), lambda: load_spec(text), lambda: load_yaml_file(path)):
        with pytest.warns(DeprecationWarning, match="'layer' is now called 'layers'") as caught:
            call()
        assert [warning.filename for warning in caught] == [__file__]


def test_a_matrix_in_a_file_is_found_from_that_files_folder(tmp_path):
    def text(path):
        return f"""
            version: 1
            extraction_points:
            - {{name: p, layers: 0, tensor_type: attn_out, position: "*", reduce: {{project: {path}}}}}
        """

    (tmp_path / "points.yaml").write_text(text("matrices/m.npy"))
    (tmp_path / "whole.yaml").write_text(text("/elsewhere/m.npy"))
    [point] = load_spec(tmp_path / "points.yaml")
    assert point.reduce == {"project": str(tmp_path / "matrices" / "m.npy")}
    [point] = load_spec(tmp_path / "whole.yaml")
    assert point.reduce == {"project": "/elsewhere/m.npy"}
    [point] = load_spec(text("matrices/m.npy"))
    assert point.reduce == {"project": "matrices/m.npy"}
