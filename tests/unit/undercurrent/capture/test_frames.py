"""Frames: what is written is what is read; what is broken is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.undercurrent.capture.tracker_sim import POINTS
from undercurrent.capture import frames
from undercurrent.capture.opening import closing, opening, point_text, request_text
from undercurrent.capture.points import Order
from undercurrent.capture.ring import Frame
from undercurrent.capture.table import Column
from undercurrent.errors import RingError

OPEN = frames.Open(
    stream=7,
    request_id="r-1",
    attempt=3,
    index=1,
    point="p",
    partition=2,
    prompt_len=5,
    cached_prefix=4,
    tensor_type="residual_stream",
    layers=(1, 3),
    width=8,
    dtype="float32",
    token_ids=False,
    point_hash="ab",
    tenant="t",
    lora="l",
    opened_at_us=12,
)
CONTROLS = [
    OPEN,
    replace(OPEN, tensor_type="kv", row_shape=(2, 1, 4)),
    frames.Close(stream=7, reason="capture_error", detail="why", last_pos=9, emitted=4, dropped=2, closed_at_us=3),
    frames.Drop(reason="ring_full", losses=(frames.Loss(stream=7, messages=1, rows=2, first_pos=3, last_pos=4),)),
    frames.Fault(kind="bad_order", detail="no", engine_id="e", at_us=1),
]


@pytest.mark.parametrize("content", CONTROLS, ids=lambda c: type(c).__name__)
def test_control_frames_survive_the_way(content):
    kind, payload = frames.encode(content)
    assert frames.decode(Frame(kind, memoryview(payload), 0)) == content


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 70))
def test_a_step_gives_each_stream_its_rows(counts, row_bytes):
    streams = [3 + 2 * i for i in range(len(counts))]
    head, positions_at, tokens_at = frames.step_head(9, streams, counts, row_bytes)
    rows = sum(counts)
    positions, tokens = np.arange(rows, dtype="<i4") + 100, np.arange(rows, dtype="<i4") + 5000
    data = np.random.default_rng(0).integers(0, 255, (rows, row_bytes), dtype=np.uint8)
    head[positions_at : positions_at + 4 * rows] = positions.tobytes()
    head[tokens_at : tokens_at + 4 * rows] = tokens.tobytes()
    step = frames.decode(Frame(frames.FrameKind.STEP, memoryview(bytes(head) + data.tobytes()), 0))
    assert isinstance(step, frames.Step)
    assert (step.plan, step.rows, step.row_bytes, step.data_at) == (9, rows, row_bytes, len(head))
    assert step.table() == (tuple(streams), tuple(counts))
    first = 0
    for (stream, pos, tok, block), expected, count in zip(step.segments(), streams, counts, strict=True):
        part = slice(first, first + count)
        assert stream == expected
        assert pos == positions[part].tobytes()
        assert tok == tokens[part].tobytes()
        assert block == data[part].tobytes()
        first += count


def test_broken_frames_are_refused():
    head, *_ = frames.step_head(1, [1], [2], 16)
    cases = [
        Frame(frames.FrameKind.STEP, memoryview(b"short"), 0),
        Frame(frames.FrameKind.STEP, memoryview(bytes(head) + bytes(31)), 0),
        Frame(frames.FrameKind.OPEN, memoryview(b"{"), 64),
        Frame(frames.FrameKind.CLOSE, memoryview(b'{"stream":1}'), 64),
        Frame(99, memoryview(b""), 64),
    ]
    for frame in cases:
        with pytest.raises(RingError):
            frames.decode(frame)
    wrong = bytearray(bytes(head) + bytes(32))
    wrong[frames.STEP_HEAD.size + 4] = 3
    with pytest.raises(RingError, match="segments"):
        frames.Step(memoryview(wrong)).table()


TEXTS = st.text(max_size=30)


@given(
    TEXTS.filter(bool), st.none() | TEXTS, TEXTS, TEXTS, st.integers(-1, 50), st.integers(0, 9), st.sampled_from(POINTS)
)
def test_what_the_first_and_the_last_frame_say_is_what_was_meant(name, tenant, lora, detail, slot, index, point):
    """They are written by hand, for the sake of the engine's thread; a dataclass says the same."""
    order = Order(
        request_id=name, attempt=1 << 62, points=(point.name, f"{lora}é"), partition=7, tenant=tenant, slot=slot,
        rollouts=6,
    )  # fmt: skip
    stream = Column(point, 4, point_text(point)).open(9, 3, range(5), range(0), -1)
    stream.emitted, stream.last_pos, stream.dropped = 4, 8, 2
    where = {"index": index, "prompt_len": 5, "cached_prefix": 3, "lora": lora, "weights_version": detail}
    kind, payload = opening(stream, request_text(order, **where, now_us=11))
    group = point.group
    assert frames.decode(Frame(kind, memoryview(payload), 0)) == frames.Open(
        stream=9, request_id=name, attempt=1 << 62, point=point.name, partition=7, tensor_type=group.tensor_type,
        layers=group.layers, width=point.width, row_shape=point.row_shape, dtype=point.dtype, token_ids=point.token_ids,
        point_hash=point.point_hash, tenant=tenant, opened_at_us=11, slot=slot + index if slot >= 0 else -1,
        tail=() if point.tail is None else point.tail.place, rollouts=6, points=order.points, **where,
    )  # fmt: skip
    kind, payload = closing(stream, "capture_error", detail, 12)
    assert frames.decode(Frame(kind, memoryview(payload), 0)) == frames.Close(
        stream=9, reason="capture_error", detail=detail, last_pos=8, emitted=4, dropped=2, closed_at_us=12
    )
