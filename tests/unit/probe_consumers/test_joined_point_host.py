"""The loop of points that are joined: halves of a number come and go, and nothing is said twice or not at all."""

from __future__ import annotations

import time
from collections import defaultdict

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from probe_consumers.aborts import AbortWriter
from probe_consumers.bound import Bound, set_fingerprint
from probe_consumers.inputs import Inputs
from probe_consumers.loop_settings import LoopSettings
from probe_consumers.metrics import HostMetrics, ProbeMetrics
from probe_consumers.observer import Watched
from probe_consumers.point_host import PointHost
from probe_consumers.runner import BindingRunner
from probe_consumers.transactor import Transactor
from probe_consumers.versions import Versions
from tests.unit.probe_consumers.host_doubles import BESIDE, CODEC, AtOnce, Lookup, Publisher, Writer, turn_until
from undercurrent.codec.tensors import row_bytes, rows_of
from undercurrent.kafka.records import Partition, Record
from undercurrent.probes import Binding, LinearProbe, LoadedProbe
from undercurrent.protocol.host_position import HostMetadata
from undercurrent.protocol.join_runner import JoinRunner
from undercurrent.protocol.joined_stream import RowFormat
from undercurrent.protocol.joining_host import JoiningHost
from undercurrent.protocol.messages import VerdictKind
from undercurrent.testing.streams import StreamBuilder

POINTS = ("residual", "attn")
PARTITIONS = 2
INPUTS = Inputs(POINTS, POINTS, ("residual.dlq", "attn.dlq"), PARTITIONS)
ALL = [Partition(point, number) for point in POINTS for number in range(PARTITIONS)]


class Cluster:
    """Logs of two topics, a group's offsets, and what transactions wrote."""

    def __init__(self):
        self.logs = defaultdict(list)
        self.committed, self.written, self.commands, self.calls = {}, [], [], []
        self.fail, self.abort_error = [], None

    def append(self, point, number, *values):
        log = self.logs[Partition(point, number)]
        for value in values:
            log.append(Record(point, number, len(log), b"k", value, int(time.time() * 1000), ()))

    def verdicts(self, *kinds):
        found = [CODEC.decode(value) for topic, value in self.written if topic == "verdicts"]
        return [item for item in found if not kinds or item.kind in kinds]


class Subscriber:
    def __init__(self, cluster, handler):
        self.cluster, self.handler = cluster, handler
        self.positions, self.paused = {}, set()

    def open(self):
        pass

    def give(self, *partitions):
        self.positions.update(dict.fromkeys(partitions))
        self.handler.on_assigned(list(partitions))

    def take(self, *partitions):
        self.handler.on_revoked(list(partitions))
        for where in partitions:
            del self.positions[where]
            self.paused.discard(where)

    def poll_batch(self, most, timeout_s):
        batch = []
        for where, position in self.positions.items():
            if position is not None and where not in self.paused:
                fresh = self.cluster.logs[where][position : position + most]
                self.positions[where] += len(fresh)
                batch += fresh
        return batch

    def take_events(self):
        return []

    def consumer_group_metadata(self):
        return "generation"

    def committed(self, partitions, timeout_s):
        return {where: self.cluster.committed.get(where, (None, None)) for where in partitions}

    def start(self, where, offset):
        if where in self.positions:
            self.positions[where] = offset
        return where in self.positions

    def pause(self, where):
        if where in self.positions:
            self.paused.add(where)

    def resume(self, where):
        self.paused.discard(where)


class JoinedWriter(Writer):
    def commit(self):
        self.cluster.written += self.records
        self.cluster.committed.update(self.offsets or {})


class JoinedLookup(Lookup):
    def beginning(self, partitions):
        return dict.fromkeys(partitions, 0)

    def end(self, partitions):
        return {Partition(*where): len(self.cluster.logs[where]) for where in partitions}


@pytest.fixture
def world():
    cluster = Cluster()
    probe = LinearProbe.from_arrays(np.ones(8), 0.0, layer=0, tensor_type="residual_stream", threshold=1e9)
    factory = LinearProbe.factory(artefact=probe.artefact)
    loaded = LoadedProbe(factory=factory, sample=probe, fingerprint=probe.fingerprint)
    bounds = [Bound(Binding(name="both", point="residual+attn", points=POINTS, probe="p"), loaded)]
    runner = BindingRunner(bounds, "group", lambda: 0)
    joins = JoinRunner(runner, INPUTS.lanes, POINTS, RowFormat(row_bytes, rows_of))
    made = []

    def make_subscriber(handler):
        made.append(Subscriber(cluster, handler))
        return made[0]

    host = PointHost(
        core=JoiningHost(POINTS, set_fingerprint(bounds), joins, INPUTS.lanes, 60_000_000),
        runner=runner,
        make_subscriber=make_subscriber,
        transactor=Transactor(
            lambda: JoinedWriter(cluster),
            INPUTS,
            "verdicts",
            CODEC,
            beside=BESIDE,
            service="s",
            letter_bytes=200_000,
            stable=False,
        ),
        aborts=AbortWriter(Publisher(cluster), "control", CODEC),
        lookup=JoinedLookup(cluster),
        codec=CODEC,
        clock=lambda: time.time_ns() // 1000,
        metrics=HostMetrics(ProbeMetrics(CollectorRegistry()), "residual+attn"),
        settings=LoopSettings(
            inputs=INPUTS,
            verdicts="verdicts",
            service="s",
            fingerprint=set_fingerprint(bounds),
            start_from="earliest",
        ),
        executor=AtOnce(),
    )
    watched = Watched(host, "residual+attn", "group", Versions(bounds), host._metrics)
    return cluster, host, made[0], watched


def streams(name, tokens=6):
    """The messages of a request's two streams, a token each."""
    found = []
    for side, point in enumerate(POINTS):
        stream = StreamBuilder(name, point=point, points=POINTS)
        values = [stream.start()]
        values += [stream.block([at], np.full(4, at + 10 * side)) for at in range(tokens)]
        found.append([*values, stream.end()])
    return found


def scores(cluster, name):
    found = [item for item in cluster.verdicts() if item.request_id == name and item.scores]
    positions = np.concatenate([np.frombuffer(item.score_positions, "<i4") for item in found])
    return dict(zip(positions.tolist(), np.concatenate([np.frombuffer(i.scores, "<f4") for i in found]), strict=True))


def turns(host, count=8):
    for _ in range(count):
        host._next_transaction_s = host._resuming._next_s = 0.0
        host.turn()


def test_both_logs_are_read_joined_and_committed_in_one_transaction(world):
    cluster, host, subscriber, watched = world
    assert watched.unready() == ["point residual+attn: no partitions assigned yet"]
    subscriber.give(*ALL)
    for point, values in zip(POINTS, streams("r"), strict=True):
        cluster.append(point, 1, *values)
    turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))
    (word,) = cluster.verdicts(VerdictKind.RESULT)
    assert (word.point, word.complete, word.end_reason, word.source_partition) == ("residual+attn", True, "finished", 1)
    assert scores(cluster, "r") == {at: 4 * (2 * at + 10) for at in range(6)}
    turns(host)
    written = {where: HostMetadata.from_text(text).emitted_up_to for where, (_, text) in cluster.committed.items()}
    assert {where: at for where, at in written.items() if at} == {Partition(point, 1): 8 for point in POINTS}
    # Nothing holds either log back once the request is over.
    assert all(cluster.committed[Partition(point, 1)][0] > 6 for point in POINTS)
    ends = host._lookup.end(ALL)
    watched.see({lane: ends[INPUTS.place(lane)] for lane in range(4)}, time.monotonic())
    assert (watched.lag_records, watched.unready()) == (0, [])
    beat = watched.heartbeat(lambda: 0, "m")
    assert (beat.partitions, beat.probes[0].point) == ((0, 1), "residual+attn")


def test_half_a_number_is_not_read_and_goes_on_when_the_other_half_is_back(world, monkeypatch):
    cluster, host, subscriber, watched = world
    sides = streams("r")
    subscriber.give(*ALL)
    for point, values in zip(POINTS, sides, strict=True):
        cluster.append(point, 0, *values[:4])
    turn_until(host, lambda: len(cluster.verdicts()) > 0)
    subscriber.take(Partition("attn", 0))
    assert Partition("residual", 0) in subscriber.paused
    for point, values in zip(POINTS, sides, strict=True):
        cluster.append(point, 0, *values[4:])
    turns(host)
    assert watched.host.emitted_up_to.keys() == {1, 3}
    assert watched.heartbeat(lambda: 0, "m").partitions == (1,)
    assert cluster.verdicts(VerdictKind.RESULT) == []
    assert watched.unready() == []
    monkeypatch.setattr("probe_consumers.halves.TORN_AFTER_S", -1.0)
    turns(host, 1)
    (reason,) = watched.unready()
    assert reason.startswith("point residual+attn: partitions 0 of only some of residual, attn have been assigned")
    subscriber.give(Partition("attn", 0))
    turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))
    turns(host)
    assert (len(cluster.verdicts(VerdictKind.RESULT)), watched.unready()) == (1, [])
    assert scores(cluster, "r") == {at: 4 * (2 * at + 10) for at in range(6)}
    positions = [at for item in cluster.verdicts() for at in np.frombuffer(item.score_positions or b"", "<i4").tolist()]
    assert sorted(positions) == list(range(6))


def test_what_nobody_can_read_goes_to_the_dead_letters_of_its_own_topic(world):
    cluster, host, subscriber, _ = world
    subscriber.give(*ALL)
    cluster.append("attn", 1, b"nonsense")
    cluster.append("residual", 0, b"nonsense too")
    turn_until(host, lambda: len([topic for topic, _ in cluster.written if topic.endswith(".dlq")]) == 2)
    assert sorted((topic, value) for topic, value in cluster.written if topic.endswith(".dlq")) == [
        ("attn.dlq", b"nonsense"),
        ("residual.dlq", b"nonsense too"),
    ]


def test_the_log_that_is_far_ahead_stands_still_until_the_other_has_caught_up(world):
    cluster, host, subscriber, _ = world
    host._core._ahead_bytes = 40
    sides = streams("r", tokens=40)
    subscriber.give(*ALL)
    cluster.append("residual", 0, *sides[0][:30])
    turn_until(host, lambda: subscriber.paused)
    assert subscriber.paused == {Partition("residual", 0)}
    cluster.append("residual", 0, *sides[0][30:])
    cluster.append("attn", 0, *sides[1])
    turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))
    assert subscriber.paused == set()
    assert sorted(scores(cluster, "r")) == list(range(40))
