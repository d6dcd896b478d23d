"""An engine made of arithmetic that drives a tracker, and a reader that knows what every row must be."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import numpy as np

from undercurrent.capture import frames
from undercurrent.capture.plan import Batch
from undercurrent.capture.points import CapturePoint, Order, tap_groups
from undercurrent.capture.ring import Ring
from undercurrent.capture.tracker import Tracker
from undercurrent.codec.tensors import bytes_of
from undercurrent.spec import ExtractionPoint
from undercurrent.testing.wanted import wanted_positions

WIDTH = 2
MAX_ROWS = 64


SPECS = {}


def point(name, position="*", layers=(0, 2), tensor="residual_stream", **fields):
    spec = ExtractionPoint(
        name=name, layers=layers, tensor_type=tensor, position=position, execution_mode="async", **fields
    )
    made = CapturePoint.of(spec, layers=4, width=WIDTH, model_dtype="float32")
    SPECS[made.point_hash] = spec
    # As shallow as it may be, so that the rows of a short request go round as well.
    return made if made.tail is None else replace(made, tail=replace(made.tail, slack=0))


POINTS = (
    point("all"),
    point("shared", "generated[*]"),
    point("strided", "generated[1:9]", layers=(1,), stride=2),
    point("last", "prompt[-1]", layers=(3,)),
    point("norm", "prompt[*]", layers=(4,), tensor="final_norm"),
    point("coded", "*", dtype="int8"),
    point("end", "generated[-1]", layers=(1,)),
    point("third_last", "generated[-3]", dtype="int8"),
    point("before_end", "generated[-1]-4", layers=(0,)),
    point("after", "generated[-3]+2", layers=(2,)),
    point("until", "generated[*]", until={"stop_token": 2}),
    point("until_strided", "*", stride=3, until={"stop_token": 14}),
    point("until_prompt", "prompt[1:]", layers=(1,), until={"stop_token": 0}),
    point("five", "generated[2:]", stride=2, until={"fixed_count": 3}),
    point("window", "generated[4:7]", layers=(3,)),
)


@dataclass
class Job:
    """One request of the simulated engine."""

    name: str
    prompt_len: int
    total: int
    cached: int
    points: tuple[str, ...]
    computed: int = 0
    known: int = 0
    opened: bool = False
    furthest: int = 0
    number: int = field(default=0)


def token(job, position):
    """The input token there: it names the request, and comes again every few positions."""
    return job.number * 10 + position * position % 7


def truth(job, position, layers):
    """The value that row must have: it names request, position, layer and element."""
    base = job.number * 1_000_000 + position * 100
    return np.array([[base + layer * 10 + i for i in range(WIDTH)] for layer in layers], dtype=np.float32)


class Sim:
    """An engine made of arithmetic, a tracker, and a reader that keeps what it reads."""

    def __init__(self, jobs, *, ring_bytes=1 << 20, points=POINTS, **options):
        self.jobs = jobs
        for number, job in enumerate(jobs):
            job.number, job.computed, job.known = number, job.cached, job.prompt_len
        self.ring = Ring.create(ring_bytes)
        self.reader = self.ring.reader()
        self.points = {p.name: p for p in points}
        self.buffers = {g: np.zeros((MAX_ROWS, g.row_bytes), np.uint8) for g in tap_groups(points)}
        options = {"check_plans": True, **options}
        self.tracker = Tracker(points, self.buffers, self.ring.writer(), **options)
        self.order = []
        self.steps = 0
        # One for all steps, whose arrays stay where they are, as an engine's do.
        self.batch = Batch(0, 0, [], *(np.zeros(MAX_ROWS + 1, np.int32) for _ in range(3)))
        self.got = {}
        self.opened, self.closed, self.seen = {}, {}, []

    def step(self, counts, *, stale=(), drafts=None):
        """Run one step of `counts`: tokens per job name, in this slot order.

        With `drafts`, as many rows more per name, whose tokens are rejected.
        """
        self.steps += 1
        names = list(counts)
        by_name = {job.name: job for job in self.jobs}
        computed, starts, token_ids, tokens = self.batch.computed, self.batch.starts, self.batch.token_ids, []
        for array in (computed, starts, token_ids):
            array[:] = -7  # what is left of an earlier step means nothing
        starts[0] = 0
        for slot, name in enumerate(names):
            job = by_name[name]
            if not job.opened:
                self.open(job)
            computed[slot] = job.computed
            rejected = (drafts or {}).get(name, 0)
            starts[slot + 1] = starts[slot] + counts[name] + rejected
            for position in range(job.computed, job.computed + counts[name] + rejected):
                real = position < job.computed + counts[name]
                for group, buffer in self.buffers.items():
                    row = truth(job, position, group.layers) if real else np.full((len(group.layers), WIDTH), -1, "f4")
                    buffer[len(tokens)] = row.view(np.uint8).reshape(-1)
                tokens.append(token(job, position) if real else -1)
        token_ids[: len(tokens)] = tokens
        self.batch.step, self.batch.rows, self.batch.engine_ids = self.steps, len(tokens), names
        self.batch.kept = None if drafts is None else np.array([counts[name] for name in names], np.int32)
        self.tracker.step(self.batch, stale)
        for name in names:
            job = by_name[name]
            job.computed += counts[name]
            job.furthest = max(job.furthest, job.computed)
            if job.computed == job.known and job.known < job.total:
                job.known += 1

    def open(self, job):
        job.opened = True
        order = Order(request_id=job.name, attempt=1, points=job.points, partition=3)
        prompt = [token(job, position) for position in range(job.prompt_len)]
        self.tracker.open(
            job.name, order, index=0, prompt_len=job.prompt_len, cached_prefix=job.cached, prompt_ids=prompt
        )

    def read(self, at_most=None):
        for frame in itertools.islice(self.reader.read(), at_most):
            content = frames.decode(frame)
            self.seen.append(content if not isinstance(content, frames.Step) else "step")
            match content:
                case frames.Open():
                    assert content.stream not in self.opened
                    self.opened[content.stream] = content
                    self.got[content.stream] = []
                case frames.Close():
                    self.closed[content.stream] = content
                case frames.Drop():
                    for loss in content.losses:
                        assert loss.stream not in self.closed
                        self.got[loss.stream].append(("lost", loss))
                case frames.Step():
                    for stream, positions, token_ids, data in content.segments():
                        assert stream not in self.closed
                        self.take(stream, positions, token_ids, data)
        self.reader.release()

    def take(self, stream, positions, token_ids, data):
        opened = self.opened[stream]
        job = next(j for j in self.jobs if j.name == opened.request_id)
        positions, token_ids = np.frombuffer(positions, "<i4"), np.frombuffer(token_ids, "<i4")
        rows = np.frombuffer(data, np.uint8).reshape(len(positions), -1)
        for position, token_id, row in zip(positions, token_ids, rows, strict=True):
            assert token_id == token(job, int(position))
            assert row.tobytes() == bytes_of(truth(job, int(position), opened.layers), opened.dtype)
            self.got[stream].append(("row", int(position)))

    def check(self, *, lossless):
        for stream, opened in self.opened.items():
            job = next(j for j in self.jobs if j.name == opened.request_id)
            tokens = [token(job, position) for position in range(job.furthest)]
            expected = wanted_positions(SPECS[opened.point_hash], tokens, job.prompt_len, cached=job.cached)
            rows = [value for kind, value in self.got[stream] if kind == "row"]
            losses = [value for kind, value in self.got[stream] if kind == "lost"]
            closed = self.closed[stream]
            lost = sum(loss.rows for loss in losses)
            assert (closed.emitted, closed.dropped) == (len(rows), lost)
            assert closed.last_pos == (rows[-1] if rows else -1)
            assert rows == sorted(set(rows))
            assert set(rows) <= set(expected)
            assert len(rows) + lost == len(expected)
            for loss in losses:
                assert set(expected) - set(rows) >= {loss.first_pos, loss.last_pos}
            if lossless:
                assert rows == expected

    def close(self):
        self.tracker = None
        self.ring.close()


def decode_jobs(count, total=40, points=("all", "strided")):
    return [Job(name=f"job{i}", prompt_len=2, total=total, cached=0, points=points) for i in range(count)]
