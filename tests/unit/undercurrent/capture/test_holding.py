"""No row past the last token comes out, none before it is missing, and a stream's order holds."""

from tests.unit.undercurrent.capture.holding_scene import Scene, point
from undercurrent.capture.frames import Step
from undercurrent.capture.holding import UNCONFIRMED


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
