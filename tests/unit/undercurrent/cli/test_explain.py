"""How `undercurrent explain` writes what it has found."""

from __future__ import annotations

import pytest

from tests.unit.undercurrent.protocol.record_world import RecordWorld
from undercurrent.cli.explain import _write
from undercurrent.insight.explaining import Explained
from undercurrent.insight.timeline import TimeLine
from undercurrent.protocol.audit_findings import Finding, FindingKind

NO_FINAL = Finding("r", FindingKind.NO_FINAL, "no engine worker has accepted it")
DOUBLE = Finding("r", FindingKind.DOUBLE_FINAL, "two of them")


@pytest.mark.parametrize(
    ("findings", "title"),
    [
        ([NO_FINAL], "No final yet, as far as was read:"),
        ([NO_FINAL, DOUBLE], "Promises that are not kept, as far as was read:"),
    ],
)
def test_a_request_that_only_waits_is_not_said_to_break_a_promise(
    findings: list[Finding], title: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world, line = RecordWorld(), TimeLine("r", "t")
    world.completed("r")
    for heard in world.in_order():
        line.take(heard)
    _write(Explained(line, findings))
    out = capsys.readouterr().out
    assert f"\n{title}\n" in out
    assert "no engine worker has accepted it" in out
