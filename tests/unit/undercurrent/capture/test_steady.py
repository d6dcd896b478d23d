"""The usual step in machine code: it is there, knows when it must not write, tears nothing, and trusts no size."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from tests.unit.undercurrent.capture.tracker_sim import Job, Sim, decode_jobs, point
from undercurrent.capture import steady
from undercurrent.capture.plan import Batch
from undercurrent.capture.points import Order
from undercurrent.capture.ring import Ring
from undercurrent.capture.table import FIELDS
from undercurrent.capture.tracker import Tracker
from undercurrent.errors import CaptureError
from undercurrent.testing.ring_log import RingLog

needs_it = pytest.mark.skipif(not steady.AVAILABLE, reason="there is no C compiler here, so Python writes every step")


def test_it_is_built_where_there_is_a_compiler():
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    assert steady.AVAILABLE or compiler is None or not header.exists(), "build it: make setup"


@needs_it
@pytest.mark.parametrize("jobs", [decode_jobs(3), [*decode_jobs(2), Job("plain", 2, 40, 0, ()), *decode_jobs(4)[3:]]])
def test_it_writes_prompts_and_every_later_step(jobs):
    """Contiguous rows and rows with a gap; the values are what the simulation says they are."""
    sim = Sim(jobs)
    try:
        sim.step({job.name: 2 for job in jobs})
        for _ in range(20):
            sim.step({job.name: 1 for job in jobs})
            sim.read()
        assert sim.tracker._steady.written == 21
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
        before = sim.tracker._steady.written
        sim.read()
        for _ in range(5):
            sim.step({"job0": 1, "job1": 1})
        assert sim.tracker._steady.written > before
        for name in ("job0", "job1"):
            sim.tracker.close(name)
        sim.read()
        sim.check(lossless=False)
    finally:
        sim.close()


@needs_it
@pytest.mark.parametrize("wrong", ["position", "row", "head"])
def test_check_plans_notices_a_frame_that_is_wrong(wrong, monkeypatch):
    sim = Sim(decode_jobs(2, points=("all",)))
    write = sim.tracker._steady.write

    def spoiled(batch, now_us):
        before = sim.tracker._writer.head
        assert write(batch, now_us)
        at = before + 16 + {"head": 16, "position": 40 + 16, "row": 112}[wrong]
        sim.ring.data[at] ^= 1
        return True

    try:
        sim.step({"job0": 2, "job1": 2})
        monkeypatch.setattr(sim.tracker._steady, "write", spoiled)
        with pytest.raises(CaptureError, match="differs"):
            sim.step({"job0": 1, "job1": 1})
    finally:
        sim.close()


def ints(*values):
    return np.array(values, np.int32)


@needs_it
def test_arrays_that_do_not_fit_and_steps_that_it_does_not_know_change_nothing():
    sim = Sim([Job("one", 2, 40, 0, ("all",))], points=(point("all"),))
    try:
        sim.step({"one": 2})
        sim.step({"one": 1})
        stepper, table, log = sim.tracker._steady._stepper, sim.tracker._table, []
        right = {"ids": ["one"], "computed": ints(3), "starts": ints(0, 1), "tokens": ints(3), "rows": 1}
        changes = (
            {"computed": ints()},
            {"computed": ints(4)},
            {"computed": ints(2)},
            {"computed": ints(-3)},
            {"starts": ints(0)},
            {"starts": ints(0, 2)},
            {"starts": ints(1, 1)},
            {"starts": ints(0, -1), "rows": -1},
            {"ids": ["one", "other"], "computed": ints(3, 0), "starts": ints(0, 3, 1)},
            {"tokens": ints()},
            {"ids": ("one",)},
            {"rows": 2},
            {"rows": 2**40},
            # More rows than the buffer has.
            {"starts": ints(0, 65), "tokens": np.zeros(65, np.int32), "rows": 65},
        )

        def run(values):
            where = values["ids"], values["computed"], values["starts"], values["tokens"]
            return stepper.run(9, values["rows"], 1, *where, log, None)

        def state():
            column = table.columns["all"]
            arrays = (table.requests, table.counters, column.cells, column.lane, column.segments)
            return [array.tobytes() for array in arrays], sim.ring.words.tobytes(), list(log)

        before = state()
        assert [run(right | change) for change in changes] == [-1] * len(changes)
        with pytest.raises(TypeError):
            run(right | {"ids": [[]]})
        assert state() == before
        assert run(right) > 0
        assert len(log) == 1
        assert run(right) == -1, "that position was written already"
    finally:
        sim.close()


@needs_it
def test_an_encoder_that_fails_leaves_the_step_unwritten(monkeypatch):
    sim = Sim(decode_jobs(2, points=("all", "coded", "end")))
    try:
        sim.step({"job0": 2, "job1": 2})
        table, log = sim.tracker._table, list(sim.tracker._table.log)

        def broken(index, at, rows):
            raise ValueError("broken here")

        def state():
            arrays = [table.requests, table.counters, *(column.cells for column in table.columns.values())]
            return [array.tobytes() for array in arrays], sim.ring.words.tobytes(), list(table.log)

        before = state()
        monkeypatch.setattr(sim.tracker._steady, "_encode", broken)
        with pytest.raises(ValueError, match="broken here"):
            sim.step({"job0": 1, "job1": 1})
        assert state() == before
        assert len(log) == 1
        monkeypatch.undo()
        for job in sim.jobs:
            sim.tracker.close(job.name)
        sim.read()
        assert {(closed.emitted, closed.dropped) for closed in sim.closed.values()} == {(2, 0), (0, 0)}
    finally:
        sim.close()


def kept(**changed):
    values = {"depth": 2, "positions": np.zeros(4, np.int64), "tokens": np.zeros(4, np.int32)}
    return tuple((values | {"rows": np.zeros((4, 16), np.uint8)} | changed).values())


def column(**changed):
    """A column of two places, and what `changed` says of it."""
    values = {
        "cells": np.zeros((2, FIELDS), np.int64), "lane": np.zeros(2, np.int64), "segments": np.zeros(4, np.uint32),
        "source": np.zeros((4, 16), np.uint8), "row_bytes": 16, "source_bytes": 16, "max_rows": 4, "stop_token": -1,
        "encoded": False, "kept": None,
    }  # fmt: skip
    return tuple((values | changed).values())


@needs_it
@pytest.mark.parametrize(
    "wrong",
    [
        {"cells": np.zeros((1, FIELDS), np.int64)},
        {"cells": np.zeros((2, FIELDS - 1), np.int64)},
        {"lane": np.zeros(1, np.int64)},
        {"segments": np.zeros(3, np.uint32)},
        {"row_bytes": 0},
        {"row_bytes": -1},
        {"row_bytes": 1 << 62},
        {"row_bytes": 1 << 64},
        {"max_rows": 0},
        {"max_rows": 1 << 63},
        {"source_bytes": 0},
        {"source_bytes": 1 << 62},
        {"source_bytes": 8},
        {"kept": kept(depth=0)},
        {"kept": kept(depth=1 << 62)},
        {"kept": kept(tokens=np.zeros(3, np.int32))},
        {"kept": kept(rows=np.zeros((3, 16), np.uint8))},
        {"kept": kept(rows=np.zeros((4, 15), np.uint8))},
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(wrong):
    ring = Ring.create(1 << 16)
    requests, counters = np.zeros((2, 2), np.int64), np.zeros(2, np.int64)
    try:
        stepper = steady._STEPPER(ring.words, ring.data, 64, {}, counters)
        stepper.use(requests, (column(),))
        with pytest.raises((ValueError, OverflowError)):
            stepper.use(requests, (column(), column(**wrong)))
        with pytest.raises(ValueError, match="nobody has said"):
            stepper.run(1, 0, 1, [], ints(), ints(0), ints(), [], None)
        with pytest.raises(ValueError, match="do not fit"):
            steady._STEPPER(ring.words, ring.data, 1 << 20, {}, counters)
        with pytest.raises(ValueError, match="do not fit"):
            steady._STEPPER(ring.words, ring.data, 64, {}, counters[:1])
        stepper.use(requests, (column(),))
        by_id = {"far": 2}
        lost = steady._STEPPER(ring.words, ring.data, 64, by_id, counters)
        lost.use(requests, (column(),))
        with pytest.raises(ValueError, match="does not exist"):
            lost.run(1, 1, 1, ["far"], ints(0), ints(0, 1), ints(5), [], None)
    finally:
        del stepper
        lost = None
        ring.close()


def stepper_of(words, data, *columns):
    """A stepper of one ring that knows a request "a", which has nothing computed yet; its columns want every row.

    What these tests do to machine code that was built before they were written would end the whole run.
    """

    def made(words, data, *columns):
        stepper = steady._STEPPER(words, data, 64, {"a": 0}, np.zeros(2, np.int64))
        cells = np.array([EVERY_ROW] * 2)
        stepper.use(np.array([[0, 1], [0, 0]]), tuple(column(cells=cells, **one) for one in columns))
        return stepper

    spoiled = np.zeros(64, np.int64)
    spoiled[16] = 64  # more was read than was ever written
    done = made(spoiled, np.zeros(4096, np.uint8), {}).run(1, 1, 1, ["a"], ints(0), ints(0, 1), ints(5), [], None)
    assert done == -1, "the machine code is older than its source: make setup"
    return made(words, data, *columns)


EVERY_ROW = [1, 0, 1 << 31, 1, 0, -1, -1, 0, 0, -1]


@needs_it
@pytest.mark.parametrize(
    ("head", "tail"), [(-4096, -4096), (8160, 8160), (8190, 8190), ((1 << 63) - 64,) * 2, (64, 128), (64, -(1 << 63))]
)
def test_a_ring_whose_words_somebody_spoiled_is_not_written(head, tail):
    words, data = np.zeros(64, np.int64), np.zeros(8192, np.uint8)
    words[8], words[16] = head, tail
    done = stepper_of(words, data, {}).run(1, 1, 1, ["a"], ints(0), ints(0, 1), ints(5), [], None)
    assert done == -1
    assert not data.any()
    assert (words[8], words[16]) == (head, tail)


@needs_it
def test_rows_whose_bytes_are_beyond_any_number_are_not_written():
    count = 1 << 24
    huge = {"row_bytes": 1 << 40, "source": np.zeros((count, 1), np.uint8), "source_bytes": 1, "max_rows": count}
    stepper = stepper_of(np.zeros(64, np.int64), np.zeros(4096, np.uint8), {**huge, "encoded": True})
    assert stepper.run(1, count, 1, ["a"], ints(0), ints(0, count), np.zeros(count, np.int32), [], None) == -1


@needs_it
@pytest.mark.parametrize("spoiled", [{3: 1 << 62}, {1: 1 << 62}, {1: -(1 << 63), 9: 0}, {0: 1 << 32}])
@pytest.mark.parametrize("kept_rows", [None, kept()])
def test_streams_whose_numbers_are_beyond_any_are_not_written(spoiled, kept_rows):
    stepper = stepper_of(np.zeros(64, np.int64), np.zeros(4096, np.uint8), {"kept": kept_rows})
    cells, requests = np.array([EVERY_ROW] * 2), np.array([[7, 1], [0, 0]])
    for field, value in spoiled.items():
        cells[0, field] = value
    stepper.use(requests, (column(cells=cells, kept=kept_rows),))
    assert stepper.run(1, 1, 1, ["a"], ints(7), ints(0, 1), ints(5), [], None) == -1


@needs_it
def test_what_a_step_calls_cannot_come_in_again():
    stepper = stepper_of(np.zeros(64, np.int64), np.zeros(8192, np.uint8), {"encoded": True}, {"encoded": True})
    where, log = (["a"], ints(0), ints(0, 1), ints(5)), []

    def again(index, at, rows):
        for method, arguments in (
            (stepper.use, (np.zeros((2, 2), np.int64), ())),
            (stepper.run, (1, 1, 1, *where, [], again)),
        ):
            with pytest.raises(RuntimeError, match="being written"):
                method(*arguments)

    assert stepper.run(1, 1, 1, *where, log, again) > 0
    assert len(log) == 1
    assert stepper.run(2, 1, 1, ["a"], ints(1), ints(0, 1), ints(5), log, lambda *_: None) > 0


@needs_it
def test_ids_that_vanish_while_they_are_looked_up_are_an_error():
    class Spoiler(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            ids.clear()
            return str.__eq__(self, other)

    ids = [Spoiler("a"), "b"]
    stepper = stepper_of(np.zeros(64, np.int64), np.zeros(4096, np.uint8), {})
    with pytest.raises(IndexError):
        stepper.run(1, 2, 1, ids, ints(0, 0), ints(0, 1, 2), ints(5, 5), [], None)


@needs_it
def test_ids_that_come_again_are_looked_up_again():
    """The same text at the same address: closed and opened anew at another place, or captured only now."""
    made = point("all", layers=(0,))
    buffer, ring = np.zeros((4, made.group.row_bytes), np.uint8), Ring.create(1 << 16)
    tracker, log = Tracker([made], {made.group: buffer}, ring.writer(), check_plans=True), RingLog(ring.reader())
    ids = ["a", "b", "c"]

    def start(name, attempt):
        order = Order(request_id=name, attempt=attempt, points=("all",), partition=0)
        tracker.open(name, order, index=0, prompt_len=1, cached_prefix=0)

    def step(number, *computed):
        tracker.step(Batch(number, 3, ids, ints(*computed), ints(0, 1, 2, 3), ints(7 * number, 8 * number, 9 * number)))

    try:
        start("a", 1)
        start("b", 1)
        step(1, 0, 0, 0)
        for name in ("a", "b"):
            tracker.close(name)
        for name in ("a", "b", "c"):
            start(name, 2)
        assert tracker._table.by_id["a"] == 1, "the places changed hands"
        step(2, 0, 0, 0)
        tracker.close("b")
        step(3, 1, 1, 1)
        for name in ("a", "c"):
            tracker.close(name)
        log.read()
        assert {key: stream.token_ids for key, stream in log.streams.items()} == {
            ("a", 0, "all"): [14, 21], ("b", 0, "all"): [16], ("c", 0, "all"): [18, 27],
        }  # fmt: skip
        assert tracker._steady.written == 3
    finally:
        # It holds the ring's memory.
        tracker = None
        ring.close()
