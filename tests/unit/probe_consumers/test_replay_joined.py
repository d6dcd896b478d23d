"""Replays of joining probes: what live hosts say under fire, whatever part of the logs is read and however it dies."""

from __future__ import annotations

import random

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml

from probe_consumers import replay_merging, replay_partition
from probe_consumers.bound import set_fingerprint
from probe_consumers.inputs import Inputs
from probe_consumers.replay import Joining, Replay, Span, comparable
from probe_consumers.replay_compare import LiveVerdicts, compare_live, read_cut
from probe_consumers.replay_merge import merge
from probe_consumers.replay_merging import merged
from probe_consumers.replay_order import Origins, Part, Plan, ReplayOrder, check_joined, probe_facts
from probe_consumers.replay_pool import run_parts
from probe_consumers.replay_range import RangeRequest
from probe_consumers.replay_source import load
from probe_consumers.runner import BindingRunner
from tests.unit.probe_consumers.replay_doubles import Killed, Mortal, bytes_of
from tests.unit.undercurrent.protocol.join_story import POINTS, Story
from tests.unit.undercurrent.protocol.join_world import Fleet
from undercurrent.codec import Codec
from undercurrent.errors import ConfigError
from undercurrent.evaluation.diff import collect, compare
from undercurrent.kafka.records import Record
from undercurrent.probes import LinearProbe
from undercurrent.protocol.host_events import Incoming
from undercurrent.protocol.joining_host import JoiningHost
from undercurrent.protocol.lanes import Lanes
from undercurrent.protocol.messages import PublisherStarted
from undercurrent.protocol.streams import StreamId

BOTH = POINTS[:2]
NAME = "+".join(BOTH)
LANES = Lanes(BOTH, 2)
CODEC = Codec()


@pytest.fixture(scope="module")
def origins(tmp_path_factory):
    """A probe that joins both points of a story; its rows are (pa's two values, pb's two layers)."""
    folder = tmp_path_factory.mktemp("probe")
    probe = LinearProbe.from_arrays(
        [0.5, -0.25, 0.125, 0.0625], 0.1, layer=3, tensor_type="residual_stream", threshold=150.0, name="both"
    )
    probe.save(folder / "both")
    bindings = folder / "probes.yaml"
    binding = {"name": "both", "points": list(BOTH), "probe": "./both", "mode": "flag"}
    bindings.write_text(yaml.safe_dump({"bindings": [binding]}))
    return Origins(probes=bindings, dataset=folder)


@pytest.fixture(scope="module")
def bounds(origins):
    return load(origins).of_point(NAME)


def lived(seed, bounds, numbers=2, steps=70):
    """Return the logs of a story by lane, and what hosts that died and took lanes from one another said of them."""
    rng = random.Random(seed)
    story = Story(rng, BOTH, numbers, steps)
    fleet = Fleet(rng, BOTH, story.logs, numbers, runner=lambda: BindingRunner(bounds, "live", lambda: 0))
    fleet.under_fire(200)
    fleet.to_the_end()
    return rng, fleet.logs, fleet.verdicts


def inputs_of(numbers):
    return Inputs(BOTH, BOTH, BOTH, numbers)


def replayed(rng, bounds, logs, spans):
    """Return what a replay says of parts of the logs that it reads in any order, and what the parts cut."""
    inputs = inputs_of(len(logs) // 2)
    begins_us = {
        lane: logs[lane][span.start][0] if span.start < span.end else None
        for lane, span in spans.items()
        if span.start > 0
    }
    run = Replay(NAME, bounds, spans, lambda: 0, joining=Joining(inputs=inputs, begins_us=begins_us))
    places = {lane: span.start for lane, span in spans.items()}
    said = []
    while left := [lane for lane, span in spans.items() if places[lane] < span.end]:
        lane = rng.choice(left)
        first = places[lane]
        places[lane] = min(spans[lane].end, first + rng.randint(1, 9))
        said += run.feed([Incoming(lane, at, *logs[lane][at], size=100) for at in range(first, places[lane])])
    return said, run.edges()


@pytest.mark.parametrize("seed", range(12))
def test_a_replay_says_what_hosts_said_that_died_and_changed_hands(bounds, seed):
    rng, logs, live = lived(seed, bounds)
    spans = {lane: Span(0, len(log)) for lane, log in logs.items()}
    said, edges = replayed(rng, bounds, logs, spans)
    assert (edges.started_before, edges.unfinished) == ({}, {})
    report = compare(*map(collect, comparable(live, said, edges, spans, LANES)))
    assert report.equal, report.differences[:3]
    assert report.scores_compared > 10


@pytest.mark.parametrize("seed", range(12))
def test_a_part_of_the_logs_says_nothing_else_and_names_what_it_cuts(bounds, seed):
    rng, logs, live = lived(seed, bounds, steps=120)
    compared = 0
    for _ in range(12):
        spans = {}
        for lane, log in logs.items():
            start = rng.choice([0, rng.randint(0, len(log) // 2)])
            spans[lane] = Span(start, rng.choice([len(log), rng.randint(start, len(log))]))
        said, edges = replayed(rng, bounds, logs, spans)
        report = compare(*map(collect, comparable(live, said, edges, spans, LANES)))
        assert report.differences == [], (spans, report.differences[:3])
        compared += report.verdicts_compared
        named = edges.started_before.keys() | edges.unfinished.keys() | {stream_of(item) for item in said}
        assert {stream_of(item) for item in live if within(item, spans, logs)} <= named
    assert compared > 20


def stream_of(verdict):
    return StreamId(verdict.request_id, verdict.attempt, verdict.index)


def within(verdict, spans, logs):
    """Whether all of a stream's records lie in the parts."""
    found = []
    for lane, log in logs.items():
        for offset, (_, message) in enumerate(log):
            if getattr(message, "request_id", None) == verdict.request_id:
                found.append(spans[lane].start <= offset < spans[lane].end)
    return all(found)


# --- as a command runs it: on disk, and dying


class LogSource:
    """A point's log as records."""

    def __init__(self, point, logs):
        self._point, self._logs = point, logs

    def batches(self, part, first):
        for at in range(first, part.span.end, 5):
            yield [self.record(part.number, offset) for offset in range(at, min(at + 5, part.span.end))]

    def record(self, number, offset):
        at_us, message = self._logs[number][offset]
        request = getattr(message, "request_id", None)
        value = b"nobody can read this" if message is None else CODEC.encode(message)
        return Record(self._point, number, offset, request and request.encode(), value, at_us // 1000, ())


def planned(out, origins, bounds, logs, requests=None):
    out.mkdir()
    plan = Plan(
        asked={"point": NAME},
        probes=probe_facts(bounds),
        fingerprint=set_fingerprint(bounds),
        source={"topics": list(BOTH)},
        origins=origins,
        parts=tuple(Part(number=lane, span=Span(0, len(log))) for lane, log in sorted(logs.items())),
        requests=requests,
        points=BOTH,
        partitions=len(logs) // 2,
    )
    plan.write(out)
    return plan


@pytest.fixture
def recorded(monkeypatch, bounds):
    _, logs, live = lived(5, bounds)
    by_point = {point: {number: logs[side * 2 + number] for number in range(2)} for side, point in enumerate(BOTH)}
    monkeypatch.setattr(replay_partition, "source_of", lambda _, loaded, point: LogSource(point, by_point[point]))
    monkeypatch.setattr(replay_merging, "CHUNK_RECORDS", 3)
    return logs, live


def carry_on(out, plan):
    run_parts(out, plan, 1, lambda: None)
    return merge(out, plan)


@pytest.mark.parametrize("after", [False, True])
def test_a_replay_that_died_anywhere_goes_on_to_the_same_bytes(recorded, origins, bounds, tmp_path, monkeypatch, after):
    logs, _ = recorded
    mortal = Mortal(monkeypatch)
    carry_on(tmp_path / "whole", planned(tmp_path / "whole", origins, bounds, logs))
    expected, steps = bytes_of(tmp_path / "whole"), mortal.steps
    assert steps > 10
    for at in range(1, steps + 1):
        mortal.steps, mortal.dies_at, mortal.after = 0, at, after
        out = tmp_path / f"{at}"
        plan = planned(out, origins, bounds, logs)
        with pytest.raises(Killed):
            carry_on(out, plan)
        mortal.dies_at = -1
        carry_on(out, plan)
        assert bytes_of(out) == expected, at


def test_some_requests_are_judged_as_among_all_of_them(recorded, origins, bounds, tmp_path):
    logs, live = recorded
    whole = carry_on(tmp_path / "whole", planned(tmp_path / "whole", origins, bounds, logs))
    names = sorted({item.request_id for item in live})[:4]
    some = carry_on(tmp_path / "some", planned(tmp_path / "some", origins, bounds, logs, tuple(names)))
    assert whole["scores"] > some["scores"] > 0
    assert some["records"]["of_other_requests"] > 0
    for table in ("verdicts", "scores"):
        mine, theirs = (pq.read_table(tmp_path / folder / f"{table}.parquet") for folder in ("some", "whole"))
        kept = theirs.filter(pc.is_in(theirs["request_id"], value_set=mine["request_id"].combine_chunks().unique()))
        assert mine.num_rows > 0
        assert mine.equals(kept)
        assert set(mine["request_id"].to_pylist()) <= set(names)


def test_a_lane_that_nothing_can_be_joined_with_is_not_read_on_and_that_is_told(
    recorded, origins, bounds, tmp_path, monkeypatch
):
    logs, _ = recorded
    monkeypatch.setitem(JoiningHost.__init__.__kwdefaults__, "ahead_bytes", 64)
    short = {lane: log if lane < 2 else log[:8] for lane, log in logs.items()}
    summary = carry_on(tmp_path / "o", plan := planned(tmp_path / "o", origins, bounds, short))
    (label, left), *_ = summary["not_read"].items()
    assert label.startswith("pa:")
    assert 0 < left["start"] < left["end"] == len(logs[int(label[3:])])
    read = plan.as_read(summary["not_read"]).spans
    assert read[int(label[3:])].end == left["start"]


# --- small parts


def rows(lane, times):
    return iter([[Record("t", lane, at, None, b"", time_ms, ()) for at, time_ms in enumerate(times)]])


def test_lanes_are_merged_by_time_and_one_that_is_ahead_waits():
    def places(feeds, ahead):
        return [(item.partition, item.offset) for chunk in merged(feeds, ahead) for item in chunk]

    feeds = {0: [1, 2, 9], 1: [1, 3, 4]}
    by_time = [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2), (0, 2)]
    assert places({lane: rows(lane, times) for lane, times in feeds.items()}, frozenset) == by_time
    others_first = [(1, 0), (1, 1), (1, 2)]
    assert places({lane: rows(lane, times) for lane, times in feeds.items()}, lambda: {0}) == others_first


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"range": RangeRequest(offsets={None: 3})}, "--from-offset"),
        ({"range": RangeRequest(ends={None: 3})}, "--to-offset"),
        ({"last": 3}, "--last"),
    ],
)
def test_what_has_no_one_meaning_for_several_topics_is_refused(tmp_path, fields, named):
    order = ReplayOrder(origins=Origins(config=tmp_path), point=NAME, out=tmp_path, **fields)
    with pytest.raises(ConfigError, match=rf"{named}: --point pa\+pb reads several topics"):
        check_joined(order)


@pytest.mark.parametrize("more_behind", [False, True])
def test_where_all_of_one_point_is_gone_that_differs_unless_it_may_lie_behind_the_range(
    monkeypatch, recorded, origins, bounds, tmp_path, more_behind
):
    logs, live = recorded
    [name, *_] = [item.request_id for item in live if item.kind == "result" and item.complete]
    nothing = PublisherStarted(engine="other", incarnation=1, started_at_us=0)

    def is_left(lane, message):
        """Neither the request's records at the second point, nor what shows there that none come."""
        starts = isinstance(message, PublisherStarted)
        return lane < 2 or not (starts or getattr(message, "request_id", "") == name)

    gone = {lane: [(at, said if is_left(lane, said) else nothing) for at, said in log] for lane, log in logs.items()}
    by_point = {point: {number: gone[side * 2 + number] for number in range(2)} for side, point in enumerate(BOTH)}
    monkeypatch.setattr(replay_partition, "source_of", lambda _, loaded, point: LogSource(point, by_point[point]))
    plan = planned(tmp_path / "o", origins, bounds, gone)
    carry_on(tmp_path / "o", plan)
    said = LiveVerdicts(tmp_path / "live", 1, CODEC)
    records = [Record("v", 0, at, b"", CODEC.encode(item), 0, ()) for at, item in enumerate(live)]
    said.write(records, NAME, frozenset({"both"}))
    whole = () if more_behind else (2, 3)
    report = compare_live(tmp_path / "o", said, "live", plan.spans, {}, plan.inputs, whole)
    assert name in {item.request_id for item in read_cut(tmp_path / "o").unfinished}
    assert (name in {item.request_id for item in report.differences}) == (not more_behind)
