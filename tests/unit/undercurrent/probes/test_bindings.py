"""The binding list."""

from __future__ import annotations

import pytest

from undercurrent.errors import ConfigError
from undercurrent.probes import load_bindings, parse_bindings

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
        ("bindings: [{name: a, probe: x}]", r"'bindings\.0\.point': is missing"),
        ("bindings: [{name: 'a b', point: p, probe: x}]", r"'bindings\.0\.name'"),
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
