"""The tracker against a plain oracle: every wanted position of every request exactly once, with the right row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.undercurrent.capture.tracker_sim import (
    MAX_ROWS,
    POINTS,
    Job,
    Sim,
    decode_jobs,
    point,
)
from undercurrent.capture import frames
from undercurrent.capture.plan import Batch
from undercurrent.capture.points import CapturePoint, Order
from undercurrent.capture.ring import Ring
from undercurrent.capture.tracker import Tracker
from undercurrent.errors import CaptureError
from undercurrent.spec import ExtractionPoint


@st.composite
def jobs(draw):
    out = []
    for number in range(draw(st.integers(1, 5))):
        prompt_len = draw(st.integers(1, 20))
        out.append(
            Job(
                name=f"job{number}",
                prompt_len=prompt_len,
                total=prompt_len + draw(st.integers(0, 14)),
                cached=draw(st.integers(0, prompt_len - 1)),
                points=tuple(draw(st.permutations([p.name for p in POINTS]))[: draw(st.integers(0, len(POINTS)))]),
            )
        )
    return out


def draw_drafts(data, counts):
    """Draw how many rows of rejected drafts each request has, None for a step without speculation."""
    if data.draw(st.integers(0, 3), label="speculates"):
        return None
    room = (MAX_ROWS - sum(counts.values())) // len(counts)
    return {name: data.draw(st.integers(0, min(4, room)), label="rejected") for name in counts}


def run(sim, data, *, drain):
    """Drive the simulation with drawn chunk sizes, absences, preemptions and slot orders until every job is done."""
    running = {job.name: job for job in sim.jobs}
    order = []
    for _ in range(400):
        if not running:
            break
        order = [n for n in order if n in running] + [n for n in running if n not in order]
        if data.draw(st.integers(0, 7), label="event") == 0:
            order = data.draw(st.permutations(order), label="order")
            victim = running[order[0]]
            if data.draw(st.booleans(), label="preempt") and victim.opened:
                victim.computed = 0
        absent = data.draw(st.integers(0, 9), label="absent")
        counts, budget = {}, MAX_ROWS
        for place, name in enumerate(order):
            job = running[name]
            left = min(job.known - job.computed, budget)
            if left > 0 and not (place == absent and len(order) > 1):
                counts[name] = left if left == 1 else data.draw(st.integers(1, left), label="chunk")
                budget -= counts[name]
        if counts:
            sim.step(counts, drafts=draw_drafts(data, counts))
        for name, job in list(running.items()):
            if job.computed >= job.total:
                sim.tracker.close(name)
                del running[name]
        if drain == "always" or (drain == "sometimes" and data.draw(st.integers(0, 5), label="read") == 0):
            sim.read()
    assert not running
    for _ in range(50):
        sim.read()
        sim.tracker.step(Batch(sim.steps, 0, [], np.zeros(0, np.int32), np.zeros(1, np.int32), np.zeros(0, np.int32)))


@given(jobs(), st.data(), st.booleans())
@settings(deadline=None, max_examples=200)
def test_every_wanted_position_comes_exactly_once_with_its_row(jobs, data, machine_code):
    sim = Sim(jobs, machine_code=machine_code)
    try:
        run(sim, data, drain="always")
        sim.check(lossless=True)
    finally:
        sim.close()


@given(jobs(), st.data(), st.booleans())
@settings(deadline=None, max_examples=150)
def test_what_a_full_ring_loses_is_declared_in_place(jobs, data, machine_code):
    sim = Sim(jobs, ring_bytes=4096, machine_code=machine_code)
    try:
        run(sim, data, drain="sometimes")
        sim.check(lossless=False)
    finally:
        sim.close()


def test_a_steady_decode_keeps_its_plan_and_gathers_around_uncaptured_requests():
    jobs = [*decode_jobs(3, points=("all",)), Job("plain", 2, 40, 0, ())]
    jobs = [jobs[0], jobs[3], jobs[1], jobs[2]]
    sim = Sim(jobs, check_plans=False, machine_code=False)
    try:
        sim.step({j.name: 2 for j in jobs})
        sim.step({j.name: 1 for j in jobs})
        plan = sim.tracker._plan
        for _ in range(20):
            sim.step({j.name: 1 for j in jobs})
        assert sim.tracker._plan is plan
        assert plan.lanes[0].first == -1
        for job in jobs:
            sim.tracker.close(job.name)
        sim.read()
        sim.check(lossless=True)
        assert sim.ring.stats().steps == 22
    finally:
        sim.close()


def test_a_batch_that_keeps_more_rows_than_it_has_is_refused():
    sim = Sim(decode_jobs(2))
    try:
        sim.step({"job0": 2, "job1": 2})
        batch = Batch(2, 2, ["job0", "job1"], *(np.array(v, np.int32) for v in ([2, 2], [0, 1, 2], [5, 6])))
        batch.kept = np.array([2, 1], np.int32)
        with pytest.raises(CaptureError, match="keeps more rows"):
            sim.tracker.step(batch)
    finally:
        sim.close()


def test_check_plans_notices_a_plan_that_is_wrong():
    sim = Sim(decode_jobs(2, points=("all",)), machine_code=False)
    try:
        sim.step({"job0": 2, "job1": 2})
        sim.step({"job0": 1, "job1": 1})
        sim.tracker._plan.lanes[0].rows[:] = sim.tracker._plan.lanes[0].rows[::-1].copy()
        with pytest.raises(CaptureError, match="differs"):
            sim.step({"job0": 1, "job1": 1})
    finally:
        sim.close()


def test_a_large_chunk_is_split_into_frames_that_fit():
    jobs = [Job("big", 60, 60, 0, ("all",)), Job("small", 4, 4, 0, ("all",))]
    sim = Sim(jobs, ring_bytes=4096)
    try:
        assert sim.tracker._max_rows["all"] < 64
        sim.step({"big": 60, "small": 4})
        for name in ("big", "small"):
            sim.tracker.close(name)
        sim.read()
        sim.check(lossless=True)
        assert sim.seen.count("step") > 1
    finally:
        sim.close()


def test_stale_taps_are_declared_and_other_points_go_on():
    jobs = decode_jobs(2, points=("all", "norm", "strided"))
    sim = Sim(jobs)
    try:
        sim.step({"job0": 2, "job1": 2}, stale={sim.points["norm"].group})
        sim.step({"job0": 1, "job1": 1})
        for job in jobs:
            sim.tracker.close(job.name)
        sim.read()
        sim.check(lossless=False)
        drops = [c for c in sim.seen if isinstance(c, frames.Drop)]
        assert [(d.reason, [x.rows for x in d.losses]) for d in drops] == [("stale_tap", [2, 2])]
        by_point = {o.point: sim.closed[s] for s, o in sim.opened.items()}
        assert (by_point["norm"].emitted, by_point["norm"].dropped) == (0, 2)
        assert (by_point["all"].emitted, by_point["all"].dropped) == (3, 0)
    finally:
        sim.close()


def test_an_error_ends_these_streams_and_the_others_go_on():
    jobs = decode_jobs(2, points=("all",))
    sim = Sim(jobs)
    try:
        sim.step({"job0": 2, "job1": 2})
        sim.tracker.fail(["job0"], "because " + "x" * 1000)
        sim.step({"job0": 1, "job1": 1})
        sim.tracker.close("job1")
        sim.tracker.close("job0")
        sim.read()
        closed = {sim.opened[s].request_id: c for s, c in sim.closed.items()}
        assert (closed["job0"].reason, closed["job0"].emitted) == ("capture_error", 2)
        assert closed["job0"].detail.startswith("because")
        assert len(closed["job0"].detail) <= 500
        assert (closed["job1"].reason, closed["job1"].emitted) == ("finished", 3)
        assert sim.ring.stats().capture_errors == 1
    finally:
        sim.close()


def broken(target, name, after):
    """Let a method of the tracker's fail at its call after so many."""
    original, calls = getattr(target, name), []

    def fail(*args, **kwargs):
        calls.append(1)
        if len(calls) == after + 1:
            raise ValueError("broken here")
        return original(*args, **kwargs)

    setattr(target, name, fail)


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_request_that_could_not_be_opened_ends_whole_and_another_takes_its_id(calls):
    jobs = decode_jobs(2, points=("all", "end", "strided"))
    sim = Sim(jobs)
    try:
        sim.step({"job0": 2})
        broken(sim.tracker._tails, "open", calls)
        with pytest.raises(ValueError, match="broken here"):
            sim.open(jobs[1])
        assert sim.tracker.captures("job1")
        sim.tracker.fail(["job1"], "broken here")
        assert not sim.tracker.captures("job1")
        sim.open(jobs[1])
        sim.step({"job0": 1, "job1": 2})
        for job in jobs:
            sim.tracker.close(job.name)
        sim.read()
        assert sim.opened.keys() == sim.closed.keys()
        reasons = [sim.closed[s].reason for s, o in sim.opened.items() if o.request_id == "job1"]
        assert reasons == ["capture_error"] * calls + ["finished"] * 3
        assert {sim.closed[s].reason for s, o in sim.opened.items() if o.request_id == "job0"} == {"finished"}
        # Numbers that were used are not used again: a reader knows a stream by its number.
        assert len(set(sim.opened)) == len(sim.opened)
    finally:
        sim.close()


@pytest.mark.parametrize(("what", "calls"), [("reserve", 0), ("reserve", 1), ("put_control", 0), ("put_control", 2)])
def test_a_request_that_could_not_be_closed_says_so_once_per_stream(what, calls):
    jobs = decode_jobs(2, points=("end", "third_last", "all"))
    sim = Sim(jobs)
    try:
        for count in (2, 1, 1, 1, 1):
            sim.step({job.name: count for job in jobs})
        broken(sim.tracker._writer, what, calls)
        with pytest.raises(ValueError, match="broken here"):
            sim.tracker.close("job0")
        sim.tracker.fail(["job0"], "broken here")
        sim.step({"job1": 1})
        sim.tracker.close("job1")
        sim.read()
        assert sim.opened.keys() == sim.closed.keys()
        of = {
            name: [sim.closed[s].reason for s, o in sim.opened.items() if o.request_id == name]
            for name in ("job0", "job1")
        }
        done = calls if what == "put_control" else 0
        assert of["job0"] == ["finished"] * done + ["capture_error"] * (3 - done)
        assert of["job1"] == ["finished"] * 3
    finally:
        sim.close()


def test_the_same_request_is_not_captured_twice_at_once():
    jobs = decode_jobs(1)
    sim = Sim(jobs)
    try:
        sim.open(jobs[0])
        order = Order(request_id="job0", attempt=1, points=("all",), partition=0)
        with pytest.raises(CaptureError, match="same id"):
            sim.tracker.open("other", order, index=0, prompt_len=2, cached_prefix=0)
        sim.tracker.open("other", order, index=1, prompt_len=2, cached_prefix=0)
        sim.tracker.close("job0")
        sim.tracker.open("third", order, index=0, prompt_len=2, cached_prefix=0)
    finally:
        sim.close()


def test_a_row_that_never_fits_is_refused_at_start():
    spec = ExtractionPoint(name="wide", layers=(0,), tensor_type="mlp_out", position="*", execution_mode="async")
    wide = CapturePoint.of(spec, layers=1, width=4096, model_dtype="float32")
    writer = Ring.create(4096).writer()
    with pytest.raises(CaptureError, match="does not fit the ring"):
        Tracker((wide,), {}, writer)


def test_points_come_and_go_between_steps_and_open_streams_keep_theirs():
    ring = Ring.create(1 << 16)
    kept, new = point("kept"), point("new")
    buffers = {kept.group: np.zeros((8, kept.row_bytes), np.uint8)}
    tracker = Tracker([kept], buffers, ring.writer())
    tracker.open(
        "e1", Order(request_id="r1", attempt=1, points=("kept",), partition=0), index=0, prompt_len=1, cached_prefix=0
    )
    with pytest.raises(CaptureError, match="cannot go: kept"):
        tracker.set_points([new], buffers)
    assert [used.name for used in tracker.used_points] == ["kept"]
    tracker.set_points([new, kept], buffers)
    tracker.open(
        "e2", Order(request_id="r2", attempt=1, points=("new",), partition=0), index=0, prompt_len=1, cached_prefix=0
    )
    ids, computed = ["e1", "e2"], np.zeros(2, np.int32)
    tracker.step(Batch(1, 2, ids, computed, np.array([0, 1, 2], np.int32), np.array([7, 8], np.int32)))
    rows = [frames.decode(frame) for frame in ring.reader().read()]
    assert sorted(step.table() for step in rows if isinstance(step, frames.Step)) == [((1,), (1,)), ((2,), (1,))]
    tracker.close("e1")
    tracker.set_points([new], buffers)
    assert [used.name for used in tracker.used_points] == ["new"]
