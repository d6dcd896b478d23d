"""What the joins of points do where one of them is late, too long, foreign, or kills its host."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.undercurrent.protocol.join_story import SECOND
from tests.unit.undercurrent.protocol.join_world import ROWS, Fleet, RowsRunner, read_outputs
from undercurrent.codec.tensors import bytes_of
from undercurrent.protocol.host_events import Fetch, Step
from undercurrent.protocol.host_states import Keeping
from undercurrent.protocol.join_cut import Past
from undercurrent.protocol.join_evidence import Minutes
from undercurrent.protocol.join_number import NumberJoin
from undercurrent.protocol.joined_stream import JoinedStream
from undercurrent.protocol.messages import EndReason, PublisherStarted, VerdictKind
from undercurrent.protocol.open_stream import Stream, StreamId
from undercurrent.protocol.rows import Piece, read_rows
from undercurrent.protocol.streams import Noted
from undercurrent.testing.streams import StreamBuilder

KILLER = 666


def built(point, request="r", **fields):
    return StreamBuilder(request, **{"point": point, "engine": "e", "incarnation": 1, "width": 1, **fields})


def rows_at(stream, *positions, **fields):
    return stream.activations(list(positions), [[float(at)] for at in positions], **fields)


class Bench:
    """Two lanes, written by hand, a second between records, and a fleet that reads them."""

    def __init__(self, pa, pb, **options):
        def timed(log):
            at_us, found = 0, []
            for item in log:
                if isinstance(item, int):
                    at_us += item * SECOND
                else:
                    at_us += SECOND
                    found.append((at_us, item))
            return found

        logs = {("pa", 0): timed(pa), ("pb", 0): timed(pb)}
        self.fleet = Fleet(random.Random(1), ("pa", "pb"), logs, 1, **options)
        self.fleet.visible = {lane: len(log) for lane, log in self.fleet.logs.items()}

    def read(self, *order, limit=1000):
        """Read so many records of lanes, given as (lane, count) or a lane."""
        for item in order:
            lane, count = item if isinstance(item, tuple) else (item, limit)
            self.fleet.read(self.fleet.owner[lane], lane, count)

    def commit(self):
        self.fleet.write(self.fleet.members[self.fleet.owner[0]])

    def crash(self):
        self.fleet.crash(self.fleet.owner[0])

    @property
    def lows(self):
        return tuple(self.fleet.committed[lane].offset for lane in (0, 1))

    def ends(self):
        return [
            (item.kind.value, item.end_reason or item.error, item.complete, item.scored)
            for item in self.fleet.verdicts
            if item.kind in {VerdictKind.RESULT, VerdictKind.ERROR}
        ]

    def shown(self):
        return {name[0]: [at for at, _ in rows] for name, rows in read_outputs(self.fleet.verdicts)[2].items()}


def whole(point, request="r", count=3, **fields):
    stream = built(point, request, **fields)
    return [stream.started(), *(rows_at(stream, at) for at in range(count)), stream.ended()]


# --- the other side never comes


def test_a_request_whose_other_stream_is_in_no_log_ends_once_that_log_has_gone_on_for_long():
    quiet = [rows_at(built("pb", "nobody"), 0)]
    bench = Bench([*whole("pa"), *whole("pa", "s")], [*whole("pb", "s"), *quiet, 599, *quiet, 120, *quiet, *quiet])
    bench.read(0, (1, 6))
    bench.commit()
    assert bench.ends() == [("result", "finished", True, 3)]
    assert bench.lows[0] == 0, "r is still awaited"
    bench.read((1, 1))
    bench.commit()
    assert len(bench.ends()) == 1
    bench.read((1, 1))
    bench.commit()
    assert bench.ends()[1:] == [("result", "lost", False, 0)]
    assert bench.lows == (9, 7), "the last record of each is read again, to know the time"
    for _ in range(2):
        bench.crash()
        bench.read(1, 0)
        bench.commit()
    assert len(bench.ends()) == 2


def test_a_request_that_has_one_point_alone_is_none_of_the_join():
    bench = Bench([*whole("pa", points=("pa",)), rows_at(built("pa", "x"), 0)], [])
    bench.read(0)
    bench.commit()
    assert (bench.ends(), bench.lows) == ([], (5, 0))


def test_streams_of_two_engines_are_never_mixed():
    bench = Bench(whole("pa"), whole("pb", engine="z"))
    bench.read(0, 1)
    bench.commit()
    assert bench.ends() == [("result", "conflict", False, 0)]


def test_a_log_that_lost_its_beginning_ends_what_was_open_there_and_goes_on():
    bench = Bench([*whole("pa"), *whole("pa", "s")], [*whole("pb"), *whole("pb", "s")])
    bench.read(0, (1, 2))
    bench.commit()
    host, places = member = bench.fleet.members[0]
    bench.fleet.act(member, host.out_of_range(1, 4, 10))
    assert (places[1], bench.lows[1]) == (4, 4)
    assert [letter for letter in bench.fleet.dead[1].items() if letter[1]] == [(2, 1)], "the loss is declared"
    bench.read(1)
    bench.commit()
    assert bench.ends() == [("result", "lost", False, 1), ("result", "finished", True, 3)]
    assert bench.shown() == {"r": [0], "s": [0, 1, 2]}


def test_lanes_of_a_log_that_is_shorter_than_it_was_begin_anew_together():
    bench = Bench(whole("pa"), whole("pb"))
    bench.read(0, 1)
    host = bench.fleet.members[0][0]
    assert host.out_of_range(0, 0, 2) == [Fetch(0), Fetch(1)]
    assert (host.emitted_up_to, host.waiting) == ({}, {0, 1})
    assert host.out_of_range(1, 0, 2) == []


def test_an_end_without_a_stream_is_forgotten_once_the_other_log_has_gone_on():
    lost = built("pb", "g").ended(reason=EndReason.LOST)
    quiet = rows_at(built("pa", "nobody"), 0)
    bench = Bench([quiet, 70, quiet, quiet], [lost, *whole("pb", "o", points=("pb",))])
    bench.read(1, (0, 1))
    bench.commit()
    assert bench.lows == (0, 0)
    bench.read(0)
    bench.commit()
    assert (bench.ends(), bench.lows) == ([], (2, 5))


# --- what a join may hold


def test_the_lane_with_less_waiting_flows_and_the_other_is_to_be_paused():
    bench = Bench(whole("pa", count=200), whole("pb", count=200))
    host = bench.fleet.members[0][0]
    bench.read((0, 60))
    assert host.ahead == {0}
    bench.read((1, 60))
    assert host.ahead == frozenset()


def test_a_member_with_one_lane_of_a_number_waits_and_begins_again_with_both():
    bench = Bench(whole("pa"), whole("pb"))
    bench.read(0, (1, 3))
    bench.commit()
    bench.fleet.rebalance([1])
    first, second = (member[0] for member in bench.fleet.members)
    assert (first.waiting, second.waiting) == ({0}, {1})
    assert (first.emitted_up_to, second.emitted_up_to) == ({}, {})
    bench.fleet.rebalance([0])
    assert (first.waiting, second.waiting, set(second.emitted_up_to)) == (set(), set(), {0, 1})
    bench.read(1, 0)
    bench.fleet.write(bench.fleet.members[1])
    assert bench.ends() == [("result", "finished", True, 3)]
    assert bench.shown() == {"r": [0, 1, 2]}


@pytest.mark.parametrize("crashes", [False, True])
def test_past_the_rebuild_limit_a_joined_probe_ends_and_its_streams_hold_nothing_back(crashes):
    keeping = Keeping(checkpoint_after_bytes=500, max_replay_bytes=1000, service="s")
    long = whole("pa", count=40), whole("pb", count=40)
    bench = Bench([*long[0], *whole("pa", "s")], [*long[1], *whole("pb", "s")], keeping=keeping)
    for _ in range(15):
        bench.read((0, 3), (1, 3))
        bench.commit()
        if crashes:
            bench.crash()
    bench.read(1, 0)
    bench.commit()
    assert bench.ends() == [("result", "rebuild_limit", False, 10), ("result", "finished", True, 3)]
    assert bench.shown() == {"r": list(range(10)), "s": [0, 1, 2]}
    assert bench.lows == (46, 46)


def test_a_dead_requests_lanes_are_not_held_while_it_goes_on():
    keeping = Keeping(checkpoint_after_bytes=500, max_replay_bytes=1000, service="s")
    bench = Bench(whole("pa", count=80), whole("pb", count=80), keeping=keeping)
    for _ in range(70):
        bench.read((0, 1), (1, 1))
        bench.commit()
    assert min(bench.lows) >= 60
    assert bench.fleet.states[0].keys() == {StreamId("r", 1, 0)}


# --- a record that kills


class Killed(RowsRunner):
    def process(self, steps):
        for step in steps:
            block = getattr(step.event, "block", None)
            if block is not None and block.step == KILLER:
                raise DyingError
            yield from super().process([step])


class DyingError(Exception):
    """A host is no more."""


def test_a_record_that_kills_ends_its_own_request_alone():
    killer = built("pa", "k")
    pa = [killer.started(), rows_at(killer, 0), rows_at(killer, 1, step=KILLER), rows_at(killer, 2), killer.ended()]
    bench = Bench([*pa, *whole("pa", "s")], [*whole("pb", "k"), *whole("pb", "s")], runner=Killed)
    fleet = bench.fleet
    for _ in range(60):
        member = fleet.members[0]
        host, places = member
        try:
            for lane in (0, 1):
                while lane in host.emitted_up_to and places[lane] < len(fleet.logs[lane]):
                    if lane in host.careful:
                        host.take_in_hand(lane, places[lane])
                        fleet.write(member)
                    bench.read((lane, 1))
                    if lane in host.careful:
                        fleet.write(member)
            fleet.write(member)
        except DyingError:
            bench.crash()
    kinds = sorted((item.request_id, item.kind.value) for item in fleet.verdicts if item.kind != VerdictKind.WATERMARK)
    assert kinds == [("k", "error"), ("s", "result"), ("s", "signal")]
    assert next(item.error for item in fleet.verdicts if item.error).endswith((" of pa", " of pb"))
    assert bench.lows == (9, 9)


# --- rows


def test_rows_of_several_element_types_are_float32_and_those_of_one_are_as_they_were():
    def piece(point, dtype, width):
        stream = built(point, dtype=dtype, width=width, layers=(2, 5))
        values = np.arange(2 * 2 * width, dtype=np.float32).reshape(2, 2, width)
        block = stream.activations([0, 1], values)
        read = read_rows(block, -1)
        assert read is not None
        return Stream(StreamId("r", 1), stream.started(), 0), Piece(block, read[0]), values

    def joined(*kinds):
        made = [piece(point, *kind) for point, kind in zip(("pa", "pb"), kinds, strict=True)]
        stream = JoinedStream([stream for stream, _, _ in made], [(2, 5)] * 2, "pa+pb", ROWS)
        block = stream.join([item for _, item, _ in made], 2)
        expected = np.concatenate([values.reshape(2, -1) for _, _, values in made], axis=1)
        return stream, block, expected

    stream, block, expected = joined(("bfloat16", 3), ("bfloat16", 1))
    assert (block.dtype, block.width, block.layers, stream.layers) == ("bfloat16", 8, (2,), (2,))
    assert block.data == bytes_of(expected, "bfloat16")
    assert [(part.point, part.start, part.stop) for part in stream.parts] == [("pa", 0, 6), ("pb", 6, 8)]
    for kinds in (("float16", 3), ("bfloat16", 1)), (("int8", 3), ("int8", 1)):
        _, block, expected = joined(*kinds)
        assert block.dtype == "float32"
        np.testing.assert_allclose(np.frombuffer(block.data, "<f4").reshape(2, 8), expected, atol=0.05)


def test_a_point_in_shards_is_joined_whole():
    shards = [built("pb", shard=shard, shards=2, layers=(shard,)) for shard in (0, 1)]
    pb = [
        shards[0].started(),
        rows_at(shards[0], 0, 1),
        shards[1].started(),
        rows_at(shards[1], 0),
        rows_at(shards[1], 1, 2),
        shards[1].ended(),
        rows_at(shards[0], 2),
        shards[0].ended(),
    ]
    bench = Bench(whole("pa"), pb)
    bench.read(0, (1, 4), 1)
    bench.commit()
    assert bench.ends() == [("result", "finished", True, 3)]
    assert bench.shown() == {"r": [0, 1, 2]}


def test_a_block_that_fits_nothing_is_missing_and_no_row_of_it_leaves():
    stream = built("pb")
    bad = replace(stream.activations([1], [[1.0]]), data=b"\0\0\0")
    pb = [stream.started(), rows_at(stream, 0), bad, rows_at(stream, 2), stream.ended()]
    bench = Bench(whole("pa"), pb)
    bench.read(1, 0)
    bench.commit()
    assert bench.ends() == [("result", "finished", False, 2)]
    assert [item.missing for item in bench.fleet.verdicts if item.kind is VerdictKind.RESULT] == [1]
    assert bench.shown() == {"r": [0, 2]}


def test_an_engine_that_never_wrote_a_lane_holds_the_other_back_for_no_longer_than_that_goes_on():
    quiet = rows_at(built("pb", "nobody"), 0)
    bench = Bench([PublisherStarted(engine="a", incarnation=5, started_at_us=0)], [quiet, 70, quiet])
    bench.read(0, (1, 1))
    bench.commit()
    assert bench.lows == (0, 0)
    bench.read(1)
    bench.commit()
    assert bench.lows == (0, 1)
    assert bench.fleet.members[0][0].mark(0) == (0, 1), "its last record, which tells the time"


def test_minutes_that_no_stream_can_be_late_for_are_forgotten():
    minute, minutes = 60_000_000, Minutes()
    for at in range(1000):
        minutes.note(at, at * minute)
    asked = [minutes.late(at * minute) for at in range(500, 1100)]
    minutes.forget(500 * minute)
    assert [minutes.late(at * minute) for at in range(500, 1100)] == asked
    assert minutes.late(0) == (511, 511 * minute)
    minutes.forget(5000 * minute)
    assert minutes.late(0) == (999, 999 * minute)
    assert not minutes.note(1000, 999 * minute)
    assert minutes.note(1001, 1000 * minute)


def test_lanes_that_go_on_for_long_keep_no_minute_that_both_have_passed():
    join, minute = NumberJoin(0, ["a", "b"], ROWS, [0, 0]), 60_000_000
    for at in range(5000):
        for side in (0, 1):
            step = Step(side, at, at * minute, Noted(None), silent=False)
            later = join.note_time(side, step)
            assert [*join.take(side, step), *join.settle(later=later)] == []
    # An hour may be read once more, and a stream's start is late after eleven minutes.
    assert join._minutes[0].late(0)[0] > 4900


@pytest.mark.parametrize("seed", range(10))
def test_where_nothing_can_be_lower_the_cut_is_what_it_would_be_found_to_be(seed):
    rng, past, plain = random.Random(seed), Past(), {}
    lows = (0, 0)
    for number in range(200):
        name, at = StreamId(f"r{number}", 1, 0), (lows[0] + rng.randrange(9), lows[1] + rng.randrange(9))
        past.add(name, at, (0, 1))
        plain[name] = at
        highest = tuple(low + rng.choice([0, 0, 1, 4]) for low in lows)
        found, before = list(highest), None
        while found != before:
            before = found
            for place in plain.values():
                if any(own >= low for own, low in zip(place, found, strict=True)):
                    found = [min(own, low) for own, low in zip(place, found, strict=True)]
        assert past.cut(highest) == tuple(found)
        lows = tuple(found)
        past.forget(lows)
        plain = {name: at for name, at in plain.items() if at[0] >= lows[0] or at[1] >= lows[1]}
        assert all(name in past for name in plain)
        assert len(past._streams) == len(plain)
