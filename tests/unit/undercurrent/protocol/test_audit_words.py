"""The audit of what probes say, and of commands and their answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.undercurrent.protocol.record_world import POINT, RecordWorld, cause, guarded
from undercurrent.protocol.audit import FindingKind
from undercurrent.protocol.messages import (
    AckOutcome,
    ControlAck,
    ControlCommand,
    Outcome,
    VerdictAction,
    VerdictKind,
)


@pytest.fixture
def world():
    return RecordWorld()


# --- nothing is wrong


def test_a_stream_without_a_verdict_is_found_unless_no_probe_reads_its_point(world):
    world.completed("r")
    world.change("verdicts", lambda m: True, lambda m: None)
    assert world.kinds() == ["no_verdict"]
    assert world.kinds(unjudged=[POINT]) == []


def test_a_probe_that_has_begun_has_to_end(world):
    world.completed("r")
    world.verdict("r", VerdictKind.SIGNAL, probe="other", action=VerdictAction.FLAG)
    (found,) = world.findings()
    assert (found.kind, found.probe) == (FindingKind.NO_VERDICT, "other")


@pytest.mark.parametrize("kind", [VerdictKind.RESULT, VerdictKind.ERROR, VerdictKind.SIGNAL, VerdictKind.WATERMARK])
def test_a_word_after_the_last_one_is_found(world, kind):
    world.completed("r")
    world.verdict("r", kind, score_positions=b"\0\0\0\0")
    (found,) = world.findings()
    assert (found.kind, found.attempt, found.point, found.probe) == (FindingKind.DOUBLE_VERDICT, 1, POINT, "guard")


def test_a_signal_or_scores_twice_are_found(world):
    offset = world.prompt("r")
    world.accept("r", offset)
    stream = world.open_stream("r")
    for source, positions in ((2, b"\1\0\0\0"), (2, b"\2\0\0\0"), (3, b"\3\0\0\0"), (3, b"\3\0\0\0"), (2, b"\2\0\0\0")):
        world.verdict("r", VerdictKind.WATERMARK, source_offset=source, score_positions=positions)
    world.verdict("r", VerdictKind.SIGNAL, action=VerdictAction.FLAG)
    world.verdict("r", VerdictKind.SIGNAL, action=VerdictAction.ABORT)
    world.verdict("r", VerdictKind.SIGNAL, action=VerdictAction.FLAG)
    world.activation("r", stream.ended())
    world.verdict("r")
    world.tokens("r", offset)
    world.final("r", offset)
    assert world.kinds() == ["double_verdict"] * 3


def test_a_verdict_on_a_stream_that_is_not_there_is_found(world):
    world.completed("r")
    world.verdict("r", attempt=7)
    assert world.kinds() == ["verdict_unfounded"]


def test_a_guard_that_is_called_complete_and_has_no_result_is_found(world):
    world.completed("r", guards=guarded("absent"))
    (found,) = world.findings()
    assert (found.kind, found.probe) == (FindingKind.GUARD_UNFOUNDED, "absent")


@pytest.mark.parametrize("outcome", [AckOutcome.TOO_LATE, AckOutcome.ALREADY, AckOutcome.STALE, AckOutcome.BRAKED])
def test_an_aborted_request_whose_command_was_answered_otherwise_is_found(world, outcome):
    world.aborted("r", outcome=outcome)
    assert world.kinds() == ["ack_contradicted"]


@pytest.mark.parametrize("outcome", [AckOutcome.APPLIED, AckOutcome.ALREADY])
def test_a_promised_abort_of_a_completed_request_is_found(world, outcome):
    world.completed("r")
    world.command("r")
    world.ack("r", outcome)
    assert world.kinds() == ["ack_contradicted"]


def test_the_first_answer_counts_and_a_command_for_one_child_is_about_that_child(world):
    offset = world.prompt("r")
    world.command("r", index=1)
    world.accept("r", offset, n=2, points=())
    for index in range(2):
        world.tokens("r", offset, index=index)
    world.final("r", offset, index=0)
    world.final("r", offset, index=1, outcome=Outcome.ABORTED, abort=cause("c"))
    world.ack("r", AckOutcome.APPLIED)
    world.ack("r", AckOutcome.TOO_LATE)
    assert world.kinds() == []
    world.change("control", lambda m: True, lambda m: replace(m, index=0))
    assert world.kinds() == ["ack_contradicted"]


def test_a_command_without_an_answer_and_an_abort_without_a_command_are_found(world):
    world.aborted("unanswered", "a")
    world.aborted("unfounded", "b")
    world.change("control.acks", lambda m: isinstance(m, ControlAck) and m.command_id == "a", lambda m: None)
    world.change("control", lambda m: isinstance(m, ControlCommand) and m.command_id == "b", lambda m: None)
    assert world.kinds() == ["command_unanswered", "abort_unfounded"]
