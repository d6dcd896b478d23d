"""The reader rule: who holds a request, and which final counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit import messages
from undercurrent.protocol.generations import GenerationsReader, Ruling
from undercurrent.protocol.messages import (
    Accepted,
    GenerationEvent,
    GenerationKind,
    Outcome,
    Released,
    ReleaseReason,
)


def accepted(attempt: int, incarnation: int, *, n: int = 1) -> Accepted:
    return messages.accepted(attempt=attempt, incarnation=incarnation, epoch=attempt, prompt_offset=7, n=n)


def event(attempt: int, incarnation: int, kind: GenerationKind, *, index: int = 0) -> GenerationEvent:
    outcome = Outcome.COMPLETED if kind is GenerationKind.FINAL else None
    fields = {"index": index, "kind": kind, "outcome": outcome, "prompt_offset": 7}
    return messages.event(attempt=attempt, incarnation=incarnation, **fields)


def released(attempt: int, incarnation: int) -> Released:
    return Released(
        request_id="r",
        attempt=attempt,
        engine="e",
        incarnation=incarnation,
        prompt_partition=0,
        prompt_offset=7,
        reason=ReleaseReason.HANDED_OVER,
        released_at_us=0,
    )


TOKENS, FINAL = GenerationKind.TOKENS, GenerationKind.FINAL


def rulings(*messages: Accepted | Released | GenerationEvent) -> list[Ruling]:
    reader = GenerationsReader()
    return [reader.apply(message, offset=offset) for offset, message in enumerate(messages)]


def test_one_attempt_from_claim_to_final() -> None:
    assert rulings(accepted(1, 5), event(1, 5, TOKENS), event(1, 5, FINAL)) == [
        Ruling.HOLDS,
        Ruling.TOKENS,
        Ruling.CLOSED,
    ]


def test_of_two_claims_of_one_attempt_the_first_holds() -> None:
    log = rulings(accepted(1, 5), accepted(1, 6), event(1, 6, FINAL), event(1, 5, FINAL))
    assert log == [Ruling.HOLDS, Ruling.VOID, Ruling.VOID, Ruling.CLOSED]


@pytest.mark.parametrize("beyond", [{"attempt": 2**63 - 1}, {"epoch": 2**63 - 1}])
def test_a_claim_that_nobody_could_outbid_is_void(beyond: dict[str, int]) -> None:
    assert rulings(accepted(1, 5), replace(accepted(2, 6), **beyond), event(1, 5, FINAL)) == [
        Ruling.HOLDS,
        Ruling.VOID,
        Ruling.CLOSED,
    ]


def test_a_higher_attempt_voids_the_lower_ones_tokens_and_final() -> None:
    log = rulings(accepted(1, 5), accepted(2, 6), event(1, 5, TOKENS), event(1, 5, FINAL), event(2, 6, FINAL))
    assert log == [Ruling.HOLDS, Ruling.HOLDS, Ruling.VOID, Ruling.VOID, Ruling.CLOSED]


def test_nothing_counts_after_the_valid_final() -> None:
    log = rulings(accepted(1, 5), event(1, 5, FINAL), accepted(2, 6), event(2, 6, TOKENS), event(2, 6, FINAL))
    assert log == [Ruling.HOLDS, Ruling.CLOSED, Ruling.VOID, Ruling.VOID, Ruling.VOID]


def test_a_second_final_of_the_holder_is_void() -> None:
    assert rulings(accepted(1, 5), event(1, 5, FINAL), event(1, 5, FINAL))[-1] is Ruling.VOID


def test_a_final_without_a_claim_is_void() -> None:
    assert rulings(event(1, 5, FINAL)) == [Ruling.VOID]


def test_nothing_of_a_pair_counts_after_its_release() -> None:
    log = rulings(accepted(1, 5), released(1, 5), event(1, 5, FINAL), accepted(2, 5), event(2, 5, FINAL))
    assert log == [Ruling.HOLDS, Ruling.RELEASED, Ruling.VOID, Ruling.HOLDS, Ruling.CLOSED]


def test_each_child_is_closed_by_one_final_and_keeps_it_over_attempts() -> None:
    reader = GenerationsReader()
    log: list[Accepted | Released | GenerationEvent] = [
        accepted(1, 5, n=2),
        event(1, 5, FINAL, index=0),
        accepted(2, 6, n=2),
        event(2, 6, FINAL, index=0),
        event(2, 6, FINAL, index=1),
    ]
    assert [reader.apply(m, offset=i) for i, m in enumerate(log)] == [
        Ruling.HOLDS,
        Ruling.CLOSED,
        Ruling.HOLDS,
        Ruling.VOID,
        Ruling.CLOSED,
    ]
    state = reader.get("r")
    assert state is not None
    assert state.closed
    assert {index: final.attempt for index, final in state.finals.items()} == {0: 1, 1: 2}


def test_a_child_that_the_request_does_not_have_is_void() -> None:
    assert rulings(accepted(1, 5), event(1, 5, FINAL, index=3))[-1] is Ruling.VOID


def test_accepts_without_release_or_final_stay_unexplained() -> None:
    reader = GenerationsReader()
    for offset, message in enumerate([accepted(1, 5), accepted(2, 6), released(2, 6), accepted(4, 7)]):
        reader.apply(message, offset=offset + 100)
    state = reader.get("r")
    assert state is not None
    assert state.unexplained == [(1, 5), (4, 7)]
    assert state.first_offset == 100
    reader.apply(event(4, 7, FINAL), offset=110)
    assert state.unexplained == []


@pytest.mark.parametrize("kind", [GenerationKind.DUPLICATE, GenerationKind.REFUSED])
def test_answers_to_a_second_prompt_change_nothing(kind: GenerationKind) -> None:
    log = rulings(accepted(1, 5), replace(event(1, 5, FINAL), kind=kind), event(1, 5, FINAL))
    assert log == [Ruling.HOLDS, Ruling.ANSWERED, Ruling.CLOSED]


def test_a_forgotten_request_is_unknown() -> None:
    reader = GenerationsReader()
    reader.apply(accepted(1, 5), offset=0)
    reader.forget("r")
    assert len(reader) == 0
    assert reader.apply(event(1, 5, FINAL), offset=1) is Ruling.VOID
