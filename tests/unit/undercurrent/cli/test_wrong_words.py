"""Words that nobody can read are refused before any broker is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from undercurrent.cli.main import app
from undercurrent.cli.running import run
from undercurrent.errors import ConfigError, ProbingError

NOWHERE = ["--bootstrap-servers", "127.0.0.1:1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dlq", "list", "--since", "yesterdayish", *NOWHERE], "'yesterdayish': expected ISO 8601"),
        (["dlq", "show", "x:a:b", *NOWHERE], "'x:a:b': expected TOPIC:PARTITION:OFFSET"),
        (["audit", "--since", "yesterdayish", *NOWHERE], "'yesterdayish': expected ISO 8601"),
        (["explain", "r", "--since", "yesterdayish", *NOWHERE], "--since 'yesterdayish': expected ISO 8601"),
        (["topics", "plan", "--offline", "--prefix", ""], "--prefix '': use 1 to 180 of the characters"),
        (["topics", "plan", "--offline", "--prefix", "a b"], "--prefix 'a b': use 1 to 180 of the characters"),
        (["probe", "train", "topic:", "--out", "o", "--label", "x", *NOWHERE], "topic: names no extraction point"),
        (["dataset", "export", "/dev/null/d", *NOWHERE], "OUT /dev/null/d: /dev/null is no folder"),
        (["dataset", "erase", ".", "--request-id", ""], "--request-id: is empty"),
        (["labels", "add", "r", "harmful", "nein", *NOWHERE], "'value': Input should be 'unknown', 'positive'"),
        (["topics", "acls", "--joined", "a+b"], "--joined a.b: no point is known; name the points with --points"),
    ],
)
@pytest.mark.timeout(60)
def test_a_wrong_word_is_named_though_no_broker_is_there(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_the_configuration_s_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("topics: {prompt_partitions: zero}\n")
    with pytest.raises(ConfigError, match=rf"^{path}: topics\.prompt_partitions: "):
        CliRunner().invoke(app, ["topics", "plan", "--offline", "--config", str(path)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--threshold", "nan"], "--threshold: nan: Input should be a finite number"),
        (["--threshold", "0", "--tensor-type", "zz"], "--tensor-type: 'zz': Input should be 'residual_stream'"),
        (["--threshold", "0", "--aggregation", "zz"], "--aggregation: {'kind': 'zz'}: Input tag 'zz'"),
    ],
)
def test_a_setting_of_an_imported_probe_is_called_as_its_option(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "v.json").write_text("[1, 2]")
    command = ["probe", "import", str(tmp_path / "v.json"), "--out", str(tmp_path / "p"), "--layer", "1", *words]
    with pytest.raises(ConfigError, match=f"^{said}"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    assert not (tmp_path / "p").exists()


def test_a_damaged_file_of_numpy_gets_no_advice_to_run_it(tmp_path: Path) -> None:
    (tmp_path / "v.npy").write_bytes(b"x")
    command = ["probe", "import", str(tmp_path / "v.npy"), "--out", str(tmp_path / "p"), "--layer", "1"]
    with pytest.raises(ProbingError, match=r"cannot be read as \.npy: it is no file of NumPy, or holds pickled"):
        CliRunner().invoke(app, [*command, "--threshold", "0"], catch_exceptions=False)


def test_a_folder_without_a_probe_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    told = rf"^{tmp_path}/p/probe\.json: there is no such file; a probe's folder has one"
    with pytest.raises(ProbingError, match=told):
        CliRunner().invoke(app, ["probe", "drift", str(tmp_path / "p"), str(tmp_path)], catch_exceptions=False)


def test_what_a_parser_puts_in_front_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, "undercurrent", ["tail", "t", "--from", "z"]) == 2
    assert "Invalid value for '--from': 'z' is not one of 'earliest', 'latest'." in capsys.readouterr().err
