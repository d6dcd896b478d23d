"""A ring, a reader that holds rows back, and a driver that confirms lengths, moved by hand."""

import numpy as np

from undercurrent.capture.frames import Close, Drop, Open, Step, step_head
from undercurrent.capture.holding import Holding
from undercurrent.capture.lengths import LengthTable
from undercurrent.capture.plan import Batch
from undercurrent.capture.points import CapturePoint, Order
from undercurrent.capture.ring import Ring
from undercurrent.capture.tracker import Tracker
from undercurrent.spec import parse_dict

WIDTH, LAYERS = 4, (0, 1)


def point(name, **fields):
    values = {
        "name": name, "layers": list(LAYERS), "tensor_type": "residual_stream", "position": "*",
        "execution_mode": "async", "queue_depth": 64, **fields,
    }  # fmt: skip
    spec = parse_dict({"version": 1, "extraction_points": [values]})
    return CapturePoint.of(spec.extraction_points[0], layers=2, width=WIDTH, model_dtype="float32")


def row(engine_id, position):
    """What stands in a row: who it is of, and where."""
    return np.arange(len(LAYERS) * WIDTH, dtype="<f4") + 1000 * position + sum(engine_id.encode())


class Scene:
    """An engine played by a tracker, a driver that tells lengths, and what came out at the other end."""

    def __init__(self, *points, max_bytes=1 << 20, blocking=(), slots=64, ring_bytes=1 << 20):
        self.ring = Ring.create(ring_bytes, slots=slots)
        points = points or (point("p"),)
        self.buffers = {p.group: np.zeros((64, p.row_bytes), np.uint8) for p in points}
        self.tracker = Tracker(points, self.buffers, self.ring.writer(), check_plans=True)
        self.table = LengthTable(self.ring.lengths)
        self.reader = self.ring.reader()
        self.holding = Holding(self.ring.lengths, max_bytes=max_bytes, blocking=blocking)
        self.points = tuple(p.name for p in points)
        self.computed, self.steps = {}, 0
        self.out = []

    def open(self, name, *, slot=None, prompt_len=2, n=1, index=0, attempt=1, points=None):
        slot = self.table.take(n) if slot is None else slot
        order = Order(request_id=name, attempt=attempt, points=points or self.points, partition=0, n=n, slot=slot)
        engine_id = f"{index}_{name}-{attempt}"
        self.tracker.open(engine_id, order, index=index, prompt_len=prompt_len, cached_prefix=0)
        self.computed[engine_id] = 0
        return slot, engine_id

    def step(self, counts):
        """One step that computes so many rows of each request."""
        self.steps += 1
        ids = list(counts)
        starts = np.concatenate([[0], np.cumsum(list(counts.values()))]).astype(np.int32)
        rows = [row(i, self.computed[i] + n) for i in ids for n in range(counts[i])]
        for buffer in self.buffers.values():
            buffer[: len(rows)] = np.stack(rows).view(np.uint8)
        self.tracker.step(
            Batch(step=self.steps, rows=int(starts[-1]), engine_ids=ids,
                  computed=np.array([self.computed[i] for i in ids], np.int32), starts=starts,
                  token_ids=np.arange(int(starts[-1]), dtype=np.int32))
        )  # fmt: skip
        for i in ids:
            self.computed[i] += counts[i]

    def read(self):
        """One reading of the ring; return what came out of it."""
        out = [
            Step(memoryview(bytes(content.payload))) if isinstance(content, Step) else content
            for content in self.holding.read(self.reader)
        ]
        self.reader.release()
        self.out += out
        return out

    def reads(self, content):
        """What comes out at once of a frame that no tracker wrote."""
        out = list(self.holding.take(content))
        self.out += out
        return out

    def played(self, spans, stream=1, engine_id="0_r-1"):
        """Step frames of one stream that no tracker wrote: so many rows from a position on."""
        for first, rows in spans:
            head, positions_at, _ = step_head(7, [stream], [rows], len(LAYERS) * WIDTH * 4)
            where = np.arange(first, first + rows, dtype="<i4")
            head[positions_at : positions_at + 4 * rows] = where.tobytes()
            data = b"".join(row(engine_id, position).tobytes() for position in where.tolist())
            yield Step(memoryview(bytes(head) + data))

    def streams(self):
        """Return positions and the closing frame by (request, attempt, index, point); check every row's bytes."""
        opened, rows, closes, losses = {}, {}, {}, {}
        for content in self.out:
            if isinstance(content, Open):
                opened[content.stream] = content
                rows[content.stream] = []
            elif isinstance(content, Close):
                closes[content.stream] = content
            elif isinstance(content, Drop):
                for loss in content.losses:
                    losses.setdefault(loss.stream, []).append((content.reason, loss))
            elif isinstance(content, Step):
                for number, positions, _, data in content.segments():
                    assert number not in closes, "rows after the end of their stream"
                    one = opened[number]
                    where = np.frombuffer(positions, "<i4").tolist()
                    values = np.frombuffer(data, "<f4").reshape(len(where), -1)
                    for position, value in zip(where, values, strict=True):
                        assert value.tobytes() == row(f"{one.index}_{one.request_id}-{one.attempt}", position).tobytes()
                    rows[number] += where
        return {
            (o.request_id, o.attempt, o.index, o.point): (rows[n], closes.get(n), losses.get(n, []))
            for n, o in opened.items()
        }

    def stream(self, name, attempt=1, index=0, at="p"):
        return self.streams()[name, attempt, index, at]
