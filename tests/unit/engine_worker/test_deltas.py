"""Tokens gathered to events."""

from __future__ import annotations

from engine_worker.deltas import DeltaBuffer, Origin
from undercurrent.protocol.worker_types import RunKey

KEY, OTHER = RunKey("r", 2), RunKey("s", 3)


def opened():
    buffer = DeltaBuffer()
    for key, partition in ((KEY, 0), (OTHER, 1)):
        buffer.open(key, Origin(engine="e", incarnation=9, partition=partition, offset=4))
    return buffer


def test_tokens_between_two_takings_become_one_event_per_child():
    buffer = opened()
    buffer.add(KEY, 0, (1,), "a")
    buffer.add(KEY, 1, (7,), "x")
    buffer.add(KEY, 0, (2, 3), "bc")
    events = [event for _, event in buffer.take(5)]
    assert [(e.index, e.first_token_index, e.token_ids, e.text) for e in events] == [
        (0, 0, (1, 2, 3), "abc"),
        (1, 0, (7,), "x"),
    ]
    assert {(e.request_id, e.attempt, e.incarnation, e.prompt_offset, e.emitted_at_us) for e in events} == {
        ("r", 2, 9, 4, 5)
    }
    assert list(buffer.take(6)) == []


def test_the_next_event_goes_on_where_the_last_one_ended():
    buffer = opened()
    buffer.add(KEY, 0, (1, 2), "ab")
    list(buffer.take(1))
    buffer.add(KEY, 0, (3,), "c")
    ((_, event),) = buffer.take(2)
    assert (event.first_token_index, event.token_ids) == (2, (3,))


def test_one_run_can_be_taken_before_the_others():
    buffer = opened()
    buffer.add(OTHER, 0, (1,), "a")
    buffer.add(KEY, 0, (2,), "b")
    assert [(partition, event.request_id) for partition, event in buffer.take(1, KEY)] == [(0, "r")]
    assert [(partition, event.request_id) for partition, event in buffer.take(1)] == [(1, "s")]


def test_text_without_tokens_is_not_lost_and_nothing_is_no_event():
    buffer = opened()
    buffer.add(KEY, 0, (), "")
    assert list(buffer.take(1)) == []
    buffer.add(KEY, 0, (), "rest")
    assert [event.text for _, event in buffer.take(1)] == ["rest"]


def test_a_closed_run_gathers_nothing():
    buffer = opened()
    buffer.add(KEY, 0, (1,), "a")
    buffer.close(KEY)
    buffer.add(KEY, 0, (2,), "b")
    assert list(buffer.take(1)) == []
    assert buffer.runs == (OTHER,)
