from __future__ import annotations

from undercurrent.insight.letter_list import LetterList
from undercurrent.insight.letters import DeadLetterRecord, Requeued
from undercurrent.kafka.records import Partition, Record
from undercurrent.protocol.dead_letters import Place
from undercurrent.protocol.requeue import Note


def letter(offset: int, source: int | None, cause: str = "undecodable", topic: str = "t.control") -> DeadLetterRecord:
    dlq = f"{topic}.dlq"
    record = Record(dlq, 0, offset, b"k", b"v", 0, ())
    of = None if source is None else Place(topic, 0, source)
    return DeadLetterRecord(record, Place(dlq, 0, offset), {"cause": cause}, of)


def test_a_record_with_several_letters_is_listed_once_by_the_first() -> None:
    found = LetterList(10)
    for item in (letter(0, 7), letter(1, 8), letter(2, 7), letter(3, 7), letter(4, None), letter(5, None)):
        found.take(item)
    assert [item.place.offset for item in found] == [0, 1, 4, 5]
    assert found.sums == {("t.control.dlq", "undecodable"): 4}
    assert found.repeats == {Place("t.control.dlq", 0, 0): 2}


def test_the_same_offset_of_another_topic_is_another_record() -> None:
    found = LetterList(10)
    for topic in ("t.control", "t.verdicts"):
        found.take(letter(0, 7, topic=topic))
    assert [item.place.topic for item in found] == ["t.control.dlq", "t.verdicts.dlq"]
    assert not found.repeats


def test_the_last_ones_are_kept_and_all_are_counted() -> None:
    found = LetterList(2, cause="poison")
    for at in range(5):
        found.take(letter(at, at, "poison"))
    found.take(letter(5, 5, "bad_key"))
    found.take(letter(6, 0, "poison"))
    found.take(Requeued(Partition("t.control.dlq", 0), Note(letter=4, at_ms=1)))
    assert [(item.place.offset, item.requeued) for item in found] == [(3, None), (4, Note(letter=4, at_ms=1))]
    assert found.sums.total() == 5
