"""Dead letters of records that are not at hand, or that stand for several. Those at hand: see the engine worker's."""

from __future__ import annotations

import pytest

from undercurrent.kafka.records import Record
from undercurrent.protocol.dead_letters import Place, dead_letter

PLACE = Place("t", 1, 5)


def test_a_letter_may_stand_for_a_gap_that_nobody_has_the_bytes_of():
    found = dead_letter("gap", "cut off by retention", PLACE, None, max_bytes=100_000, to_offset=9)
    assert (found.key, found.value) == (None, None)
    assert dict(found.headers) == {
        "undercurrent.cause": b"gap",
        "undercurrent.detail": b"cut off by retention",
        "undercurrent.topic": b"t",
        "undercurrent.partition": b"1",
        "undercurrent.offset": b"5",
        "undercurrent.to_offset": b"9",
    }


@pytest.mark.parametrize("value", [None, b""])
def test_a_record_without_bytes_stays_as_it_is(value):
    found = dead_letter("c", "d", PLACE, Record("t", 1, 5, None, value, 3, ()), max_bytes=100_000)
    assert (found.key, found.value) == (None, value)
    assert dict(found.headers)["undercurrent.timestamp_ms"] == b"3"
