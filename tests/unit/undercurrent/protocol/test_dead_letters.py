"""Dead letters of records that are not at hand, or that stand for several. Those at hand: see the engine worker's."""

from __future__ import annotations

import pytest

from undercurrent.kafka.records import Record
from undercurrent.protocol.dead_letters import Place, dead_letter, origin, said_of

PLACE = Place("t", 1, 5)
SAID = {"service": "probes", "now_ms": 8, "max_bytes": 100_000}


def test_a_letter_may_stand_for_a_gap_that_nobody_has_the_bytes_of():
    found = dead_letter("gap", "cut off by retention", PLACE, None, **SAID, to_offset=9)
    assert (found.key, found.value) == (None, None)
    assert dict(found.headers) == {
        "undercurrent.cause": b"gap",
        "undercurrent.detail": b"cut off by retention",
        "undercurrent.service": b"probes",
        "undercurrent.topic": b"t",
        "undercurrent.partition": b"1",
        "undercurrent.offset": b"5",
        "undercurrent.at_ms": b"8",
        "undercurrent.to_offset": b"9",
    }


@pytest.mark.parametrize("value", [None, b""])
def test_a_record_without_bytes_stays_as_it_is(value):
    found = dead_letter("c", "d", PLACE, Record("t", 1, 5, None, value, 3, ()), **SAID)
    assert (found.key, found.value) == (None, value)
    assert dict(found.headers)["undercurrent.timestamp_ms"] == b"3"


def test_what_a_letter_says_is_read_back_and_says_which_record_it_is_of():
    own = (("undercurrent.cause", b"of an earlier letter"), ("trace", None))
    found = dead_letter("c", "d" * 5000, PLACE, Record("t", 1, 5, b"k", b"v", 3, own), **SAID)
    said = said_of(found.headers)
    assert (said["cause"], said["service"], said["at_ms"], len(said["detail"])) == ("c", "probes", "8", 2000)
    assert ("trace", b"") in found.headers
    assert origin(found.headers) == PLACE


@pytest.mark.parametrize("headers", [(), (("undercurrent.topic", b"t"), ("undercurrent.partition", b"x"))])
def test_what_somebody_else_wrote_is_of_no_record(headers):
    assert origin(headers) is None


def test_headers_of_the_record_take_room_from_its_value():
    value, own = b"x" * 50_000, (("h", b"y" * 60_000),)
    found = dead_letter("c", "d", PLACE, Record("t", 1, 5, b"k", value, 3, own), **SAID)
    size = len(found.value) + sum(len(name) + len(text) for name, text in found.headers)
    assert len(found.value) < len(value)
    assert size < 100_000
