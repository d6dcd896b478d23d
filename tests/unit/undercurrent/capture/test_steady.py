"""The steady step in machine code: it writes what Python would, knows when it must not, and trusts no size."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from tests.unit.undercurrent.capture.tracker_sim import Job, Sim, decode_jobs, point
from undercurrent.capture import steady
from undercurrent.capture.ring import Ring

needs_it = pytest.mark.skipif(not steady.AVAILABLE, reason="there is no C compiler here, so Python writes every step")


def test_it_is_built_where_there_is_a_compiler():
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    assert steady.AVAILABLE or compiler is None or not header.exists(), "build it: make setup"


@needs_it
@pytest.mark.parametrize("jobs", [decode_jobs(3), [*decode_jobs(2), Job("plain", 2, 40, 0, ()), *decode_jobs(4)[3:]]])
def test_it_writes_all_but_the_first_step_of_a_plan(jobs):
    """Contiguous rows and rows with a gap; the values are what the simulation says they are."""
    sim = Sim(jobs)
    try:
        sim.step({job.name: 2 for job in jobs})
        written = 0
        for _ in range(20):
            before = sim.tracker._plan.sent if sim.tracker._plan else 0
            sim.step({job.name: 1 for job in jobs})
            written += sim.tracker._plan.sent > before
            sim.read()
        # The strided point changes its mind in between.
        assert written >= 8
        for job in jobs:
            sim.tracker.close(job.name)
        sim.read()
        sim.check(lossless=True)
    finally:
        sim.close()


@needs_it
def test_a_ring_that_has_no_room_is_left_to_python_and_then_used_again():
    sim = Sim(decode_jobs(2, total=200, points=("all",)), ring_bytes=8192)
    try:
        sim.step({"job0": 2, "job1": 2})
        for _ in range(120):
            sim.step({"job0": 1, "job1": 1})
        assert sim.ring.stats().dropped_rows > 0
        sim.read()
        for _ in range(5):
            sim.step({"job0": 1, "job1": 1})
        assert sim.tracker._plan.sent > 0
        for name in ("job0", "job1"):
            sim.tracker.close(name)
        sim.read()
        sim.check(lossless=False)
    finally:
        sim.close()


@needs_it
@pytest.mark.parametrize(
    "wrong",
    [
        {"starts": b"1234"},
        {"computed": b""},
        {"rows": 3},
        {"rows": 2**40},
        {"lane": {"row_bytes": 1 << 40}},
        {"lane": {"row_bytes": 0}},
        {"lane": {"count": 0}},
        {"lane": {"count": 1 << 33}},
        {"lane": {"first": 1}},
        {"lane": {"first": -1}},
        {"lane": {"positions_at": 1000}},
        {"lane": {"positions_at": -8}},
        {"lane": {"rows": np.array([0, 2], np.int64)}},
        {"lane": {"rows": np.array([0, -1], np.int64)}},
        {"lane": {"rows": np.array([0], np.int64)}},
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(wrong):
    lane = {"head": bytearray(100), "source": bytes(32), "rows": None, "first": 0, "count": 2, "row_bytes": 16,
            "positions_at": 60, "tokens_at": 70}  # fmt: skip
    lane |= wrong.pop("lane", {})
    lane["tokens_at"] = lane["positions_at"] + 8
    ring = Ring.create(1 << 16)
    try:
        values = {"starts": bytes(12), "computed": bytes(8), "rows": 2, **wrong}
        with pytest.raises((ValueError, OverflowError)):
            steady._STEADY(
                ring.words, ring.data, 64, ["a", "b"], values["starts"], values["computed"], values["rows"], 64, [],
                (tuple(lane.values()),),
            )  # fmt: skip
    finally:
        ring.close()


@needs_it
def test_arrays_that_are_too_short_or_of_other_requests_are_not_written():
    sim = Sim([Job("one", 2, 40, 0, ("all",))], points=(point("all"),))
    try:
        sim.step({"one": 2})
        sim.step({"one": 1})
        plan, ints = sim.tracker._plan, lambda *values: np.array(values, np.int32)
        right = {"ids": ["one"], "computed": ints(3), "starts": ints(0, 1), "tokens": ints(3), "rows": 1}
        changes = (
            {"computed": ints()},
            {"computed": ints(4)},
            {"starts": ints(0)},
            {"starts": ints(0, 2)},
            {"tokens": ints()},
            {"ids": ["other"]},
            {"ids": []},
            {"ids": ("one",)},
            {"rows": 2},
        )

        def run(values):
            where = values["ids"], values["computed"], values["starts"], values["tokens"]
            return plan.steady.run(plan.steps, 9, values["rows"], 1, *where)

        assert [run(right | change) for change in changes] == [-1] * len(changes)
        assert run(right) > 0
    finally:
        sim.close()
