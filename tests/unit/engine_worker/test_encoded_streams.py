"""From the rows of a step to what a probe host reads: every encoding and a last row, over everything but Kafka."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from engine_worker.publisher_messages import Identity
from engine_worker.publisher_streams import StreamWriter
from undercurrent.capture.holding import Holding
from undercurrent.capture.lengths import LengthTable
from undercurrent.capture.plan import Batch
from undercurrent.capture.points import CapturePoint, Order
from undercurrent.capture.ring import Ring
from undercurrent.capture.tracker import Tracker
from undercurrent.codec import Codec, as_array, positions
from undercurrent.codec.blocks import RECORD_OVERHEAD_BYTES
from undercurrent.protocol.messages import ActivationBlock, StreamEnded, StreamStarted
from undercurrent.spec import ExtractionPoint

LAYERS, WIDTH, PROMPT, ROWS = (0, 2), 64, 5, 12
CODEC = Codec()


@pytest.fixture
def points(tmp_path):
    np.save(tmp_path / "m.npy", np.eye(WIDTH, 3, dtype=np.float32))
    specs = {
        "model": {},
        "float32": {"dtype": "float32"},
        "float16": {"dtype": "float16"},
        "int8": {"dtype": "int8"},
        "reduced": {"reduce": {"project": str(tmp_path / "m.npy")}},
        "last": {"position": "generated[-1]", "dtype": "int8"},
    }
    return [
        CapturePoint.of(
            ExtractionPoint(
                name, LAYERS, "residual_stream", **{"position": "*", **fields}, execution_mode="async"
            ),
            layers=3,
            width=WIDTH,
            model_dtype="bfloat16",
        )
        for name, fields in specs.items()
    ]  # fmt: skip


def published(points, values):
    """Compute rows in a chunk and then one by one, one more than the request has, and return what is published."""
    names = tuple(point.name for point in points)
    [group] = {point.group for point in points}
    buffer = np.zeros((ROWS + 1, group.row_bytes), np.uint8)
    ring = Ring.create(1 << 20, slots=4)
    try:
        tracker = Tracker(points, {group: buffer}, ring.writer(), check_plans=True)
        table, holding, reader = LengthTable(ring.lengths), Holding(ring.lengths, max_bytes=1 << 20), ring.reader()
        order = Order(request_id="r", attempt=1, points=names, partition=0, slot=table.take(1))
        tracker.open("r", order, index=0, prompt_len=PROMPT, cached_prefix=0)
        chunks = [range(PROMPT), *(range(p, p + 1) for p in range(PROMPT, ROWS + 1))]
        for number, span in enumerate(chunks, 1):
            buffer[: len(span)] = values[span.start : span.stop].view(np.uint8).reshape(len(span), -1)
            arrays = ([span.start], [0, len(span)], list(span))
            tracker.step(Batch(number, len(span), ["r"], *(np.array(a, np.int32) for a in arrays)))
        tracker.close("r")
        # The row at ROWS is of a token past the end: its request has ROWS tokens.
        table.tell(order.slot, 0, ROWS, final=True)
        room = RECORD_OVERHEAD_BYTES + 4 * (WIDTH * 4 * len(LAYERS) + 8)
        writer = StreamWriter(
            CODEC,
            Identity(engine="e", incarnation=1, model="m"),
            {name: name for name in names},
            dict.fromkeys(names, room),
        )
        for content in [*holding.read(reader), *holding.read(reader)]:
            writer.take(content, 0)
        found = {name: [] for name in names}
        for where, records in writer.cycle().records.items():
            found[where.topic] += [CODEC.decode(record.value) for record in records]
        return found
    finally:
        ring.close()


def test_what_is_published_is_what_was_computed_in_the_points_own_form(points):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(ROWS + 1, len(LAYERS), WIDTH)).astype(ml_dtypes.bfloat16)
    wide = values.astype(np.float32)
    found = published(points, values)
    for name, messages in found.items():
        started, *blocks, ended = messages
        assert isinstance(started, StreamStarted)
        assert isinstance(ended, StreamEnded)
        assert all(isinstance(block, ActivationBlock) for block in blocks)
        places = np.concatenate([positions(block) for block in blocks]).tolist()
        assert places == ([ROWS - 2] if name == "last" else list(range(ROWS))), name
        assert (ended.emitted, ended.dropped) == ((len(places),) * 2, (0, 0)), name
        assert {(block.dtype, block.width) for block in blocks} == {(started.dtype, started.width)}
        got = np.concatenate([as_array(block) for block in blocks])
        exact = wide[places]
        match name:
            case "model":
                assert (started.dtype, got.dtype) == ("bfloat16", values.dtype)
                assert np.array_equal(got, values[places])
            case "float32" | "float16":
                assert started.dtype == name
                assert np.abs(got - exact).max() < 1e-6
            case "reduced":
                assert (started.dtype, started.width) == ("float32", 3)
                assert np.array_equal(got, exact[..., :3])
            case "int8" | "last":
                assert (started.dtype, got.dtype) == ("int8", np.float32)
                steps = np.abs(exact).max(axis=2, keepdims=True) / 127
                assert (np.abs(got - exact) <= steps * 0.501).all()
