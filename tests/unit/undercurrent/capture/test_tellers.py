"""Lengths that several processes tell: each its own requests, and nothing waits for one that has ended."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from undercurrent.capture.frames import Close, Drop, Step
from undercurrent.capture.holding import UNCONFIRMED, Holding
from undercurrent.capture.identity import mark_of
from undercurrent.capture.lengths import length_in
from undercurrent.capture.plan import Batch
from undercurrent.capture.points import CapturePoint, Order
from undercurrent.capture.ring import Ring
from undercurrent.capture.tellers import MAX_TELLERS, Tellers, begin_telling
from undercurrent.capture.tracker import Tracker
from undercurrent.errors import CaptureError
from undercurrent.spec import parse_dict
from undercurrent.testing.waiting import wait_until

TELL = """
import sys
from undercurrent.capture.ring import Ring
from undercurrent.capture.tellers import begin_telling
table = begin_telling([Ring.open(path) for path in sys.argv[3:]], int(sys.argv[1]), int(sys.argv[2]))
slot = table.take(1)
table.tell(slot, 0, 5)
print(slot, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def teller():
    """Return what starts a process that tells of one request that it has 5 tokens; and the slot of that."""
    started = []

    def start(index, count, *rings):
        command = [sys.executable, "-c", TELL, str(index), str(count), *(ring.path for ring in rings)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process, int(process.stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_two_processes_tell_of_their_own_requests_in_every_ring(teller):
    rings = [Ring.create(4096), Ring.create(4096)]
    slots = [teller(index, 2, *rings)[1] for index in (0, 1)]
    assert len(set(slots)) == 2
    assert [length_in(ring.lengths, slot) for ring in rings for slot in slots] == [(5, False)] * 4
    tellers = Tellers(rings[0])
    tellers.look()
    assert [length_in(rings[0].lengths, slot) for slot in slots] == [(5, False)] * 2
    tellers.close()


def test_what_waits_for_a_process_that_is_killed_is_lost_and_declared_and_ends(teller):
    ring = Ring.create(1 << 16)
    values = {"name": "p", "layers": [0], "tensor_type": "residual_stream", "position": "*"}
    spec = parse_dict({"version": 1, "extraction_points": [{**values, "execution_mode": "async", "queue_depth": 64}]})
    point = CapturePoint.of(spec.extraction_points[0], layers=1, width=2, model_dtype="float32")
    buffers = {point.group: np.zeros((8, point.row_bytes), np.uint8)}
    tracker = Tracker([point], buffers, ring.writer())
    holding, reader, tellers = Holding(ring.lengths, max_bytes=1 << 20), ring.reader(), Tellers(ring)
    dead, dead_slot = teller(0, 2, ring)
    _, other_slot = teller(1, 2, ring)
    for name, slot in (("dead", dead_slot), ("other", other_slot)):
        order = Order(request_id=name, attempt=1, points=("p",), partition=0, slot=slot)
        tracker.open(name, order, index=0, prompt_len=1, cached_prefix=0)
    for position in range(8):
        tracker.step(
            Batch(step=position + 1, rows=2, engine_ids=["dead", "other"], computed=np.full(2, position, np.int32),
                  starts=np.array([0, 1, 2], np.int32), token_ids=np.full(2, 65, np.int32))
        )  # fmt: skip
    tracker.close("dead")

    def read():
        tellers.look()
        found = list(holding.read(reader))
        reader.release()
        return found

    seen = read()
    assert sum(len(step.table()[0]) for step in seen if isinstance(step, Step)) == 2 * 5
    assert read() == [], "three rows of each wait, and the end of one"
    dead.kill()
    dead.wait(10)
    lost = wait_until(read, 10, "what follows from its end")
    drops = [content for content in lost if isinstance(content, Drop)]
    assert {drop.reason for drop in drops} == {UNCONFIRMED}
    assert [(loss.rows, loss.first_pos) for drop in drops for loss in drop.losses] == [(1, 5), (1, 6), (1, 7)]
    (closed,) = [content for content in lost if isinstance(content, Close)]
    assert (closed.emitted, closed.dropped, closed.last_pos) == (5, 3, 4)
    assert length_in(ring.lengths, other_slot) == (5, False), "the other tells on"
    # What it had sent to the engine, and what comes of it later, waits for nobody either.
    order = Order(request_id="late", attempt=1, points=("p",), partition=0, slot=dead_slot)
    tracker.open("late", order, index=0, prompt_len=1, cached_prefix=0)
    tracker.step(
        Batch(step=9, rows=2, engine_ids=["late"], computed=np.zeros(1, np.int32),
              starts=np.array([0, 2], np.int32), token_ids=np.full(2, 65, np.int32))
    )  # fmt: skip
    tracker.close("late")
    late = read()
    assert [loss.rows for content in late if isinstance(content, Drop) for loss in content.losses] == [1]
    assert [(content.emitted, content.dropped) for content in late if isinstance(content, Close)] == [(1, 1)]
    tellers.close()


def test_one_that_takes_the_place_of_another_begins_with_a_clean_share(teller):
    ring = Ring.create(4096)
    first, slot = teller(0, 1, ring)
    first.kill()
    first.wait(10)
    begin_telling([ring], 0, 1)
    assert length_in(ring.lengths, slot) == (0, False)
    tellers = Tellers(ring)
    table = begin_telling([ring], 0, 1)
    mine = table.take(1)
    table.tell(mine, 0, 3)
    tellers.look()
    assert length_in(ring.lengths, mine) == (3, False)
    tellers.close()


def test_a_number_that_a_thread_has_by_now_is_no_process(teller):
    ring = Ring.create(4096)
    first, slot = teller(0, 1, ring)
    number = list(ring.words).index(mark_of(first.pid))
    first.kill()
    first.wait(10)
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    ring.words[number] = thread.native_id
    tellers = Tellers(ring)
    try:
        tellers.look()
        assert length_in(ring.lengths, slot) == (0, False)
    finally:
        done.set()
        thread.join()
        tellers.close()


def test_another_process_that_has_the_number_by_now_is_not_the_one_that_is_meant(teller):
    ring = Ring.create(4096)
    process, slot = teller(0, 1, ring)
    mark = mark_of(process.pid)
    # As if that one had begun earlier, and this one had its number since.
    ring.words[list(ring.words).index(mark)] = mark - (1 << 22)
    tellers = Tellers(ring)
    tellers.look()
    assert length_in(ring.lengths, slot) == (0, False)
    tellers.close()


def test_one_that_begins_while_its_forerunner_is_found_to_have_ended_keeps_its_share_and_is_looked_after(
    teller, monkeypatch
):
    ring = Ring.create(4096)
    first, _ = teller(0, 1, ring)
    first.kill()
    first.wait(10)
    tellers, begun = Tellers(ring), []

    def gone(pid):
        begun.append(teller(0, 1, ring))
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", gone)
        tellers.look()
    [(second, slot)] = begun
    assert length_in(ring.lengths, slot) == (5, False)
    tellers.look()
    assert length_in(ring.lengths, slot) == (5, False)
    second.kill()
    second.wait(10)
    tellers.look()
    assert length_in(ring.lengths, slot) == (0, False)
    tellers.close()


def test_who_cannot_be_looked_after_right_now_is_asked_about_again(teller, monkeypatch):
    ring = Ring.create(4096)
    process, slot = teller(0, 1, ring)
    tellers = Tellers(ring)

    def full(pid):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", full)
        tellers.look()
    tellers.look()
    assert length_in(ring.lengths, slot) == (5, False)
    process.kill()
    process.wait(10)
    tellers.look()
    assert length_in(ring.lengths, slot) == (0, False)
    tellers.close()


@pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 1), (0, MAX_TELLERS + 1)])
def test_more_of_them_than_there_is_place_for_are_refused(index, count):
    with pytest.raises(CaptureError, match=f"at most {MAX_TELLERS}"):
        begin_telling([Ring.create(4096)], index, count)
