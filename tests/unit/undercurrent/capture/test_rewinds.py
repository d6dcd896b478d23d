"""What is computed again: skipped where it is the same, taken back and given anew where it is not; other weights."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

from tests.unit.undercurrent.capture.tracker_sim import MAX_ROWS, POINTS
from undercurrent.capture.plan import Batch
from undercurrent.capture.points import Order, tap_groups
from undercurrent.capture.ring import Ring
from undercurrent.capture.tracker import Tracker
from undercurrent.testing.ring_log import RingLog


def feed(tracker, step, computed, tokens, name="one"):
    """Run one step of a single request, its tokens at the positions from `computed` on."""
    count = len(tokens)
    arrays = [np.array(values, np.int32) for values in ([computed], [0, count], tokens)]
    tracker.step(Batch(step, count, [name], *arrays))


@contextmanager
def one_request(points=("all",), prompt_ids=()):
    """A tracker with one open request of four prompt tokens, and what its ring says."""
    ring = Ring.create(1 << 20)
    log = RingLog(ring.reader())
    buffers = {g: np.zeros((MAX_ROWS, g.row_bytes), np.uint8) for g in tap_groups(POINTS)}
    tracker = Tracker(POINTS, buffers, ring.writer(), check_plans=True)
    order = Order(request_id="one", attempt=1, points=points, partition=0)
    tracker.open("one", order, index=0, prompt_len=4, cached_prefix=0, prompt_ids=prompt_ids)
    try:
        yield tracker, log
    finally:
        tracker = None
        ring.close()


@pytest.mark.parametrize("steps", [1, 5, 70])
def test_the_same_tokens_computed_again_are_skipped(steps):
    with one_request() as (tracker, log):
        feed(tracker, 1, 0, [1, 2, 3, 4])
        for step in range(steps):
            feed(tracker, 2 + step, 4 + step, [10 + step])
        feed(tracker, 100, 0, [1, 2, 3, 4, *range(10, 10 + steps)][:MAX_ROWS])
        feed(tracker, 101, 4 + steps, [7])
        tracker.close("one")
        log.read()
        stream = log.streams["one", 0, "all"]
        assert stream.positions == list(range(5 + steps))
        assert stream.rewinds == []


@pytest.mark.parametrize("steps", [1, 5, 70])
@pytest.mark.parametrize("back", [1, 0])
def test_other_tokens_computed_again_take_the_rows_back_and_give_them_anew(steps, back):
    """A step after another prefix of the same positions: nothing of the old one may be left behind the new one."""
    with one_request(("all", "last", "shared")) as (tracker, log):
        feed(tracker, 1, 0, [1, 2, 3, 4])
        for step in range(steps):
            feed(tracker, 2 + step, 4 + step, [10 + step])
        where = 3 + steps - back
        feed(tracker, 100, where, [999])
        feed(tracker, 101, where + 1, [998])
        tracker.close("one")
        log.read()
        stream = log.streams["one", 0, "all"]
        assert [r.first_pos for r in stream.rewinds] == [where]
        assert stream.positions == list(range(where + 2))
        assert stream.token_ids[-2:] == [999, 998]
        assert stream.closed.last_pos == where + 1
        # The last prompt position was taken back only where the rewind reaches it.
        last = log.streams["one", 0, "last"]
        assert [r.first_pos for r in last.rewinds] == ([3] if where == 3 else [])
        assert last.positions == [3]


def test_a_part_computed_again_and_then_more_is_compared_where_it_overlaps():
    with one_request() as (tracker, log):
        feed(tracker, 1, 0, [1, 2, 3, 4])
        feed(tracker, 2, 2, [3, 4, 5, 6])
        feed(tracker, 3, 4, [5, 7, 8])
        tracker.close("one")
        log.read()
        stream = log.streams["one", 0, "all"]
        assert (stream.positions, stream.token_ids) == (list(range(7)), [1, 2, 3, 4, 5, 7, 8])
        assert [r.first_pos for r in stream.rewinds] == [5]


def test_positions_that_came_from_elsewhere_come_in_order_once_they_are_computed():
    with one_request() as (tracker, log):
        feed(tracker, 1, 0, [1, 2])
        feed(tracker, 2, 4, [5])  # 2 and 3 were computed somewhere else
        feed(tracker, 3, 0, [1, 2, 8, 9, 5])
        tracker.close("one")
        log.read()
        stream = log.streams["one", 0, "all"]
        assert stream.positions == [0, 1, 2, 3, 4]
        assert [r.first_pos for r in stream.rewinds] == [2]


def test_positions_that_came_from_elsewhere_are_declared_lost():
    """A request that was preempted in its prompt, and finds more of it in the prefix cache than it had computed."""
    with one_request(("all", "last", "norm", "until_prompt", "shared", "coded")) as (tracker, log):
        feed(tracker, 1, 0, [1])
        feed(tracker, 2, 3, [4])
        for step in range(70):
            feed(tracker, 3 + step, 4 + step, [10 + step])
        tracker.close("one")
        log.read()
        for name, positions, lost in (
            ("all", [0, *range(3, 74)], [(1, 2, 2)]),
            ("last", [3], []),
            ("norm", [0, 3], [(1, 2, 2)]),
            ("until_prompt", [3], [(1, 2, 2)]),
            ("shared", list(range(4, 74)), []),
            ("coded", [0, *range(3, 74)], [(1, 2, 2)]),
        ):
            stream = log.streams["one", 0, name]
            assert stream.positions == positions
            assert [(loss.first_pos, loss.last_pos, loss.rows) for loss in stream.losses] == lost
            assert (stream.closed.emitted, stream.closed.dropped) == (len(positions), sum(rows for *_, rows in lost))
            assert stream.rewinds == []


def test_a_stop_token_among_positions_that_came_from_elsewhere_ends_the_stream():
    """The token 14 ends `until_strided`, which wants positions 0, 3, 6 and so on; 0 ends `until_prompt`."""
    with one_request(("all", "until_strided", "until_prompt"), prompt_ids=[1, 0, 14, 4]) as (tracker, log):
        feed(tracker, 1, 0, [1])
        feed(tracker, 2, 3, [4])
        feed(tracker, 3, 4, [10])
        tracker.close("one")
        log.read()
        for name, positions, lost in (
            ("all", [0, 3, 4], [(1, 2, 2)]),
            ("until_strided", [0], []),
            ("until_prompt", [], [(1, 1, 1)]),
        ):
            stream = log.streams["one", 0, name]
            assert (name, stream.positions) == (name, positions)
            assert [(loss.first_pos, loss.last_pos, loss.rows) for loss in stream.losses] == lost


def test_other_weights_end_every_stream():
    with one_request(("all", "norm")) as (tracker, log):
        feed(tracker, 1, 0, [1, 2, 3, 4])
        tracker.supersede("weights changed")
        feed(tracker, 2, 4, [5])
        tracker.close("one")
        log.read()
        for name in ("all", "norm"):
            closed = log.streams["one", 0, name].closed
            assert (closed.reason, closed.detail, closed.last_pos) == ("superseded", "weights changed", 3)
