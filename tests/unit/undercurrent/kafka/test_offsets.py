"""What is made of a broker's answers about offsets."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from undercurrent.errors import UnreachableError
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.records import Partition
from undercurrent.kafka.settings import KafkaSettings

WHERE = Partition("t", 0)
# What the client fills in before an answer: an offset that is none.
INVALID = -1001


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Offsets that an administrative client answers, one after the other; the last for ever."""
    given: list[int] = []

    def list_offsets(question, **_):
        (where,) = question
        future: Future[SimpleNamespace] = Future()
        future.set_result(SimpleNamespace(offset=given.pop(0) if len(given) > 1 else given[0]))
        return {where: future}

    admin = SimpleNamespace(list_offsets=list_offsets)
    monkeypatch.setattr(OffsetLookup, "_client", lambda self: admin)
    return given


def lookup(timeout_s: float) -> OffsetLookup:
    return OffsetLookup(KafkaSettings(bootstrap_servers="nowhere:9"), timeout_s=timeout_s)


@pytest.mark.parametrize("none", [INVALID, -1])
@pytest.mark.parametrize("question", ["beginning", "end"])
def test_an_answer_without_an_offset_is_asked_for_again(answers: list[int], none: int, question: str) -> None:
    answers += [none, none, 7]
    assert getattr(lookup(60.0), question)([WHERE]) == {WHERE: 7}


def test_no_offset_in_time_is_an_error_and_never_a_position(answers: list[int]) -> None:
    answers.append(INVALID)
    with pytest.raises(UnreachableError, match=r"t\[0\]"):
        lookup(0.3).end([WHERE])


def test_no_record_as_late_as_a_time_is_the_end(answers: list[int]) -> None:
    answers += [-1, 9]
    assert lookup(60.0).at_time([WHERE], 5) == {WHERE: 9}
