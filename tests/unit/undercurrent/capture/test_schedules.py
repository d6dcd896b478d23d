"""Whoever comes, goes, waits, starts over or moves to another slot: frames are those of a step looked at by itself."""

from __future__ import annotations

import random
import struct
from copy import deepcopy

import numpy as np
import pytest

from tests.unit.undercurrent.capture.tracker_sim import MAX_ROWS, POINTS, SPECS, Job, Sim, point, token, truth
from undercurrent.capture import steady
from undercurrent.capture.frames import FrameKind, Step, decode
from undercurrent.capture.ring import Frame
from undercurrent.testing.wanted import wanted_positions

EVERY = (*POINTS, point("coded_strided", stride=3, dtype="float16", layers=(1, 2)))
ALL = tuple(p.name for p in EVERY)
# No row is kept for the end, none is encoded.
PLAIN = tuple(p.name for p in POINTS if p.tail is None and p.encoder is None)


def make_jobs(rng, names, count=24):
    jobs = []
    for number in range(count):
        prompt_len = rng.randint(1, 12)
        points = tuple(rng.sample(names, rng.randint(0, len(names)))) if rng.random() < 0.9 else ()
        cached = rng.randint(0, prompt_len - 1) if rng.random() < 0.3 else 0
        jobs.append(Job(f"job{number}", prompt_len, prompt_len + rng.randint(0, 90), cached, points))
    return jobs


class Schedule:
    """Drives simulations alike: requests join, leave early or late, wait, are preempted and change their slots."""

    def __init__(self, sims, rng, *, others=False, stale=0.0):
        self.sims, self.rng, self.others, self.stale = sims, rng, others, stale
        self.waiting, self.order, self.stride = [job.name for job in sims[0].jobs], [], rng.choice([1, 1, 7])

    def steps(self):
        """Do one step after the other; yield what each had: tokens per name."""
        rng = self.rng
        while self.waiting or self.order:
            while self.waiting and (not self.order or (len(self.order) < 8 and rng.random() < 0.3)):
                self.order.append(self.waiting.pop(0))
            if rng.random() < 0.1:
                rng.shuffle(self.order)
            if rng.random() < 0.04:
                self.preempt(rng.choice(self.order))
            counts = self.counts()
            if counts:
                stale = rng.random() < self.stale
                for sim in self.sims:
                    sim.step(counts, stale={sim.points["all"].group} if stale else ())
                yield counts
            for name in [n for n in self.order if self.over(n)]:
                self.order.remove(name)
                for sim in self.sims:
                    sim.tracker.close(name)
            if rng.random() < 0.02 and self.order:
                # As an engine does: the last slot's request moves into the one that became free.
                name, last = rng.choice(self.order), self.order.pop()
                if name != last:
                    self.order[self.order.index(name)] = last
                for sim in self.sims:
                    sim.tracker.close(name)

    def counts(self):
        counts, room, jobs = {}, MAX_ROWS, [sim_job(self.sims[0], name) for name in self.order]
        decodes = self.rng.random() < 0.8
        for job in jobs:
            left = min(job.known - job.computed, room)
            if left > 0 and self.rng.random() < (0.97 if decodes else 0.7):
                counts[job.name] = left if left == 1 else self.rng.randint(1, left)
                room -= counts[job.name]
        return counts

    def over(self, name):
        job = sim_job(self.sims[0], name)
        return job.computed >= job.total

    def preempt(self, name):
        jobs = [sim_job(sim, name) for sim in self.sims]
        if jobs[0].opened:
            for job in jobs:
                job.computed = 0
                # Other tokens at the same positions: what was captured of them is taken back.
                job.number += 50 if self.others else 0


def contents(sim):
    frames = [(frame.kind, bytes(frame.payload)) for frame in sim.reader.read()]
    sim.reader.release()
    return frames


def numbers(sim):
    """What a tracker has counted, in arrays; what a plan in use has done and not counted yet is none of it."""
    tracker = sim.tracker
    tracker._retire()
    table = tracker._table
    table.sort_log()
    columns = [(c.cells.tolist(), c.lane.tolist()) for c in table.columns.values()]
    histories = {request.engine_id: bytes(request.history) for request in table.all()}
    kept = [tracker._tails.of(c.point) for c in table.columns.values() if c.point.tail is not None]
    tails = [(k.positions.tolist(), k.tokens.tolist(), k.rows.tobytes()) for k in kept]
    return table.requests.tolist(), table.counters.tolist(), columns, histories, tails


@pytest.mark.skipif(not steady.AVAILABLE, reason="there is no C compiler here, so there is one way only")
@pytest.mark.parametrize("ring_bytes", [1 << 20, 8192])
@pytest.mark.parametrize("names", [PLAIN, ALL])
@pytest.mark.parametrize("seed", range(6))
def test_machine_code_and_python_write_the_same_bytes_and_count_the_same(seed, names, ring_bytes):
    rng = random.Random(seed)
    jobs = make_jobs(rng, names)
    sims = [
        Sim(
            deepcopy(jobs),
            ring_bytes=ring_bytes,
            points=EVERY,
            machine_code=code,
            check_plans=not seed,
            clock_us=lambda: 7,
        )
        for code in (True, False)
    ]
    try:
        done = 0
        for _ in Schedule(sims, rng, others=True, stale=0.02).steps():
            done += 1
            if ring_bytes > 8192 or rng.random() < 0.3:
                ours, theirs = map(contents, sims)
                assert ours == theirs
            if rng.random() < 0.05:
                ours, theirs = map(numbers, sims)
                assert ours == theirs
        assert contents(sims[0]) == contents(sims[1])
        assert numbers(sims[0]) == numbers(sims[1])
        assert done > 100
        if ring_bytes > 8192:
            assert sims[0].tracker._steady.written > done // 2
    finally:
        for sim in sims:
            sim.close()


def expected_frames(sim, counts, before):
    """The step frames of a step from what its requests are, without what anybody has kept: payloads without numbers."""
    numbers = {(opened.request_id, opened.point): number for number, opened in sim.opened.items()}
    out = []
    for name, made in sim.points.items():
        streams, rows, positions, token_ids, data = [], [], [], [], b""
        for job_name, count in counts.items():
            job = sim_job(sim, job_name)
            if name not in job.points:
                continue
            tokens = [token(job, p) for p in range(job.computed)]
            wanted = wanted_positions(SPECS[made.point_hash], tokens, job.prompt_len, cached=job.cached)
            low = max(before[job_name], job.computed - count)
            mine = [p for p in wanted if low <= p < job.computed]
            if mine:
                streams.append(numbers[job_name, name])
                rows.append(len(mine))
                positions += mine
                token_ids += [tokens[p] for p in mine]
                data += b"".join(truth(job, p, made.group.layers).tobytes() for p in mine)
        if streams:
            table = struct.pack(f"<{2 * len(streams)}I", *streams, *rows)
            table += struct.pack(f"<{2 * len(positions)}i", *positions, *token_ids)
            data_at = (16 + 40 + len(table) + 63) // 64 * 64 - 16
            sizes = struct.pack("<4I", len(positions), len(streams), made.row_bytes, data_at)
            out.append((struct.pack("<2Q", sim.steps, 7), (sizes + table).ljust(data_at - 24, b"\0") + data))
    return out


@pytest.mark.parametrize("machine_code", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_every_frame_is_the_one_that_its_step_alone_asks_for(seed, machine_code):
    """The oracle reads specs, tokens and positions; it has no plan, no table and no machine code."""
    rng = random.Random(100 + seed)
    jobs = make_jobs(rng, PLAIN)
    sim = Sim(jobs, machine_code=machine_code, check_plans=False, clock_us=lambda: 7)
    tables, before, frames_seen = {}, dict.fromkeys((j.name for j in jobs), 0), 0
    try:
        for counts in Schedule([sim], rng).steps():
            frames = contents(sim)
            sim_opens(sim, frames)
            steps = [payload for kind, payload in frames if kind == FrameKind.STEP]
            assert [(p[:16], p[24:]) for p in steps] == expected_frames(sim, counts, before)
            for name in counts:
                before[name] = max(before[name], sim_job(sim, name).computed)
            for payload in steps:
                step = Step(memoryview(payload))
                # A reader may keep what it derived of a number.
                assert tables.setdefault(step.plan, step.table()) == step.table()
            frames_seen += len(steps)
        assert 0 < len(tables) < frames_seen
    finally:
        sim.close()


def sim_opens(sim, frames):
    """Tell a simulation of the streams that some frames open."""
    for kind, payload in frames:
        if kind == FrameKind.OPEN:
            opened = decode(Frame(kind, memoryview(payload), 0))
            sim.opened[opened.stream] = opened


def test_a_stream_that_comes_or_goes_leaves_the_places_of_the_others_alone():
    jobs = [Job(f"job{n}", 2, 80, 0, ("all",)) for n in range(200)]
    sim = Sim(jobs, ring_bytes=1 << 22, points=(POINTS[0],))
    try:
        names = [job.name for job in jobs]
        running = names[:30]
        for name in names[30:]:
            sim.step({n: 1 if sim_job(sim, n).computed else 2 for n in running})
            table = sim.tracker._table
            kept = {n: table.by_id[n] for n in running[1:]}
            sim.tracker.close(running.pop(0))
            running.append(name)
            assert {n: table.by_id[n] for n in kept} == kept
            sim.read()
        assert len(table.requests) == 64
        assert np.count_nonzero(table.columns["all"].cells[:, 0]) == 29
    finally:
        sim.close()


def sim_job(sim, name):
    return next(job for job in sim.jobs if job.name == name)
