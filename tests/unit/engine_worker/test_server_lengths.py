"""An API server says how long its requests are, and keeps nothing of those that have ended."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine_worker.server_lengths import ServerLengths
from undercurrent.capture.lengths import LengthTable, length_in
from undercurrent.capture.ring import Ring
from undercurrent.errors import CaptureError


def told(*rings):
    return [(ring.path, Path(ring.path).stat().st_ino) for ring in rings]


def test_a_request_is_followed_from_its_first_token_to_its_last_in_every_ring():
    rings = [Ring.create(4096), Ring.create(4096)]
    lengths = ServerLengths.of(told(*rings), index=0, count=2)
    slot = lengths.take("a")
    assert [length_in(ring.lengths, slot) for ring in rings] == [(0, False)] * 2
    lengths.counted("a", 7)
    lengths.counted("nobody", 9)
    assert [length_in(ring.lengths, slot) for ring in rings] == [(7, False)] * 2
    lengths.counted("a", 6)
    lengths.ended("a")
    lengths.ended("a")
    lengths.counted("a", 12)
    assert [length_in(ring.lengths, slot) for ring in rings] == [(7, True)] * 2
    assert lengths.running == 0


def test_ten_thousand_requests_take_no_more_room_than_those_that_run():
    table = LengthTable(memoryview(bytearray(8 * 16)).cast("q"))
    lengths = ServerLengths(table)
    running = [f"r{n}" for n in range(8)]
    assert all(lengths.take(name) >= 0 for name in running)
    for number in range(10_000):
        assert lengths.take(f"short{number}") >= 0
        lengths.ended(f"short{number}")
    assert (table.used, lengths.running) == (8, 8)


def test_where_there_is_no_room_requests_run_unconfirmed_and_the_log_says_so_once(caplog):
    lengths = ServerLengths(LengthTable(memoryview(bytearray(16)).cast("q")))
    slots = [lengths.take(str(n)) for n in range(5)]
    assert [slot >= 0 for slot in slots] == [True, True, False, False, False]
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    lengths.counted("3", 4)
    lengths.ended("3")
    lengths.ended("0")
    assert lengths.take("later") >= 0


def test_a_ring_that_is_not_that_engines_is_refused():
    ring = Ring.create(4096)
    with pytest.raises(CaptureError, match="another ring"):
        ServerLengths.of([(ring.path, 1)], index=0, count=1)
    with pytest.raises(CaptureError, match="cannot be opened here"):
        ServerLengths.of([("/proc/0/fd/3", 1)], index=0, count=1)
    with pytest.raises(CaptureError, match="no engine"):
        ServerLengths.of([], index=0, count=1)
