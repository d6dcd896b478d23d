"""A full ring and points whose policy is to wait: for how long, for whom, and what is declared after it."""

from __future__ import annotations

import threading
import time

from tests.unit.undercurrent.capture.tracker_sim import (
    Job,
    Sim,
    decode_jobs,
    point,
)


def test_a_blocking_point_waits_for_its_reader_and_loses_nothing():
    blocking = (point("all", overflow="block"),)
    jobs = decode_jobs(4, total=300, points=("all",))
    sim = Sim(jobs, ring_bytes=4096, points=blocking, block_timeout_s=30)
    stop = threading.Event()

    def read():
        # Nothing is read until the writer has found the ring full once.
        while not stop.wait(0.001):
            if sim.ring.stats().full_events:
                sim.read()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        sim.step({j.name: 2 for j in jobs})
        for _ in range(290):
            sim.step({j.name: 1 for j in jobs})
        for job in jobs:
            sim.tracker.close(job.name)
    finally:
        stop.set()
        thread.join(30)
    try:
        sim.read()
        # An end that found no room waits in the writer for the next step.
        sim.tracker.idle(sim.steps + 1)
        sim.read()
        sim.check(lossless=True)
        assert sim.ring.stats().full_events > 0
    finally:
        sim.close()


def test_a_blocking_point_without_a_reader_gives_up_once_and_declares_its_loss():
    blocking = (point("all", overflow="block"),)
    jobs = decode_jobs(4, total=300, points=("all",))
    sim = Sim(jobs, ring_bytes=4096, points=blocking, block_timeout_s=0.05)
    try:
        sim.step({j.name: 2 for j in jobs})
        began = time.monotonic()
        for _ in range(100):
            sim.step({j.name: 1 for j in jobs})
        # Once, and not for each of the steps.
        assert 0.05 <= time.monotonic() - began < 2.5
        sim.read()
        sim.step({j.name: 1 for j in jobs})
        for job in jobs:
            sim.tracker.close(job.name)
        sim.read()
        sim.check(lossless=False)
        assert sim.ring.stats().dropped_rows == sum(c.dropped for c in sim.closed.values()) > 0
    finally:
        sim.close()


class _Waits:
    """Counts how often a tracker sleeps until its reader is back; what `then` says is done in the sleep."""

    def __init__(self, monkeypatch):
        self.times, self.then = 0, lambda: None
        monkeypatch.setattr("undercurrent.capture.emission.time", self)

    def monotonic(self):
        return float(self.times)

    def time_ns(self):
        return 0

    def sleep(self, _):
        self.times += 1
        self.then()


def test_a_small_frame_that_finds_room_is_no_sign_of_the_reader(monkeypatch):
    points = (point("small", layers=(1,)), point("all", layers=(0, 1, 2, 3), overflow="block"))
    jobs = [Job("small", 2, 300, 0, ("small",)), Job("long", 900, 950, 0, ("all",))]
    sim = Sim(jobs, ring_bytes=16448, points=points, block_timeout_s=3.0)
    waits = _Waits(monkeypatch)
    try:
        sim.step({"small": 2, "long": 50})
        for _ in range(15):
            sim.step({"small": 1, "long": 50})
        assert waits.times == 3
        sim.read()
        # The waiting was in the middle: small frames came after it too.
        lost = sim.ring.stats().dropped_rows
        assert 100 < lost < 1000
        small = next(stream for stream, opened in sim.opened.items() if opened.point == "small")
        assert len([1 for kind, _ in sim.got[small] if kind == "row"]) > 16 - lost // 50 + 2
    finally:
        sim.close()


def test_a_blocking_point_waits_again_for_a_reader_that_has_come_back(monkeypatch):
    sim = Sim(
        [Job("long", 900, 950, 0, ("all",))], ring_bytes=16384, points=(point("all", overflow="block"),),
        block_timeout_s=3.0,
    )  # fmt: skip
    waits = _Waits(monkeypatch)
    try:
        while not waits.times:
            sim.step({"long": 50})
        # It is back, but slow: what it gives back at first is too little for a frame of rows.
        sim.read(at_most=1)
        waits.then = sim.read
        lost = sim.ring.stats().dropped_rows
        sim.step({"long": 50})
        assert sim.ring.stats().dropped_rows == lost == 50
        sim.tracker.close("long")
        sim.read()
        sim.check(lossless=False)
    finally:
        sim.close()
