"""Stop tokens: seen in every step of a steady decode too, and forgotten with the tokens that a rewind takes back."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.undercurrent.capture.tracker_sim import Sim, decode_jobs, point
from undercurrent.capture.plan import Batch
from undercurrent.capture.points import Order, tap_groups
from undercurrent.capture.ring import Ring
from undercurrent.capture.tracker import Tracker
from undercurrent.testing.ring_log import RingLog

POINTS = ("until", "until_strided", "until_prompt", "strided", "end", "five")


@pytest.mark.parametrize("check_plans", [False, True])
@pytest.mark.parametrize("points", [POINTS, ("until",), ("until_strided", "all"), ("end",), ("before_end", "all")])
def test_a_steady_decode_sees_each_ones_stop_token_and_keeps_each_ones_last_rows(points, check_plans):
    jobs = decode_jobs(4, total=60, points=points)
    sim = Sim(jobs, check_plans=check_plans)
    try:
        sim.step({job.name: 2 for job in jobs})
        for _ in range(50):
            sim.step({job.name: 1 for job in jobs})
        for job in jobs:
            sim.tracker.close(job.name)
        sim.read()
        sim.check(lossless=True)
        rows = [len(sim.got[s]) for s, o in sim.opened.items() if o.point in {"until", "until_strided"}]
        assert not rows or min(rows) < 10, "no stop token was met"
    finally:
        sim.close()


def test_a_stop_token_that_is_taken_back_ends_nothing():
    made = point("until", "generated[*]", layers=(1,), until={"stop_token": 3})
    [group] = tap_groups([made])
    buffer, ring = np.zeros((16, group.row_bytes), np.uint8), Ring.create(1 << 16)
    try:
        tracker, log = Tracker([made], {group: buffer}, ring.writer(), check_plans=True), RingLog(ring.reader())

        def compute(step, start, token_ids):
            arrays = ([start], [0, len(token_ids)], token_ids)
            tracker.step(Batch(step, len(token_ids), ["r"], *(np.array(a, np.int32) for a in arrays)))

        order = Order(request_id="r", attempt=1, points=("until",), partition=0)
        tracker.open("r", order, index=0, prompt_len=2, cached_prefix=0)
        compute(1, 0, [7, 7])
        for step, token_id in enumerate([5, 6, 3, 8, 9], 2):
            compute(step, step, [token_id])
        log.read()
        assert log.streams["r", 0, "until"].positions == [2, 3, 4]
        compute(7, 3, [1, 2, 4])
        for step, token_id in enumerate([5, 3, 6], 8):
            compute(step, step - 2, [token_id])
        tracker.close("r")
        log.read()
        stream = log.streams["r", 0, "until"]
        assert stream.positions == [2, 3, 4, 5, 6, 7]
        assert stream.token_ids == [5, 1, 2, 4, 5, 3]
        assert [rewind.first_pos for rewind in stream.rewinds] == [3]
    finally:
        ring.close()
