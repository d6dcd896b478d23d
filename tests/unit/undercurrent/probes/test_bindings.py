"""The binding list."""

from __future__ import annotations

import pytest

from undercurrent.errors import ConfigError, SpecValidationError
from undercurrent.probes import load_bindings, parse_bindings
from undercurrent.spec import ExtractionPoint, ProbeSpec, check_pipeline
from undercurrent.topics import JOIN

TEXT = """
bindings:
  - name: vault-guard
    point: residual
    probe: probes/vault
    mode: abort
    args: {threshold: 0.5}
  - {name: watcher, point: residual, probe: 'mine:Watcher'}
"""


def test_bindings_come_in_order_and_default_to_shadow(tmp_path):
    path = tmp_path / "probes.yaml"
    path.write_text(TEXT, encoding="utf-8")
    guard, watcher = load_bindings(path)
    assert (guard.name, guard.point, guard.probe, guard.mode) == ("vault-guard", "residual", "probes/vault", "abort")
    assert guard.args == {"threshold": 0.5}
    assert (watcher.mode, watcher.args) == ("shadow", {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bindings: [{name: a, point: p, probe: x, mdoe: abort}]", r"field 'bindings\.0\.mdoe': unknown key"),
        ("bindings: [{name: a, point: p, probe: x, mode: kill}]", r"'bindings\.0\.mode'.*'shadow', 'flag' or 'abort'"),
        ("bindings: [{name: a, probe: x}]", r"'bindings\.0'.*names no point; accepted: point, or points"),
        ("bindings: [{name: 'a b', point: p, probe: x}]", r"'bindings\.0\.name'"),
        ("bindings: [{name: a, point: [p, q], probe: x}]", r"'bindings\.0\.point'.*names them in points: \[a, b\]"),
        ("bindings: [{name: a, points: [p], probe: x}]", r"'bindings\.0\.points'.*two points or more, each once"),
        ("bindings: [{name: a, points: [p, q, p], probe: x}]", r"'bindings\.0\.points'.*each once"),
        ("bindings: [{name: a, points: [], probe: x}]", r"'bindings\.0\.points'.*two points or more"),
        ("bindings: [{name: a, points: p+q, probe: x}]", r"'bindings\.0\.points'.*accepted: a list, \[p, q\]"),
        ("bindings: [{name: a, points: [p, 7], probe: x}]", r"'bindings\.0\.points\.1'.*string"),
        ("bindings: [{name: a, points: [p, ''], probe: x}]", r"'bindings\.0\.points\.1'"),
        ("bindings: [{name: a, point: p, points: [p, q], probe: x}]", r"'bindings\.0\.points'.*one of the two"),
        ("bindings: [{name: a, point: p, probe: x}, {name: a, point: q, probe: y}]", "two bindings are called 'a'"),
        ("bindings: []", "'bindings'"),
        ("bindngs: []", "'bindngs': unknown key; accepted: bindings, version"),
        ("probes: &a [*a]", "contains itself"),
        ("", "dictionary"),
        ("{", "not YAML"),
    ],
)
def test_errors_name_file_and_field(text, words):
    with pytest.raises(ConfigError, match=rf"my\.yaml: .*{words}"):
        parse_bindings(text, "my.yaml")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_bindings(tmp_path / "absent.yaml")


def test_a_probe_that_joins_is_called_by_all_of_its_points():
    (joined,) = parse_bindings("bindings: [{name: a, points: [residual, attn], probe: x}]")
    assert (joined.point, joined.points, joined.sources) == ("residual+attn", ("residual", "attn"), joined.points)
    (single,) = parse_bindings("bindings: [{name: a, point: residual, probe: x}]")
    assert (single.points, single.sources) == ((), ("residual",))
    assert joined.model_copy(update={"name": "b"}).point == joined.point


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{name: a, point: q, probe: x}", "binding 'a': field 'point': 'q'; accepted: p, r"),
        ("{name: a, points: [p, q], probe: x}", "binding 'a': field 'points': 'q'; accepted: p, r"),
        ("{name: a, point: p+r, probe: x}", "binding 'a': field 'point': 'p\\+r'; accepted: p, r"),
    ],
)
def test_points_that_are_not_there_are_refused(text, words):
    (binding,) = parse_bindings(f"bindings: [{text}]")
    with pytest.raises(ConfigError, match=words):
        binding.check_points(("p", "r"))


def test_no_point_of_a_pipeline_can_be_taken_for_two_that_are_joined():
    spec = ProbeSpec(1, [ExtractionPoint(f"a{JOIN}b", (0,), "residual_stream", "*", execution_mode="async")])
    with pytest.raises(SpecValidationError, match=r"a\+b"):
        check_pipeline(spec)
