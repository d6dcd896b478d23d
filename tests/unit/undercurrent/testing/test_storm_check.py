"""The checker of storms: silent on a record that is right, and loud on each way in which one can be wrong."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from tests.unit import messages
from undercurrent.protocol.messages import (
    AckOutcome,
    ControlAck,
    GenerationEvent,
    GenerationKind,
    Message,
    Outcome,
    Released,
    ReleaseReason,
)
from undercurrent.testing.fake_engine import generated_text
from undercurrent.testing.storm_check import Kind, Sent, problems, stories

TOKENS = 6
TEXT = generated_text("r", TOKENS)


def claim(attempt: int) -> Message:
    return messages.accepted(attempt=attempt, incarnation=10 + attempt)


def said(attempt: int, text: str = TEXT) -> GenerationEvent:
    return messages.event(attempt=attempt, incarnation=10 + attempt, kind=GenerationKind.TOKENS, text=text)


def final(attempt: int, outcome: Outcome = Outcome.COMPLETED, **fields: object) -> GenerationEvent:
    values = {"kind": GenerationKind.FINAL, "outcome": outcome, "finish_reason": "length", "generated_tokens": TOKENS}
    return messages.event(attempt=attempt, incarnation=10 + attempt, **{**values, **fields})


def released(attempt: int) -> Released:
    return Released(
        request_id="r",
        attempt=attempt,
        engine="e",
        incarnation=10 + attempt,
        prompt_partition=0,
        prompt_offset=0,
        reason=ReleaseReason.SHUTDOWN,
        released_at_us=0,
    )


def answer(offset: int, kind: GenerationKind = GenerationKind.DUPLICATE) -> GenerationEvent:
    return messages.event(attempt=0, incarnation=99, kind=kind, prompt_offset=offset)


def ack(outcome: AckOutcome) -> ControlAck:
    return ControlAck(command_id="c", request_id="r", engine="e", incarnation=11, outcome=outcome, received_at_us=1)


LOST = {"finish_reason": "engine_lost", "generated_tokens": 0}
SENT = Sent(request_id="r", kind=Kind.PLAIN, tokens=TOKENS)
ABORTED = Sent(request_id="r", kind=Kind.ABORTED, tokens=TOKENS, command="c")
WHOLE = [claim(1), said(1), final(1)]
STOPPED = final(1, Outcome.ABORTED, generated_tokens=2)


def found(
    sent: Sent,
    log: list[Message],
    acks: tuple[Message, ...] = (),
    started: tuple[tuple[str, int], ...] = (),
    dead: dict[str, str] | None = None,
) -> list[str]:
    told = stories(log, {sent.request_id: sent.n}, Counter())
    return list(problems([sent], told, acks, started, dead or {}))


@pytest.mark.parametrize(
    ("sent", "log", "acks", "dead"),
    [
        (SENT, [claim(1), said(1), final(1)], (), {}),
        (SENT, [claim(1), said(1, "xx"), released(1), claim(2), said(2), final(2), said(1), final(1)], (), {}),
        (replace(SENT, n=2), [claim(1), said(1), final(1), *(
            replace(m, index=1) for m in (said(1, generated_text("r", TOKENS, index=1)), final(1))
        )], (), {}),
        (SENT, [claim(1), claim(2), claim(3), claim(4), final(4, Outcome.FAILED, **LOST)], (), {"r": "engine_lost"}),
        (ABORTED, [claim(1), said(1, TEXT[:2]), STOPPED], (ack(AckOutcome.APPLIED),), {}),
        (ABORTED, [claim(1), said(1), final(1)], (ack(AckOutcome.TOO_LATE), ack(AckOutcome.APPLIED)), {}),
        (replace(SENT, repeats={7: GenerationKind.DUPLICATE}), [claim(1), said(1), final(1), answer(7)], (), {}),
    ],
    ids=["plain", "taken over", "two children", "given up", "aborted", "too late", "repeated"],
)  # fmt: skip
def test_a_record_that_is_right_is_found_right(sent, log, acks, dead) -> None:
    assert found(sent, log, acks, (("r", 1),), dead) == []


@pytest.mark.parametrize(
    ("sent", "log", "says"),
    [
        (SENT, [], "finals of \\[\\]"),
        (SENT, [claim(1), said(1)], "finals of \\[\\]"),
        (SENT, [claim(1), claim(2), said(1), final(1)], "finals of \\[\\]"),
        (SENT, [claim(1), released(1), said(1), final(1)], "finals of \\[\\]"),
        (replace(SENT, n=2), [claim(1), said(1), final(1)], "finals of \\[0\\]"),
        (SENT, [claim(1), said(1, TEXT[:3]), claim(2), said(2, TEXT[3:]), final(2)], "has the text"),
        (SENT, [claim(1), said(1, TEXT[:3]), final(1)], "has the text"),
        (SENT, [claim(1), said(1), said(1), final(1)], "has the text"),
        (SENT, [claim(1), final(1, Outcome.ABORTED, generated_tokens=0)], "it ended as"),
        (SENT, [claim(1), final(1, Outcome.FAILED, generated_tokens=0)], "it ended as"),
        (SENT, [claim(1), claim(2), claim(3), final(3, Outcome.FAILED, **LOST)], "given up after 2 deaths"),
        (
            SENT,
            [claim(1), released(1), claim(2), claim(3), claim(4), final(4, Outcome.FAILED, **LOST)],
            "given up after 2 deaths",
        ),
        (replace(SENT, kind=Kind.LATE), [claim(1), said(1), final(1)], "it ended as"),
        (
            replace(SENT, repeats={7: GenerationKind.REFUSED}),
            [claim(1), said(1), final(1), answer(7)],
            "further prompt",
        ),
        (replace(SENT, repeats={7: GenerationKind.DUPLICATE}), [claim(1), said(1), final(1)], "further prompt"),
        (ABORTED, [claim(1), said(1), final(1)], "was not answered"),
    ],
)
def test_each_broken_promise_is_found(sent, log, says) -> None:
    (said_of_it, *_) = found(sent, log, dead={"r": "engine_lost"})
    assert re.search(says, said_of_it), said_of_it


def test_an_answer_that_the_final_contradicts_is_found() -> None:
    log = [claim(1), said(1), final(1)]
    assert "answered as applied" in found(ABORTED, log, (ack(AckOutcome.APPLIED),))[0]
    stopped = [claim(1), said(1, TEXT[:2]), STOPPED]
    assert "answered as too late" in found(ABORTED, stopped, (ack(AckOutcome.TOO_LATE),))[0]


def test_what_is_given_up_without_a_dead_letter_and_what_ran_unclaimed_is_found() -> None:
    lost = [claim(1), claim(2), claim(3), claim(4), final(4, Outcome.FAILED, **LOST)]
    assert "with the dead letter None" in found(SENT, lost)[0]
    over = [claim(1), said(1), final(1), claim(2)]
    assert "attempt 2 ran and never held" in found(SENT, over, started=(("r", 1), ("r", 2)))[0]
