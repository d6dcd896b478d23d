"""The command line: what is wrong is one line and an exit code, before a model is loaded."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from examples.openai_server.__main__ import PROG_NAME, app
from undercurrent.cli.running import EXIT_USAGE, run

POINTS = """\
version: 1
extraction_points:
  - {name: guard, layers: [1], tensor_type: residual_stream, position: "*", probe_type: guard}
"""


@pytest.fixture
def points(tmp_path: Path) -> Path:
    path = tmp_path / "points.yaml"
    path.write_text(POINTS)
    return path


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = run(app, PROG_NAME, ["--model", "nowhere", *arguments], group=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert code != 0
    assert line.startswith(f"{PROG_NAME}: ")
    return line


@pytest.fixture(autouse=True)
def _logging_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.openai_server.__main__.setup_logging", lambda *_, **__: None)


def test_wrong_options_are_said_by_name(capsys: pytest.CaptureFixture[str], points: Path) -> None:
    assert "--engine-args" in complaint(capsys, "--engine-args", "{")
    assert "JSON object" in complaint(capsys, "--engine-args", "[1]")
    assert "NAME=FOLDER" in complaint(capsys, "--probe", "guard")
    assert "--api-key is empty" in complaint(capsys, "--api-key", "")
    assert "guard" in complaint(capsys, "--points", str(points))
    assert "no point has this probe_type" in complaint(capsys, "--probe", "guard=x:Y")


def test_a_wrong_spec_names_point_and_field(capsys: pytest.CaptureFixture[str], points: Path) -> None:
    points.write_text(POINTS.replace("residual_stream", "residual"))
    assert "tensor_type" in complaint(capsys, "--points", str(points))


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen at 127.0.0.1:{port}" in complaint(capsys, "--port", str(port))
    assert run(app, PROG_NAME, ["--model", "x", "--port", "99999"], group=False) == EXIT_USAGE
