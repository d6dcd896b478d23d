"""The story of a request as the topics tell it."""

from typing import Any

import numpy as np
import pytest

from tests.unit import messages
from undercurrent.cli.demo.story import Story, Teller
from undercurrent.protocol.messages import (
    AbortCause,
    Accepted,
    AckOutcome,
    BindingMode,
    CommandSource,
    ControlAck,
    GenerationEvent,
    GenerationKind,
    Guard,
    GuardState,
    Outcome,
    ProbeVerdict,
    VerdictAction,
    VerdictKind,
)


@pytest.fixture
def story() -> Story:
    return Story([Teller("a", "vault", "Who?"), Teller("b", "other", "What?")], probe="vault")


def accepted(request_id: str = "a", attempt: int = 1) -> Accepted:
    return messages.accepted(request_id, attempt)


def event(request_id: str = "a", attempt: int = 1, **fields: Any) -> GenerationEvent:
    return messages.event(request_id, attempt, **fields)


def tokens(text: str, first: int = 0, **fields: Any) -> GenerationEvent:
    ids = tuple(range(len(text)))
    return event(kind=GenerationKind.TOKENS, text=text, token_ids=ids, first_token_index=first, **fields)


def verdict(kind: VerdictKind, probe: str = "vault", **fields: Any) -> ProbeVerdict:
    return ProbeVerdict(
        request_id="a",
        attempt=1,
        point="residual",
        probe=probe,
        service="probes",
        kind=kind,
        mode=BindingMode.ABORT,
        action=VerdictAction.CONTINUE,
        source_partition=0,
        source_offset=0,
        decided_at_us=1,
        **fields,
    )


def test_tokens_add_up_and_the_final_closes(story: Story) -> None:
    cause = AbortCause(command_id="c", source=CommandSource.PROBE, score=4.5, token_pos=9, reason="vault 4.5 >= 2")
    final = event(
        kind=GenerationKind.FINAL,
        outcome=Outcome.ABORTED,
        generated_tokens=5,
        prompt_tokens=7,
        abort=cause,
        guards=(Guard(probe="vault", state=GuardState.BEHIND),),
    )
    for offset, message in enumerate([accepted(), tokens("Fir"), tokens("st", 3), final, tokens("late", 5)]):
        story.take(message, offset)
    teller = story["a"]
    assert (teller.text, teller.tokens, teller.outcome) == ("First", 5, Outcome.ABORTED)
    assert (teller.score_at_abort, teller.abort_token_pos, teller.reason) == (4.5, 9, "vault 4.5 >= 2")
    assert teller.guards == {"vault": "behind"}
    assert not story.finished


def test_a_higher_attempt_voids_what_a_lower_one_said(story: Story) -> None:
    for offset, message in enumerate([accepted(), tokens("First"), accepted(attempt=3), tokens("zombie", 5)]):
        story.take(message, offset)
    assert (story["a"].text, story["a"].tokens) == ("", 0)
    story.take(tokens("Again", attempt=3), 4)
    assert story["a"].text == "Again"


def test_scores_of_watermarks_are_kept_by_position(story: Story) -> None:
    story.take(accepted(), 0)
    positions = np.array([4, 5], dtype="<i4").tobytes()
    scores = np.array([[1.0, 3.0], [2.0, -1.0]], dtype="<f4").tobytes()
    story.take(
        verdict(VerdictKind.WATERMARK, score_positions=positions, score_layers=(1, 2), scores=scores, clear_up_to=5), 0
    )
    assert story["a"].scores == {4: 3.0, 5: 2.0}
    assert story["a"].latest_score == 2.0


def test_another_probes_verdicts_are_not_this_ones(story: Story) -> None:
    assert story.take(verdict(VerdictKind.RESULT, probe="other"), 0) is None
    assert not story["a"].judged


def test_the_first_applied_ack_gives_the_latency(story: Story) -> None:
    ack = {"command_id": "c", "request_id": "a", "engine": "engine", "incarnation": 1, "received_at_us": 1}
    story.take(ControlAck(**ack, outcome=AckOutcome.UNKNOWN), 0)
    assert story["a"].latency_ms is None
    story.take(
        ControlAck(**ack, outcome=AckOutcome.APPLIED, captured_at_us=1000, applied_at_us=43_500, token_index=9), 1
    )
    story.take(ControlAck(**ack, outcome=AckOutcome.APPLIED, captured_at_us=1000, applied_at_us=99_000), 2)
    assert (story["a"].latency_ms, story["a"].applied_at_token) == (42.5, 9)


def test_a_story_ends_when_all_are_final_and_judged(story: Story) -> None:
    for offset, request_id in enumerate(("a", "b")):
        story.take(accepted(request_id), 2 * offset)
        outcome = Outcome.COMPLETED if request_id == "a" else Outcome.FAILED
        story.take(event(request_id, kind=GenerationKind.FINAL, outcome=outcome), 2 * offset + 1)
    assert story.finished
    assert not story.judged
    story.take(verdict(VerdictKind.RESULT), 0)
    assert story.judged


def test_an_error_is_the_probes_last_word(story: Story) -> None:
    story.take(accepted(), 0)
    story.take(verdict(VerdictKind.ERROR, error="another model"), 0)
    assert (story["a"].judged, story["a"].probe_error) == (True, "another model")


def test_requests_of_others_are_no_part_of_it(story: Story) -> None:
    assert story.take(accepted("somebody"), 0) is None
    assert [teller.request_id for teller in story] == ["a", "b"]
