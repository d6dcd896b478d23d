"""What passes between a probe and whoever runs it."""

from __future__ import annotations

import dataclasses
import inspect
import time

import pytest

from undercurrent.core import ProbeAction, ProbeResult, ProbeSignal, RequestContext
from undercurrent.errors import ProbeError


def test_a_signal_has_the_fields_of_the_contract_and_says_when():
    before = time.time()
    signal = ProbeSignal("flag", {"why": "x"}, 0.5)
    assert (signal.action, signal.metadata, signal.confidence) == (ProbeAction.FLAG, {"why": "x"}, 0.5)
    assert before <= signal.timestamp <= time.time()
    assert (ProbeSignal().action, ProbeSignal().metadata, ProbeSignal().confidence) == ("continue", {}, None)
    assert ProbeSignal().metadata is not ProbeSignal().metadata
    with pytest.raises(dataclasses.FrozenInstanceError):
        signal.action = ProbeAction.ABORT


@pytest.mark.parametrize("action", ["ABORT", "stop", "", None, 3, []])
def test_an_action_is_one_of_three(action):
    with pytest.raises(ProbeError, match="accepted: continue, flag, abort"):
        ProbeSignal(action)


def test_a_result_keeps_its_own_history():
    first, second = ProbeResult("r", "p", "clear"), ProbeResult("r", "p", "clear")
    first.signal_history.append(ProbeSignal())
    assert (second.signal_history, second.metadata) == ([], {})
    assert list(inspect.signature(ProbeResult).parameters) == [
        "request_id", "extraction_point_name", "verdict", "signal_history", "metadata",
    ]  # fmt: skip


def test_a_context_is_frozen_and_takes_its_three_fields():
    ctx = RequestContext("r", {"prompt": "x"}, {"name": "p"})
    assert (ctx.request_id, ctx.prompt_metadata, ctx.extraction_point_config) == ("r", {"prompt": "x"}, {"name": "p"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        ctx.request_id = "s"
