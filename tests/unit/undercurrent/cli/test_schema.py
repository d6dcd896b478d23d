from __future__ import annotations

import json

import pytest
import yaml

from undercurrent.cli.main import PROG_NAME, app
from undercurrent.cli.running import run
from undercurrent.spec import json_schema


def test_the_schema_is_printed_as_json_or_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, PROG_NAME, ["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()
    assert run(app, PROG_NAME, ["schema", "--format", "yaml"]) == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text) == json_schema()
    assert "&id" not in text


def test_another_format_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, PROG_NAME, ["schema", "--format", "xml"]) == 2
    assert "xml" in capsys.readouterr().err
