from __future__ import annotations

import io
import json
from typing import Any

import pytest

from producer.show import BlockView, JsonView, StreamView, end_line, failed
from tests.unit import messages
from undercurrent.protocol.messages import (
    AbortCause,
    CommandSource,
    GenerationEvent,
    GenerationKind,
    Guard,
    GuardState,
    Outcome,
)


def event(kind: GenerationKind = GenerationKind.TOKENS, **fields: Any) -> GenerationEvent:
    return messages.event(kind=kind, **fields)


def final(outcome: Outcome = Outcome.COMPLETED, **fields: Any) -> GenerationEvent:
    return event(GenerationKind.FINAL, outcome=outcome, **fields)


def streamed(*events: GenerationEvent) -> tuple[str, str]:
    out, notes = io.StringIO(), io.StringIO()
    view = StreamView(out, notes)
    for item in events:
        view.show(item)
    return out.getvalue(), notes.getvalue()


def test_one_request_is_written_as_it_comes_and_its_end_beside_it() -> None:
    out, notes = streamed(
        event(text="Hello "), event(text="you"), final(text=".", generated_tokens=3, finish_reason="stop")
    )
    assert out == "Hello you.\n"
    assert notes == "[r: completed, 3 tokens, stop]\n"


def test_an_attempt_that_starts_over_is_said() -> None:
    out, notes = streamed(event(text="old"), event(attempt=2, text="new"), final(attempt=2))
    assert out == "old\nnew\n"
    assert notes.splitlines()[0] == "[attempt 2 starts over]"


def test_several_requests_are_written_whole_and_void_text_is_left_out() -> None:
    out = io.StringIO()
    view = BlockView(out)
    for item in (
        event(text="void"),
        event(request_id="s", text="other"),
        event(attempt=2, text="good "),
        final(attempt=2, text="end"),
        final(request_id="s", index=0),
    ):
        view.show(item)
    first, second = out.getvalue().split("--- ")[1:]
    assert first.splitlines()[1] == "good end"
    assert second.splitlines()[1] == "other"
    assert "void" not in out.getvalue()


def test_json_lines_hold_every_field() -> None:
    out = io.StringIO()
    view = JsonView(out)
    view.show(event(text="ü\n", token_ids=(1, 2)))
    view.show(final())
    first, second = map(json.loads, out.getvalue().splitlines())
    assert (first["kind"], first["text"], first["token_ids"]) == ("tokens", "ü\n", [1, 2])
    assert second["outcome"] == "completed"


@pytest.mark.parametrize(
    ("shown", "says"),
    [
        (
            final(
                Outcome.ABORTED,
                abort=AbortCause(
                    command_id="c", source=CommandSource.PROBE, probe="vault", token_pos=41, score=0.98, reason="leak"
                ),
            ),
            "aborted, 0 tokens, by vault at position 41, score 0.980: leak",
        ),
        (final(Outcome.ABORTED, abort=AbortCause(command_id="c", source=CommandSource.OPERATOR)), "by operator"),
        (final(Outcome.FAILED, error="prompt too long"), "failed, 0 tokens, prompt too long"),
        (
            final(guards=(Guard(probe="a", state=GuardState.COMPLETE), Guard(probe="b", state=GuardState.ABSENT))),
            "guards: b absent",
        ),
        (final(index=2), "r child 2: completed"),
        (event(GenerationKind.REFUSED, error="other content"), "refused, another prompt has this id: other content"),
        (event(GenerationKind.DUPLICATE), "its result follows"),
    ],
)
def test_the_end_line_says_how_and_why(shown: GenerationEvent, says: str) -> None:
    assert says in end_line(shown)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (final(Outcome.COMPLETED), False),
        (final(Outcome.ABORTED), False),
        (final(Outcome.FAILED), True),
        (final(Outcome.UNKNOWN), True),
        (event(GenerationKind.REFUSED), True),
        (event(GenerationKind.DUPLICATE), False),
        (event(), False),
    ],
)
def test_only_a_request_without_a_result_failed(shown: GenerationEvent, expected: bool) -> None:
    assert failed(shown) is expected
