"""One request's time line: what is told once, what is told by the run, and what counts for nobody."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.undercurrent.protocol.record_world import POINT, RecordWorld, guarded
from undercurrent.insight.curves import Curve
from undercurrent.insight.timeline import TimeLine, iterate
from undercurrent.protocol.messages import VerdictAction, VerdictKind


def told(world, request_id):
    line = TimeLine(request_id, "t")
    for heard in world.in_order():
        line.take(heard)
    return line


def words(line):
    return [entry.what for entry in line.entries]


@pytest.fixture
def world():
    return RecordWorld()


def test_a_completed_request_is_told_from_its_prompt_to_its_final(world):
    world.completed("other")
    world.completed("r", guards=guarded())
    line = told(world, "r")
    assert words(line) == ["prompt", "accepted", "stream", "activations", "stream end", "verdict", "tokens", "final"]
    assert line.outcome == "completed"
    by_word = {entry.what: entry for entry in line.entries}
    assert by_word["activations"].text == f"{POINT}: 3 records, positions 0 to 2, layers 0"
    assert by_word["tokens"].text == "2 tokens in 2 events, attempt 1"
    assert "guard guard complete" in by_word["final"].text
    assert all(entry["topic"].startswith("t.") for entry in iterate(line.entries))


def test_what_counts_for_nobody_is_void_and_a_stream_without_its_own_end_says_why_it_closed(world):
    world.handed_over("r", duplicate=True)
    line = told(world, "r")
    assert [entry.what for entry in line.entries if entry.void] == ["final"]
    assert {"released", "duplicate", "stream closed"} <= set(words(line))
    (closed,) = (entry for entry in line.entries if entry.what == "stream closed")
    assert closed.facts == {"point": POINT, "attempt": 1, "index": 0, "reason": "superseded"}


def test_a_gap_parts_the_activations(world):
    stream = world.open_stream("r", tokens=2)
    stream.skip(3)
    world.activation("r", stream.activations([5], [[0.0] * 4]))
    line = told(world, "r")
    assert words(line) == ["stream", "activations", "gap", "activations"]
    assert "3 messages before seq 6 never came" in line.entries[2].text
    assert (line.outcome, len(told(world, "nobody"))) == ("unknown", 0)


def test_commands_answers_and_dead_letters_are_told(world):
    world.aborted("a")
    assert {"command", "ack"} <= set(words(told(world, "a")))
    offset = world.add("prompts", world.home("p"), "p", None)
    world.letter("prompts", world.home("p"), offset)
    log = world.logs["t.prompts.dlq", world.home("p")]
    log[0] = log[0]._replace(key="p", said={"cause": "undecodable", "detail": "no PromptRequest"})
    line = told(world, "p")
    assert words(line) == ["unreadable", "dead letter"]
    assert line.entries[1].text.endswith("undecodable: no PromptRequest")


def test_scores_become_a_curve_and_signals_lines(world):
    world.completed("r")
    scores = np.array([[0.0, 1.0], [4.0, np.nan], [2.0, -1.0]], "<f4")
    world.verdict(
        "r",
        VerdictKind.WATERMARK,
        probe="other",
        score_positions=np.arange(3, dtype="<i4").tobytes(),
        score_layers=(0, 1),
        scores=scores.tobytes(),
    )
    world.verdict("r", VerdictKind.SIGNAL, probe="other", action=VerdictAction.FLAG, token_pos=1, score=4.0)
    line = told(world, "r")
    curve = line.curves[1, 0, POINT, "other"]
    assert curve.points == [(0, 1.0), (1, 4.0), (2, 2.0)]
    assert curve.line(3) == "▁█▃"
    (signal,) = (entry for entry in line.entries if entry.what == "signal")
    assert signal.text == "other says flag at position 1, score 4 (shadow)"


def test_a_long_curve_keeps_its_peak_and_a_flat_one_is_flat():
    curve = Curve()
    curve._scores = {position: float(position == 777) for position in range(1000)}
    line = curve.line(40)
    assert (len(line), line.count("█"), line.count("▁")) == (40, 1, 39)
    curve._scores = dict.fromkeys(range(5), 2.0)
    assert curve.line(40) == "▁" * 5
    assert Curve().line(40) == ""


def test_the_prompt_of_an_erased_request_is_not_shown(world):
    world.completed("r")
    line = TimeLine("r", "t", erased=True)
    for heard in world.in_order():
        line.take(heard)
    assert [entry.text for entry in line.entries if entry.what == "prompt"] == ["erased"]
