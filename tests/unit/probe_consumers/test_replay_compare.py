from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from probe_consumers.replay import Span
from probe_consumers.replay_compare import LiveVerdicts
from probe_consumers.replay_order import Origins, Part, Plan, read_plan
from undercurrent.cli.main import PROG_NAME, app
from undercurrent.cli.running import run
from undercurrent.codec import Codec
from undercurrent.errors import ReplayError
from undercurrent.kafka.records import Record
from undercurrent.protocol.messages import BindingMode, ProbeVerdict, VerdictAction, VerdictKind

CODEC = Codec()


def verdict(request_id: str) -> ProbeVerdict:
    return ProbeVerdict(
        request_id=request_id,
        attempt=1,
        point="p",
        probe="guard",
        service="g",
        kind=VerdictKind.RESULT,
        mode=BindingMode.SHADOW,
        action=VerdictAction.CONTINUE,
        source_partition=0,
        source_offset=0,
        decided_at_us=0,
    )


def test_a_service_to_compare_with_is_refused_where_nothing_live_is_compared(tmp_path: Path, capsys: Any) -> None:
    arguments = ["replay", str(tmp_path), "--out", str(tmp_path / "o"), "--service", "g", "--point", "p"]
    assert run(app, PROG_NAME, arguments) == 2
    assert "--service and --compare none: it says whose live verdicts are compared" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_live_verdict_that_cannot_be_read_is_named_and_the_others_are_compared(tmp_path: Path) -> None:
    live = LiveVerdicts(tmp_path / "live", 1, CODEC)
    values = [CODEC.encode(verdict("a")), b"", *[b"?"] * 6, CODEC.encode(verdict("b"))]
    live.write((Record("v", 2, at, b"k", value, 0, ()) for at, value in enumerate(values)), "p", frozenset({"guard"}))
    assert [said.request_id for said in live.read(0, "g")] == ["a", "b"]
    assert live.services == {"g": 2}
    told = live.passed_over.told()
    assert told.startswith("7 records cannot be read and count for nothing: v[2] offset 1: no bytes")
    assert told.endswith("; ...")


def test_a_plan_that_was_changed_by_hand_is_refused(tmp_path: Path) -> None:
    parts = (Part(number=0, span=Span(3, 9)),)
    plan = Plan(
        asked={"point": "p", "from_offset": {"0": 3}},
        probes=[],
        fingerprint="f",
        source={"topic": "t"},
        origins=Origins(config=tmp_path / "host.yaml"),
        parts=parts,
        requests=("r-\u00fc",),
    )
    plan.write(tmp_path)
    assert read_plan(tmp_path) == plan
    file = tmp_path / "plan.json"
    told = json.loads(file.read_text())
    told["parts"][0]["span"]["end"] = 8
    file.write_text(json.dumps(told))
    with pytest.raises(ReplayError, match=r"plan\.json: was changed after the replay began.*start again"):
        read_plan(tmp_path)
