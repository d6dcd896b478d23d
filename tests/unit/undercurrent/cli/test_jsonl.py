from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.unit import messages
from undercurrent.cli.jsonl import MAX_LISTED, dumps, message_dict
from undercurrent.errors import DecodeError
from undercurrent.protocol.messages import (
    ActivationBlock,
    BindingMode,
    GenerationKind,
    Guard,
    GuardState,
    Outcome,
    ProbeVerdict,
    VerdictAction,
    VerdictKind,
)


def as_json(message: Any) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return dict(json.loads(dumps(message_dict(message)), parse_constant=refuse))


def block(positions: int = 2, data: bytes | None = None) -> ActivationBlock:
    values = np.arange(positions * 2 * 3, dtype=np.float32).astype(ml_dtypes.bfloat16)
    return ActivationBlock(
        request_id="r",
        attempt=1,
        point="p",
        engine="e",
        incarnation=1,
        tensor_type="residual_stream",
        dtype="bfloat16",
        width=3,
        layers=(0, 1),
        seq=1,
        step=1,
        captured_at_us=1,
        positions=np.arange(positions, dtype="<i4").tobytes(),
        token_ids=b"",
        data=values.tobytes() if data is None else data,
    )


def verdict(scores: list[float]) -> ProbeVerdict:
    return ProbeVerdict(
        request_id="r",
        attempt=1,
        point="p",
        probe="linear",
        service="s",
        kind=VerdictKind.WATERMARK,
        mode=BindingMode.ABORT,
        action=VerdictAction.CONTINUE,
        score_positions=np.arange(len(scores), dtype="<i4").tobytes(),
        score_layers=(2,),
        scores=np.array(scores, dtype="<f4").tobytes(),
        source_partition=0,
        source_offset=0,
        decided_at_us=1,
    )


def test_a_tensor_is_shown_as_shape_and_norm() -> None:
    shown = as_json(block())
    assert shown["type"] == "ActivationRecord"
    assert shown["positions"] == [0, 1]
    assert shown["token_ids"] == []
    assert shown["data"]["shape"] == [2, 2, 3]
    assert shown["data"]["dtype"] == "bfloat16"
    assert shown["data"]["norm"] == pytest.approx(float(np.linalg.norm(np.arange(12))))


def test_a_long_list_is_shown_as_its_shape_and_ends() -> None:
    shown = as_json(block(positions=MAX_LISTED + 1))["positions"]
    assert shown["shape"] == [MAX_LISTED + 1]
    assert (shown["first"], shown["last"]) == (0, MAX_LISTED)


def test_scores_that_are_no_numbers_keep_the_line_strict_json() -> None:
    shown = as_json(verdict([0.5, float("nan"), float("inf")]))
    assert shown["scores"] == [0.5, "nan", "inf"]
    assert shown["score_positions"] == [0, 1, 2]


def test_an_array_that_does_not_fit_its_shape_is_an_error() -> None:
    with pytest.raises(DecodeError, match="needs 24"):
        message_dict(block(data=b"\0" * 22))


def test_nested_records_enums_and_hashes_are_plain() -> None:
    guards = (Guard(probe="g", state=GuardState.ABSENT),)
    event = messages.event(attempt=3, kind=GenerationKind.FINAL, outcome=Outcome.COMPLETED, guards=guards)
    shown = as_json(event)
    assert shown["outcome"] == "completed"
    assert shown["guards"] == [{"probe": "g", "clear_up_to": -1, "state": "absent"}]
    accepted = messages.accepted(content_hash=b"\x01\xff")
    assert as_json(accepted)["content_hash"] == "01ff"
