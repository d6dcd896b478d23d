"""Which dead letters may go back, and how that is noted."""

from __future__ import annotations

import pytest

from tests.unit import messages
from undercurrent.kafka.records import Record
from undercurrent.protocol.dead_letters import Place, dead_letter, said_of
from undercurrent.protocol.generations import GenerationsReader
from undercurrent.protocol.messages import GenerationKind, Outcome
from undercurrent.protocol.requeue import (
    REQUEUED_FROM,
    Note,
    objection_to_letter,
    objection_to_prompt,
    read_note,
    requeued_from,
    requeued_headers,
)

LETTER = Place("t.prompts.dlq", 1, 3)


def made(cause="bad_request", topic="t.prompts", partition=1, value=b"v", own=(), **options):
    original = None if value is None else Record(topic, partition, 7, b"k", value, 1, own)
    return dead_letter(
        cause,
        "why",
        Place(topic, partition, 7),
        original,
        service="engine",
        now_ms=2,
        **{"max_bytes": 100_000, **options},
    )


def objection(letter, place=LETTER):
    return objection_to_letter("t", place, letter.value, letter.headers)


def test_a_prompt_that_is_whole_may_go_back():
    assert objection(made()) is None
    assert objection(made("undecodable")) is None
    assert objection(made(value=b"")) is None, "an empty value is what was sent"


@pytest.mark.parametrize(
    ("letter", "place", "said"),
    [
        (made(max_bytes=16_400, value=b"x" * 100), LETTER, "cut"),
        (made(value=None), LETTER, "never there"),
        (made(value=None, to_offset=9), LETTER, "records that are gone"),
        (made("bad_key"), LETTER, "right key"),
        (made("bad_partition"), LETTER, "right key"),
        (made(topic="t.activations.p"), Place("t.activations.p.dlq", 1, 3), "replay"),
        (made(), Place("t.control.dlq", 1, 3), "do not say"),
        (made(partition=0), LETTER, "do not say"),
    ],
)
def test_what_may_not_go_back_is_refused_with_the_reason(letter, place, said):
    assert said in objection(letter, place)


def test_somebody_elses_record_and_a_note_are_no_letters():
    assert "do not say" in objection_to_letter("t", LETTER, b"v", ())
    assert "note of a requeue" in objection_to_letter("t", LETTER, None, Note(3, 5).headers())


def state_of(*outcomes, n=1):
    reader = GenerationsReader()
    reader.apply(messages.accepted(n=n), offset=0)
    for index, outcome in enumerate(outcomes):
        final = messages.event(kind=GenerationKind.FINAL, index=index, outcome=outcome)
        reader.apply(final, offset=index + 1)
    return reader.get("r")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (None, "no failed final"),
        (state_of(), "still open, with attempt 1 of e"),
        (state_of(Outcome.FAILED, n=2), "still open"),
        (state_of(Outcome.COMPLETED), "has a result (completed)"),
        (state_of(Outcome.FAILED, Outcome.ABORTED, n=2), "has a result (aborted)"),
    ],
)
def test_only_a_request_that_failed_is_run_again(state, said):
    assert said in objection_to_prompt("r", state)


def test_a_failed_request_may_be_run_again():
    assert objection_to_prompt("r", state_of(Outcome.FAILED, Outcome.FAILED, n=2)) is None


def test_a_requeued_record_has_its_own_headers_and_says_which_letter_it_was():
    letter = made(own=(("trace", b"x"),))
    back = requeued_headers(letter.headers, LETTER)
    assert back == (("trace", b"x"), (REQUEUED_FROM, b"t.prompts.dlq:1:3"))
    assert requeued_from(back)
    assert not requeued_from(letter.headers)
    again = made(own=back)
    assert requeued_headers(again.headers, Place(*LETTER[:2], 9)) == (
        ("trace", b"x"),
        (REQUEUED_FROM, b"t.prompts.dlq:1:9"),
    )


@pytest.mark.parametrize("note", [Note(3, 5), Note(3, 5, (2, 11))])
def test_a_note_is_read_back(note):
    assert read_note(said_of(note.headers())) == note
    assert read_note(said_of(made().headers)) is None
