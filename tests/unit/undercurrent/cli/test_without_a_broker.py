"""What commands say that have no broker to ask."""

from __future__ import annotations

import json

import pytest

from undercurrent.cli.main import PROG_NAME, app
from undercurrent.cli.running import run
from undercurrent.errors import UnreachableError


def test_a_status_for_a_script_says_down_as_json_too(monkeypatch, capsys):
    def unreachable(*_):
        raise UnreachableError("no Kafka broker answered at here:1")

    monkeypatch.setattr("undercurrent.cli.pipelines.pipeline_of", unreachable)
    assert run(app, PROG_NAME, ["status", "--json"]) == 2
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["level"], told["troubles"][0]["text"]) == ("down", "no Kafka broker answered at here:1")
    assert "down: no Kafka broker answered" in err


@pytest.mark.parametrize(("options", "said"), [([], "the cluster was not looked at"), (["--offline"], "")])
def test_a_plan_that_asked_no_broker_says_so(monkeypatch, capsys, options, said):
    monkeypatch.delenv("UNDERCURRENT_BOOTSTRAP_SERVERS", raising=False)
    assert run(app, PROG_NAME, ["topics", "plan", *options]) == 0
    out, err = capsys.readouterr()
    assert "undercurrent.prompts" in out
    assert said in err
    assert bool(err) == bool(said)
