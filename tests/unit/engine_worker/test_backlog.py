"""What waits behind a cycle in flight is bounded, each point's policy decides what goes, and readers can tell."""

from __future__ import annotations

import tracemalloc
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.publisher_cycle import Bound
from engine_worker.publisher_messages import Identity
from engine_worker.publisher_streams import StreamWriter
from tests.unit.engine_worker.test_publisher_streams import CODEC, ROW_BYTES, opened, step
from undercurrent.capture.frames import Close, Drop, Loss, Rewind
from undercurrent.codec import positions
from undercurrent.codec.blocks import RECORD_OVERHEAD_BYTES
from undercurrent.protocol.messages import ActivationBlock, StreamEnded, StreamStarted
from undercurrent.spec import Overflow

NEWEST, OLDEST, BLOCK = Overflow.DROP_NEWEST, Overflow.DROP_OLDEST, Overflow.BLOCK


def writer(*, max_rows=1000, max_bytes=1 << 20, **bounds):
    limit = RECORD_OVERHEAD_BYTES + max_rows * (ROW_BYTES + 8)
    return StreamWriter(
        CODEC, Identity(engine="e", incarnation=5, model="m"), {point: f"t.{point}" for point in bounds},
        dict.fromkeys(bounds, limit), bounds=bounds, max_waiting_bytes=max_bytes,
    )  # fmt: skip


def in_flight(streams, *numbers, **changes):
    """Open streams, and let their starts be in flight."""
    for number in numbers:
        streams.take(opened(number, **changes), 0)
    streams.cycle()
    streams.busy = True


def play(streams, numbers, steps, first=0):
    for number in range(first, first + steps):
        streams.take(step(number + 1, dict.fromkeys(numbers, 1), first=number)[0], 0)


def written(streams):
    """Let everything out that waits; return the messages of each request, and what was lost by point and reason."""
    streams.busy = False
    messages, lost = defaultdict(list), defaultdict(dict)
    while True:
        streams.refill(1 << 30)
        cycle = streams.cycle()
        for point, counts in cycle.counts.items():
            for reason, count in counts.dropped.items():
                lost[point][reason] = lost[point].get(reason, 0) + count
        for outs in cycle.records.values():
            for out in outs:
                messages[out.key.decode()].append(CODEC.decode(out.value))
        if not cycle.records:
            return messages, lost


@pytest.mark.parametrize(("policy", "kept", "seqs"), [(NEWEST, [0, 1, 2], [1, 2, 3]), (OLDEST, [7, 8, 9], [8, 9, 10])])
def test_a_request_s_records_beyond_its_depth_go_and_leave_their_numbers(policy, kept, seqs):
    streams = writer(p=Bound(policy, 3))
    in_flight(streams, 1, 2)
    play(streams, [1], 10)
    play(streams, [2], 2)
    for number, last in ((1, 9), (2, 1)):
        streams.take(Close(stream=number, reason="finished", last_pos=last), 0)
    messages, lost = written(streams)
    *blocks, ended = messages["r1"]
    assert [positions(block).tolist() for block in blocks] == [[at] for at in kept]
    assert [block.seq for block in blocks] == seqs
    assert (ended.seq, ended.last_seq, ended.last_pos) == (11, seqs[-1], kept[-1])
    assert (ended.emitted, ended.dropped) == ((3, 3), (7, 7))
    # Another request has its own.
    assert (len(messages["r2"]), messages["r2"][-1].dropped) == (3, (0, 0))
    assert lost == {"p": {"queue_depth": 14}}


def test_a_blocking_point_says_when_the_reading_has_to_stop_and_loses_nothing():
    streams = writer(p=Bound(BLOCK, 3))
    in_flight(streams, 1)
    for number in range(5):
        assert streams.full is (number >= 3)
        play(streams, [1], 1, first=number)
    messages, lost = written(streams)
    assert not streams.full
    assert ([block.seq for block in messages["r1"]], lost) == ([1, 2, 3, 4, 5], {})


def test_bytes_are_bounded_for_all_requests_together_and_each_point_has_its_policy():
    sizes = {"max_bytes": 40_000}
    for policy, kept in ((NEWEST, "first"), (OLDEST, "last")):
        streams = writer(p=Bound(policy), quiet=Bound(), **sizes)
        in_flight(streams, 1, 2)
        streams.take(opened(3, point="quiet"), 0)
        play(streams, [3], 5)
        play(streams, [1, 2], 100)
        assert streams.waiting_bytes <= 40_000
        messages, lost = written(streams)
        for name in ("r1", "r2"):
            found = [positions(block)[0] for block in messages[name]]
            count = len(found)
            assert 10 < count < 90
            assert found == list(range(count) if kept == "first" else range(100 - count, 100))
        assert lost["p"]["buffer_full"] == 2 * (200 - len(messages["r1"]) - len(messages["r2"]))
        # Its neighbour's records came first, and whoever is full takes nothing of them.
        assert len(messages["r3"]) == 6
        assert "quiet" not in lost or not lost["quiet"]


def test_a_point_that_blocks_is_never_given_up_for_the_bytes_of_others():
    streams = writer(p=Bound(BLOCK), other=Bound(OLDEST), max_bytes=20_000)
    in_flight(streams, 1)
    streams.take(opened(2, point="other"), 0)
    play(streams, [2], 10)
    while not streams.full:
        play(streams, [1], 1, first=streams.waiting_bytes)
    assert 20_000 <= streams.waiting_bytes < 20_800
    _, lost = written(streams)
    assert lost == {}


def test_a_block_in_parts_waits_as_one_and_goes_as_one():
    streams = writer(max_rows=10, p=Bound(NEWEST, 1))
    in_flight(streams, 1)
    streams.take(step(1, {1: 24})[0], 0)
    streams.take(step(2, {1: 15}, first=24)[0], 0)
    messages, lost = written(streams)
    assert [(block.seq, len(positions(block))) for block in messages["r1"]] == [(1, 10), (2, 10), (3, 4)]
    assert lost == {"p": {"queue_depth": 30}}
    streams.take(step(3, {1: 1}, first=39)[0], 0)
    streams.take(Close(stream=1, reason="finished"), 0)
    (block, ended) = written(streams)[0]["r1"]
    assert (block.seq, ended.emitted, ended.dropped) == (6, (25, 25), (15, 15))


def test_words_about_a_stream_are_never_dropped_but_bounded_too():
    streams = writer(p=Bound(NEWEST), max_bytes=64 << 10)
    streams.busy = True
    number = 0
    while not streams.full:
        number += 1
        streams.take(opened(number), 0)
        streams.take(step(number, {number: 1})[0], 0)
        streams.take(Close(stream=number, reason="finished"), 0)
    assert streams.waiting_bytes < 80 << 10
    messages, _ = written(streams)
    assert len(messages) == number
    for mine in messages.values():
        assert isinstance(mine[0], StreamStarted)
        assert isinstance(mine[-1], StreamEnded)
        assert mine[-1].emitted[0] + mine[-1].dropped[0] == 1


def test_a_cycle_is_shared_between_points():
    streams = writer(p=Bound(), q=Bound())
    streams.busy = True
    streams.take(opened(1), 0)
    play(streams, [1], 100)
    streams.take(opened(2, point="q"), 0)
    play(streams, [2], 3)
    streams.busy = False
    streams.refill(8_000)
    cycle = streams.cycle()
    assert cycle.counts["q"].records == 3
    assert 3 < cycle.counts["p"].records < 100
    assert cycle.record_bytes < 9_000


def test_a_long_outage_takes_no_memory_for_what_was_dropped():
    streams = writer(p=Bound(OLDEST, 4))
    in_flight(streams, 1)
    tracemalloc.start()
    try:
        play(streams, [1], 2_000)
        before, _ = tracemalloc.get_traced_memory()
        play(streams, [1], 6_000, first=2_000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 300_000
    assert len(written(streams)[0]["r1"]) == 4


def test_another_incarnation_cuts_what_was_begun_and_begins_what_was_not():
    streams = writer(p=Bound())
    in_flight(streams, 1, 2)
    play(streams, [1, 2], 3)
    streams.take(Close(stream=2, reason="finished"), 0)
    streams.take(opened(3), 0)
    play(streams, [3], 2)
    streams.take(opened(4), 0)
    streams.take(Close(stream=4, reason="finished"), 0)
    streams.renew(Identity(engine="e", incarnation=900_000, model="m"))
    streams.busy = False
    play(streams, [1, 3], 1, first=3)
    streams.take(Rewind(stream=1, first_pos=2), 0)
    streams.take(Close(stream=1, reason="finished"), 0)
    streams.refill(1 << 30)
    cycle = streams.cycle()
    messages = [CODEC.decode(out.value) for outs in cycle.records.values() for out in outs]
    assert {(message.request_id, message.incarnation) for message in messages} == {("r3", 900_000), ("r4", 900_000)}
    assert [m.seq for m in messages if m.request_id == "r3"] == [0, 1, 2, 3]
    assert sorted(cycle.ended) == [(f"r{number}", 2, 0, "p") for number in (1, 2, 4)]
    assert cycle.counts["p"].dropped == {"cut_off": 2 * (3 + 3 + 1)}
    assert cycle.counts["p"].open_streams == 1


def test_with_one_shard_of_a_stream_the_others_are_cut_though_they_open_later():
    streams = writer(p=Bound())
    shards = [{"request_id": "r", "shard": shard, "shards": 3, "layers": (shard,)} for shard in range(3)]
    streams.take(opened(1, **shards[0]), 0)
    streams.take(step(1, {1: 1})[0], 0)
    streams.take(Close(stream=1, reason="finished"), 0)
    streams.cycle()
    streams.busy = True
    streams.take(opened(2, **shards[1]), 0, ring=1)
    streams.renew(Identity(engine="e", incarnation=900_000, model="m"))
    streams.busy = False
    streams.take(opened(3, **shards[2]), 0, ring=2)
    for ring in (1, 2):
        streams.take(step(2, {ring + 1: 1})[0], 0, ring=ring)
        streams.take(Close(stream=ring + 1, reason="finished"), 0, ring=ring)
    cycle = streams.cycle()
    assert cycle.records == {}
    assert cycle.ended == [("r", 2, 0, "p")]
    # The same engine's next stream is one again.
    streams.take(opened(4, request_id="r", attempt=3), 0)
    assert len(streams.cycle().records) == 1


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.sets(st.integers(1, 4), min_size=1), st.integers(1, 25)),
        st.tuples(st.just("lost"), st.integers(1, 4), st.integers(1, 3)),
        st.tuples(st.just("acknowledged"), st.integers(500, 20_000)),
    ),
    max_size=60,
)


@given(
    ACTIONS,
    st.sampled_from([NEWEST, OLDEST, BLOCK]),
    st.none() | st.integers(1, 5),
    st.integers(3_000, 60_000),
)
def test_whatever_happens_every_row_is_written_or_counted(actions, policy, depth, max_bytes):  # noqa: C901
    streams = writer(max_rows=10, max_bytes=max_bytes, p=Bound(policy, depth))
    numbers, at, captured, given_up = range(1, 5), dict.fromkeys(range(1, 5), 0), defaultdict(list), defaultdict(int)
    log, lost = defaultdict(list), 0

    def take_cycle(most):
        nonlocal lost
        streams.refill(most)
        cycle = streams.cycle()
        lost += sum(count for counts in cycle.counts.values() for count in counts.dropped.values())
        for outs in cycle.records.values():
            for out in outs:
                log[out.key.decode()].append(CODEC.decode(out.value))
        return bool(cycle.records)

    for number in numbers:
        streams.take(opened(number), 0)
    take_cycle(1 << 30)
    streams.busy = True
    for serial, (kind, *values) in enumerate(actions, 1):
        if kind == "step":
            who, rows = values
            if streams.full:
                continue
            for number in sorted(who):
                streams.take(step(serial, {number: rows}, first=at[number])[0], 0)
                captured[number] += range(at[number], at[number] + rows)
                at[number] += rows
        elif kind == "lost":
            number, rows = values
            loss = Loss(stream=number, messages=1, rows=rows, first_pos=at[number], last_pos=at[number] + rows - 1)
            streams.take(Drop(reason="ring_full", losses=(loss,)), 0)
            at[number] += rows
            given_up[number] += rows
        else:
            streams.busy = False
            take_cycle(values[0])
            streams.busy = True
        if policy is not BLOCK:
            assert streams.waiting_bytes <= max_bytes + 30 * (ROW_BYTES + 200)
    for number in numbers:
        streams.take(Close(stream=number, reason="finished", last_pos=at[number] - 1), 0)
    streams.busy = False
    while take_cycle(10_000):
        pass
    assert streams.waiting_bytes == 0
    dropped = 0
    for number in numbers:
        started, *blocks, ended = log[f"r{number}"]
        assert isinstance(started, StreamStarted)
        assert all(isinstance(block, ActivationBlock) for block in blocks)
        seqs = [block.seq for block in blocks]
        assert seqs == sorted(set(seqs))
        found = [position for block in blocks for position in positions(block).tolist()]
        assert found == sorted(found)
        assert set(found) <= set(captured[number])
        assert ended.emitted == (len(found),) * 2
        assert ended.dropped == (len(captured[number]) - len(found) + given_up[number],) * 2
        assert ended.last_seq == (seqs[-1] if seqs else 0)
        assert ended.last_pos == (found[-1] if found else -1)
        # Nothing was lost: no number is missing; and the other way round.
        assert (ended.seq == len(blocks) + 1) is (ended.dropped[0] == 0)
        if policy is BLOCK:
            assert ended.dropped[0] == given_up[number]
        dropped += ended.dropped[0]
    assert lost == 2 * dropped
