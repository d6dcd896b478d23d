"""Nobody reads the ring: memory stays bounded, what ends is said as soon as there is room, though no step comes."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from undercurrent.capture.frames import Close, Fault, Open, decode
from undercurrent.capture.idle import IdleWriter
from undercurrent.capture.points import CapturePoint, Order
from undercurrent.capture.ring import Ring
from undercurrent.capture.room import MAX_WAITING_BYTES
from undercurrent.capture.tracker import Tracker
from undercurrent.errors import CaptureError
from undercurrent.spec import parse_dict
from undercurrent.testing.waiting import wait_until


@pytest.fixture
def ring():
    return Ring.create(4096)


@pytest.fixture
def tracker(ring):
    values = {"name": "p", "layers": [0], "tensor_type": "residual_stream", "position": "*"}
    spec = parse_dict({"version": 1, "extraction_points": [{**values, "execution_mode": "async", "queue_depth": 64}]})
    point = CapturePoint.of(spec.extraction_points[0], layers=1, width=2, model_dtype="float32")
    made = Tracker([point], {point.group: np.zeros((8, point.row_bytes), np.uint8)}, ring.writer())
    made.writer_for_test = made._writer
    return made


def order(name):
    return Order(request_id=name, attempt=1, points=("p",), partition=0)


def run(tracker, name):
    tracker.open(name, order(name), index=0, prompt_len=1, cached_prefix=0)
    tracker.close(name)


def test_ends_that_found_no_room_come_out_though_the_engine_is_idle(ring, tracker):
    idle = IdleWriter(tracker.writer_for_test)
    for number in range(50):
        idle.guarded(lambda name: run(tracker, name))(f"r{number}")
    assert tracker.writer_for_test.waiting_bytes > 0
    reader, found = ring.reader(), []

    def read():
        found.extend(decode(frame) for frame in reader.read())
        reader.release()
        return sum(isinstance(content, Close) for content in found) == 50

    # No step from here on.
    wait_until(read, 20, "fifty ends")
    assert [c.stream for c in found if isinstance(c, Open)] == list(range(1, 51))
    assert tracker.writer_for_test.waiting_bytes == 0
    wait_until(lambda: "undercurrent ends" not in {t.name for t in threading.enumerate()}, 10, "the thread's end")


def test_what_waits_for_a_reader_is_bounded_and_capture_goes_on_when_it_is_back(ring, tracker):
    opened = 0
    while tracker.writer_for_test.waiting_bytes <= MAX_WAITING_BYTES:
        run(tracker, f"r{opened}")
        opened += 1
    with pytest.raises(CaptureError, match="nobody has read"):
        run(tracker, "one more")
    told = sum(tracker.fault("bad_order", "x" * 400) for _ in range(20_000))
    assert 0 < told < 20_000
    assert tracker.writer_for_test.waiting_bytes < MAX_WAITING_BYTES + (2 << 20)
    assert ring.stats().capture_errors == 20_000, "each is counted"
    reader, kinds = ring.reader(), {Open: 0, Close: 0, Fault: 0}
    while ring.stats().pending_controls or reader.available_bytes:
        for frame in reader.read():
            kinds[type(decode(frame))] += 1
        reader.release()
        tracker.idle(1)
    assert kinds == {Open: opened, Close: opened, Fault: told}
    run(tracker, "after")
    assert sum(1 for _ in reader.read()) == 2
