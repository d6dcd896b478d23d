"""Words that nobody can read are refused before any broker is asked."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from undercurrent.cli.main import app
from undercurrent.errors import ProbingError

NOWHERE = ["--bootstrap-servers", "127.0.0.1:1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dlq", "list", "--since", "yesterdayish", *NOWHERE], "'yesterdayish': expected ISO 8601"),
        (["dlq", "show", "x:a:b", *NOWHERE], "'x:a:b': expected TOPIC:PARTITION:OFFSET"),
        (["audit", "--since", "yesterdayish", *NOWHERE], "'yesterdayish': expected ISO 8601"),
        (["topics", "acls", "--joined", "a+b"], "--joined a.b: no point is known; name the points with --points"),
    ],
)
@pytest.mark.timeout(60)
def test_a_wrong_word_is_named_though_no_broker_is_there(words: list[str], said: str) -> None:
    with pytest.raises(ProbingError, match=said):
        CliRunner().invoke(app, words, catch_exceptions=False)
