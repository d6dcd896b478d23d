"""How far guards have come, as a final says it."""

from __future__ import annotations

import pytest

from undercurrent.protocol.guarding import GuardRules
from undercurrent.protocol.guards import GuardBook
from undercurrent.protocol.messages import (
    BindingMode,
    BoundProbe,
    GuardState,
    ProbeHeartbeat,
    ProbeVerdict,
    VerdictAction,
    VerdictKind,
)


def beat(probe="g", point="p", partitions=(0,)):
    bound = BoundProbe(probe=probe, point=point, mode=BindingMode.ABORT)
    return ProbeHeartbeat(service="s", member="m", probes=(bound,), partitions=partitions, sent_at_us=0)


def verdict(kind, clear_up_to, *, attempt=1, probe="g", index=0, **fields):
    return ProbeVerdict(
        request_id="r",
        attempt=attempt,
        index=index,
        point="p",
        probe=probe,
        service="s",
        kind=kind,
        mode=BindingMode.ABORT,
        action=VerdictAction.CONTINUE,
        clear_up_to=clear_up_to,
        source_partition=0,
        source_offset=0,
        decided_at_us=0,
        **fields,
    )


def watched(*probes):
    book = GuardBook(GuardRules(probes=probes or ("g",)))
    book.watch("r", 1, ("p",), 0)
    return book


def state(book, now_s=10.0):
    (guard,) = book.states("r", 1, 0, now_s)
    return guard.state, guard.clear_up_to


def test_without_a_host_a_guard_is_absent_and_nothing_waits_for_it():
    book = watched()
    assert state(book) == (GuardState.ABSENT, -1)
    assert book.settled("r", 1, 0, 10.0)


def test_a_host_that_has_fallen_silent_is_absent():
    book = watched()
    book.heartbeat(beat(), 10.0)
    assert state(book, 12.9)[0] is GuardState.BEHIND
    assert state(book, 13.1)[0] is GuardState.ABSENT


def test_a_host_that_reads_another_point_does_not_guard_the_request():
    book = watched()
    book.heartbeat(beat(point="another"), 10.0)
    assert state(book)[0] is GuardState.ABSENT


@pytest.mark.parametrize("partitions", [(), (1, 2)])
def test_a_host_that_does_not_read_the_partition_does_not_guard_the_request(partitions):
    book = watched()
    book.heartbeat(beat(partitions=partitions), 10.0)
    assert state(book)[0] is GuardState.ABSENT


def test_a_guard_is_behind_until_its_result_is_on_record():
    book = watched()
    book.heartbeat(beat(), 10.0)
    book.verdict(verdict(VerdictKind.WATERMARK, 7))
    assert state(book) == (GuardState.BEHIND, 7)
    assert not book.settled("r", 1, 0, 10.0)
    book.verdict(verdict(VerdictKind.RESULT, 9))
    assert state(book) == (GuardState.COMPLETE, 9)
    assert book.settled("r", 1, 0, 10.0)


def test_a_probe_that_failed_is_an_error_also_when_a_result_follows():
    book = watched()
    book.verdict(verdict(VerdictKind.ERROR, 3))
    book.verdict(verdict(VerdictKind.RESULT, 3))
    assert state(book)[0] is GuardState.ERROR


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"end_reason": "finished"}, GuardState.COMPLETE),
        # A cached prefix is part of the stream's own declaration.
        ({"end_reason": "finished", "partial": True}, GuardState.COMPLETE),
        ({"end_reason": "conflict", "complete": False}, GuardState.INCOMPLETE),
        ({"end_reason": "rewound", "complete": False}, GuardState.INCOMPLETE),
        ({"end_reason": "finished", "complete": False, "missing": 2}, GuardState.INCOMPLETE),
        ({"end_reason": "capture_error", "partial": True}, GuardState.INCOMPLETE),
    ],
)
def test_a_result_on_a_stream_that_was_not_whole_is_no_complete_guard(fields, found):
    book = watched()
    book.heartbeat(beat(), 10.0)
    book.verdict(verdict(VerdictKind.RESULT, 9, **fields))
    assert state(book) == (found, 9)
    assert book.settled("r", 1, 0, 10.0)


def test_verdicts_of_another_attempt_child_or_probe_say_nothing():
    book = watched()
    book.heartbeat(beat(), 10.0)
    book.verdict(verdict(VerdictKind.RESULT, 9, attempt=2))
    book.verdict(verdict(VerdictKind.RESULT, 9, index=1))
    book.verdict(verdict(VerdictKind.RESULT, 9, probe="another"))
    assert state(book) == (GuardState.BEHIND, -1)


def test_guards_stand_in_the_configured_order_and_a_dropped_run_is_forgotten():
    book = watched("b", "a")
    assert [guard.probe for guard in book.states("r", 1, 0, 0.0)] == ["b", "a"]
    book.verdict(verdict(VerdictKind.RESULT, 9, probe="a"))
    book.drop("r", 1)
    assert [guard.clear_up_to for guard in book.states("r", 1, 0, 0.0)] == [-1, -1]
