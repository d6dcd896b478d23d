"""States of long streams: what a reader that takes one up comes to, and what holds back a partition."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.undercurrent.protocol.host_oracle import read_outputs
from tests.unit.undercurrent.protocol.host_world import (
    FINGERPRINT,
    POINT,
    CountingRunner,
    block,
    ended,
    invalidated,
    started,
)
from undercurrent.codec import BlockDecoder, Codec
from undercurrent.errors import ProtocolError
from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_events import Incoming
from undercurrent.protocol.host_position import Committed, HostMetadata, Notice, Resume, resume_from
from undercurrent.protocol.host_states import Keeping
from undercurrent.protocol.messages import VerdictKind
from undercurrent.protocol.stream_state import read_stream, rollouts_of, write_stream
from undercurrent.protocol.streams import Arrived, Stream, StreamId, StreamTable
from undercurrent.testing.streams import StreamBuilder

KEEPING = Keeping(service="g", checkpoint_after_bytes=5, max_replay_bytes=40)


class World:
    def __init__(self, log, keeping=KEEPING, *, can_be_written=True):
        self.log, self.keeping, self.can_be_written = log, keeping, can_be_written
        self.committed, self.states, self.verdicts, self.letters = None, {}, [], []
        self.read = 0

    def take_up(self, states=None):
        runner = CountingRunner(can_be_written=self.can_be_written)
        host = ProbeHost(POINT, FINGERPRINT, runner, abort_max_age_us=10**12, keeping=self.keeping)
        host.assign([0])
        resume = resume_from(self.committed, 0, len(self.log), FINGERPRINT, "earliest")
        given = list(self.states.values()) if states is None else states
        host.begin(0, resume, given if resume.states else [])
        self.write(host)
        return host, resume.offset

    def write(self, host):
        transaction = host.transaction()
        self.verdicts += transaction.verdicts
        self.letters += transaction.dead_letters
        for offset, metadata in transaction.offsets.values():
            self.committed = Committed(offset=offset, metadata=metadata)
        for key, state in transaction.states.items():
            self.states[key.stream] = state
            if state is None:
                del self.states[key.stream]

    def run(self, cuts=(), crashes=()):
        """Read the log; write at each cut, and let another member take over at each crash, unwritten."""
        host, at = self.take_up()
        pending = sorted(crashes)
        while at < len(self.log):
            self.read += 1
            host.records([Incoming(0, at, 0, self.log[at], size=1)], 0)
            at += 1
            if at in cuts:
                self.write(host)
            if pending and at >= pending[0]:
                pending.pop(0)
                host, at = self.take_up()
        self.write(host)
        return host


def long_log(tokens=60):
    """One stream that stays open, and short ones beside it."""
    log = [started("long", 1)]
    for at in range(tokens):
        log.append(block("long", 1, at, at + 1))
        if at % 4 == 0:
            name = f"short-{at}"
            log += [started(name, 1), block(name, 1, 0, 1), ended(name, 1, 2)]
    return [*log, ended("long", 1, tokens + 1)]


def test_an_open_stream_holds_its_partition_back_by_no_more_than_its_last_state():
    world = World(long_log()[:-1])
    host = world.run(cuts=range(len(world.log)))
    offset, emitted = host.mark(0)
    assert emitted == len(world.log)
    assert 0 <= emitted - offset <= KEEPING.checkpoint_after_bytes + 1
    metadata = HostMetadata.from_text(world.committed.metadata)
    assert (metadata.states, len(world.states)) == (1, 1)
    before, world.read = world.read, 0
    world.run()
    assert world.read <= KEEPING.checkpoint_after_bytes + 1 < before


@given(
    cuts=st.sets(st.integers(1, 105), max_size=30),
    crashes=st.sets(st.integers(1, 105), max_size=4),
    after=st.integers(1, 20),
)
def test_who_takes_states_up_says_what_one_says_who_read_it_all(cuts, crashes, after):
    plain = World(long_log(), None)
    plain.run()
    world = World(long_log(), Keeping(checkpoint_after_bytes=after))
    world.run(cuts, crashes)
    assert read_outputs(world.verdicts) == read_outputs(plain.verdicts)
    assert world.states == {}, "nothing is left of streams that have closed"


@given(cuts=st.sets(st.integers(1, 105), max_size=30), crashes=st.sets(st.integers(1, 105), max_size=4))
def test_probes_that_cannot_be_written_down_end_at_the_same_record_whoever_reads_it(cuts, crashes):
    plain = World(long_log(), can_be_written=False)
    plain.run()
    world = World(long_log(), can_be_written=False)
    world.run(cuts, crashes)
    assert read_outputs(world.verdicts) == read_outputs(plain.verdicts)
    [limited] = [item for item in plain.verdicts if item.end_reason == "rebuild_limit"]
    assert (limited.kind, limited.request_id, limited.complete) == (VerdictKind.RESULT, "long", False)
    assert limited.source_offset == KEEPING.max_replay_bytes


def test_a_stream_whose_probes_have_ended_holds_nothing_back():
    world = World(long_log()[:-1], can_be_written=False)
    host = world.run(cuts=range(len(world.log)))
    assert host.mark(0)[0] > KEEPING.max_replay_bytes


def test_probes_that_can_be_written_down_go_on_beyond_the_limit():
    world = World(long_log())
    world.run(cuts=range(len(world.log)))
    assert {item.end_reason for item in world.verdicts if item.kind is VerdictKind.RESULT} == {"finished"}


def test_a_state_that_is_gone_is_a_declared_loss_and_its_stream_says_nothing_more():
    world = World(long_log()[:-1])
    world.run(cuts=range(len(world.log)))
    said = len(world.verdicts)
    world.log.append(block("long", 1, 60, 61))
    host, offset = world.take_up(states=[])
    host.records([Incoming(0, at, 0, world.log[at], size=1) for at in range(offset, len(world.log))], 0)
    world.write(host)
    assert [letter.cause for letter in world.letters] == [Notice.STATES_LOST.value, "no_open_stream"]
    assert len(world.verdicts) == said


def test_a_stream_whose_state_lies_beyond_what_retention_took_goes_on_for_whoever_reads_next():
    log = [started("old", 1), started("long", 1), *(block("long", 1, at, at + 1) for at in range(20))]
    world = World(log)
    world.run(cuts=range(len(log) + 1))
    host, offset = world.take_up()
    log_start = world.states[StreamId("long", 1)].position
    assert offset < log_start
    host.out_of_range(0, log_start, len(log))
    world.write(host)
    assert [letter.cause for letter in world.letters] == [Notice.OUT_OF_RANGE.value]
    world.log += [block("long", 1, 20, 21), ended("long", 1, 22)]
    host, offset = world.take_up()
    host.records([Incoming(0, at, 0, world.log[at], size=1) for at in range(offset, len(world.log))], 0)
    world.write(host)
    results = [item for item in world.verdicts if item.kind is VerdictKind.RESULT]
    assert [(item.request_id, item.end_reason, item.scored) for item in results] == [
        ("old", "lost", 0),
        ("long", "finished", 21),
    ]


def test_a_stream_that_would_not_fit_its_topic_is_not_written_down():
    start = replace(started("r", 1), unembedded_positions=tuple(range(100_000)))
    assert write_stream(Stream(StreamId("r", 1), start, 0)) is None
    assert write_stream(Stream(StreamId("r", 1), replace(start, unembedded_positions=()), 0)) is not None


@pytest.mark.parametrize(("text", "offset"), [("", 0), ("[]", 0), ('{"started": {"rollouts": 7}}', 7)])
def test_the_rollouts_that_a_written_stream_began_under_can_be_told(text, offset):
    assert rollouts_of(text) == offset


@pytest.mark.parametrize("text", ["", "{", "[]", '{"started": {}}'])
def test_a_damaged_state_is_as_good_as_none(text):
    with pytest.raises(ProtocolError):
        read_stream(text, 0)


def test_an_operators_reset_takes_no_state_up():
    world = World(long_log())
    world.run(cuts=range(30), crashes=())
    world.committed = Committed(offset=0)
    world.verdicts = []
    world.run()
    plain = World(long_log(), None)
    plain.run()
    assert read_outputs(world.verdicts) == read_outputs(plain.verdicts)


@pytest.mark.parametrize("count", range(1, 13))
def test_a_stream_in_shards_goes_on_from_its_state_wherever_it_was_taken(count):
    """Rows that wait for the other shard, a rewind and both ends: the same joined rows as without."""
    log = [started("r", 1, shards=2), block("r", 1, 0, 1), block("r", 1, 1, 2)]
    log += [started("r", 1, shard=1, shards=2), block("r", 1, 0, 1, shard=1), block("r", 1, 2, 3)]
    log += [invalidated("r", 1, 2, 1, 4), block("r", 1, 2, 5, revision=1), block("r", 1, 1, 2, shard=1)]
    log += [invalidated("r", 1, 2, 1, 3, shard=1), block("r", 1, 2, 4, shard=1, revision=1)]
    log += [ended("r", 1, 6), ended("r", 1, 5, shard=1)]
    whole, told = StreamTable(POINT), []
    for offset, message in enumerate(log):
        told.append([shape(event) for event in whole.observe(offset, message)])
    first = StreamTable(POINT)
    for offset, message in enumerate(log[:count]):
        first.observe(offset, message)
    second = StreamTable(POINT)
    for stream in first:
        text = write_stream(stream)
        taken = read_stream(text, stream.start_offset)
        taken.resumes_at = count
        assert write_stream(taken) == text
        second.restore(taken)
    assert all(
        not [e for e in second.observe(at, log[at]) if shape(e)[0] not in ("Nothing", "Stray")]
        for at in range(1, count)
    )
    assert [[shape(e) for e in second.observe(at, log[at])] for at in range(count, len(log))] == told[count:]


def shape(event):
    stream = getattr(event, "stream", None)
    rows = struct.unpack("<i", event.block.positions) if hasattr(event, "block") else ()
    ended = () if stream is None or not stream.end_reason else (stream.end_reason, stream.complete, stream.missing)
    return (type(event).__name__, *rows, getattr(event, "clear_up_to", None), *ended)


def test_a_record_is_counted_from_where_a_state_was_taken():
    """The bytes from its start on are the same for whoever took it up, so that its limit comes at the same record."""
    world = World(long_log()[:-1])
    world.run(cuts=range(len(world.log)))
    [state] = world.states.values()
    assert state.read_bytes == state.position - 1
    again = World(world.log)
    again.committed, again.states = world.committed, dict(world.states)
    again.log = [*world.log, *(block("long", 1, at, at + 1) for at in range(60, 90))]
    again.run(cuts=range(len(again.log)))
    [state] = again.states.values()
    assert state.read_bytes == state.position - 1


def test_a_begin_without_states_asks_for_none():
    host = ProbeHost(POINT, FINGERPRINT, CountingRunner(), abort_max_age_us=1, keeping=KEEPING)
    host.assign([0])
    host.begin(0, Resume(offset=3, emitted_up_to=3))
    assert host.open_streams(0) == []


def test_rows_that_wait_for_another_shard_are_written_down_as_a_host_reads_them():
    builders = [StreamBuilder("r", shard=number, shards=2, layers=(number,)) for number in (0, 1)]
    decoder, table = BlockDecoder(Codec(), lambda _: None), StreamTable("residual")
    ahead = [builder.start() for builder in builders] + [builders[0].block([at], [[[at] * 4]]) for at in (0, 1)]
    for offset, value in enumerate(ahead):
        table.observe(offset, decoder.decode(b"r", value))
    [stream] = table
    other = StreamTable("residual")
    other.restore(read_stream(write_stream(stream), stream.start_offset))
    late = [decoder.decode(b"r", builders[1].block([at], [[[9 - at] * 4]])) for at in (0, 1)]
    told = [[event for message in late for event in each.observe(9, message)] for each in (table, other)]
    rows = [[(bytes(event.block.data), event.clear_up_to) for event in events] for events in told]
    assert all(isinstance(event, Arrived) for event in told[0])
    assert rows[0] == rows[1] != []
