"""Which streams are open, and from where a reader comes to the same ones."""

from __future__ import annotations

import numpy as np
import pytest

from undercurrent.protocol.messages import EndReason, PublisherStarted, Released, ReleaseReason
from undercurrent.protocol.streams import Arrived, Closed, Joined, Nothing, Opened, Stray, StreamTable
from undercurrent.testing.streams import StreamBuilder


def block(stream, position):
    return stream.activations([position], [0] * (stream.width * len(stream.layers)))


class Table(StreamTable):
    """Numbers the records."""

    def __init__(self):
        super().__init__("residual")
        self.offset = 0

    def read(self, message):
        events = self.observe(self.offset, message)
        self.offset += 1
        return events


def test_a_stream_opens_takes_its_blocks_and_closes():
    table, stream = Table(), StreamBuilder("r")
    [opened] = table.read(stream.started())
    assert isinstance(opened, Opened)
    assert opened.layers == (0,)
    [arrived] = table.read(block(stream, 0))
    assert isinstance(arrived, Arrived)
    assert (arrived.gap, arrived.clear_up_to) == (0, 0)
    [closed] = table.read(stream.ended())
    assert isinstance(closed, Closed)
    assert (closed.stream.complete, closed.stream.partial, closed.stream.end_reason) == (True, False, "finished")
    assert len(table) == 0


def test_a_gap_is_declared_where_it_shows_and_stops_the_clear_mark():
    table, stream = Table(), StreamBuilder("r")
    table.read(stream.started())
    table.read(block(stream, 0))
    stream.skip(2)
    [after] = table.read(block(stream, 3))
    assert (after.gap, after.clear_up_to) == (2, 0)
    stream.skip()
    [closed] = table.read(stream.ended(dropped=3))
    assert (closed.stream.missing, closed.stream.complete, closed.stream.partial) == (3, False, True)


def test_a_lost_start_of_a_stream_leaves_strays_not_a_stream():
    table, stream = Table(), StreamBuilder("r")
    stream.skip()
    assert table.read(block(stream, 0)) == [Stray("no_open_stream")]
    assert table.read(stream.ended()) == [Nothing()]


def test_a_higher_attempt_closes_every_lower_one_of_its_request_and_of_no_other():
    table = Table()
    for name, attempt, index in (("r", 1, 0), ("r", 1, 1), ("other", 1, 0)):
        table.read(StreamBuilder(name, attempt=attempt, index=index).started())
    closed = table.read(StreamBuilder("r", attempt=2).started())
    assert [type(event) for event in closed] == [Closed, Closed, Opened]
    assert {event.stream.end_reason for event in closed[:2]} == {"superseded"}
    assert not any(event.stream.complete for event in closed[:2])
    assert sorted((stream.id.request_id, stream.id.attempt) for stream in table) == [("other", 1), ("r", 2)]


def test_a_lower_attempt_is_void_while_a_higher_one_is_open():
    table, zombie = Table(), StreamBuilder("r", attempt=1)
    table.read(StreamBuilder("r", attempt=2).started())
    assert table.read(zombie.started()) == [Stray("stale_attempt")]
    assert table.read(block(zombie, 0)) == [Stray("no_open_stream")]
    assert [stream.id.attempt for stream in table] == [2]


def test_a_newer_incarnation_closes_the_streams_of_its_engines_older_ones():
    table = Table()
    for name, engine, incarnation in (("a", "e", 1), ("b", "e", 2), ("c", "f", 1)):
        table.read(StreamBuilder(name, engine=engine, incarnation=incarnation).started())
    [closed] = table.read(PublisherStarted(engine="e", incarnation=2, started_at_us=0))
    assert (closed.stream.id.request_id, closed.stream.end_reason) == ("a", "lost")
    assert table.read(PublisherStarted(engine="e", incarnation=2, started_at_us=0)) == [Nothing()]


def test_a_stream_of_shards_closes_when_each_has_ended():
    table = Table()
    first = StreamBuilder("r", layers=(0,), shard=0, shards=2)
    second = StreamBuilder("r", layers=(1,), shard=1, shards=2)
    [opened] = table.read(first.started())
    assert opened.layers is None
    assert table.read(block(first, 0)) == [Nothing()]
    [joined] = table.read(second.started())
    assert isinstance(joined, Joined)
    assert joined.layers == (0, 1)
    [arrived] = table.read(block(second, 0))
    assert (arrived.clear_up_to, arrived.block.layers) == (0, (0, 1))
    assert table.read(first.ended()) == [Nothing()]
    [closed] = table.read(second.ended())
    assert closed.stream.complete


def test_the_reason_of_a_stream_of_shards_is_the_one_that_is_not_finished():
    table = Table()
    shards = [StreamBuilder("r", layers=(number,), shard=number, shards=2) for number in range(2)]
    for shard in shards:
        table.read(shard.started())
    table.read(shards[0].ended(EndReason.CAPTURE_ERROR))
    [closed] = table.read(shards[1].ended())
    assert (closed.stream.end_reason, closed.stream.partial) == ("capture_error", True)


def test_lost_speaks_for_the_whole_stream_and_is_never_complete():
    table = Table()
    table.read(StreamBuilder("r", shard=0, shards=2).started())
    [closed] = table.read(StreamBuilder("r", engine="somebody else").ended(EndReason.LOST))
    assert (closed.stream.end_reason, closed.stream.complete, closed.stream.missing) == ("lost", False, 0)


def test_a_cached_prefix_is_partial_and_complete():
    table, stream = Table(), StreamBuilder("r", cached_prefix=4)
    table.read(stream.started())
    table.read(block(stream, 4))
    [closed] = table.read(stream.ended())
    assert (closed.stream.complete, closed.stream.partial) == (True, True)


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (StreamBuilder("r").started(), "repeated_start"),
        (StreamBuilder("r", incarnation=0).activations([0], [0] * 4), "foreign"),
        (StreamBuilder("r", incarnation=0).ended(), "foreign"),
        (StreamBuilder("r").activations([0], [0] * 4), "repeated"),
        (StreamBuilder("r", shard=1).activations([0], [0] * 4), "foreign"),
        (StreamBuilder("r", shard=1, shards=2).started(), "foreign"),
        (StreamBuilder("r", point="other").activations([0], [0] * 4), "wrong_point"),
        (
            Released(
                request_id="r",
                attempt=1,
                engine="e",
                incarnation=1,
                prompt_partition=0,
                prompt_offset=0,
                reason=ReleaseReason.SHUTDOWN,
                released_at_us=0,
            ),
            "wrong_message",
        ),
    ],
)
def test_what_does_not_belong_to_an_open_stream_is_a_stray_and_harms_it_not(message, cause):
    table, stream = Table(), StreamBuilder("r")
    table.read(stream.started())
    table.read(block(stream, 0))
    assert table.read(message) == [Stray(cause)]
    assert isinstance(table.read(block(stream, 1))[0], Arrived)
    assert table.read(stream.ended())[0].stream.complete


@pytest.mark.parametrize("other", [{"engine": "other"}, {"incarnation": 9}])
@pytest.mark.parametrize("shard", [0, 1])
def test_a_second_live_writer_is_a_conflict_that_takes_nothing_and_clears_nothing(other, shard):
    table = Table()
    mine, theirs = (
        [StreamBuilder("r", layers=(number,), shard=number, shards=2, **who) for number in range(2)]
        for who in ({}, other)
    )
    for builder in mine:
        table.read(builder.started())
    table.read(block(mine[0], 0))
    assert table.read(block(mine[1], 0))[0].clear_up_to == 0
    for message in (theirs[shard].started(), block(theirs[shard], 1), theirs[shard].invalidated(0)):
        assert table.read(message) == [Stray("conflict")]
    assert table.read(theirs[shard].ended()) == [Stray("conflict")]
    assert table.read(block(mine[0], 1)) == [Nothing()]
    [arrived] = table.read(block(mine[1], 1))
    assert (arrived.block.engine, arrived.clear_up_to) == ("engine", 0)
    table.read(mine[0].ended())
    [closed] = table.read(mine[1].ended())
    assert (closed.stream.complete, closed.stream.end_reason, closed.stream.missing) == (False, "conflict", 0)


def test_shards_of_two_engines_are_never_joined():
    table = Table()
    first = StreamBuilder("r", layers=(0,), shard=0, shards=2)
    second = StreamBuilder("r", layers=(1,), shard=1, shards=2, engine="other")
    table.read(first.started())
    assert table.read(second.started()) == [Stray("conflict")]
    table.read(block(first, 0))
    assert table.read(block(second, 0)) == [Stray("conflict")]


@pytest.mark.parametrize(
    "wrong", [{"layers": (0,)}, {"width": 5}, {"dtype": "float16"}, {"prompt_len": 7}, {"shards": 3}]
)
def test_a_shard_of_something_else_is_no_part_of_the_stream(wrong):
    table = Table()
    table.read(StreamBuilder("r", layers=(0,), shard=0, shards=2).started())
    assert table.read(StreamBuilder("r", **({"layers": (1,), "shard": 1, "shards": 2} | wrong)).started()) == [
        Stray("foreign")
    ]


def test_shards_too_far_apart_end_the_handing_on_and_are_said():
    table, wide = Table(), {"width": 1 << 20, "dtype": "float16"}
    first, second = (StreamBuilder("r", layers=(number,), shard=number, shards=2, **wide) for number in range(2))
    for builder in (first, second):
        table.read(builder.started())
    table.read(block(first, 0))
    assert isinstance(table.read(block(second, 0))[0], Arrived)
    for position in range(1, 34):
        table.read(block(first, position))
    assert table.read(block(second, 1)) == [Nothing()]
    table.read(first.ended())
    [closed] = table.read(second.ended())
    assert (closed.stream.complete, closed.stream.end_reason, closed.stream.clear_up_to) == (False, "shard_behind", 0)


def test_rows_that_nobody_has_seen_can_be_rewound():
    table, shards = Table(), [StreamBuilder("r", layers=(number,), shard=number, shards=2) for number in range(2)]
    for builder in shards:
        table.read(builder.started())
    table.read(block(shards[0], 0))
    table.read(block(shards[0], 1))
    assert table.read(shards[0].invalidated(1)) == [Nothing()]
    table.read(shards[0].activations([1], [7.0] * 4))
    [arrived] = table.read(shards[1].activations([0, 1], [0.0] * 8))
    assert np.frombuffer(arrived.block.positions, "<i4").tolist() == [0]
    assert table.read(shards[1].invalidated(1)) == [Nothing()]
    [arrived] = table.read(block(shards[1], 1))
    assert np.frombuffer(arrived.block.data, "<f4").reshape(2, 4)[:, 0].tolist() == [7.0, 0.0]
    assert (arrived.block.revision, arrived.clear_up_to) == (1, 1)
    table.read(shards[0].ended())
    [closed] = table.read(shards[1].ended())
    assert (closed.stream.complete, closed.stream.end_reason) == (True, "finished")


def test_rows_that_were_handed_on_and_rewound_end_the_handing_on_and_are_said():
    table, stream = Table(), StreamBuilder("r")
    table.read(stream.started())
    for position in range(3):
        table.read(block(stream, position))
    assert table.read(stream.invalidated(1)) == [Nothing()]
    assert table.read(block(stream, 1)) == [Nothing()]
    [closed] = table.read(stream.ended())
    assert (closed.stream.complete, closed.stream.end_reason, closed.stream.clear_up_to) == (False, "rewound", 0)


def test_a_record_of_a_revision_that_is_void_is_a_stray():
    table, stream = Table(), StreamBuilder("r")
    table.read(stream.started())
    table.read(stream.invalidated(5))
    stream.revision = 0
    assert table.read(block(stream, 5)) == [Stray("stale_revision")]
    assert table.read(stream.invalidated(3)) == [Stray("stale_revision")]


def test_the_low_watermark_is_the_oldest_open_start():
    table = Table()
    first, second = StreamBuilder("a"), StreamBuilder("b")
    table.read(first.started())
    table.read(second.started())
    assert table.low_watermark(2) == 0
    table.read(first.ended())
    assert table.low_watermark(3) == 1
    table.read(second.ended())
    assert table.low_watermark(4) == 4


def reread(messages, start):
    """Return the open streams of a reader that begins at an offset."""
    table = StreamTable("residual")
    for offset in range(start, len(messages)):
        table.observe(offset, messages[offset])
    return {(stream.id, stream.start_offset, len(stream.shards)) for stream in table}


def test_no_reader_begins_where_a_stale_start_would_look_like_a_new_stream():
    higher, other = StreamBuilder("a", attempt=2), StreamBuilder("b")
    messages = [higher.started(), other.started(), StreamBuilder("a", attempt=1).started(), higher.ended()]
    table = Table()
    for message in messages:
        table.read(message)
    low = table.low_watermark(4)
    assert low == 0
    assert reread(messages, low) == reread(messages, 0)
    assert reread(messages, 1) != reread(messages, 0)


def test_no_reader_begins_where_a_second_shard_would_look_like_the_first():
    shards = [StreamBuilder("a", layers=(number,), shard=number, shards=2) for number in range(2)]
    other = StreamBuilder("b")
    messages = [shards[0].started(), shards[0].ended(), other.started(), shards[1].started(), shards[1].ended()]
    table = Table()
    for message in messages:
        table.read(message)
    assert table.low_watermark(5) == 0
    assert reread(messages, 2) != reread(messages, 0)
    table.read(other.ended())
    assert table.low_watermark(6) == 6
