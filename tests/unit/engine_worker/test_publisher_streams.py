"""Frames become numbered messages: gaps are exactly the losses, and what is too large is split or declared."""

import numpy as np
import pytest

from engine_worker.publisher_messages import Identity
from engine_worker.publisher_streams import StreamWriter
from undercurrent.capture.frames import STEP_STAMP, Close, Drop, Fault, Loss, Open, Rewind, Step, step_head
from undercurrent.codec import Codec, as_array, positions, token_ids, views
from undercurrent.codec.blocks import RECORD_OVERHEAD_BYTES
from undercurrent.errors import RingError
from undercurrent.protocol.messages import ActivationBlock, EndReason, StreamEnded, StreamInvalidated, StreamStarted

CODEC = Codec()
ROW_BYTES = 2 * 4 * 4  # two layers of width 4 in float32
TOPIC = "t.activations.p"


def writer(max_rows=1000, **options):
    limit = RECORD_OVERHEAD_BYTES + max_rows * (ROW_BYTES + 8)
    return StreamWriter(CODEC, Identity(engine="e", incarnation=5, model="m"), {"p": TOPIC}, {"p": limit}, **options)


def opened(stream, **changes):
    fields = {
        "stream": stream, "request_id": f"r{stream}", "attempt": 2, "index": 0, "point": "p", "partition": stream % 3,
        "prompt_len": 4, "cached_prefix": 0, "tensor_type": "residual_stream", "layers": (1, 3), "width": 4,
        "dtype": "float32", "opened_at_us": 7,
    }  # fmt: skip
    return Open(**{**fields, **changes})


def step(number, rows_of, first=0):
    """A step frame in which each stream has so many rows, at positions from `first` on."""
    streams, counts = list(rows_of), list(rows_of.values())
    head, positions_at, tokens_at = step_head(1, streams, counts, ROW_BYTES)
    STEP_STAMP.pack_into(head, 0, number, 1000 + number)
    where = np.concatenate([np.arange(first, first + n) for n in counts]).astype("<i4")
    head[positions_at : positions_at + 4 * len(where)] = where.tobytes()
    head[tokens_at : tokens_at + 4 * len(where)] = (where + 100).astype("<i4").tobytes()
    data = np.arange(len(where) * ROW_BYTES // 4, dtype="<f4") + 1000 * number
    return Step(memoryview(bytes(head) + data.tobytes())), data.reshape(-1, 2, 4)


def messages(cycle):
    return [(where.number, out.key, CODEC.decode(out.value)) for where, outs in cycle.records.items() for out in outs]


def test_a_stream_is_numbered_without_a_gap_and_bracketed():
    streams = writer()
    first, rows = step(1, {1: 4})
    second, more = step(2, {1: 1}, first=4)
    for content in (opened(1), first, second, Close(stream=1, reason="finished", last_pos=4, closed_at_us=9)):
        streams.take(content, now_us=50)
    cycle = streams.cycle()
    (_, _, started), (_, _, a), (_, _, b), (partition, key, ended) = messages(cycle)
    assert (partition, key) == (1, b"r1")
    assert isinstance(started, StreamStarted)
    assert (started.seq, started.layers, started.prompt_len) == (0, (1, 3), 4)
    assert [a.seq, b.seq, ended.seq, ended.last_seq] == [1, 2, 3, 2]
    assert (positions(a).tolist(), token_ids(b).tolist(), b.step, b.captured_at_us) == ([0, 1, 2, 3], [104], 2, 1002)
    assert as_array(a).tobytes() == rows.tobytes()
    assert as_array(b).tobytes() == more.tobytes()
    assert (ended.emitted, ended.dropped, ended.last_pos) == ((5, 5), (0, 0), 4)
    assert ended.reason is EndReason.FINISHED
    assert cycle.ended == [("r1", 2, 0, "p")]
    assert cycle.captured_at_us == [1001, 1002]
    assert streams.cycle().records == {}


def test_the_shape_of_a_row_travels_with_the_stream_and_with_each_record():
    streams = writer()
    content, rows = step(1, {1: 2})
    streams.take(opened(1, tensor_type="router_topk", row_shape=(2, 2)), now_us=50)
    streams.take(content, now_us=50)
    (_, _, started), (_, _, found) = messages(streams.cycle())
    assert (started.row_shape, started.width, found.row_shape) == ((2, 2), 4, (2, 2))
    tensors = [record.tensor for record in views(found, started.prompt_len)]
    assert np.array_equal(np.stack(tensors), rows.reshape(4, 2, 2))


def test_streams_of_one_step_are_numbered_apart():
    streams = writer()
    shared, rows = step(1, {2: 1, 1: 3})
    for content in (opened(1), opened(2), shared):
        streams.take(content, 0)
    blocks = [m for _, _, m in messages(streams.cycle()) if isinstance(m, ActivationBlock)]
    assert [(m.request_id, m.seq, len(positions(m))) for m in blocks] == [("r1", 1, 3), ("r2", 1, 1)]
    assert as_array(blocks[0]).tobytes() == rows[1:].tobytes()
    assert as_array(blocks[1]).tobytes() == rows[:1].tobytes()


def test_a_declared_loss_leaves_exactly_its_gap():
    streams = writer()
    loss = Loss(stream=1, messages=3, rows=5, first_pos=1, last_pos=5)
    last, _ = step(9, {1: 1}, first=6)
    for content in (
        opened(1),
        step(1, {1: 1})[0],
        Drop(reason="ring_full", losses=(loss,)),
        last,
        Close(stream=1, reason="finished"),
    ):
        streams.take(content, 0)
    cycle = streams.cycle()
    out = [m for _, _, m in messages(cycle)]
    assert [m.seq for m in out] == [0, 1, 5, 6]
    assert (out[-1].emitted, out[-1].dropped, out[-1].last_seq) == ((2, 2), (5, 5), 5)
    assert cycle.counts["p"].dropped == {"ring_full": 10}


def test_a_rewind_takes_a_number_and_later_records_have_the_next_revision():
    streams = writer()
    for content in (
        opened(1, shard=1, shards=2),
        step(1, {1: 3})[0],
        Rewind(stream=1, first_pos=1, rewound_at_us=8),
        step(2, {1: 2}, first=1)[0],
        Close(stream=1, reason="finished"),
    ):
        streams.take(content, 0)
    started, first, invalidated, again, ended = (message for _, _, message in messages(streams.cycle()))
    assert isinstance(invalidated, StreamInvalidated)
    assert (invalidated.seq, invalidated.first_position, invalidated.revision) == (2, 1, 1)
    assert (first.revision, again.revision, again.seq, ended.seq) == (0, 1, 3, 4)
    assert {message.shard for message in (started, first, invalidated, again, ended)} == {1}
    assert started.shards == 2


def test_rings_number_their_streams_apart_and_a_stream_has_ended_when_its_last_shard_has():
    streams = writer()
    streams.take(opened(1, shard=0, shards=2), 0, ring=0)
    streams.take(opened(2, request_id="other"), 0, ring=0)
    streams.take(opened(1, shard=1, shards=2, layers=(5,)), 0, ring=1)
    assert streams.cycle().counts["p"].open_streams == 2
    streams.take(Close(stream=1, reason="finished"), 0, ring=1)
    assert streams.cycle().ended == []
    streams.take(Close(stream=2, reason="finished"), 0, ring=0)
    streams.take(Close(stream=1, reason="finished"), 0, ring=0)
    cycle = streams.cycle()
    assert cycle.ended == [("other", 2, 0, "p"), ("r1", 2, 0, "p")]
    assert cycle.counts["p"].open_streams == 0


def test_a_prefill_above_the_topic_s_limit_is_split_and_each_part_numbered():
    streams = writer(max_rows=10)
    big, rows = step(1, {1: 24})
    for content in (opened(1), big):
        streams.take(content, 0)
    blocks = [m for _, _, m in messages(streams.cycle())][1:]
    assert [(m.seq, positions(m).tolist()[0], len(positions(m))) for m in blocks] == [
        (1, 0, 10),
        (2, 10, 10),
        (3, 20, 4),
    ]
    assert b"".join(as_array(m).tobytes() for m in blocks) == rows.tobytes()
    assert b"".join(token_ids(m).tobytes() for m in blocks) == (np.arange(24) + 100).astype("<i4").tobytes()


def test_a_row_that_no_record_can_hold_is_declared_and_takes_nothing_along():
    streams = writer(max_rows=0)
    for content in (opened(1), step(1, {1: 2})[0], Close(stream=1, reason="finished")):
        streams.take(content, 0)
    cycle = streams.cycle()
    started, ended = [m for _, _, m in messages(cycle)]
    assert isinstance(started, StreamStarted)
    assert isinstance(ended, StreamEnded)
    assert (ended.seq, ended.last_seq, ended.dropped) == (2, 0, (2, 2))
    assert cycle.counts["p"].dropped == {"too_large": 4}


def test_a_point_without_token_ids_sends_none():
    streams = writer()
    for content in (opened(1, token_ids=False), step(1, {1: 2})[0]):
        streams.take(content, 0)
    assert messages(streams.cycle())[1][2].token_ids == b""


def test_open_streams_are_counted_until_they_end():
    streams = writer()
    for content in (opened(1), opened(2), Close(stream=1, reason="finished")):
        streams.take(content, 0)
    assert streams.cycle().counts["p"].open_streams == 1
    assert streams.cycle().counts["p"].open_streams == 1
    streams.take(Close(stream=2, reason="capture_error", detail="why"), 0)
    last = streams.cycle()
    assert last.counts["p"].open_streams == 0
    assert messages(last)[0][2].detail == "why"


def test_a_fault_is_counted_by_kind():
    streams = writer()
    streams.take(Fault(kind="bad_order", detail="not JSON"), 0)
    assert streams.cycle().faults == {"bad_order": 1}


@pytest.mark.parametrize("content", [Close(stream=4, reason="finished"), step(1, {4: 1})[0], opened(1, point="q")])
def test_a_frame_of_something_unknown_is_refused_by_name(content):
    with pytest.raises(RingError, match="never opened"):
        writer().take(content, 0)


def test_a_publisher_that_takes_over_a_ring_leaves_out_what_its_forerunner_opened():
    streams = writer(late=True)
    both, rows = step(1, {1: 1, 2: 1}, first=4)
    lost = Drop(reason="ring_full", losses=(Loss(stream=1, messages=1, rows=1, first_pos=5, last_pos=5),))
    for content in (opened(2), both, lost, Close(stream=1, reason="finished", last_pos=5, closed_at_us=9)):
        streams.take(content, now_us=50)
    cycle = streams.cycle()
    (_, _, started), (_, _, block) = messages(cycle)
    assert (started.request_id, block.request_id) == ("r2", "r2")
    assert as_array(block).tobytes() == rows[1:].tobytes()
    assert cycle.faults == {"orphaned": 3}
    assert cycle.ended == []


def test_streams_whose_engine_is_gone_end_as_lost_where_they_stand():
    streams = writer()
    content, _ = step(1, {1: 3})
    for frame in (opened(1), content):
        streams.take(frame, now_us=50)
    streams.cycle()
    streams.give_up("the engine is gone", now_us=60)
    ((_, _, ended),) = messages(streams.cycle())
    assert (ended.reason, ended.detail, ended.seq, ended.last_seq) == (EndReason.LOST, "the engine is gone", 2, 1)
    assert (ended.last_pos, ended.emitted, ended.ended_at_us) == (2, (3, 3), 60)
    streams.give_up("again", now_us=70)
    assert streams.cycle().records == {}


def test_a_stream_says_which_rollouts_it_begins_under():
    known = [3]
    streams = writer(rollouts=lambda: known[0])
    streams.take(opened(1), now_us=0)
    known[0] = 4
    streams.take(opened(2, rollouts=2), now_us=0)
    streams.take(opened(3), now_us=0)
    assert [item.rollouts for _, _, item in messages(streams.cycle())] == [3, 2, 4]
    plain = writer()
    plain.take(opened(1), now_us=0)
    assert [item.rollouts for _, _, item in messages(plain.cycle())] == [0]


def test_a_stream_says_all_points_of_its_request():
    streams = writer()
    streams.take(opened(1, points=("attn", "residual")), now_us=0)
    streams.take(opened(2), now_us=0)
    assert [item.points for _, _, item in messages(streams.cycle())] == [("attn", "residual"), ()]
