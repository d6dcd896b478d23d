"""No row past the last token comes out, none before it is missing, and a stream's order holds."""

import random

import numpy as np
import pytest

from undercurrent.capture.frames import Close, Drop, Loss, Open, Rewind, Step, step_head
from undercurrent.capture.holding import UNCONFIRMED, Holding
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


@pytest.fixture
def scene():
    return Scene()


def test_prompt_rows_go_at_once_and_a_generated_row_when_its_token_was_seen(scene):
    slot, run = scene.open("r")
    scene.step({run: 2})
    scene.read()
    assert scene.stream("r")[0] == [0, 1]
    scene.step({run: 1})
    assert scene.read() == []
    scene.table.tell(slot, 0, 3)
    assert [type(content) for content in scene.read()] == [Step]
    assert scene.stream("r")[0] == [0, 1, 2]
    assert scene.holding.held_bytes == 0


def test_in_a_steady_decode_frames_pass_as_they_stand(scene):
    slots = [scene.open(name) for name in "abc"]
    scene.step({run: 2 for _, run in slots})
    scene.read()
    for length in range(3, 20):
        for slot, _ in slots:
            scene.table.tell(slot, 0, length)
        scene.step({run: 1 for _, run in slots})
        (content,) = scene.read()
        assert (content.segment_count, content.plan < 1 << 63) == (3, True)
    assert all(scene.stream(name)[0] == list(range(19)) for name in "abc")


def test_rows_past_a_stop_string_never_leave_and_the_end_agrees_with_what_did(scene):
    slot, run = scene.open("r")
    scene.step({run: 2})
    for _ in range(5):
        scene.step({run: 1})
    # The stop string was complete with token 4: two more were computed meanwhile.
    scene.table.tell(slot, 0, 5, final=True)
    scene.tracker.close(run)
    scene.read()
    rows, closed, losses = scene.stream("r")
    assert rows == [0, 1, 2, 3, 4]
    assert (closed.emitted, closed.dropped, closed.last_pos, losses) == (5, 0, 4, [])
    assert scene.holding.past_end == 2


def test_the_end_waits_with_the_rows_before_it(scene):
    slot, run = scene.open("r")
    scene.step({run: 2})
    scene.step({run: 1})
    scene.step({run: 1})
    scene.tracker.close(run)
    scene.read()
    assert scene.stream("r")[:2] == ([0, 1], None)
    scene.table.tell(slot, 0, 3)
    scene.read()
    assert scene.stream("r")[:2] == ([0, 1, 2], None)
    scene.table.tell(slot, 0, 3, final=True)
    scene.read()
    rows, closed, _ = scene.stream("r")
    assert (rows, closed.emitted, closed.last_pos) == ([0, 1, 2], 3, 2)
    assert scene.holding.waiting == 0


def test_an_end_whose_rows_are_all_known_waits_for_nobody(scene):
    slot, run = scene.open("r")
    scene.step({run: 2})
    scene.table.tell(slot, 0, 4)
    scene.step({run: 1})
    scene.tracker.close(run)
    scene.read()
    rows, closed, _ = scene.stream("r")
    assert (rows, closed.last_pos, closed.emitted) == ([0, 1, 2], 2, 3)


def test_an_abort_before_any_token_leaves_the_prompt_alone(scene):
    slot, run = scene.open("r", prompt_len=3)
    scene.table.tell(slot, 0, 3, final=True)
    scene.step({run: 3})
    scene.step({run: 1})
    scene.tracker.close(run)
    scene.read()
    rows, closed, _ = scene.stream("r")
    assert (rows, closed.emitted, closed.last_pos) == ([0, 1, 2], 3, 2)


def test_a_final_below_the_prompt_never_takes_a_prompt_row(scene):
    slot, run = scene.open("r", prompt_len=3)
    scene.table.tell(slot, 0, 0, final=True)
    scene.step({run: 3})
    scene.tracker.close(run)
    scene.read()
    assert scene.stream("r")[0] == [0, 1, 2]


def test_children_end_at_lengths_of_their_own(scene):
    slot, first = scene.open("r", n=2)
    _, second = scene.open("r", slot=slot, n=2, index=1)
    scene.step({first: 2, second: 2})
    for _ in range(6):
        scene.step({first: 1, second: 1})
    scene.table.tell(slot, 0, 4, final=True)
    scene.table.tell(slot, 1, 7)
    scene.read()
    scene.step({second: 1})
    scene.table.tell(slot, 1, 8, final=True)
    for run in (first, second):
        scene.tracker.close(run)
    scene.read()
    assert [scene.stream("r", index=i)[0] for i in range(2)] == [list(range(4)), list(range(8))]
    assert [scene.stream("r", index=i)[1].emitted for i in range(2)] == [4, 8]


def test_one_slow_request_holds_up_no_other(scene):
    (_, slow), (slot, quick) = scene.open("s"), scene.open("q")
    scene.step({slow: 2, quick: 2})
    for length in range(3, 8):
        scene.table.tell(slot, 0, length)
        scene.step({slow: 1, quick: 1})
        scene.read()
        assert scene.stream("q")[0] == list(range(length))
    assert scene.stream("s")[0] == [0, 1]


def test_rows_of_several_accepted_tokens_are_split_where_the_length_says(scene):
    slot, run = scene.open("r")
    scene.step({run: 2})
    scene.table.tell(slot, 0, 4)
    scene.step({run: 4})
    scene.read()
    assert scene.stream("r")[0] == [0, 1, 2, 3]
    scene.table.tell(slot, 0, 5, final=True)
    scene.tracker.close(run)
    scene.read()
    rows, closed, _ = scene.stream("r")
    assert (rows, closed.emitted, closed.last_pos) == ([0, 1, 2, 3, 4], 5, 4)


def test_a_request_without_a_slot_passes_beside_one_that_waits(scene):
    _, waits = scene.open("w")
    _, free = scene.open("f", slot=-1)
    scene.step({waits: 2, free: 2})
    scene.step({waits: 1, free: 1})
    scene.tracker.close(free)
    scene.read()
    assert scene.stream("f")[0] == [0, 1, 2]
    assert scene.stream("f")[1].emitted == 3
    assert scene.stream("w")[0] == [0, 1]


def test_the_last_published_position_of_a_strided_point_is_what_its_end_says():
    scene = Scene(point("p", stride=3))
    slot, run = scene.open("r")
    scene.step({run: 2})
    for _ in range(9):
        scene.step({run: 1})
    scene.table.tell(slot, 0, 8, final=True)
    scene.tracker.close(run)
    scene.read()
    rows, closed, _ = scene.stream("r")
    assert rows == [0, 3, 6]
    assert (closed.emitted, closed.last_pos) == (3, 6)


def test_a_run_whose_id_is_used_again_cannot_reach_the_new_stream():
    scene = Scene(slots=1)
    old_slot, old = scene.open("r", attempt=1)
    scene.table.tell(old_slot, 0, 3)
    scene.step({old: 2})
    scene.step({old: 1})
    scene.step({old: 1})
    scene.read()
    # Aborted, and its only slot given to the next run before the reader ever heard a last length.
    scene.table.free(old_slot, 1)
    new_slot, new = scene.open("r", attempt=2)
    scene.table.tell(new_slot, 0, 50)
    scene.step({old: 1, new: 2})
    scene.tracker.close(old)
    scene.read()
    rows, closed, losses = scene.stream("r", attempt=1)
    assert rows == [0, 1, 2]
    assert (closed.emitted, closed.dropped, closed.last_pos) == (3, 2, 2)
    assert [(reason, loss.rows) for reason, loss in losses] == [(UNCONFIRMED, 1), (UNCONFIRMED, 1)]
    assert scene.stream("r", attempt=2)[0] == [0, 1]


def test_beyond_the_bound_a_point_that_may_lose_rows_loses_them_declared():
    scene = Scene(max_bytes=600)
    slot, run = scene.open("r")
    scene.step({run: 2})
    for _ in range(20):
        scene.step({run: 1})
        scene.read()
    assert not scene.holding.full
    assert scene.holding.held_bytes < 900
    scene.table.tell(slot, 0, 15, final=True)
    scene.tracker.close(run)
    scene.read()
    rows, closed, losses = scene.stream("r")
    assert all(reason == UNCONFIRMED for reason, _ in losses)
    lost = [loss.first_pos for _, loss in losses]
    # What is lost lies before the end, too: each real row is either here or declared, none twice.
    assert sorted(rows + lost) == list(range(15))
    assert 2 < len(rows) < 15
    assert (closed.emitted, closed.dropped, closed.last_pos) == (len(rows), len(lost), rows[-1])


def test_beyond_the_bound_a_point_that_blocks_stops_the_reading_and_loses_nothing():
    scene = Scene(max_bytes=600, blocking=("p",))
    slot, run = scene.open("r")
    scene.step({run: 2})
    for _ in range(20):
        scene.step({run: 1})
        scene.read()
    assert scene.holding.full
    assert scene.reader.available_bytes > 0
    held = scene.holding.held_bytes
    scene.table.tell(slot, 0, 15, final=True)
    scene.tracker.close(run)
    scene.read()
    assert scene.holding.held_bytes == 0 < held
    scene.read()
    rows, closed, losses = scene.stream("r")
    assert (rows, losses) == (list(range(15)), [])
    assert (closed.emitted, closed.dropped, closed.last_pos) == (15, 0, 14)


def test_who_must_go_on_reads_everything():
    scene = Scene(max_bytes=600, blocking=("p",))
    _, run = scene.open("r")
    scene.step({run: 2})
    for _ in range(20):
        scene.step({run: 1})
    scene.read()
    assert scene.holding.full
    scene.holding.hurry()
    scene.read()
    assert scene.reader.available_bytes == 0
    assert scene.stream("r")[0] == [0, 1]


def lossy(scene, run, first, last, slot, length, *, final):
    """Have the capture side declare a loss, then tell a length; return what comes of it."""
    stream = next(c.stream for c in scene.out if isinstance(c, Open))
    loss = Loss(stream=stream, messages=2, rows=last - first + 1, first_pos=first, last_pos=last)
    before = scene.holding.take(Drop(reason="ring_full", losses=(loss,)))
    scene.table.tell(slot, 0, length, final=final)
    return before, scene.read()


@pytest.mark.parametrize(
    ("length", "final", "declared"),
    [(9, False, 3), (9, True, 3), (8, True, 3), (7, True, 2), (5, True, 0), (7, False, None)],
)
def test_a_loss_counts_as_far_as_the_request_goes(scene, length, final, declared):
    slot, run = scene.open("r")
    scene.step({run: 2})
    scene.read()
    before, after = lossy(scene, run, 5, 7, slot, length, final=final)
    assert before == []
    assert sum(drop.losses[0].rows for drop in after) == (declared or 0)
    assert scene.holding.waiting == (1 if declared is None else 0)
    if declared is not None:
        (closed,) = scene.holding.take(Close(stream=1, reason="finished", emitted=2, dropped=3, last_pos=1))
        assert (closed.emitted, closed.dropped) == (2, declared)


def test_what_is_said_of_a_stream_that_was_never_opened_here_passes(scene):
    _, run = scene.open("r")
    scene.step({run: 2})
    scene.read()
    stranger = [Close(stream=9, reason="finished"), Rewind(stream=9, first_pos=1)]
    assert [scene.holding.take(content) for content in stranger] == [(content,) for content in stranger]
    loss = Drop(reason="ring_full", losses=(Loss(stream=9, messages=1, rows=1, first_pos=8, last_pos=8),))
    assert scene.holding.take(loss) == [loss]


@pytest.mark.parametrize("seen", [2, 3, 4, 5])
def test_rows_that_wait_and_are_computed_anew_are_forgotten_and_what_left_is_taken_back(scene, seen):
    slot, run = scene.open("r")
    scene.step({run: 2})
    scene.table.tell(slot, 0, seen)
    for _ in range(4):
        scene.step({run: 1})
    scene.read()
    (rewound,) = scene.reads(Rewind(stream=1, first_pos=3)) or (None,)
    # Nothing has left that would have to be taken back.
    assert (rewound is None) == (seen <= 3)
    scene.computed[run] = 3
    for content in scene.played([(3, 1), (4, 1), (5, 1)]):
        scene.out += scene.holding.take(content)
    scene.table.tell(slot, 0, 5, final=True)
    scene.read()
    (closed,) = scene.holding.take(Close(stream=1, reason="finished", emitted=9, last_pos=5))
    rows = scene.stream("r")[0]
    valid = rows if rewound is None else rows[:3] + rows[seen:]
    assert valid == [0, 1, 2, 3, 4]
    assert (closed.emitted, closed.last_pos) == (len(rows), 4)


def test_a_rewind_of_a_request_without_a_slot_passes(scene):
    _, run = scene.open("f", slot=-1)
    scene.step({run: 4})
    scene.read()
    rewind = Rewind(stream=1, first_pos=3)
    assert scene.reads(rewind) == [rewind]


def test_a_rewind_of_one_of_several_shards_passes_though_nothing_has_left_here(scene):
    slot = scene.table.take(1)
    identity = {"request_id": "s", "attempt": 1, "index": 0, "point": "p", "partition": 0, "slot": slot, "shards": 2}
    shape = {"tensor_type": "residual_stream", "layers": (0,), "width": 1, "dtype": "float32"}
    opened = Open(stream=1, prompt_len=1, cached_prefix=0, **identity, **shape)
    scene.holding.take(opened)
    rewind = Rewind(stream=1, first_pos=3)
    # Another shard's rows may have left already, and both have to come to the same revision.
    assert list(scene.holding.take(rewind)) == [rewind]


class Chance:
    """Requests that come, go, grow and are read at random."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        bound = self.rng.choice([1 << 20, 4000])
        self.scene = Scene(point("p"), point("q", stride=2), max_bytes=bound, blocking=("p", "q"))
        self.live, self.lengths, self.ended, self.number = {}, {}, {}, 0

    def come(self):
        self.number += 1
        name, n, prompt = f"r{self.number}", self.rng.randint(1, 2), self.rng.randint(1, 5)
        slot = self.scene.table.take(n)
        for index in range(n):
            _, run = self.scene.open(name, slot=slot, n=n, index=index, prompt_len=prompt)
            self.live[run] = (name, slot, index, prompt)
            self.lengths[run] = prompt

    def compute(self):
        computed, chosen = self.scene.computed, [run for run in self.live if self.rng.random() < 0.8]
        counts = {r: self.live[r][3] if computed[r] == 0 else self.rng.choice([1, 1, 1, 3]) for r in chosen}
        if counts:
            self.scene.step(counts)

    def hear(self, run):
        """The driver hears of more tokens, or of the last ones."""
        name, slot, index, _ = self.live[run]
        most = max(self.lengths[run], self.scene.computed[run] + 1)
        self.lengths[run] = self.rng.randint(self.lengths[run], most)
        done = self.rng.random() < 0.1
        self.scene.table.tell(slot, index, self.lengths[run], final=done)
        if done:
            self.ended[run] = (name, index, self.lengths[run])

    def close(self, run):
        name, slot, index, _ = self.live.pop(run)
        self.ended.setdefault(run, (name, index, self.lengths[run]))
        self.scene.table.tell(slot, index, self.ended[run][2], final=True)
        self.scene.tracker.close(run)

    def turn(self):
        if len(self.live) < 6 and self.rng.random() < 0.3:
            self.come()
        self.compute()
        for run in list(self.live):
            if run in self.ended and self.rng.random() < 0.4:
                self.close(run)
            elif run not in self.ended and self.rng.random() < 0.6:
                self.hear(run)
        if self.rng.random() < 0.7:
            self.scene.read()


@pytest.mark.parametrize("seed", range(12))
def test_every_row_before_the_end_comes_once_and_none_after_it_whoever_is_slow(seed):
    chance = Chance(seed)
    for _ in range(150):
        chance.turn()
    for run in list(chance.live):
        chance.close(run)
    scene = chance.scene
    for _ in range(3):
        scene.read()
    assert scene.holding.waiting == 0
    found = scene.streams()
    assert len(chance.ended) > 10
    for run, (name, index, length) in chance.ended.items():
        real = range(min(length, scene.computed[run]))
        for at, stride in (("p", 1), ("q", 2)):
            rows, closed, losses = found[name, 1, index, at]
            assert (rows, losses) == (list(real[::stride]), [])
            assert (closed.emitted, closed.last_pos) == (len(rows), rows[-1] if rows else -1)
