"""`undercurrent plan`: figures with their formulas, and what is wrong by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from undercurrent.cli.main import PROG_NAME, app
from undercurrent.cli.running import run
from undercurrent.probes import LinearProbe
from undercurrent.testing import demo_model

VAULT = demo_model.folder()


def plan(*more: str, model: Path = VAULT / "model", spec: Path = VAULT / "points.yaml") -> int:
    given = ["--model", str(model), "--spec", str(spec), "--tokens-per-s", "1000", "--requests-per-s", "5"]
    return run(app, PROG_NAME, ["plan", *given, "--prompt-tokens", "500", *more])


def test_each_figure_has_its_formula(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--retention", "1h", "--replication", "2", "--disk", "30 GiB", "--probes", str(VAULT / "probes.yaml")]
    assert plan(*more, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    topic = found["activations.residual"]
    assert topic["rows_per_s"]["value"] == 5 * (500 + 199)
    assert "5 x (500 + 199)" in topic["rows_per_s"]["formula"]
    rate = topic["bytes_per_s"]["value"]
    assert topic["disk_bytes"]["value"] == pytest.approx(rate * (3600 + 900 + 300) * 2)
    assert found["network"]["replicated_bytes_per_s"]["value"] == pytest.approx(rate)
    assert found["network"]["consumed_bytes_per_s"]["value"] == pytest.approx(rate)
    (guard,) = (figures for about, figures in found.items() if about.startswith("probe "))
    assert 0 < guard["cores"]["value"] < 1
    assert "from the table" in guard["cores"]["formula"]
    fits = found["activations"]["longest_retention_s"]["value"]
    assert rate * 2 * (1.25 * fits + 300) == pytest.approx(30 << 30)
    assert found["brokers away"]["survived_s"]["value"] == pytest.approx((352 << 20) / (5 * 699 * (256 + 8)))
    assert plan(*more) == 0
    text = capsys.readouterr().out
    assert "LlamaForCausalLM: 4 layers of 128 in bfloat16" in text
    assert all(figure["formula"] in text for figures in found.values() for figure in figures.values())


def test_buffers_are_those_of_the_engines_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "engine.yaml").write_text("publisher: {ring_mib: 128, max_cycle_mib: 64, buffer_mib: 512}\n")
    values = []
    for more in ([], ["--config", str(tmp_path / "engine.yaml")], ["--engines", "2"]):
        assert plan("--json", *more) == 0
        values.append(json.loads(capsys.readouterr().out)["brokers away"]["survived_s"]["value"])
    assert values[1] == values[2] == pytest.approx(2 * values[0])


def test_a_probe_is_timed_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--probes", str(VAULT / "probes.yaml"), "--measure", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    (guard,) = (figures for about, figures in found.items() if about.startswith("probe "))
    assert "measured here, just now" in guard["cores"]["formula"]
    assert 0 < guard["cores"]["value"] < 10


POINTS = """
version: 1
extraction_points:
  - {name: residual, layers: [1], tensor_type: residual_stream, position: "*", execution_mode: async}
  - {name: attn, layers: [1, 2], tensor_type: attn_out, position: "generated[*]", execution_mode: async}
"""
JOINED = "bindings: [{name: both, points: [residual, attn], probe: ./both}]"


@pytest.mark.parametrize("measured", [False, True])
def test_a_probe_that_joins_points_costs_both_topics_and_the_joining(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measured: bool
) -> None:
    spec, probes = tmp_path / "points.yaml", tmp_path / "probes.yaml"
    spec.write_text(POINTS)
    probes.write_text(JOINED)
    weight = np.ones(3 * 128, np.float32)
    probe = LinearProbe.from_arrays(weight, 0.0, layer=1, tensor_type="residual_stream", threshold=1.0)
    probe.save(tmp_path / "both")
    assert plan("--probes", str(probes), "--json", *(["--measure"] if measured else []), spec=spec) == 0
    found = json.loads(capsys.readouterr().out)
    topics = [found[f"activations.{point}"] for point in ("residual", "attn")]
    read = sum(topic["bytes_per_s"]["value"] for topic in topics)
    assert found["network"]["consumed_bytes_per_s"]["value"] == pytest.approx(read)
    cores = found["probe both"]["cores"]
    terms = re.findall(r"([a-z/ ]+) x ([\d.]+) us", cores["formula"])
    assert [name.strip() for name, _ in terms] == ["records/s", "rows/s", "records/s of all its points", "their rows/s"]
    record_s, row_s, join_record_s, join_row_s = (float(cost) * 1e-6 for _, cost in terms)
    rows = [topic["rows_per_s"]["value"] for topic in topics]
    records = [topic["records_per_s"]["value"] for topic in topics]
    assert rows[0] > rows[1]
    # Only the tokens that both have are shown to the probe; what either has is read.
    whole = max(records) * record_s + rows[1] * row_s + sum(records) * join_record_s + sum(rows) * join_row_s
    assert cores["value"] == pytest.approx(whole, rel=0.02)
    assert join_record_s > 0


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--retention", "1 fortnight"], "--retention: '1 fortnight'; accepted: a time above 0"),
        (["--disk", "30"], "--disk: '30'; accepted: a size above 0"),
        (["--tokens-per-s", "0"], "--tokens-per-s: 0; accepted: a number above 0"),
        (["--compression", "gzip"], "--compression: 'gzip'; accepted: none, lz4, zstd"),
        (["--dtype", "fp8"], "'fp8'; accepted: float32, float16, bfloat16"),
        (["--measure"], "--measure: there is nothing to time"),
    ],
)
def test_options_that_are_wrong_are_named(more: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*more) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "there is no such file or folder; accepted: a model's folder, or its config.json"),
        ("{", "is no JSON"),
        ("[]", "holds a list; accepted: an object"),
        ('{"hidden_size": 64}', "has none of the fields num_hidden_layers, n_layer"),
        ('{"num_hidden_layers": 2, "hidden_size": "64"}', "field 'hidden_size': '64'; accepted: a whole number from 1"),
        ('{"num_hidden_layers": 2, "hidden_size": 64, "dtype": "int4"}', "field 'dtype': 'int4'; accepted: float32"),
        ('{"num_hidden_layers": 1, "hidden_size": 64}', "point 'residual': the model has layers 0 to 0"),
    ],
)
def test_models_that_are_wrong_are_named(
    config: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    if config is not None:
        path.write_text(config)
    assert plan(model=path) == 2
    err = capsys.readouterr().err
    assert says in err
    assert str(path) in err


def test_other_families_name_their_fields_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12}')
    assert plan(model=tmp_path) == 0
    assert "gpt2: 12 layers of 768 in float32" in capsys.readouterr().out
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Gemma3"], "text_config": {"num_hidden_layers": 5, "hidden_size": 32, "dtype": "bfloat16"}}'
    )
    assert plan(model=tmp_path) == 0
    assert "Gemma3: 5 layers of 32 in bfloat16" in capsys.readouterr().out


def test_a_binding_without_a_point_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "points.yaml"
    spec.write_text((VAULT / "points.yaml").read_text().replace("name: residual", "name: other"))
    assert plan("--probes", str(VAULT / "probes.yaml"), spec=spec) == 2
    assert "field 'point': 'residual'; accepted: other" in capsys.readouterr().err
