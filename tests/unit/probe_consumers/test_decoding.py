"""What cannot be read says why, instead of failing somewhere behind."""

from __future__ import annotations

import numpy as np
import pytest

from probe_consumers.decoding import incoming
from tests.unit.undercurrent.codec.test_blocks import block
from undercurrent.codec import Codec
from undercurrent.kafka.records import Record
from undercurrent.testing.streams import StreamBuilder

CODEC = Codec()


def read(**changes):
    return incoming(CODEC, Record("t", 1, 2, b"r", CODEC.encode(block(**changes)), 3, ()))


def int32(*values):
    return np.array(values, "<i4").tobytes()


def test_a_block_that_fits_together_is_read():
    found = read()
    assert (found.message, found.error) == (block(), "")
    assert (found.partition, found.offset, found.timestamp_us) == (1, 2, 3000)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"positions": b"12345"}, "5 bytes are no whole number of int32"),
        ({"positions": b""}, "a block without positions"),
        ({"positions": int32(0, -3, 2)}, "token position -3; accepted: 0 and above"),
        ({"width": 0, "data": b""}, "width 0"),
        ({"layers": (2, 2)}, "layers [2, 2]"),
        ({"layers": (), "data": b""}, "layers []"),
        ({"data": b"\0" * 95}, "95 bytes"),
        ({"token_ids": int32(1)}, "1 token ids for 3 positions"),
    ],
)
def test_a_block_that_does_not_is_refused_by_name(changes, said):
    found = read(**changes)
    assert found.message is None
    assert said in found.error


def test_bytes_that_are_no_message_say_so():
    assert incoming(CODEC, Record("t", 0, 0, b"r", b"no", 0, ())).error


def test_a_request_id_that_fits_no_verdict_is_poison():
    record = Record("t", 0, 0, b"k", StreamBuilder("r" * 1025).start(), 0, ())
    assert "request id of 1025 bytes; accepted: up to 1024" in incoming(CODEC, record).error
    record = Record("t", 0, 0, b"k", StreamBuilder("r" * 1024).start(), 0, ())
    assert incoming(CODEC, record).error == ""
