"""Rows that wait when there is no room for more, and what is said of losses and rewinds meanwhile."""

import pytest

from tests.unit.undercurrent.capture.holding_scene import Scene
from undercurrent.capture.frames import Close, Drop, Loss, Open, Rewind
from undercurrent.capture.holding import UNCONFIRMED


def lost_positions(losses):
    return [position for _, loss in losses for position in range(loss.first_pos, loss.last_pos + 1)]


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
    lost = lost_positions(losses)
    # What is lost lies before the end, too: each real row is either here or declared, none twice.
    assert sorted(rows + lost) == list(range(15))
    assert 2 < len(rows) < 15
    assert (closed.emitted, closed.dropped, closed.last_pos) == (len(rows), len(lost), rows[-1])


def test_what_is_lost_while_nobody_confirms_takes_no_memory_for_each_row():
    scene = Scene(max_bytes=600)
    slot, run = scene.open("r")
    scene.step({run: 2})
    for _ in range(500):
        scene.step({run: 1})
        scene.read()
    assert scene.holding.waiting < 20
    scene.table.tell(slot, 0, 400, final=True)
    scene.tracker.close(run)
    scene.read()
    rows, closed, losses = scene.stream("r")
    lost = lost_positions(losses)
    assert sorted(rows + lost) == list(range(400))
    assert (closed.emitted, closed.dropped, sum(loss.rows for _, loss in losses)) == (len(rows), len(lost), len(lost))


def test_a_rewind_into_what_was_lost_leaves_the_loss_of_what_is_still_valid():
    scene = Scene(max_bytes=1)
    slot, run = scene.open("r")
    for rows in (2, *[1] * 20):
        scene.step({run: rows})
        scene.read()
    assert scene.reads(Rewind(stream=1, first_pos=10)) == [], "nothing has left that would have to be taken back"
    for content in scene.played([(position, 1) for position in range(10, 15)]):
        scene.reads(content)
    scene.table.tell(slot, 0, 15, final=True)
    scene.read()
    (closed,) = scene.reads(Close(stream=1, reason="finished", emitted=27, last_pos=14))
    rows, _, losses = scene.stream("r")
    assert rows + lost_positions(losses) == list(range(15))
    assert (closed.emitted, closed.dropped) == (len(rows), 15 - len(rows))


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
