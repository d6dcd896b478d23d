"""What counts from the end: the row is picked by the last length, whoever learns it first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.undercurrent.capture.tracker_sim import point
from undercurrent.capture import frames
from undercurrent.capture.holding import Holding
from undercurrent.capture.lengths import LengthTable
from undercurrent.capture.plan import Batch
from undercurrent.capture.points import Order
from undercurrent.capture.ring import Ring
from undercurrent.capture.tracker import Tracker
from undercurrent.spec import parse_position

SLACK = 6


class Late:
    """One request of an engine that runs ahead of who confirms its length."""

    def __init__(self, selector, prompt_len, *, cached=0, slack=SLACK, layers=(1,), ring_bytes=1 << 16):
        made = point("tail", selector, layers=layers)
        self.point = replace(made, tail=replace(made.tail, slack=slack))
        self.width = 2 * len(layers)
        self.buffer = np.zeros((64, self.point.group.row_bytes), np.uint8)
        self.ring = Ring.create(ring_bytes, slots=8)
        self.table = LengthTable(self.ring.lengths)
        self.tracker = Tracker([self.point], {self.point.group: self.buffer}, self.ring.writer(), check_plans=True)
        self.reader, self.holding = self.ring.reader(), Holding(self.ring.lengths, max_bytes=1 << 20)
        self.slot = self.table.take(1)
        self.computed, self.steps, self.out = cached, 0, []
        order = Order(request_id="r", attempt=1, points=("tail",), partition=0, slot=self.slot)
        self.tracker.open("r", order, index=0, prompt_len=prompt_len, cached_prefix=cached)

    def compute(self, count, *, stale=(), token_from=1000):
        self.steps += 1
        positions = np.arange(self.computed, self.computed + count)
        self.buffer[:count] = positions.astype("<f4").repeat(self.width).view(np.uint8).reshape(count, -1)
        arrays = ([self.computed], [0, count], positions + token_from)
        self.tracker.step(Batch(self.steps, count, ["r"], *(np.array(a, np.int32) for a in arrays)), stale)
        self.computed += count

    def read(self):
        for content in self.holding.read(self.reader):
            if isinstance(content, frames.Step):
                for _, positions, token_ids, data in content.segments():
                    found = np.frombuffer(positions, "<i4").tolist()
                    assert np.frombuffer(token_ids, "<i4").tolist() == [p + 1000 for p in found]
                    assert np.frombuffer(data, "<f4").tolist() == [float(p) for p in found for _ in range(self.width)]
                    self.out += found
            elif not isinstance(content, frames.Open):
                self.out.append(content)
        self.reader.release()


@given(
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(1, 9),
    st.integers(0, SLACK - 1),
    st.sampled_from(["generated[-1]", "generated[-3]", "generated[-1]-3", "generated[-4]+2"]),
    st.booleans(),
    st.data(),
)
@settings(deadline=None, max_examples=150)
def test_the_row_is_the_one_that_the_final_length_names(prompt_len, cached, generated, ahead, selector, told, data):
    cached = min(cached, prompt_len - 1)
    engine = Late(selector, prompt_len, cached=cached)
    try:
        final = prompt_len + generated
        engine.compute(prompt_len - cached)
        while engine.computed < final - 1 + ahead:
            engine.table.tell(engine.slot, 0, min(final, max(0, engine.computed - data.draw(st.integers(0, 4)))))
            engine.compute(1)
            if data.draw(st.booleans()):
                engine.read()
        if told:
            engine.table.tell(engine.slot, 0, final, final=True)
        else:
            engine.table.tell(engine.slot, 0, final - min(ahead, 1))
        engine.tracker.close("r")
        engine.read()
        engine.table.tell(engine.slot, 0, final, final=True)
        engine.read()
        named = parse_position(selector).resolve_absolute(prompt_len, generated - 1) if generated > 1 else None
        expected = [] if named is None or named < cached else [named]
        *rows, closed = engine.out
        assert rows == expected
        assert (closed.emitted, closed.dropped, closed.reason) == (len(expected), 0, "finished")
        assert closed.last_pos == (expected[0] if expected else -1)
    finally:
        engine.ring.close()


def test_one_frame_leaves_where_nobody_confirms_and_one_row_is_in_it():
    engine = Late("generated[-2]", 3)
    try:
        engine.tracker.close("r")
        order = Order(request_id="s", attempt=1, points=("tail",), partition=0)
        engine.tracker.open("r", order, index=0, prompt_len=3, cached_prefix=0)
        engine.compute(3)
        for _ in range(40):
            engine.compute(1)
        engine.tracker.close("r")
        engine.read()
        assert [x for x in engine.out if isinstance(x, int)] == [41]
    finally:
        engine.ring.close()


def test_an_engine_that_is_too_far_ahead_loses_the_row_and_says_so():
    engine = Late("generated[-1]", 2, slack=2)
    try:
        engine.compute(2)
        for _ in range(12):
            engine.compute(1)
        engine.table.tell(engine.slot, 0, 5)
        engine.tracker.close("r")
        engine.table.tell(engine.slot, 0, 6, final=True)
        engine.read()
        drop, closed = engine.out
        assert drop.reason == "unconfirmed"
        assert [(x.first_pos, x.last_pos, x.rows) for x in drop.losses] == [(4, 4, 1)]
        assert (closed.emitted, closed.dropped) == (0, 1)
    finally:
        engine.ring.close()


def test_a_row_that_an_engine_has_overwritten_before_it_went_back_is_overrun_and_no_stale_tap():
    engine = Late("generated[-3]", 2, slack=2)
    try:
        engine.compute(2)
        for _ in range(12):
            engine.compute(1)
        # What it had computed from 6 on is void: other tokens come there. Row 3 went for one of those.
        engine.computed = 6
        engine.compute(1, token_from=2000)
        engine.table.tell(engine.slot, 0, 7, final=True)
        engine.tracker.close("r")
        engine.read()
        *rest, closed = engine.out
        drops = [found for found in rest if isinstance(found, frames.Drop)]
        assert [(d.reason, d.losses[0].first_pos, d.losses[0].last_pos) for d in drops] == [("overrun", 3, 3)]
        assert (closed.emitted, closed.dropped) == (0, 1)
    finally:
        engine.ring.close()


@pytest.mark.parametrize("stale_step", [3, 4])
def test_a_row_whose_tap_did_not_run_is_not_kept(stale_step):
    engine = Late("generated[-1]", 2)
    try:
        engine.compute(2)
        for step in range(2, 5):
            engine.compute(1, stale=(engine.point.group,) if step == stale_step else ())
        engine.table.tell(engine.slot, 0, 6, final=True)
        engine.tracker.close("r")
        engine.read()
        *rest, closed = engine.out
        if stale_step == 4:
            assert [(d.reason, d.losses[0].first_pos) for d in rest] == [("stale_tap", 4)]
            assert (closed.emitted, closed.dropped) == (0, 1)
        else:
            assert rest == [4]
    finally:
        engine.ring.close()


@pytest.mark.parametrize("final", [5, 6, 7, 8])
@pytest.mark.parametrize("stale_step", range(2, 8))
def test_only_the_row_that_is_meant_can_be_lost_of_those_that_were_kept(final, stale_step):
    """The engine is ahead: when it ends the request, nobody has said yet which of its last rows it is."""
    engine = Late("generated[-1]", 2)
    try:
        engine.compute(2)
        for step in range(2, 8):
            engine.compute(1, stale=(engine.point.group,) if step == stale_step else ())
        engine.table.tell(engine.slot, 0, 4)
        engine.tracker.close("r")
        engine.read()
        engine.table.tell(engine.slot, 0, final, final=True)
        engine.read()
        *rest, closed = engine.out
        named = final - 2
        if stale_step == named:
            assert [(d.reason, [(x.first_pos, x.rows, x.messages) for x in d.losses]) for d in rest] == [
                ("stale_tap", [(named, 1, 1)])
            ]
        else:
            assert rest == [named]
        assert (closed.emitted, closed.dropped) == ((0, 1) if stale_step == named else (1, 0))
        assert engine.holding.past_end == 0
    finally:
        engine.ring.close()


def test_one_row_is_lost_where_none_of_those_that_may_be_meant_can_wait():
    engine = Late("generated[-1]", 2)
    engine.holding = Holding(engine.ring.lengths, max_bytes=0)
    try:
        engine.compute(2)
        for _ in range(6):
            engine.compute(1)
        engine.table.tell(engine.slot, 0, 4)
        engine.tracker.close("r")
        engine.read()
        assert engine.out == []
        engine.table.tell(engine.slot, 0, 6, final=True)
        engine.read()
        drop, closed = engine.out
        assert [(x.first_pos, x.last_pos, x.rows, x.messages) for x in drop.losses] == [(4, 4, 1, 1)]
        assert (closed.emitted, closed.dropped) == (0, 1)
    finally:
        engine.ring.close()


def test_another_lost_row_does_not_pass_for_the_one_that_is_meant():
    engine = Late("generated[-1]", 2, slack=2)
    try:
        engine.compute(2)
        for step in range(2, 14):
            engine.compute(1, stale=(engine.point.group,) if step == 12 else ())
        engine.table.tell(engine.slot, 0, 5)
        engine.tracker.close("r")
        engine.table.tell(engine.slot, 0, 6, final=True)
        engine.read()
        drop, closed = engine.out
        assert [(x.first_pos, x.last_pos, x.rows) for x in drop.losses] == [(4, 4, 1)]
        assert (closed.emitted, closed.dropped) == (0, 1)
    finally:
        engine.ring.close()


def test_a_stream_that_ends_with_an_error_has_no_last_row():
    engine = Late("generated[-1]", 2)
    try:
        engine.compute(2)
        engine.compute(1)
        engine.tracker.fail(["r"], "because")
        engine.table.tell(engine.slot, 0, 4, final=True)
        engine.read()
        assert [type(x).__name__ for x in engine.out] == ["Close"]
    finally:
        engine.ring.close()


def test_places_are_given_back_and_hold_nothing_of_who_was_there():
    engine = Late("generated[-1]-2", 2)
    try:
        for attempt in range(2, 40):
            engine.compute(2)
            engine.compute(1)
            engine.tracker.close("r")
            order = Order(request_id="r", attempt=attempt, points=("tail",), partition=0)
            engine.computed = 0
            engine.tracker.open("r", order, index=0, prompt_len=2, cached_prefix=0)
        assert len(engine.tracker._tails._rows["tail"].rows) == 4 * engine.point.tail.depth
    finally:
        engine.ring.close()


def test_more_rows_than_a_frame_holds_come_in_several_and_one_is_picked():
    engine = Late("generated[-1]", 2, slack=30, layers=(0, 1, 2, 3), ring_bytes=4096)
    try:
        engine.tracker._tails._max_rows = {"tail": 7}
        engine.compute(2)
        engine.table.tell(engine.slot, 0, 3)
        for _ in range(20):
            engine.compute(1)
        engine.tracker.close("r")
        engine.read()
        assert engine.out == []
        engine.table.tell(engine.slot, 0, 12, final=True)
        engine.read()
        *rows, closed = engine.out
        assert rows == [10]
        assert (closed.emitted, closed.dropped, closed.last_pos) == (1, 0, 10)
    finally:
        engine.ring.close()
